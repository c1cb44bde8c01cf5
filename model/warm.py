"""Compiling ahead what a model will need on a GPU, so that its first start is as quick as every other.

The kernels of all layers are the same, and none of them depends on what weights say: one layer, of the model's sizes
and with nothing in its weights, launches every variant that there is.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from monograph.arena import Arena, HostMemory, format_nbytes
from monograph.errors import HubError
from monograph.model.config import ModelConfig
from monograph.model.graph import supports_pdl
from monograph.model.layout import plan_host_layout
from monograph.model.open import OpenModel, open_model
from monograph.model.plan import choose_device, choose_dtype, make_plan
from monograph.model.prepare import Prepared, Report, cache_folder, prepare, starting
from monograph.model.program import build_program, with_tiles
from monograph.model.state import StepState
from monograph.model.tiles import choose_tiles


@dataclass(frozen=True)
class Warmed:
    """What warming left.

    Attributes:
        device: The GPU's name.
        dtype: Of weights and KV cache.
        max_seq_len: The length that it was planned for.
        kernels: All that the model needs.
        seconds: What getting them took.
        folder: Where they are.
        new_nbytes: What was added to the folder.
        new_files: How many files that is.
    """

    device: str
    dtype: torch.dtype
    max_seq_len: int
    kernels: list[Prepared]
    seconds: float
    folder: Path
    new_nbytes: int
    new_files: int

    @property
    def compiled(self) -> int:
        """Kernels that had to be compiled."""
        return sum(kernel.compiled for kernel in self.kernels)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        lengths = "divides" if self.max_seq_len % 16 == 0 else "does not divide"
        added = f"added {format_nbytes(self.new_nbytes)} in {self.new_files:,} files to" if self.new_files else "all in"
        return (
            f"{len(self.kernels)} kernels for {self.device} in {dtype}, at every max_seq_len that 16 {lengths}: "
            f"{self.compiled} compiled in {self.seconds:.1f} s, {added} {self.folder}"
        )


def warm_model(
    model: str,
    *,
    revision: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    max_seq_len: int | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    report: Report | None = None,
) -> Warmed | None:
    """Compile every kernel that ``load`` with the same arguments will need, and leave them in Triton's cache.

    Only the configuration is read and one layer is allocated. Weights are neither needed nor fetched.

    Args:
        model: As for ``load``, like what follows.
        revision: Branch, tag or commit on the Hub.
        device: "auto", "cpu", "cuda" or "cuda:1".
        dtype: "auto", "bfloat16", "float16" or "float32".
        max_seq_len: Kernels are the same for all lengths that 16 divides, and others for the rest.
        token: Hub access token.
        local_files_only: Never ask the network.
        report: Called after each kernel with it, its number from 1 and how many there are.

    Returns:
        What there is now; None on a CPU, which runs the kernels' PyTorch references and compiles nothing.

    Raises:
        HubError: A GGUF file of the Hub that is not here yet: it would have to be fetched, weights and all.
        MonographError: As ``load``.
    """
    where = choose_device(device)
    if where.type == "cpu":
        return None
    with starting(where):
        config, chosen = _open(model, revision, where, dtype, token, local_files_only)
    plan = make_plan(replace(config, num_layers=1), where, chosen, max_seq_len)
    folder = cache_folder()
    before = _files(folder)
    with (
        Arena(plan.layout, where) as arena,
        HostMemory(plan_host_layout(plan.capacity), where) as host,
    ):
        StepState(arena, host)  # halts: no launch writes anything
        tiles = choose_tiles(plan.config, chosen, where)  # what load will take
        program = with_tiles(build_program(plan.config, plan.capacity, arena, host), tiles.tiles)
        torch.cuda.synchronize(where)
        started = time.perf_counter()
        kernels = prepare(program, where, supports_pdl(where), report)
        seconds = time.perf_counter() - started
    new = _files(folder).items() - before.items()
    return Warmed(
        device=torch.cuda.get_device_name(where),
        dtype=chosen,
        max_seq_len=plan.max_seq_len,
        kernels=kernels,
        seconds=seconds,
        folder=folder,
        new_nbytes=sum(nbytes for _, nbytes in new),
        new_files=len(new),
    )


def _open(
    model: str,
    revision: str | None,
    device: torch.device,
    dtype: str | torch.dtype,
    token: str | None,
    local_files_only: bool,
) -> tuple[ModelConfig, torch.dtype]:
    """Read a model's configuration and choose its dtype as ``load`` will."""
    opened = _open_without_fetching(model, revision, token, local_files_only)
    if not opened.is_local:
        return opened.config, choose_dtype(dtype, opened.config, device)
    with closing(opened.source()) as source:
        return opened.config, choose_dtype(dtype, opened.config, device, source)


def _open_without_fetching(model: str, revision: str | None, token: str | None, local_files_only: bool) -> OpenModel:
    if Path(model).expanduser().exists() or ":" not in model:
        return open_model(model, revision=revision, token=token, local_files_only=local_files_only)
    try:
        return open_model(model, revision=revision, token=token, local_files_only=True)
    except HubError as error:
        raise HubError(
            f"{error} (warming fetches no weights, and a GGUF file has the configuration in one with them: load the "
            "model once)"
        ) from error


def _files(folder: Path) -> dict[Path, int]:
    """Sizes of the files in a folder of which other processes may make use at the same time."""
    found: dict[Path, int] = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                found[path] = path.stat().st_size
    return found
