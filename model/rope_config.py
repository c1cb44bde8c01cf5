"""The settings of RoPE, and how the files of models spell them.

Older files have the base as `rope_theta` and the rest under `rope_scaling`; those of transformers 5 have all of it
under `rope_parameters`. Where the base is given twice, the nested one wins; where the rest differs, the file is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from monograph.errors import ConfigError
from monograph.model.config_fields import MAX_POSITIONS, Fields, check_integer, check_number
from monograph.model.family import Family, RopeType
from monograph.model.json_file import describe

DEFAULT_THETA = 10000.0
DEFAULT_BETA_FAST = 32.0
DEFAULT_BETA_SLOW = 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it is stretched to longer contexts.

    Attributes:
        rope_type: "default"; "linear", all frequencies divided by `factor`; "llama3", low frequencies divided by
            `factor` with a smooth passage to the high ones; "yarn", the same with a passage that is even over the
            pairs, and cosines and sines multiplied by `attention_factor`.
        theta: Base of the geometric series of frequencies.
        factor: The stretch of all kinds but "default".
        low_freq_factor: "llama3" only: wavelengths over original length / low_freq_factor are stretched fully.
        high_freq_factor: "llama3" only: wavelengths under original length / high_freq_factor are not stretched.
        original_max_position_embeddings: "llama3" and "yarn" only: length the model was first trained for.
        frequencies: Divisors of the frequencies, one a pair of dimensions (the tensor `rope_freqs` of a GGUF file).
        beta_fast: "yarn" only: pairs that turn this often within the original length, or more, are not stretched.
        beta_slow: "yarn" only: pairs that turn this often or less are stretched fully.
        attention_factor: "yarn" only: factor of cosines and sines, so that scores grow by its square.
        truncate: "yarn" only: the passage begins and ends at whole pairs.
    """

    rope_type: RopeType = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    frequencies: tuple[float, ...] | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in get_args(RopeType):
            supported = ", ".join(get_args(RopeType))
            raise ConfigError(f"rope_type: expected one of {supported}, got {describe(self.rope_type)}; not supported")
        check_number("rope_theta", self.theta, above=1.0)
        if check_number("rope factor", self.factor) < 1.0:
            raise ConfigError(f"rope factor: expected a number of at least 1, got {self.factor:g}")
        for divisor in self.frequencies or ():
            check_number("rope frequencies", divisor)
        if self.rope_type in ("default", "linear"):
            return
        if self.frequencies is not None:
            raise ConfigError(
                f"rope_type: expected default or linear beside explicit frequencies, got {self.rope_type}"
            )
        check_integer("original_max_position_embeddings", self.original_max_position_embeddings, 1, MAX_POSITIONS)
        if self.rope_type == "llama3":
            low = check_number("low_freq_factor", self.low_freq_factor)
            high = check_number("high_freq_factor", self.high_freq_factor)
            if high <= low:
                raise ConfigError(f"high_freq_factor: expected a number above low_freq_factor {low:g}, got {high:g}")
            return
        slow, fast = check_number("beta_slow", self.beta_slow), check_number("beta_fast", self.beta_fast)
        if fast < slow:
            raise ConfigError(f"beta_fast: expected a number of at least beta_slow {slow:g}, got {fast:g}")
        check_number("attention_factor", self.attention_factor)
        if not isinstance(self.truncate, bool):
            raise ConfigError(f"truncate: expected true or false, got {describe(self.truncate)}")


