"""One graph for every length: right at each, never compiled again, never slow."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator

import pytest
import torch

from bench.common import percentile
from bench.shapes import random_cache
from bench.step import Step
from monograph.model.decoder import Decoder
from monograph.model.sampling import Sampling
from tests.gpu import tiny

pytestmark = pytest.mark.gpu

RELATIVE_ERROR = 2e-5  # two orders of fp32 summation over thousands of terms and two layers
LONG = 40960  # past the length at which every split of the tiny model is at work
SPLIT_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257)


@pytest.fixture(scope="module")
def long() -> Iterator[Decoder]:
    decoder = tiny.make(torch.float32, LONG)
    random_cache(decoder.arena, tiny.CONFIG)
    yield decoder
    decoder.close()


def test_tokens_and_logits_of_every_length(fp32: Decoder) -> None:
    """A sequence of 4,000 tokens that graphs drew; then the step at each length against the references on a CPU, which
    read the whole sequence at once."""
    drawn = Sampling(temperature=1.0, seed=3).resolve({})
    ids = tiny.random_ids(3)
    ids += tiny.answer(fp32, ids, 4000, drawn)
    reference = tiny.twin_on_cpu(fp32, len(ids) + 1)
    want = reference.logits(ids, "prefill")  # [len(ids), vocab_size]
    reference.close()
    lengths = [*range(1, 600), *range(600, len(ids), 61), *(n + i for n in range(640, 4000, 128) for i in (-1, 0, 1))]
    graph = tiny.graphs_of(fp32.runner)
    for length in sorted({*lengths, len(ids)}):
        tiny.begin(fp32, ids[:length], length - 1)
        with fp32.runner.context():
            fp32.runner.decode()
        tiny.settle()
        error = tiny.relative_error(fp32.arena.view("logits"), want[length - 1])
        assert error < RELATIVE_ERROR, (length, error)
        best = want[length - 1].topk(2)
        if best.values[0] - best.values[1] > RELATIVE_ERROR * best.values[0].abs():
            assert int(fp32.arena.view("tokens")[length]) == int(best.indices[0]), length
        assert int(fp32.arena.view("position")) == length
    assert tiny.graphs_of(fp32.runner) == graph


def test_greedy_tokens_equal_the_references(fp32: Decoder) -> None:
    """Token for token, each depending on all before it."""
    reference = tiny.twin_on_cpu(fp32, 1024)
    for prompt_tokens, seed in ((1, 1), (2, 2), (16, 3), (511, 4), (512, 5), (513, 6)):
        ids = tiny.random_ids(prompt_tokens, seed)
        assert tiny.answer(fp32, ids, 100) == tiny.answer(reference, ids, 100), prompt_tokens
    reference.close()


def active_splits(step: Step, length: int) -> int:
    """How many splits leave a partial result at a length."""
    step.begin(length)
    with step.context():
        step.arena.view("partial_lse").fill_(float("nan"))
        step.runner.decode()
        written = ~step.arena.view("partial_lse").isnan().any(dim=1)
        return max(1, int(written.sum()))


def test_every_split_boundary(long: Decoder) -> None:
    """On both sides of every length at which one more program joins, graph, single launches and references agree; the
    splits are few at short lengths, and all of them at long ones."""
    step = Step(long)
    grid = range(16, LONG + 1, 16)
    splits = dict(zip(grid, (active_splits(step, length) for length in grid), strict=True))
    assert splits[16] == 1
    assert max(splits.values()) == splits[LONG] == long.capacity.num_splits
    boundaries = []
    for length in grid:
        if length > 16 and splits[length] != splits[length - 16]:
            assert splits[length] > splits[length - 16]
            at = next(n for n in range(length - 15, length + 1) if active_splits(step, n) != splits[length - 16])
            boundaries += [at - 1, at]
    assert len(boundaries) >= 2 * 16
    for length in {*SPLIT_LENGTHS, *boundaries, LONG - 1, LONG}:
        assert str(step.check(length)) == "ok", length


def test_b17_no_length_compiles(bf16: Decoder, compilations: list[str]) -> None:
    for length in (1, 2, 15, 16, 17, 31, 32, 100, 511, 512, 513, 1024):
        tiny.answer(bf16, tiny.random_ids(length), 20)
        tiny.answer(bf16, tiny.random_ids(length), 3, tiny.DRAWN)
    assert not compilations


@pytest.mark.usefixtures("quiet")
def test_b17_no_step_is_slow(bf16: Decoder, compilations: list[str]) -> None:
    """2,000 steps, timed one by one on the GPU, which is kept busy: the host is ahead of it from the start."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2001)]
    tiny.clean(bf16)
    tiny.begin(bf16, tiny.random_ids(1))
    gc.collect()
    gc.disable()
    try:
        with bf16.runner.context():
            bf16.runner.prefill()
            torch.cuda._sleep(200_000_000)  # 0.1 s
            events[0].record()
            for event in events[1:]:
                bf16.runner.decode()
                event.record()
    finally:
        gc.enable()
    tiny.settle()
    times = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    slowest = max(range(len(times)), key=times.__getitem__)
    assert times[slowest] < 3 * percentile(times, 50), (slowest, times[slowest], percentile(times, 50))
    assert int(bf16.arena.view("position")) == 2001
    assert not compilations
