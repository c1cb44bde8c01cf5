"""How a step is timed, checked and left, with graphs that run the references on the CPU; real ones: tests/gpu."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import monograph as mg
from bench.shapes import random_decoder
from monograph.model import tune_step as tune_step_module
from monograph.model.decoder import Decoder
from monograph.model.graph import GraphRunner
from monograph.model.kept_tiles import kept_tiles
from monograph.model.program import Launch, run
from monograph.model.tile_key import TileKey
from monograph.model.tiles import current_tiles
from monograph.model.tune import LENGTHS, OUT_OF_TIME, WEIGHTS, Tuned
from monograph.model.tune_step import (
    StepBench,
    keep_tuned,
    lengths_for,
    measured_facts,
    shipped_entry,
    tune_and_keep,
    tune_decoder,
    within_rule,
)
from tests.bench.tiny import CONFIG

CPU = torch.device("cpu")


class FakeGraph:
    """Replays launches by their references."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches = launches

    def replay(self) -> None:
        with torch.inference_mode():
            run(self.launches)


class FakeRunner(GraphRunner):
    """Captures nothing; what it was asked to capture is remembered."""

    def __init__(self) -> None:
        self.pdl = False
        self.asked: list[Sequence[Launch]] = []
        self.captured_all: list[Any] = []

    def capture(self, launches: Sequence[Launch]) -> Any:
        self.asked.append(launches)
        return FakeGraph(launches)

    def capture_all(self, program: Any) -> None:
        self.captured_all.append(program)

    def drain(self) -> None:
        pass

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Decoder]:
    """A decoder on a CPU that takes itself for a GPU."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made = random_decoder(CONFIG, torch.float32, 1100, CPU)
    monkeypatch.setattr(made, "runner", FakeRunner())
    yield made
    monkeypatch.undo()
    made.close()


def runner_of(decoder: Decoder) -> FakeRunner:
    assert isinstance(decoder.runner, FakeRunner)
    return decoder.runner


def test_lengths_that_fit() -> None:
    assert lengths_for(131072) == LENGTHS
    assert lengths_for(16402) == LENGTHS
    assert lengths_for(16401) == (64, 1024)
    assert lengths_for(100) == (64,)
    assert lengths_for(64) == (32,)


def test_a_sample_runs_the_step_at_each_length(decoder: Decoder) -> None:
    with StepBench(decoder) as bench:
        times = bench.sample({})
        assert len(times) == 2
        assert min(times) > 0
        assert bench.weights == list(WEIGHTS[:2])
        # A longest batch of 16, one before it: the last sample was at 1,024.
        assert int(decoder.arena.view("position")) in range(1024 + 4, 1024 + 17)


def test_a_step_that_stops_is_no_fast_step(decoder: Decoder) -> None:
    """Were it taken for one, what breaks the logits would be the fastest of all."""
    with StepBench(decoder) as bench:
        decoder.arena.view("final_norm").fill_(float("nan"))
        with pytest.raises(AssertionError, match=r"after timing position \d+, halted 4 at length 64"):
            bench.sample({})


def test_everything_is_put_back(decoder: Decoder) -> None:
    state = [slot.name for slot in decoder.arena.layout.entries if slot.lifetime == "state" and slot.shape != (1,)]
    state.remove("stop_ids")
    before = {name: decoder.arena.view(name).clone() for name in state}
    decoder.remember([1, 2, 3])
    with StepBench(decoder) as bench:
        bench.sample({})
        assert bool(decoder.arena.view("layers.0.k_cache").any())
    for name, was in before.items():
        assert torch.equal(decoder.arena.view(name), was), name
    assert int(decoder.arena.view("halted")) == 1
    assert decoder._cached == []


def test_candidates_are_captured_once_with_their_tiles(decoder: Decoder) -> None:
    tiles = {"qkv": {"BLOCK_N": 2}}
    with StepBench(decoder) as bench:
        runner = runner_of(decoder)
        before = len(runner.asked)
        bench.sample(tiles)
        bench.sample(tiles)
        assert len(runner.asked) == before + 1
        assert [launch.tile for launch in runner.asked[-1] if launch.use == "qkv"] == [tiles["qkv"]] * 2
        assert len(runner.asked[-1]) == len(decoder.program.decode)


def test_kernels_are_made_ready_halted(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which knows one thread: nothing of a step under way is touched; faults are words."""
    monkeypatch.setattr(tune_step_module, "num_threads", lambda: 1)
    with StepBench(decoder) as bench:
        decoder.arena.view("halted").zero_()  # a step is under way
        before = decoder.arena.fingerprint()
        done: list[int] = []
        wanted = [
            *((use, tile) for use, tile in current_tiles(decoder.program).items() if use != "attention"),
            ("qkv", {"BLOCK_N": 3}),
            ("qkv", {"depth": 1}),
        ]
        outcomes = bench.compile(wanted, bench.clock() + 60, done.append)
        assert outcomes[:5] == [""] * 5
        assert outcomes[6].startswith("ValueError: qkv: tile has no depth")
        assert done == list(range(1, 8))
        assert decoder.arena.fingerprint() == before
        assert bench.compile(wanted[:1], bench.clock() - 1, done.append) == [OUT_OF_TIME]


