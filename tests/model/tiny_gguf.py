"""Small GGUF files for tests, written with the gguf library from weights under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny Llama."""

    vocab_size: int = 96
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False


def random_weights(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return float32 weights under Hugging Face's names: matrices N(0, 0.15), norms 1 + N(0, 0.1), biases N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    q_width, kv_width = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inter = shape.hidden_size, shape.intermediate_size
    matrices = {
        "self_attn.q_proj": (q_width, hidden, shape.attention_bias),
        "self_attn.k_proj": (kv_width, hidden, shape.attention_bias),
        "self_attn.v_proj": (kv_width, hidden, shape.attention_bias),
        "self_attn.o_proj": (hidden, q_width, shape.attention_bias),
        "mlp.gate_proj": (inter, hidden, shape.mlp_bias),
        "mlp.up_proj": (inter, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, inter, shape.mlp_bias),
    }
    weights = {"model.embed_tokens.weight": 0.15 * normal(shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for part, (rows, columns, has_bias) in matrices.items():
            weights[f"{prefix}{part}.weight"] = 0.15 * normal(rows, columns)
            if has_bias:
                weights[f"{prefix}{part}.bias"] = normal(rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = 1 + 0.1 * normal(hidden)
    weights["model.norm.weight"] = 1 + 0.1 * normal(hidden)
    if not shape.tied:
        weights["lm_head.weight"] = 0.15 * normal(shape.vocab_size, hidden)
    return weights


def gguf_name(name: str) -> str:
    """Return GGUF's name of one of Llama's tensors."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of q or k as GGUF has them: row 2 j + p of a head is row p * head_dim / 2 + j of `rows`."""
    head_dim = rows.shape[0] // num_heads
    half = head_dim // 2
    order = [head * head_dim + p * half + j for head in range(num_heads) for j in range(half) for p in range(2)]
    return rows[order]


def stored(name: str, weight: torch.Tensor, shape: Shape) -> np.ndarray:
    """Return a weight in GGUF's row order."""
    if ".q_proj." in name:
        weight = interleaved(weight, shape.num_q_heads)
    elif ".k_proj." in name:
        weight = interleaved(weight, shape.num_kv_heads)
    return weight.contiguous().numpy()


def metadata_writer(path: Path, shape: Shape, split_max_tensors: int = 0) -> gguf.GGUFWriter:
    """Return a writer that has the settings of a tiny Llama and no tokenizer."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    writer.add_context_length(256)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_q_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    if shape.head_dim * shape.num_q_heads != shape.hidden_size:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything that the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    shape: Shape,
    kind: Kind = Kind.F32,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a model without a tokenizer: matrices as `kind`, vectors as F32, `extra` tensors as they are."""
    writer = metadata_writer(path, shape)
    for name, weight in weights.items():
        array = stored(name, weight, shape)
        if array.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    finish(writer)
    return path


def write_tokenizer(
    path: Path,
    model: str,
    tokens: Sequence[str],
    types: Sequence[int] | None = None,
    *,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    **metadata: str | int | bool | list[str],
) -> Path:
    """Write a file with a tokenizer and nothing else; `metadata` goes under "tokenizer.ggml."."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    if types is not None:
        writer.add_token_types(list(types))
    if merges is not None:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))
    for name, value in metadata.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    finish(writer)
    return path
