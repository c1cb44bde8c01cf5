"""The configuration of a model: every fact that the layout, the weights and the kernels need, checked and frozen.

Both spellings of config.json are read: the older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of
transformers 5 (`rope_parameters`, `dtype`). Where the same setting is given twice, the nested or newer one wins, as it
does for transformers; a file that contradicts itself is refused. What differs between families of models is in
`family.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from monograph.model.config_window import read_window
from monograph.model.family import FAMILIES, Family
from monograph.model.json_file import describe, read_json_object
from monograph.model.rope_config import RopeConfig as RopeConfig
from monograph.model.rope_config import read_rope

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

DEFAULT_NO_ROPE_LAYER_INTERVAL = 4


@dataclass(frozen=True)
class ModelConfig:
    """Facts of a model. Built by `from_folder` or `from_dict`; a GGUF file's metadata makes the same.

    Attributes:
        attention_bias: q, k and v have biases; so has o, unless the family says otherwise (`output_bias`).
        dtype: The dtype that the file says its weights have, None if it says nothing.
        eos_token_ids: Every id that ends an answer, () if the file names none.
        sliding_window: Positions that one attends to at most, its own among them, in the layers that are limited; None
            if none is.
        layers_without_rope: Numbers of the layers whose queries and keys are not turned.
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
    sliding_window: int | None = None
    layers_without_rope: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ConfigError(f"model_type: expected one of {', '.join(FAMILIES)}, got {describe(self.model_type)}")
        check_integer("vocab_size", self.vocab_size, 1, MAX_VOCAB_SIZE)
        check_integer("hidden_size", self.hidden_size, 1, MAX_WIDTH)
        check_integer("intermediate_size", self.intermediate_size, 1, MAX_WIDTH)
        check_integer("num_hidden_layers", self.num_layers, 1, MAX_LAYERS)
        check_integer("num_attention_heads", self.num_q_heads, 1, MAX_HEADS)
        check_integer("num_key_value_heads", self.num_kv_heads, 1, MAX_HEADS)
        check_integer("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        check_integer("max_position_embeddings", self.max_position_embeddings, 1, MAX_POSITIONS)
        check_number("rms_norm_eps", self.rms_norm_eps)
        for layer in self.layers_without_rope:
            check_integer("layers_without_rope", layer, 0, self.num_layers - 1)
        if self.sliding_window is not None:
            check_integer("sliding_window", self.sliding_window, 2, MAX_POSITIONS)
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

    @property
    def family(self) -> Family:
        """What this model has in common with others of its `model_type`."""
        return FAMILIES[self.model_type]

    @property
    def output_bias(self) -> bool:
        """Whether o has a bias."""
        return self.attention_bias and self.family.biases == "flags"

    @property
    def longest_seq_len(self) -> int:
        """The longest sequence that is computed as the model's authors meant it: up to `max_position_embeddings`, and
        no longer than a sliding window, which up to its own length hides nothing."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

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
                that is not supported. The message names `source` and the field.
        """
        try:
            return _read(values)
        except ConfigError as fault:
            raise ConfigError(f"{source}: {fault}") from None


def _read(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    model_type, family = _read_family(fields)
    check_keys(values, family.keys)
    vocab_size = fields.required_integer("vocab_size", 1, MAX_VOCAB_SIZE)
    hidden_size = fields.required_integer("hidden_size", 1, MAX_WIDTH)
    num_q_heads = fields.required_integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS)
    if num_kv_heads is None and "num_key_value_heads" not in values:
        num_kv_heads = family.num_kv_heads
    num_layers = fields.required_integer("num_hidden_layers", 1, MAX_LAYERS)
    hidden_act = fields.text("hidden_act")
    if hidden_act not in (None, "silu"):
        raise ConfigError(f"hidden_act: expected silu, got {describe(hidden_act)}; not supported")
    max_position = fields.integer("max_position_embeddings", 1, MAX_POSITIONS) or family.max_position_embeddings
    layers_without_rope = _read_layers_without_rope(fields, num_layers) if family.skips_rope else ()
    attention_bias, mlp_bias = _read_biases(fields, family)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.required_integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads or num_q_heads,
        head_dim=fields.integer("head_dim", 1, MAX_HEAD_DIM) or _derived_head_dim(hidden_size, num_q_heads),
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number("rms_norm_eps") or family.rms_norm_eps,
        rope=read_rope(fields, family, max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tie_word_embeddings),
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        dtype=_read_dtype(fields),
        bos_token_id=fields.integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        sliding_window=read_window(fields, family, num_layers, layers_without_rope),
        layers_without_rope=layers_without_rope,
    )


def _read_family(fields: Fields) -> tuple[str, Family]:
    supported = ", ".join(FAMILIES)
    for wrapped in ("text_config", "vision_config"):
        if wrapped in fields and fields.values[wrapped] != {}:
            raise ConfigError(
                f"{wrapped}: expected a text-only model of type {supported}, got a multimodal model of type "
                f"{describe(fields.values.get('model_type'))}; not supported"
            )
    model_type = fields.text("model_type")
    if model_type is None or model_type not in FAMILIES:
        found = "no such field" if model_type is None else describe(model_type)
        raise ConfigError(f"model_type: expected one of {supported}, got {found}; not supported")
    family = FAMILIES[model_type]
    architectures = fields.values.get("architectures")
    if architectures is None or architectures == []:
        return model_type, family
    known = family.architectures
    if not isinstance(architectures, list) or any(name not in known for name in architectures):
        raise ConfigError(f"architectures: expected [{known[0]}], got {describe(architectures)}; not supported")
    return model_type, family


def _read_biases(fields: Fields, family: Family) -> tuple[bool, bool]:
    """Whether attention and MLP have biases. A flag that contradicts what the family always has is refused."""
    if family.biases == "flags":
        return fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    always = {"attention_bias": family.biases == "qkv", "mlp_bias": False}
    for name, fixed in always.items():
        if fields.flag(name, fixed) != fixed:
            raise ConfigError(
                f"{name}: expected null or {describe(fixed)} for {family.name}, got {describe(not fixed)}; "
                "not supported"
            )
    return always["attention_bias"], always["mlp_bias"]


def _read_layers_without_rope(fields: Fields, num_layers: int) -> tuple[int, ...]:
    turned = fields.values.get("no_rope_layers")  # which, against its name, is 1 for a layer that has RoPE
    if turned is None:
        interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS) or DEFAULT_NO_ROPE_LAYER_INTERVAL
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(turned, list) or len(turned) != num_layers or any(each not in (0, 1) for each in turned):
        raise ConfigError(f"no_rope_layers: expected {num_layers} numbers 0 or 1, got {describe(turned)}")
    return tuple(layer for layer, is_turned in enumerate(turned) if not is_turned)


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
