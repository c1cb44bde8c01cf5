"""Decoders that the GPU tests share, the counter of compilations, and a process that starts from nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from monograph.kernels.triton_import import triton
from monograph.model.decoder import Decoder
from tests.gpu import tiny
from tests.gpu.process import FreshProcess


@pytest.fixture(scope="session")
def fresh_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshProcess]:
    process = FreshProcess(tmp_path_factory.mktemp("triton"))
    yield process
    process.end()


@pytest.fixture(scope="session", autouse=True)
def _start_early(fresh_process: FreshProcess) -> None:
    """It compiles everything anew, on another core, while the first tests run."""


@pytest.fixture
def quiet(fresh_process: FreshProcess) -> None:
    """Nobody else uses the GPU: for tests of time."""
    fresh_process.facts()


@pytest.fixture(scope="session")
def bf16(fresh_process: FreshProcess) -> Iterator[Decoder]:
    decoder = tiny.make(torch.bfloat16)
    yield decoder
    decoder.close()


@pytest.fixture(scope="session")
def fp32(fresh_process: FreshProcess) -> Iterator[Decoder]:
    decoder = tiny.make(torch.float32)
    yield decoder
    decoder.close()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every kernel variant that Triton makes, whether compiled or found on disk, from here on."""
    made: list[str] = []

    def note(*, repr: str, **_: object) -> None:  # noqa: A002  # Triton's name
        made.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)  # pyright: ignore[reportAttributeAccessIssue]
    return made
