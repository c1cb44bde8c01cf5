"""Replays that the driver submits in rows, and answers beside threads that are busy in Python."""

from __future__ import annotations

import threading

import pytest
import torch

from bench.host_loop import busy_threads
from monograph.model.decoder import Decoder
from tests.gpu import tiny

pytestmark = pytest.mark.gpu

STEPS = 400


def test_rows_are_submitted_under_the_lock(bf16: Decoder) -> None:
    keeps = bf16.runner._decodes.keeps_lock  # type: ignore[attr-defined]
    assert keeps == hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")


def test_rows_are_steps(bf16: Decoder) -> None:
    """A row of seven steps leaves what seven steps leave, in every byte."""
    ids = tiny.random_ids(40)
    found = []
    for rows in ([1] * 21, [7] * 3, [21]):
        tiny.clean(bf16)
        tiny.begin(bf16, ids, limit=tiny.NEVER, stop_ids=())
        tiny.prefill(bf16)
        for count in rows:
            bf16.runner.decode(count)
        tiny.settle()
        found.append(tiny.bits(bf16, len(ids) + 21))
    for bits in found[1:]:
        assert tiny.differing(found[0], bits) == []


def test_a_thread_that_never_used_the_gpu(bf16: Decoder) -> None:
    """It has no context of its own, and gets the same tokens; the current device of no thread changes."""
    ids = tiny.random_ids(30)
    wanted = tiny.answer(bf16, ids, 50)
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(tiny.answer(bf16, ids, 50)))
    thread.start()
    thread.join()
    assert found == [wanted]
    assert torch.cuda.current_device() == tiny.DEVICE.index or tiny.DEVICE.index is None


@pytest.mark.parametrize("count", [1, 4])
def test_busy_threads_change_no_token(bf16: Decoder, count: int) -> None:
    ids = tiny.random_ids(30)
    wanted = tiny.answer(bf16, ids, STEPS, tiny.DRAWN)
    with busy_threads(count):
        assert tiny.answer(bf16, ids, STEPS, tiny.DRAWN) == wanted
