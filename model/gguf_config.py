"""A model's configuration from the metadata of a GGUF file of architecture llama."""

from __future__ import annotations

import math
import os

import numpy as np
import torch

from monograph.errors import ConfigError
from monograph.model.config import ModelConfig, RopeConfig
from monograph.model.gguf_dequantise import dequantise, dtype_of, is_float
from monograph.model.gguf_file import GGUFFile
from monograph.model.gguf_token_ids import eos_token_ids, special_token_id

ROPE_FREQS = "rope_freqs.weight"

_ARCHITECTURE = "llama"
# Read below, or without effect on the numbers.
_KNOWN_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    }
)
# Keys that change the numbers, with the value at which they do not. A key found neither here nor above may only be off.
_NEUTRAL_VALUES = {
    "attention.causal": True,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "tensor_data_layout": "Meta AI original pth",
}


def config_from_gguf(file: str | os.PathLike[str] | GGUFFile) -> ModelConfig:
    """Read a model's configuration.

    Weights are stored in the dtype of `config.dtype` if all matrices are; it is None where they are quantised or mixed.

    Args:
        file: The path of the file, or the open file (left open).

    Raises:
        CheckpointError: The file is damaged.
        ConfigError: Another architecture, a missing key, or a setting that is not supported. Names file and key.
    """
    if not isinstance(file, GGUFFile):
        with GGUFFile(file) as opened:
            return config_from_gguf(opened)
    _check_kind(file)
    num_q_heads = _per_layer(file, "attention.head_count")
    hidden_size = file.integer(_key("embedding_length"))
    head_dim = _head_dim(file, hidden_size, num_q_heads)
    _check_settings(file, head_dim)
    vocab_size = _vocab_size(file)
    try:
        return ModelConfig(
            model_type=_ARCHITECTURE,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_per_layer(file, "feed_forward_length"),
            num_layers=file.integer(_key("block_count")),
            num_q_heads=num_q_heads,
            num_kv_heads=_per_layer(file, "attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            max_position_embeddings=file.integer(_key("context_length")),
            rms_norm_eps=_number(file, "attention.layer_norm_rms_epsilon"),
            rope=_rope(file),
            tie_word_embeddings="output.weight" not in file.tensors,
            attention_bias=_has_bias(file, "attn_q", "attn_k", "attn_v", "attn_output"),
            mlp_bias=_has_bias(file, "ffn_gate", "ffn_up", "ffn_down"),
            dtype=_dtype(file),
            bos_token_id=special_token_id(file, "bos"),
            eos_token_ids=eos_token_ids(file),
        )
    except ConfigError as error:
        if str(file.path) in str(error):
            raise
        raise ConfigError(f"{file.path}: {error}") from None


def _check_kind(file: GGUFFile) -> None:
    kind = file.text("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{file.path}: holds an object of type {kind!r}, not a model")
    architecture = file.text("general.architecture")
    if architecture != _ARCHITECTURE:
        raise ConfigError(f"{file.path}: architecture {architecture!r} is not supported ({_ARCHITECTURE} is)")


def _check_settings(file: GGUFFile, head_dim: int) -> None:
    """Refuse, by its name, every setting under the architecture that would change the numbers."""
    prefix = _key("")
    for key, value in file.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _KNOWN_KEYS:
            continue
        neutral = _NEUTRAL_VALUES.get(name)
        if name == "attention.scale" and isinstance(value, float) and math.isclose(value, head_dim**-0.5, rel_tol=1e-6):
            continue
        if isinstance(value, list | np.ndarray):
            is_off = not any(value)
        elif neutral is not None:
            is_off = type(value) is type(neutral) and value == neutral
        else:
            is_off = not value
        if not is_off:
            raise ConfigError(f"{file.path}: metadata {key} = {value!r:.80} is not supported")


def _head_dim(file: GGUFFile, hidden_size: int, num_q_heads: int) -> int:
    if _key("attention.key_length") in file.metadata:
        head_dim = file.integer(_key("attention.key_length"))
    elif num_q_heads < 1 or hidden_size % num_q_heads:
        raise ConfigError(
            f"{file.path}: {_key('embedding_length')} {hidden_size} is not a multiple of "
            f"{_key('attention.head_count')} {num_q_heads}, and there is no {_key('attention.key_length')}"
        )
    else:
        head_dim = hidden_size // num_q_heads
    for name in ("attention.value_length", "rope.dimension_count"):
        found = file.integer(_key(name), head_dim)
        if found != head_dim:
            raise ConfigError(f"{file.path}: metadata {_key(name)} = {found} differs from the head size {head_dim}")
    return head_dim


def _vocab_size(file: GGUFFile) -> int:
    """Return the number of rows of the embedding, which a vocabulary may leave unused at its end."""
    num_tokens = len(file.texts("tokenizer.ggml.tokens", []))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        return file.integer(_key("vocab_size"), num_tokens)
    if num_tokens > embedding.shape[0]:
        raise ConfigError(f"{file.path}: {num_tokens:,} tokens, but an embedding of {embedding.shape[0]:,} rows")
    return embedding.shape[0]


def _rope(file: GGUFFile) -> RopeConfig:
    """Read base, linear scaling and the frequency divisors (which is how Llama 3's scaling is stored)."""
    theta = _number(file, "rope.freq_base", 10000.0)
    scaling = file.text(_key("rope.scaling.type"), "linear")
    if scaling not in ("none", "linear"):
        raise ConfigError(f"{file.path}: metadata {_key('rope.scaling.type')} = {scaling!r} is not supported")
    factor = 1.0
    if scaling == "linear":
        factor = _number(file, "rope.scaling.factor", _number(file, "rope.scale_linear", 1.0)) or 1.0
    return RopeConfig("default" if factor == 1.0 else "linear", theta, factor, frequencies=_frequencies(file))


def _frequencies(file: GGUFFile) -> tuple[float, ...] | None:
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    if not is_float(tensor.type):
        raise ConfigError(f"{file.path}: tensor {ROPE_FREQS} is of type {tensor.type.name}, expected plain floats")
    raw = np.empty(tensor.nbytes, dtype=np.uint8)
    file.read_into(tensor, 0, raw)
    return tuple(dequantise(raw, tensor.type).tolist())


def _dtype(file: GGUFFile) -> torch.dtype | None:
    kinds = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    kind = kinds.pop() if len(kinds) == 1 else None
    return dtype_of(kind) if kind is not None and is_float(kind) else None


def _has_bias(file: GGUFFile, *parts: str) -> bool:
    return any(name.endswith(tuple(f".{part}.bias" for part in parts)) for name in file.tensors)


def _per_layer(file: GGUFFile, name: str, default: int | None = None) -> int:
    """Read an integer that may be given once for each layer, as long as all layers have the same."""
    value = file.metadata.get(_key(name))
    if not isinstance(value, np.ndarray):
        return file.integer(_key(name), default)
    different = sorted({int(number) for number in value})
    if len(different) != 1:
        raise ConfigError(
            f"{file.path}: metadata {_key(name)} differs between layers ({different!r:.80}), not supported"
        )
    return different[0]


def _number(file: GGUFFile, name: str, default: float | None = None) -> float:
    """Read a number; of the doubles that are the same float32, the shortest in decimal (1e-05, not 9.99999975e-06)."""
    value = file.number(_key(name), default)
    rounded = np.float32(value)
    return float(str(rounded)) if float(rounded) == value else value


def _key(name: str) -> str:
    return f"{_ARCHITECTURE}.{name}"
