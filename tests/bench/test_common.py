"""The form of a result file, and the figures in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import bench.common
from bench.common import Clock, commit, device_slug, machine_facts, percentile, print_table, spread, write_results

CPU = torch.device("cpu")


@pytest.mark.parametrize(("percent", "wanted"), [(0, 1.0), (20, 1.8), (50, 3.0), (80, 4.2), (100, 5.0)])
def test_percentile(percent: float, wanted: float) -> None:
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], percent) == pytest.approx(wanted)
    assert percentile([7.0], percent) == 7.0


def test_spread_is_of_the_middle_three_fifths() -> None:
    assert spread([float(i) for i in range(101)]) == {"ms": 50.0, "p20_ms": 20.0, "p80_ms": 80.0}


def test_facts_have_the_form_of_every_result_file(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine_facts(CPU)
    assert list(facts) == ["device", "driver", "torch", "triton", "commit", "date"]
    assert all(facts.values())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", facts["date"])
    monkeypatch.setenv("MONOGRAPH_COMMIT", "abc")
    assert commit() == "abc"


def test_the_newest_has_the_plain_name_and_older_ones_their_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.common, "RESULTS", tmp_path)
    facts = {**machine_facts(CPU), "device": "NVIDIA H200"}
    for day in (1, 2, 2, 3):
        path = write_results("decode", {**facts, "date": f"2026-01-0{day}T10:20:30+00:00"}, 4500.0, [{"ms": day}])
    assert path.name == "decode-h200.json"
    found = {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()}
    assert {name: run["rows"] for name, run in found.items()} == {
        "decode-h200.json": [{"ms": 3}],
        "decode-h200-20260101T102030.json": [{"ms": 1}],
        "decode-h200-20260102T102030.json": [{"ms": 2}],
        "decode-h200-20260102T102030-2.json": [{"ms": 2}],
    }
    assert list(found["decode-h200.json"]) == [*facts, "ceiling_gb_s", "rows"]


def test_device_slug() -> None:
    assert device_slug("NVIDIA GeForce RTX 4090") == "geforce-rtx-4090"


def test_clock_measures_each_span_once() -> None:
    clock = Clock(CPU)
    for size in (1, 2):
        with clock.span():
            torch.zeros(size)
    times = clock.times_ms()
    assert len(times) == 2
    assert all(0 < span < 1000 for span in times)
    assert clock.times_ms() == []


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{"ms": 1.23456, "n": 10000}, {"ms": None}], {"ms": "time:.2f", "n": "count:,"})
    assert capsys.readouterr().out == "time   count\n1.23  10,000\n   -       -\n"
