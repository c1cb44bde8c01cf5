"""What a checkpoint must hold, from the wanted side.

A checkpoint is read through a `Source`, whatever its file format. All sources speak the tensor names and shapes of
Hugging Face's models (``model.layers.0.self_attn.q_proj.weight``, ``[out, in]``). Completeness is judged by what the
configuration asks for, never by what happens to be on disk: a tensor that is missing, left over or misshapen is an
error that names it, before anything is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch

from monograph.errors import CheckpointError, ConfigError
from monograph.model.config import DTYPES, ModelConfig

EMBED = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

# Buffers that early converters stored although they follow from the configuration.
_HARMLESS_EXTRA = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_QUANTISED_EXTRA = re.compile(r"(qweight|qzeros|scales|g_idx|weight_scale|weight_scale_inv|absmax|quant_state.*)$")
_MAX_NAMED = 64

_READABLE = (*DTYPES.values(), torch.float64)
_DTYPE_NAMES: Mapping[str, torch.dtype] = {
    **DTYPES,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "half": torch.float16,
    "fp32": torch.float32,
    "float": torch.float32,
}


class Source(Protocol):
    """A set of named tensors on disk, read one at a time.

    `read` returns a CPU tensor in the file's dtype (or float32 where the file holds quantised blocks). The caller drops
    each tensor before it asks for the next, and a source keeps none of those it has handed out.
    """

    def names(self) -> set[str]:
        """Return the name of every tensor in the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its data."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` would give, without reading the data."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, contiguous and on the CPU. Raises CheckpointError if its data is damaged."""
        ...

    def read_rows(self, name: str, first: int, out: torch.Tensor) -> None:
        """Read rows of a tensor into memory that is there already. Safe to call from several threads at once.

        Args:
            name: The tensor, of at least one dimension.
            first: Its first row wanted; like ``len(out)``, a multiple of ``row_unit``.
            out: On the CPU, contiguous, with the tensor's dtype and the shape of those rows.

        Raises:
            CheckpointError: The data is damaged.
        """
        ...

    def row_unit(self, name: str) -> int:
        """Return how many rows of a tensor can only be read together."""
        ...

    @property
    def is_quantised(self) -> bool:
        """Whether the weights are stored as quantised blocks, so that no dtype of theirs is the natural one."""
        ...

    def close(self) -> None:
        """Release the files. Calling it twice does no harm."""
        ...


def layer_name(layer: int, part: str, kind: str = "weight") -> str:
    """Return the name of a layer's tensor, as ``layer_name(0, "self_attn.q_proj")``."""
    return f"model.layers.{layer}.{part}.{kind}"


class Projection(NamedTuple):
    """A matrix of a layer as checkpoints store it, [rows, columns]."""

    part: str
    rows: int
    columns: int
    bias: bool


