"""The cost of a choice: every setting is judged, and what is wrong is not timed."""

from __future__ import annotations

import pytest
import torch

from bench.sampling import GREEDY, SCALES, SETTINGS, judge, measure, scale_logits
from bench.step import Step
from tests.bench.test_decode import FORM
from tests.bench.tiny import tiny_step


@pytest.fixture
def step() -> Step:
    return tiny_step()


def test_every_setting_has_a_row(step: Step) -> None:
    rows = measure(step, "tiny", 20, rounds=2)
    assert [(row["scores"], row["setting"]) for row in rows] == [(s, name) for s in SCALES for name in SETTINGS]
    for row in rows:
        assert set(FORM) <= set(row)
        assert row["verdict"] == "ok"
        assert row["ms"] > 0
        assert (row["over_greedy_us"] == 0) == (row["setting"] == GREEDY)
    kept = {(row["scores"], row["setting"]): row["kept"] for row in rows}
    assert kept["flat", "top-p 0.9"] > kept["peaked", "top-p 0.9"]
    assert kept["flat", "top-k 50"] == 50


def test_scores_get_the_spread_asked_for(step: Step) -> None:
    for std in (1.0, 6.0):
        scale_logits(step, std, 20)
        judge(step, 20, GREEDY)
        assert float(step.arena.view("logits").std()) == pytest.approx(std, rel=0.5)


@pytest.mark.parametrize("setting", [GREEDY, "top-k 50"])
def test_a_wrong_token_is_seen_and_not_timed(step: Step, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    decode = step.runner.decode

    def spoilt() -> None:
        decode()
        position = int(step.arena.view("position"))
        step.arena.view("tokens")[position] = (step.arena.view("tokens")[position] + 1) % step.config.vocab_size

    monkeypatch.setattr(step.runner, "decode", spoilt)
    assert "expected" in judge(step, 20, setting)["verdict"]
    rows = measure(step, "tiny", 20, rounds=1)
    assert all(row["ms"] is None for row in rows)
    assert torch.isfinite(step.arena.view("logits")).all()
