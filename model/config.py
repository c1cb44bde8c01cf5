"""The configuration of a Llama model: every fact that the layout, the weights and the kernels need, checked and frozen.

Both spellings of config.json are read: the older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of
transformers 5 (`rope_parameters`, `dtype`). Where the same setting is given twice, the nested or newer one wins, as it
does for transformers; a file that contradicts itself is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from monograph.errors import ConfigError
from monograph.model.config_fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    Fields,
    check_integer,
    check_number,
)
from monograph.model.config_keys import check_keys
from monograph.model.json_file import describe, read_json_object

MODEL_TYPES = ("llama",)
# The second spelling is that of the first conversions of Llama 1.
ARCHITECTURES = ("LlamaForCausalLM", "LLaMAForCausalLM")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

RopeType = Literal["default", "linear", "llama3"]
DEFAULT_ROPE_THETA = 10000.0
DEFAULT_RMS_NORM_EPS = 1e-6
DEFAULT_MAX_POSITION_EMBEDDINGS = 2048


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it is stretched to longer contexts.

    Attributes:
        rope_type: "default"; "linear", all frequencies divided by `factor`; "llama3", low frequencies divided by
            `factor` with a smooth passage to the high ones.
        theta: Base of the geometric series of frequencies.
        factor: The stretch of "linear" and "llama3".
        low_freq_factor: "llama3" only: wavelengths over original length / low_freq_factor are stretched fully.
        high_freq_factor: "llama3" only: wavelengths under original length / high_freq_factor are not stretched.
        original_max_position_embeddings: "llama3" only: length the model was first trained for.
        frequencies: Divisors of the frequencies, one a pair of dimensions (the tensor `rope_freqs` of a GGUF file).
    """

    rope_type: RopeType = "default"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    frequencies: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in get_args(RopeType):
            supported = ", ".join(get_args(RopeType))
            raise ConfigError(f"rope_type: expected one of {supported}, got {describe(self.rope_type)}; not supported")
        check_number("rope_theta", self.theta, above=1.0)
        if check_number("rope factor", self.factor) < 1.0:
            raise ConfigError(f"rope factor: expected a number of at least 1, got {self.factor:g}")
        for divisor in self.frequencies or ():
            check_number("rope frequencies", divisor)
        if self.rope_type != "llama3":
            return
        if self.frequencies is not None:
            raise ConfigError("rope_type: expected default or linear beside explicit frequencies, got llama3")
        low = check_number("low_freq_factor", self.low_freq_factor)
        high = check_number("high_freq_factor", self.high_freq_factor)
        if high <= low:
            raise ConfigError(f"high_freq_factor: expected a number above low_freq_factor {low:g}, got {high:g}")
        check_integer("original_max_position_embeddings", self.original_max_position_embeddings, 1, MAX_POSITIONS)


@dataclass(frozen=True)
class ModelConfig:
    """Facts of a Llama model. Built by `from_folder` or `from_dict`; a GGUF file's metadata makes the same.

    Attributes:
        dtype: The dtype that the file says its weights have, None if it says nothing.
        eos_token_ids: Every id that ends an answer, () if the file names none.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: torch.dtype | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_integer("vocab_size", self.vocab_size, 1, MAX_VOCAB_SIZE)
        check_integer("hidden_size", self.hidden_size, 1, MAX_WIDTH)
        check_integer("intermediate_size", self.intermediate_size, 1, MAX_WIDTH)
        check_integer("num_hidden_layers", self.num_layers, 1, MAX_LAYERS)
        check_integer("num_attention_heads", self.num_q_heads, 1, MAX_HEADS)
        check_integer("num_key_value_heads", self.num_kv_heads, 1, MAX_HEADS)
        check_integer("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        check_integer("max_position_embeddings", self.max_position_embeddings, 1, MAX_POSITIONS)
        check_number("rms_norm_eps", self.rms_norm_eps)
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads: expected a divisor of num_attention_heads {self.num_q_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number (RoPE rotates pairs), got {self.head_dim}")
        if self.rope.frequencies is not None and len(self.rope.frequencies) != self.head_dim // 2:
            raise ConfigError(
                f"rope frequencies: expected {self.head_dim // 2} values (head_dim / 2), "
                f"got {len(self.rope.frequencies)}"
            )

    @property
    def scale(self) -> float:
        """Factor of the attention scores: the head size to the power -1/2, whatever the hidden size."""
        return float(self.head_dim**-0.5)

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `path`/config.json. Raises ConfigError naming the file and the field."""
        return cls.from_file(Path(path) / "config.json")

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read a config.json under whatever name. Raises ConfigError naming the file and the field."""
        return cls.from_dict(read_json_object(path, ConfigError), source=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read the content of a config.json.

        Args:
            values: The parsed object.
            source: Name of its origin, for error messages.

        Raises:
            ConfigError: A field is missing, of the wrong type, out of range, contradictory, or asks for a computation
                that is not Llama's. The message names `source` and the field.
        """
        try:
            return _read(values)
        except ConfigError as fault:
            raise ConfigError(f"{source}: {fault}") from None


