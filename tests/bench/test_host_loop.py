"""The benchmark of the host's loop, on a CPU with a tiny model, and its verdicts."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import bench.host_loop
from bench.host_loop import Run, busy_threads, gpu_ms, verdict
from bench.shapes import SHAPES
from tests.bench.test_decode import FORM
from tests.bench.tiny import CONFIG, tiny_step

RIGHT = Run(tokens=[4, 5, 6], wall_ms=1.0, gap_ms=1.5, largest_piece=1, first_token_ms=2.0, cpu_ms=0.1)


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    monkeypatch.setitem(SHAPES, "tiny", replace(CONFIG, vocab_size=300))  # 256 bytes and some merges
    arguments = ["--model", "tiny", "--device", "cpu", "--max-seq-len", "96", "--tokens", "12", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", ["host_loop.py", *arguments, "--busy", "0,2", "--json", str(path)])
    bench.host_loop.main()
    rows = json.loads(path.read_text())["rows"]
    assert [row["busy_threads"] for row in rows] == [0, 2]
    for row in rows:
        assert list(row)[: len(FORM) + 1] == [*FORM, "verdict"]
        assert (row["bench"], row["verdict"], row["new_tokens"]) == ("host_loop", "ok", 12)
        assert row["ratio"] == pytest.approx(row["ms"] / row["gpu_ms"], rel=1e-3)
        assert row["gap_ms"] >= row["ms"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("busy")]


def test_busy_threads_are_busy_and_end() -> None:
    before = threading.active_count()
    with busy_threads(2):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_the_time_of_replays_is_of_as_many_as_asked() -> None:
    step = tiny_step()
    assert gpu_ms(step, 10, 7) > 0
    assert int(step.arena.view("position")) == 17


@pytest.mark.parametrize(
    ("runs", "ratio", "wanted"),
    [
        ([RIGHT, RIGHT], 1.009, "ok"),
        ([RIGHT], None, "ok"),
        ([RIGHT], 1.02, "wall time 1.0200 of the GPU's, at most 1.01 expected"),
        ([RIGHT, replace(RIGHT, tokens=[4, 7, 6])], 1.0, "token 1 is 7, elsewhere 5"),
        ([replace(RIGHT, tokens=[4, 5])], 1.0, "2 tokens, expected 3"),
    ],
)
def test_verdicts(runs: list[Run], ratio: float | None, wanted: str) -> None:
    assert verdict(runs, RIGHT.tokens, 3, ratio) == wanted
