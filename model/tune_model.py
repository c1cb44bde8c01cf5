"""Tuning a model by name, as `monograph tune` does: load it, tune its decode step on this GPU, keep the outcome."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monograph.model.load import load
from monograph.model.plan import choose_device
from monograph.model.tune import DEFAULT_SECONDS, Report, Tuned
from monograph.model.tune_step import lengths_for
from monograph.model.upload import Progress


@dataclass(frozen=True)
class TunedModel:
    """What tuning a model left.

    Attributes:
        device: The GPU's name.
        dtype: Of weights and KV cache.
        lengths: At which it was timed.
        found: The tiles, and what they gain.
        path: Where they are kept.
    """

    device: str
    dtype: torch.dtype
    lengths: tuple[int, ...]
    found: Tuned
    path: str

    def __str__(self) -> str:
        found, dtype = self.found, str(self.dtype).removeprefix("torch.")
        lines = [
            f"length {length:,}: {before:.4f} ms a token before, {after:.4f} after"
            for length, before, after in zip(self.lengths, found.before_ms, found.after_ms, strict=True)
        ]
        outcome = f"{found.gain:.1%} faster" if found.gain else "nothing is faster than what it had"
        lines.append(
            f"{outcome} on {self.device} in {dtype}: {found.timed} candidates timed, {found.unusable} unusable, "
            f"{found.left_out} left out for time, in {found.seconds:.1f} s"
        )
        return "\n".join([*lines, f"kept in {self.path}; every load of this shape, dtype and GPU takes it from there"])


def tune_model(
    model: str,
    *,
    revision: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    max_seq_len: int | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress | None = None,
    report: Report | None = None,
) -> TunedModel | None:
    """Tune the decode step of a model on a GPU, from its defaults, and keep the outcome in place of an earlier one.

    Args:
        model: As for ``load``, like what follows.
        revision: Branch, tag or commit on the Hub.
        device: "auto", "cpu", "cuda" or "cuda:1".
        dtype: "auto", "bfloat16", "float16" or "float32".
        max_seq_len: Room to time in, 16,402 or more for all lengths; the outcome holds for every length.
        token: Hub access token.
        local_files_only: Never ask the network.
        seconds: Budget of the search, loading not included.
        progress: Called while weights are read.
        report: Called while it tunes.

    Returns:
        What was found; None on a CPU, where there is nothing to tune.

    Raises:
        MonographError: As ``load`` and ``Engine.tune``.
    """
    where = choose_device(device)
    if where.type == "cpu":
        return None
    with load(
        model,
        revision=revision,
        device=where,
        dtype=dtype,
        max_seq_len=max_seq_len,
        token=token,
        local_files_only=local_files_only,
        progress=progress,
        tune="off",
    ) as engine:
        found = engine.tune(seconds, report)
        assert found is not None, where
        return TunedModel(
            device=torch.cuda.get_device_name(where),
            dtype=engine.capacity.dtype,
            lengths=lengths_for(engine.capacity.max_seq_len),
            found=found,
            path=engine.load_stats.tiles_from,
        )