def _read(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    _check_kind(fields)
    check_keys(values)
    vocab_size = fields.required_integer("vocab_size", 1, MAX_VOCAB_SIZE)
    hidden_size = fields.required_integer("hidden_size", 1, MAX_WIDTH)
    num_q_heads = fields.required_integer("num_attention_heads", 1, MAX_HEADS)
    hidden_act = fields.text("hidden_act")
    if hidden_act not in (None, "silu"):
        raise ConfigError(f"hidden_act: expected silu, got {describe(hidden_act)}; not supported")
    max_position = fields.integer("max_position_embeddings", 1, MAX_POSITIONS) or DEFAULT_MAX_POSITION_EMBEDDINGS
    return ModelConfig(
        model_type=values["model_type"],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.required_integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=fields.required_integer("num_hidden_layers", 1, MAX_LAYERS),
        num_q_heads=num_q_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS) or num_q_heads,
        head_dim=fields.integer("head_dim", 1, MAX_HEAD_DIM) or _derived_head_dim(hidden_size, num_q_heads),
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number("rms_norm_eps") or DEFAULT_RMS_NORM_EPS,
        rope=_read_rope(fields, max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        dtype=_read_dtype(fields),
        bos_token_id=fields.integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
    )


def _check_kind(fields: Fields) -> None:
    supported = ", ".join(MODEL_TYPES)
    for wrapped in ("text_config", "vision_config"):
        if wrapped in fields and fields.values[wrapped] != {}:
            raise ConfigError(
                f"{wrapped}: expected a text-only model of type {supported}, got a multimodal model of type "
                f"{describe(fields.values.get('model_type'))}; not supported"
            )
    model_type = fields.text("model_type")
    if model_type not in MODEL_TYPES:
        found = "no such field" if model_type is None else describe(model_type)
        raise ConfigError(f"model_type: expected one of {supported}, got {found}; not supported")
    architectures = fields.values.get("architectures")
    if architectures is None or architectures == []:
        return
    if not isinstance(architectures, list) or any(name not in ARCHITECTURES for name in architectures):
        raise ConfigError(f"architectures: expected [{ARCHITECTURES[0]}], got {describe(architectures)}; not supported")


def _derived_head_dim(hidden_size: int, num_q_heads: int) -> int:
    if hidden_size % num_q_heads:
        raise ConfigError(
            f"head_dim: expected an integer, since hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_q_heads}, got null"
        )
    return hidden_size // num_q_heads


def _read_dtype(fields: Fields) -> torch.dtype | None:
    name = "dtype" if "dtype" in fields else "torch_dtype"
    text = fields.text(name)
    if text is None or text == "auto":
        return None
    dtype = DTYPES.get(text.removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"{name}: expected one of {', '.join(DTYPES)}, got {describe(text)}; not supported")
    return dtype


# Keys of the nested object beside the base and the kind, by kind of RoPE.
_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_COMMON = ("rope_theta", "rope_type", "type", "original_max_position_embeddings")
# No effect at these values, whatever the kind.
_ROPE_NEUTRAL: Mapping[str, float] = {"partial_rotary_factor": 1, "attention_factor": 1, "factor": 1}


def _read_rope(fields: Fields, max_position: int) -> RopeConfig:
    nested = _nested_rope(fields)
    theta = (nested.number("rope_theta", 1.0) if nested else None) or fields.number("rope_theta", 1.0)
    theta = theta or DEFAULT_ROPE_THETA
    if nested is None:
        return RopeConfig(theta=theta)
    rope_type = _rope_type(nested)
    for key, value in nested.values.items():
        if value is None or key in _ROPE_COMMON or key in _ROPE_KEYS[rope_type] or value == _ROPE_NEUTRAL.get(key):
            continue
        raise ConfigError(
            f"{nested.prefix}{key}: expected no such field beside rope_type {rope_type}, got {describe(value)}; "
            "not supported"
        )
    given: dict[str, float] = {}
    for key in _ROPE_KEYS[rope_type]:
        number = nested.number(key)
        if number is None:
            raise ConfigError(f"{nested.prefix}{key}: expected a number for rope_type {rope_type}, got no such field")
        given[key] = number
    if rope_type != "llama3":
        return RopeConfig(rope_type, theta, given.get("factor", 1.0))
    # A top-level original length wins over the nested one, as for transformers.
    original = fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    original = original or nested.integer("original_max_position_embeddings", 1, MAX_POSITIONS) or max_position
    return RopeConfig(rope_type, theta, given["factor"], given["low_freq_factor"], given["high_freq_factor"], original)


def _nested_rope(fields: Fields) -> Fields | None:
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


def _rope_type(nested: Fields) -> RopeType:
    new, old = nested.text("rope_type"), nested.text("type")
    if new is not None and old is not None and new != old:
        raise ConfigError(f"{nested.prefix}rope_type: expected the same as {nested.prefix}type {old!r}, got {new!r}")
    kind = new or old
    if kind is None:
        if "factor" in nested:
            raise ConfigError(f"{nested.prefix}rope_type: expected a type beside a factor, got no such field")
        kind = "default"
    for supported in get_args(RopeType):
        if kind == supported:
            return supported  # type: ignore[no-any-return]
    known = ", ".join(get_args(RopeType))
    raise ConfigError(f"{nested.prefix}rope_type: expected one of {known}, got {describe(kind)}; not supported")