def test_logits_are_checked_against_the_references(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    with StepBench(decoder) as bench:
        assert bench.agrees({"qkv": {"BLOCK_N": 2}})
        taken, wrong = bench._logits, {"qkv": {"BLOCK_N": 8}}
        monkeypatch.setattr(
            bench, "_logits", lambda tiles, length: taken(tiles, length) * (1.01 if tiles == wrong else 1.0)
        )
        assert bench.agrees({"qkv": {"BLOCK_N": 2}})
        assert not bench.agrees(wrong)


def test_no_memory_for_the_check_says_the_way_out(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(length: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with StepBench(decoder) as bench:
        monkeypatch.setattr(bench, "_reference_logits", full)
        with pytest.raises(mg.CapacityError, match=r"no memory left for the check.* less than max_seq_len 1,100"):
            bench.agrees({})


def test_the_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(1000, generator=generator)
    off = torch.randn(1000, generator=generator) * 1e-2
    untuned = want + off
    assert within_rule(untuned, untuned, want)
    assert within_rule(want - off, untuned, want)  # as far away, in the other direction
    assert within_rule(want + 1.99 * off, untuned, want)
    assert not within_rule(want + 2.01 * off, untuned, want)
    worst = untuned.clone()
    worst[7] = want[7] + 2.1 * off.abs().max()
    assert not within_rule(worst, untuned, want)
    assert within_rule(want * (1 + 1e-5), want, want)  # the order of sums
    assert not within_rule(want * (1 + 1e-4), want, want)
    for bad in (float("nan"), float("inf")):
        broken = untuned.clone()
        broken[3] = bad
        assert not within_rule(broken, untuned, want)


def test_the_outcome_is_used_and_kept(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    better = {"BLOCK_N": 4, "num_warps": 2}

    def search(start: Any, bench: Any, seconds: float, report: Any) -> Tuned:
        assert 4 < seconds < 5  # less what it took to begin
        assert "trigger" not in start["qkv"]  # launches do not overlap here
        return Tuned(start, {**start, "qkv": better}, [2.0, 3.0], [1.0, 2.0], gain=0.4, accepted=["qkv"])

    monkeypatch.setattr(tune_step_module, "search", search)
    found, chosen = tune_and_keep(decoder, 5)
    assert found.seconds > 0
    assert runner_of(decoder).captured_all == [decoder.program]
    assert current_tiles(decoder.program)["qkv"] == {"trigger": 1, **better}
    assert chosen.sources()["qkv"] == "tuned"
    key = TileKey.of(CONFIG, torch.float32, CPU)
    assert kept_tiles(key, 132) == found.tiles
    facts = measured_facts(found, 1100)
    assert (facts["lengths"], facts["before_ms"], facts["after_ms"]) == ([64, 1024], [2.0, 3.0], [1.0, 2.0])
    assert "'qkv': {'BLOCK_N': 4, 'num_warps': 2}" in shipped_entry(found, key, "bench/results/a.json")
    assert Path(chosen.where) == keep_tuned(decoder, found)


def test_a_real_search_over_fake_graphs(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in turn, a second long; references do not know tiles, so that nothing is faster but by luck."""
    monkeypatch.setattr(StepBench, "compile", lambda self, wanted, until, note: [""] * len(wanted))
    found = tune_decoder(decoder, 1.0)
    assert found.timed > 0
    assert len(found.before_ms) == len(found.after_ms) == 2
    assert int(decoder.arena.view("halted")) == 1


def test_what_cannot_be_tuned_is_refused(monkeypatch: pytest.MonkeyPatch, decoder: Decoder) -> None:
    with pytest.raises(mg.ConfigError, match="tune: expected a budget of more than 0 seconds, got 0"):
        tune_decoder(decoder, 0)
    short = random_decoder(CONFIG, torch.float32, 63, CPU)
    monkeypatch.setattr(short, "runner", FakeRunner())
    with pytest.raises(mg.ConfigError, match="tune: expected max_seq_len of at least 64, got 63; tune with more"):
        tune_decoder(short)
