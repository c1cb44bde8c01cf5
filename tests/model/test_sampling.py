"""What `Sampling` refuses, and how its settings are merged."""

from __future__ import annotations

import math

import pytest

import monograph as mg
from monograph.model.sampling import Sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"1": 0.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: "a"}),
    ],
)
def test_errors_name_the_field(field: str, value: object) -> None:
    with pytest.raises(mg.ConfigError, match=rf"{field}.*expected .*, got") as caught:
        Sampling(**{field: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_limits_are_allowed() -> None:
    Sampling(
        temperature=0,
        top_k=0,
        top_p=0,
        min_p=1,
        repetition_penalty=1e-3,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -math.inf, 5: -100.5},
        seed=2**64 - 1,
    )


def test_said_wins_over_author_wins_over_built_in() -> None:
    author = {"temperature": 0.6, "top_k": 20, "min_p": None}
    merged = Sampling(top_k=0, top_p=0.5).resolve(author)
    assert (merged.temperature, merged.top_k, merged.top_p, merged.min_p) == (0.6, 0, 0.5, 0.0)
    assert merged.repetition_penalty == 1.0
    assert merged.resolve({}) == merged


def test_unsaid_seeds_differ_and_said_ones_stay() -> None:
    assert len({Sampling().resolve({}).seed for _ in range(20)}) == 20
    assert Sampling(seed=0).resolve({}).seed == 0


def test_tiny_temperature_becomes_greedy() -> None:
    assert Sampling(temperature=9e-6).resolve({}).temperature == 0.0
    assert Sampling(temperature=1e-5).resolve({}).temperature == 1e-5


def test_settings_are_immutable_copies() -> None:
    bias = {3: 1.0}
    sampling = Sampling(logit_bias=bias)
    bias[4] = 2.0
    assert sampling.logit_bias == {3: 1.0}
    with pytest.raises(AttributeError):
        sampling.seed = 3  # type: ignore[misc]