def projections(config: ModelConfig) -> tuple[Projection, ...]:
    """Return the matrices of a layer, in the order in which the kernels want their rows: q before k before v, gate
    before up. Families that store those as one tensor each have them in the same order."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = config.attention_bias, config.mlp_bias
    o_proj = Projection("self_attn.o_proj", hidden, q_width, config.output_bias)
    down_proj = Projection("mlp.down_proj", hidden, inter, mlp)
    if config.family.fused:
        return (
            Projection("self_attn.qkv_proj", q_width + 2 * kv_width, hidden, attention),
            o_proj,
            Projection("mlp.gate_up_proj", 2 * inter, hidden, mlp),
            down_proj,
        )
    return (
        Projection("self_attn.q_proj", q_width, hidden, attention),
        Projection("self_attn.k_proj", kv_width, hidden, attention),
        Projection("self_attn.v_proj", kv_width, hidden, attention),
        o_proj,
        Projection("mlp.gate_proj", inter, hidden, mlp),
        Projection("mlp.up_proj", inter, hidden, mlp),
        down_proj,
    )


def wanted_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a model needs, in the order in which checkpoints store them.

    A tied head is not among them: whether it may be there is a matter of `check_complete`.
    """
    hidden = config.hidden_size
    wanted: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        wanted[layer_name(layer, "input_layernorm")] = (hidden,)
        for part, rows, columns, bias in projections(config):
            wanted[layer_name(layer, part)] = (rows, columns)
            if bias:
                wanted[layer_name(layer, part, "bias")] = (rows,)
        wanted[layer_name(layer, "post_attention_layernorm")] = (hidden,)
    wanted[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        wanted[LM_HEAD] = (config.vocab_size, hidden)
    return wanted


def check_complete(source: Source, config: ModelConfig) -> None:
    """Check that a checkpoint holds exactly what a configuration asks for. Reads no tensor data.

    With tied embeddings one of the two names suffices. If both are there, their equality is checked while loading.

    Raises:
        CheckpointError: Names every tensor that is missing, left over, misshapen or of a dtype that is not supported.
    """
    names = source.names()
    wanted = wanted_tensors(config)
    if config.tie_word_embeddings and LM_HEAD in names:
        shape = wanted[EMBED]
        if EMBED not in names:
            del wanted[EMBED]
        wanted[LM_HEAD] = shape
    missing = [name for name in wanted if name not in names]
    extra = sorted(name for name in names if name not in wanted and not _HARMLESS_EXTRA.search(name))
    misshapen = [
        f"{name} (expected {list(shape)}, got {list(source.shape(name))})"
        for name, shape in wanted.items()
        if name in names and source.shape(name) != shape
    ]
    wrong_dtype = [
        f"{name} ({str(source.dtype(name)).removeprefix('torch.')})"
        for name in wanted
        if name in names and source.dtype(name) not in _READABLE
    ]
    problems = []
    if missing:
        problems.append(f"missing tensors: {_listed(missing)}{_missing_hint(missing, names, config)}")
    if extra:
        problems.append(
            f"tensors that the configuration has no place for: {_listed(extra)}{_extra_hint(extra, config)}"
        )
    if misshapen:
        problems.append(f"tensors of another shape than the configuration says: {_listed(misshapen)}")
    if wrong_dtype:
        problems.append(
            "tensors whose dtype is not supported (expected bfloat16, float16, float32 or float64): "
            f"{_listed(wrong_dtype)}"
        )
    if problems:
        raise CheckpointError("checkpoint does not match its configuration: " + "; ".join(problems))


def resolve_dtype(requested: str | torch.dtype, config: ModelConfig, source: Source | None) -> torch.dtype:
    """Return the dtype that a model's weights shall have.

    Args:
        requested: "auto", a dtype, or its name ("bfloat16", "bf16", ...). "auto" is the dtype that the configuration
            names, else the one that most of the checkpoint is stored in.
        config: The model.
        source: The checkpoint; None if it is not at hand, and then float32 stands for what it is stored in.

    Raises:
        ConfigError: The dtype is not one of bfloat16, float16 and float32.
    """
    if isinstance(requested, str) and requested == "auto":
        if config.dtype is not None:
            return config.dtype
        return torch.float32 if source is None else _stored_dtype(source)
    known = requested if isinstance(requested, torch.dtype) else None
    if isinstance(requested, str):
        known = _DTYPE_NAMES.get(requested.removeprefix("torch."))
    if known not in DTYPES.values():
        raise ConfigError(f"dtype: expected auto, {', '.join(DTYPES)}, got {requested}")
    assert known is not None
    return known


def _stored_dtype(source: Source) -> torch.dtype:
    num_elements: dict[torch.dtype, int] = {}
    for name in sorted(source.names()):
        dtype = source.dtype(name)
        num_elements[dtype] = num_elements.get(dtype, 0) + torch.Size(source.shape(name)).numel()
    stored = {dtype: count for dtype, count in num_elements.items() if dtype in DTYPES.values()}
    return max(stored, key=lambda dtype: stored[dtype]) if stored else torch.float32


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    rest = len(listed) - _MAX_NAMED
    return ", ".join(listed[:_MAX_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")


def _missing_hint(missing: list[str], names: set[str], config: ModelConfig) -> str:
    if missing == [LM_HEAD]:
        return (
            " (tie_word_embeddings is false, also when config.json does not say; a model whose head is its embedding "
            "needs it to be true)"
        )
    if EMBED in missing and "embed_tokens.weight" in names:
        return " (the names lack 'model.': this looks like the body of a model saved without its head)"
    if any(name.endswith(".bias") for name in missing):
        if config.family.biases == "qkv":
            return f" ({config.family.name} has biases of q, k and v)"
        return " (attention_bias asks for biases of q, k, v and o, mlp_bias for those of gate, up and down)"
    return " (an incomplete download or conversion?)"


def _extra_hint(extra: list[str], config: ModelConfig) -> str:
    if any(_QUANTISED_EXTRA.search(name) for name in extra):
        return " (this looks like a quantised checkpoint, which is not supported)"
    if any(name.endswith(".bias") for name in extra):
        if config.family.biases != "flags":
            return f" ({config.family.name} has no such biases)"
        return " (attention_bias or mlp_bias is false in config.json, yet the checkpoint has biases)"
    return ""