# Keys of the nested object beside the base and the kind, by kind of RoPE; of "yarn" only the factor is required.
_KEYS: Mapping[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
# `finetuned`, in files of YaRN, says how a model came to be.
_COMMON = ("rope_theta", "rope_type", "type", "original_max_position_embeddings", "finetuned")
# No effect at these values, whatever the kind.
_NEUTRAL: Mapping[str, float] = {"partial_rotary_factor": 1, "attention_factor": 1, "factor": 1}


def read_rope(fields: Fields, family: Family, max_position: int) -> RopeConfig:
    """Read the RoPE settings of a config.json.

    Args:
        fields: The whole file.
        family: Of the model.
        max_position: The model's longest sequence, which stands for the original length where the file names none.

    Raises:
        ConfigError: A kind or a field that is not supported, missing, out of range or contradictory, by its name.
    """
    nested = _nested(fields)
    theta = (nested.number("rope_theta", 1.0) if nested else None) or fields.number("rope_theta", 1.0)
    theta = theta or family.rope_theta
    if nested is None:
        return RopeConfig(theta=theta)
    rope_type = _rope_type(nested, family)
    for key, value in nested.values.items():
        if value is None or key in _COMMON or key in _KEYS[rope_type] or value == _NEUTRAL.get(key):
            continue
        raise ConfigError(
            f"{nested.prefix}{key}: expected no such field beside rope_type {rope_type}, got {describe(value)}; "
            "not supported"
        )
    # A top-level original length wins over the nested one, as for transformers.
    original = fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    original = original or nested.integer("original_max_position_embeddings", 1, MAX_POSITIONS) or max_position
    if rope_type == "yarn":
        return _read_yarn(nested, theta, original, max_position)
    given = {key: _required(nested, key, rope_type) for key in _KEYS[rope_type]}
    if rope_type != "llama3":
        return RopeConfig(rope_type, theta, given.get("factor", 1.0))
    return RopeConfig(rope_type, theta, given["factor"], given["low_freq_factor"], given["high_freq_factor"], original)


def _read_yarn(nested: Fields, theta: float, original: int, max_position: int) -> RopeConfig:
    # A factor that is null, unlike one that is absent, is what the two lengths say.
    implied = "factor" in nested.values and nested.values["factor"] is None
    factor = max_position / original if implied else _required(nested, "factor", "yarn")
    attention_factor = nested.number("attention_factor")
    if attention_factor is None:
        mscale, all_dim = (_number_or_off(nested, key) for key in ("mscale", "mscale_all_dim"))
        if mscale and all_dim:
            attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
        else:
            attention_factor = _yarn_scale(factor, 1.0)
    # For transformers a null here is an "off", not the default.
    truncate = nested.flag("truncate", False) if "truncate" in nested.values else True
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_max_position_embeddings=original,
        beta_fast=_number_or_off(nested, "beta_fast") or DEFAULT_BETA_FAST,
        beta_slow=_number_or_off(nested, "beta_slow") or DEFAULT_BETA_SLOW,
        attention_factor=attention_factor,
        truncate=truncate,
    )


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _required(nested: Fields, key: str, rope_type: RopeType) -> float:
    number = nested.number(key)
    if number is None:
        raise ConfigError(f"{nested.prefix}{key}: expected a number for rope_type {rope_type}, got no such field")
    return number


def _number_or_off(nested: Fields, key: str) -> float | None:
    """A positive number; None where the field is absent or zero."""
    value = nested.values.get(key)
    return None if value == 0 and not isinstance(value, bool) else nested.number(key)


def _nested(fields: Fields) -> Fields | None:
    older, newer = fields.object("rope_scaling"), fields.object("rope_parameters")
    if older is not None and newer is not None and _settings(older) != _settings(newer):
        raise ConfigError(
            f"rope_scaling: expected the same settings as rope_parameters, got {describe(older.values)} beside "
            f"{describe(newer.values)}; remove the one that is wrong"
        )
    nested = newer or older
    for key, value in nested.values.items() if nested else ():
        if isinstance(value, dict):
            raise ConfigError(
                f"{nested.prefix if nested else ''}{key}: expected one RoPE for all layers, got an object; RoPE by "
                "layer type is not supported"
            )
    return nested


def _settings(nested: Fields) -> dict[str, Any]:
    settings = {key: value for key, value in nested.values.items() if value is not None and key != "rope_theta"}
    kind = settings.pop("type", "default")
    settings.setdefault("rope_type", kind)
    return settings


def _rope_type(nested: Fields, family: Family) -> RopeType:
    new, old = nested.text("rope_type"), nested.text("type")
    if new is not None and old is not None and new != old:
        raise ConfigError(f"{nested.prefix}rope_type: expected the same as {nested.prefix}type {old!r}, got {new!r}")
    kind = new or old
    if kind is None:
        if "factor" in nested:
            raise ConfigError(f"{nested.prefix}rope_type: expected a type beside a factor, got no such field")
        kind = "default"
    for supported in family.rope_types:
        if kind == supported:
            return supported
    known = ", ".join(family.rope_types)
    raise ConfigError(
        f"{nested.prefix}rope_type: expected one of {known} for {family.name}, got {describe(kind)}; not supported"
    )
