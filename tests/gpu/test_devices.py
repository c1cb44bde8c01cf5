"""B18: everything happens on the engine's device, whichever is current; a device that is not there is refused clearly.

The last device of the machine plays the part of cuda:1. With one GPU what is left to test is the refusal.
"""

from __future__ import annotations

import pytest
import torch

from monograph.errors import ConfigError
from monograph.model.decoder import Decoder
from monograph.model.plan import choose_device
from tests.gpu import fresh_process as fresh
from tests.gpu import tiny
from tests.gpu.process import FreshProcess

pytestmark = pytest.mark.gpu


def test_b18_a_device_that_is_not_there() -> None:
    count = torch.cuda.device_count()
    for name in (f"cuda:{count}", "cuda:99"):
        with pytest.raises(ConfigError, match=f"'{name}' is not on this machine, which has {count} CUDA device"):
            choose_device(name)
        with pytest.raises(ConfigError, match=f"PyTorch sees {count} CUDA device"):
            tiny.make(device=torch.device(name))


def test_b18_a_device_that_is_not_current(bf16: Decoder) -> None:
    """Tokens are those of cuda:0, in turn on both; the current device stays current, and nothing is allocated on it."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(0)
    ids = tiny.random_ids(600)
    wanted = [tiny.answer(bf16, ids, 60, sampling) for sampling in (tiny.GREEDY, tiny.DRAWN)]
    allocated = torch.cuda.memory_allocated(0)
    decoder = tiny.make(device=device)
    grown = torch.cuda.memory_allocated(0) - allocated
    assert grown == 0 or device.index == 0
    for _ in range(3):
        for sampling, tokens in zip((tiny.GREEDY, tiny.DRAWN), wanted, strict=True):
            assert tiny.answer(decoder, ids, 60, sampling) == tokens
            assert tiny.answer(bf16, ids, 60, sampling) == tokens
    assert torch.cuda.memory_allocated(0) - allocated == grown
    assert torch.cuda.current_device() == 0
    assert all(decoder.arena.view(name).device == device for name in decoder.arena.layout)
    assert decoder.runner.stream.device == device  # type: ignore[attr-defined]
    decoder.close()


def test_b18_visible_devices(bf16: Decoder) -> None:
    """A process that sees the last device alone computes the same bits."""
    process = FreshProcess(None, CUDA_VISIBLE_DEVICES=str(torch.cuda.device_count() - 1))
    try:
        found = process.facts()["digest"]
    finally:
        process.end()
    tiny.replay(bf16, tiny.random_ids(fresh.PROMPT_TOKENS), fresh.STEPS, tiny.DRAWN)
    assert found == tiny.digest(tiny.bits(bf16, fresh.PROMPT_TOKENS + fresh.STEPS))
