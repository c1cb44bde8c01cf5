from __future__ import annotations

from typing import Any

import pytest
import torch

from monograph.arena.device import on_device, resolve_device, settle
from monograph.errors import ConfigError


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


@pytest.mark.parametrize("asked", ["cpu", torch.device("cpu"), "cpu:0"])
def test_cpu(asked: str | torch.device) -> None:
    assert resolve_device(asked) == torch.device("cpu")
    with on_device(resolve_device(asked)):
        settle(resolve_device(asked))


@pytest.mark.parametrize("asked", ["mps", "meta", "gpu", "", None, 1.5, "cuda:x"])
def test_another_device_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected 'cpu', 'cuda' or 'cuda:N'"):
        resolve_device(asked)


def test_cuda_gets_the_index_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, count=2, current=1)
    assert resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cuda:0") == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("count", "asked", "seen"),
    [(0, "cuda", "0 CUDA devices"), (1, "cuda:1", "1 CUDA device;"), (2, "cuda:2", "2 CUDA")],
)
def test_b18_a_gpu_that_is_not_there_is_refused_clearly(
    monkeypatch: pytest.MonkeyPatch, count: int, asked: str, seen: str
) -> None:
    see_gpus(monkeypatch, count)
    with pytest.raises(ConfigError, match=f"asked for 'cuda:.', PyTorch sees {seen}"):
        resolve_device(asked)
