"""The decode benchmark from its command line to its file, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bench.decode
from bench.shapes import SHAPES
from bench.step import Step, Verdict
from tests.bench.tiny import CONFIG

# The form that all result files of the project share.
FORM = ["bench", "model", "system", "dtype", "seq_len", "max_seq_len", "ms", "p20_ms", "p80_ms", "floor_ms", "graphs"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the benchmark with arguments and return its file's content."""
    monkeypatch.setitem(SHAPES, "tiny", CONFIG)

    def run(*arguments: str) -> Any:
        path = tmp_path / "run.json"
        fixed = ["--model", "tiny", "--device", "cpu", "--max-seq-len", "96", "--replays", "16", "--ceiling", "10"]
        monkeypatch.setattr("sys.argv", ["decode.py", *fixed, "--json", str(path), *arguments])
        bench.decode.main()
        return json.loads(path.read_text())

    return run


def test_rows(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    content = run("--lengths", "1,40", "--compare-max-seq-len", "80")
    assert content["ceiling_gb_s"] == 10
    assert [(row["seq_len"], row["max_seq_len"]) for row in content["rows"]] == [(1, 96), (40, 96), (64, 96), (64, 80)]
    for row in content["rows"]:
        assert list(row)[: len(FORM) + 1] == [*FORM, "verdict"]
        assert row["verdict"] == "ok"
        assert 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"]
        assert row["floor_ms"] == pytest.approx(row["nbytes"] / 10 / 1e6, rel=1e-3)
    assert content["rows"][1]["wall_ms"] > 0
    assert "max_seq_len 96 / 80: ratio" in capsys.readouterr().out


def test_a_length_that_fails_has_no_times_and_the_others_stand(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = Step.check

    def red(self: Step, seq_len: int) -> Verdict:
        if seq_len == 3:
            raise ZeroDivisionError("why not")
        verdict = check(self, seq_len)
        verdict.faults += ["too pretty"] if seq_len == 2 else []
        return verdict

    monkeypatch.setattr(Step, "check", red)
    with pytest.raises(SystemExit) as end:
        run("--lengths", "1,2,3,97")
    assert end.value.code == 1
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    wanted = ["ok", "too pretty", "ZeroDivisionError: why not", "length outside 1..96"]
    assert [row["verdict"] for row in rows] == wanted
    assert [row["ms"] is None for row in rows] == [False, True, True, True]
    assert [row["floor_ms"] is None for row in rows] == [False, True, True, True]
