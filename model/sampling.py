"""How the next token is chosen: the settings a caller gives, checked here, before anything reaches the device.

A field left at None means "not said": the model author's generation_config.json decides, and where that is silent the
built-in default does. A field that was said wins always, 0 included.
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from monograph.errors import ConfigError

# Dividing by a smaller temperature leaves the range of fp32, and the distribution is one-hot long before.
MIN_TEMPERATURE = 1e-5
SEED_LIMIT = 2**64

T = TypeVar("T")


@dataclass(frozen=True)
class Sampling:
    """Settings of one answer.

    The order of effects follows transformers: logit_bias, repetition penalty, frequency and presence penalties,
    temperature, top-k, top-p, min-p, draw.

    Attributes:
        temperature: Divisor of the scores; 0 is greedy (the lowest id wins a tie), and so is anything below 1e-5.
        top_k: Keep the k highest scores (ties at the k-th are kept); 0 keeps all.
        top_p: Keep the most probable tokens until their mass reaches p; 1 keeps all.
        min_p: Keep tokens at least min_p times as probable as the best one; 0 keeps all.
        repetition_penalty: Divides positive and multiplies negative scores of every id in prompt and answer; 1 is off.
        presence_penalty: Subtracted once from the score of every id in the answer so far; 0 is off.
        frequency_penalty: Subtracted from an id's score once for each time it is in the answer so far; 0 is off.
        logit_bias: Token id -> value added to its logit; -inf bans it.
        seed: 0..2^64-1; the same seed after the same prompt draws the same tokens. None draws a fresh one.

    Raises:
        ConfigError: A field of the wrong type or out of range; the message names it.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_float("temperature", self.temperature, low=0.0)
        _check_int("top_k", self.top_k, low=0, high=2**31)
        _check_float("top_p", self.top_p, low=0.0, high=1.0)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0, low_open=True)
        _check_float("presence_penalty", self.presence_penalty)
        _check_float("frequency_penalty", self.frequency_penalty)
        _check_int("seed", self.seed, low=0, high=SEED_LIMIT)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        for name in _FLOATS:  # numbers of other kinds, NumPy's for one, become plain ones, which a file can hold
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, float(value))

    def resolve(self, defaults: Mapping[str, Any]) -> Sampling:
        """The effective settings: what was said here, else ``defaults`` (field -> value), else the built-in value.

        Args:
            defaults: The model author's values under this class's field names; None counts as not said.

        Returns:
            Settings with no field but ``logit_bias`` left at None; a seed is drawn when none was said.
        """
        chosen: dict[str, Any] = {
            name: first_given(getattr(self, name), defaults.get(name), _BUILT_IN.get(name))
            for name in (field.name for field in fields(self))
        }
        if chosen["seed"] is None:
            chosen["seed"] = secrets.randbits(64)
        effective = Sampling(**chosen)
        if effective.temperature is not None and effective.temperature < MIN_TEMPERATURE:
            effective = replace(effective, temperature=0.0)
        return effective

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids that the model does not have, and a bias that bans every token.

        Raises:
            ConfigError: ``logit_bias`` names an id outside 0..vocab_size-1 or leaves no token.
        """
        bias = self.logit_bias or {}
        for token_id in bias:
            if token_id >= vocab_size:
                raise ConfigError(f"logit_bias: expected ids 0..{vocab_size - 1}, got {token_id}")
        if len(bias) == vocab_size and all(value == -math.inf for value in bias.values()):
            raise ConfigError("logit_bias: every token is banned; leave at least one")

    @property
    def uses_penalties(self) -> bool:
        """Whether any penalty that needs token counts is on."""
        repetition = self.repetition_penalty is not None and self.repetition_penalty != 1.0
        return repetition or bool(self.presence_penalty) or bool(self.frequency_penalty)


_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_BUILT_IN: dict[str, float | int] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def check_sampling(sampling: object) -> None:
    """Refuse settings of another kind.

    Raises:
        ConfigError: Neither None nor a Sampling.
    """
    if sampling is not None and not isinstance(sampling, Sampling):
        way_out = "; write Sampling(**...)" if isinstance(sampling, Mapping) else ""
        raise ConfigError(f"sampling: expected a Sampling, got {type(sampling).__name__}{way_out}")


def _check_float(
    name: str, value: object, low: float | None = None, high: float | None = None, low_open: bool = False
) -> None:
    if value is None:
        return
    wanted = "a finite number"
    if low is not None:
        wanted += f" {'above' if low_open else 'of at least'} {low:g}"
    if high is not None:
        wanted += f" and at most {high:g}"
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    too_low = low is not None and (number <= low if low_open else number < low)
    if not math.isfinite(number) or too_low or (high is not None and number > high):
        raise ConfigError(f"{name}: expected {wanted}, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
        raise ConfigError(f"{name}: expected an integer from {low} to {high - 1}, got {value!r}")


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias: expected a mapping of token id to number, got {type(bias).__name__}")
    checked: dict[int, float] = {}
    for token_id, value in bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral) or token_id < 0:
            raise ConfigError(f"logit_bias: expected token ids of at least 0, got {token_id!r}")
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or math.isnan(value) or value == math.inf:
            raise ConfigError(f"logit_bias[{token_id}]: expected a number below +inf, got {value!r}")
        checked[int(token_id)] = float(value)
    return checked


def first_given(*layers: T | None) -> T | None:
    """Return the first value that is not None: explicit argument, then file, then built-in. 0 and False count."""
    for value in layers:
        if value is not None:
            return value
    return None
