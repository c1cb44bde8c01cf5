"""Launches overlap, and no sanitizer sees a race between kernels: so each kernel in turn is made late on purpose.

Every program of the kernel lets the next launch start first of all and then spins for tens of microseconds before it
loads and stores anything. Whatever the next launches read or write too early then shows in the bits of the run: logits,
KV cache, tokens, state, over several steps. That the delay has taken hold is seen in the time, and that a missing wait
would show, in a copy that lacks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from monograph.model.decoder import Decoder
from monograph.model.program import Launch, run
from tests.gpu import tiny
from tests.gpu.delayed import DELAY_NS, copies_forgotten, enter_and_dawdle, enter_without_waiting, with_copies
from tests.gpu.process import FreshProcess

pytestmark = pytest.mark.gpu

PROMPT = 530  # a whole chunk, and a part of one in which most tiles have nothing to do
STEPS = 8
DECODE = ("embed", "qkv", "attention", "o", "gate_up", "down", "head", "sample")
PREFILL = (
    "embed_rows",
    "attn_norm",
    "qkv",
    "attention",
    "o",
    "mlp_norm",
    "gate_up",
    "down",
    "last_row",
    "head",
    "sample",
)


@dataclass
class Run:
    """What a run left, and the time of its passes in nanoseconds."""

    bits: tiny.Bits
    prefill_ns: float
    decode_ns: float


@pytest.fixture(scope="module", autouse=True)
def _forget_copies() -> Iterator[None]:
    with copies_forgotten():
        yield


def captured(decoder: Decoder, launches: tuple[Launch, ...]) -> torch.cuda.CUDAGraph:
    """Warm up while halted, so that nothing is written, and capture."""
    decoder.runner.drain()
    decoder.state.halt()
    tiny.settle()
    with decoder.runner.context():
        run(launches, pdl=True)
    tiny.settle()
    return decoder.runner.capture(launches)  # type: ignore[attr-defined]


def run_graphs(decoder: Decoder, prefill: torch.cuda.CUDAGraph, decode: torch.cuda.CUDAGraph) -> Run:
    """From a clean state: the prompt's two chunks, then some steps in a row."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    tiny.clean(decoder)
    tiny.begin(decoder, tiny.random_ids(PROMPT), sampling=tiny.DRAWN)
    with decoder.runner.context():
        marks[0].record()
        for _ in range(2):
            prefill.replay()
        marks[1].record()
        for _ in range(STEPS):
            decode.replay()
        marks[2].record()
    tiny.settle()
    times = [before.elapsed_time(after) * 1e6 for before, after in itertools.pairwise(marks)]
    return Run(tiny.bits(decoder, PROMPT + STEPS), *times)


@pytest.fixture(scope="module")
def right(bf16: Decoder, fresh_process: FreshProcess) -> Run:
    """The run without delays; its bits are those of launches one by one and without overlap."""
    fresh_process.facts()  # nobody else uses the GPU from here on: times are compared
    assert bf16.runner.pdl, "launches do not overlap on this machine: there is nothing to race"
    graphs = bf16.runner.prefill_graph, bf16.runner.decode_graph  # type: ignore[attr-defined]
    run_graphs(bf16, *graphs)
    overlapping = run_graphs(bf16, *graphs)
    tiny.launch(bf16, tiny.random_ids(PROMPT), STEPS, False, tiny.DRAWN)
    assert tiny.differing(tiny.bits(bf16, PROMPT + STEPS), overlapping.bits) == []
    return overlapping


def test_every_kernel_is_tried(bf16: Decoder) -> None:
    assert set(DECODE) == {launch.name.rpartition(".")[2] for launch in bf16.program.decode}
    assert set(PREFILL) == {launch.name.rpartition(".")[2] for launch in bf16.program.prefill}


@pytest.mark.parametrize("name", DECODE)
def test_a_late_kernel_of_the_decode_step(bf16: Decoder, right: Run, name: str) -> None:
    late = with_copies(bf16.program.decode, {name}, enter_and_dawdle)
    delays = sum(one is not other for one, other in zip(late, bf16.program.decode, strict=True))
    found = run_graphs(bf16, bf16.runner.prefill_graph, captured(bf16, late))  # type: ignore[attr-defined]
    assert found.decode_ns > right.decode_ns + 0.5 * STEPS * delays * DELAY_NS  # it was late indeed
    assert tiny.differing(right.bits, found.bits) == []


@pytest.mark.parametrize("name", PREFILL)
def test_a_late_kernel_of_the_prefill_chunk(bf16: Decoder, right: Run, name: str) -> None:
    late = with_copies(bf16.program.prefill, {name}, enter_and_dawdle)
    delays = sum(one is not other for one, other in zip(late, bf16.program.prefill, strict=True))
    found = run_graphs(bf16, captured(bf16, late), bf16.runner.decode_graph)  # type: ignore[attr-defined]
    assert found.prefill_ns > right.prefill_ns + 0.5 * 2 * delays * DELAY_NS
    assert tiny.differing(right.bits, found.bits) == []


def test_all_kernels_late_at_once(bf16: Decoder, right: Run) -> None:
    found = run_graphs(
        bf16,
        captured(bf16, with_copies(bf16.program.prefill, set(PREFILL), enter_and_dawdle)),
        captured(bf16, with_copies(bf16.program.decode, set(DECODE), enter_and_dawdle)),
    )
    assert tiny.differing(right.bits, found.bits) == []


@pytest.mark.parametrize(("late", "hasty"), [("attention", "o"), ("down", "head")])
def test_a_missing_wait_would_show(bf16: Decoder, right: Run, late: str, hasty: str) -> None:
    """A launch that does not wait for the late one reads what was there before."""
    wrong = with_copies(bf16.program.decode, {late}, enter_and_dawdle)
    wrong = with_copies(wrong, {hasty}, enter_without_waiting)
    found = run_graphs(bf16, bf16.runner.prefill_graph, captured(bf16, wrong))  # type: ignore[attr-defined]
    assert "logits" in tiny.differing(right.bits, found.bits)
    bf16.arena.view("arrivals").zero_()  # two attentions at once may have miscounted
    again = run_graphs(bf16, bf16.runner.prefill_graph, bf16.runner.decode_graph)  # type: ignore[attr-defined]
    assert tiny.differing(right.bits, again.bits) == []
