"""Time over the live length: which lengths are measured, and what is too far above its neighbours."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bench.scaling
from bench.scaling import above_line, first_lengths, spread_lengths
from bench.shapes import SHAPES
from bench.splits import active_splits, split_changes
from bench.step import BATCH, Step, Timing, Verdict
from monograph.kernels.attention import attention, attention_torch
from monograph.model.program import Launch
from tests.bench.test_decode import FORM
from tests.bench.tiny import CONFIG, tiny_step

RIGHT = Verdict(error=0.0, plain_error=0.0, argmax_agrees=True)


@pytest.mark.parametrize(("longest", "count"), [(131072, 40), (8192, 40), (50, 40), (7, 40), (2, 1)])
def test_lengths_are_spread_evenly(longest: int, count: int) -> None:
    lengths = spread_lengths(longest, count)
    assert len(lengths) == min(longest, count)
    assert lengths[0] == 1
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == longest or count == 1
    ratios = [after / before for before, after in pairwise(lengths) if before > 100]
    assert not ratios or max(ratios) / min(ratios) < 1.02


def test_batches_beside_a_change_do_not_cross_it() -> None:
    changes = [193, 321, 4000, 4090]
    points = first_lengths(4096, changes, 40)
    assert {length for length, changed in points.items() if changed} == {193, 321, 4000}
    for change in changes:
        assert change - BATCH in points
    assert list(points) == sorted(points)
    assert max(points) + BATCH - 1 == 4096  # 4,090 has no room for a batch after it
    assert len(points) >= 40


def test_above_line() -> None:
    points = [(1.0, 10.0), (2.0, 11.0), (4.0, 12.0), (8.0, 30.0)]
    first, second, third, last = above_line(points)
    assert first is last is None
    assert second == pytest.approx(11 / (10 + 2 / 3) - 1)
    assert third == pytest.approx(12 / (11 + 19 / 3) - 1)
    assert above_line(points[:2]) == [None, None]


def test_splits_are_those_of_the_kernel() -> None:
    """At both sides of the first changes the kernel itself, run once, leaves as many partial results."""
    step = tiny_step(max_seq_len=420)
    attention = next(launch for launch in step.program.decode if launch.name == "layers.0.attention")
    splits, changes = active_splits(step.decoder), split_changes(step.decoder)
    assert len(changes) >= 2
    lse = step.arena.view("partial_lse")
    for length in sorted({1, 420, *(side for change in changes[:2] for side in (change - 1, change))}):
        step.begin(length)
        step.arena.view("q").normal_()
        lse.fill_(float("nan"))
        attention.kernel(*attention.args, **attention.constants)
        left = int(lse.isfinite().all(dim=1).sum())
        assert max(left, 1) == splits(length), length  # a split alone leaves its result, and no part


def test_splits_of_the_tensor_core_kernel() -> None:
    """Whose blocks are of rows older than the live one: 128 with eight warps, two of them a split."""

    def new(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    cache, one, q = new(8, 4096, 64, dtype=torch.bfloat16), new(1, dtype=torch.int32), new(32, 64, dtype=torch.float32)
    partials = new(33, 32, 64, dtype=torch.float32), new(33, 32, dtype=torch.float32), new(8, dtype=torch.int32)
    launch = Launch(
        "layers.0.attention", attention, attention_torch, (q, cache, cache, one, one, *partials, q), {"scale": 0.1}
    )
    decoder: Any = SimpleNamespace(program=SimpleNamespace(decode=[launch]))
    splits = active_splits(decoder)
    lengths = (1, 129, 385, 386, 513, 641, 642, 1025, 131072)
    assert [splits(length) for length in lengths] == [1, 1, 1, 2, 2, 2, 3, 4, 33]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the benchmark with times that a function of the first live length gives; its exit status and its rows."""
    monkeypatch.setitem(SHAPES, "tiny", CONFIG)
    monkeypatch.setattr(Step, "check", lambda self, length: RIGHT)

    def run(ms: Any) -> tuple[Any, list[dict[str, Any]]]:
        def time(self: Step, length: int, replays: int, alone: int) -> Timing:
            return Timing([ms(length)] * 3, [], length + 7.5)

        monkeypatch.setattr(Step, "time", time)
        path = tmp_path / "run.json"
        fixed = ["--model", "tiny", "--device", "cpu", "--max-seq-len", "700", "--ceiling", "10", "--points", "12"]
        monkeypatch.setattr("sys.argv", ["scaling.py", *fixed, "--json", str(path)])
        status = None
        try:
            bench.scaling.main()
        except SystemExit as end:
            status = end.code
        return status, json.loads(path.read_text())["rows"]

    return run


def test_a_line_passes(run: Any) -> None:
    status, rows = run(lambda length: 1 + length / 100)
    assert status is None
    assert len(rows) > 12
    for row in rows:
        assert list(row)[: len(FORM) + 1] == [*FORM, "verdict"]
        assert row["verdict"] == "ok"
        assert row["in_line"]
        assert row["floor_ms"] == pytest.approx(row["nbytes"] / 10 / 1e6, rel=1e-3)
    assert any(row["splits_change"] for row in rows)
    assert max(abs(row["above_line"]) for row in rows[1:-1]) < 1e-4


@pytest.mark.parametrize(("height", "wanted"), [(1.07, 1), (1.04, None)])
def test_a_point_that_is_too_high_fails(run: Any, height: float, wanted: int | None) -> None:
    _, rows = run(lambda length: 1.0)
    peak = rows[len(rows) // 2]["seq_len"]
    status, rows = run(lambda length: height if length == peak else 1.0)
    assert status == wanted
    high = [row for row in rows if not row["in_line"]]
    assert [row["seq_len"] for row in high] == ([peak] if wanted else [])
    for row in high:
        assert row["above_line"] == pytest.approx(height - 1, abs=1e-4)
        assert row["first_ms"] == row["ms"] == height  # found twice


def test_a_hiccup_is_timed_again(run: Any) -> None:
    seen: list[int] = []

    def ms(length: int) -> float:
        seen.append(length)
        return 2.0 if len(seen) == 5 else 1.0

    status, rows = run(ms)
    assert status is None
    (again,) = (row for row in rows if row.get("first_ms") == 2.0)
    assert again["ms"] == 1.0
    assert len(seen) == len(rows) + 3


def test_a_wrong_step_is_not_timed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: Step, length: int) -> Any:
        if length == 1:
            raise ZeroDivisionError("why not")
        return RIGHT

    monkeypatch.setattr(Step, "check", check)
    status, rows = run(lambda length: 1.0)
    assert status == 1
    assert (rows[0]["verdict"], rows[0]["ms"]) == ("ZeroDivisionError: why not", None)
    assert all(row["ms"] for row in rows[1:])


def test_on_a_cpu() -> None:
    step = tiny_step(max_seq_len=200)
    rows = bench.scaling.measure(step, "tiny", first_lengths(200, split_changes(step.decoder), 5), 16, None)
    assert all(row["verdict"] == "ok" and row["ms"] > 0 for row in rows)
    assert rows[0]["floor_ms"] is None
