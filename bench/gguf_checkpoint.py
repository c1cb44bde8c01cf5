"""Writes the weights of an arena as a GGUF file, for systems that read nothing else.

As converters write it: matrices in the dtype of the weights, vectors in fp32, the rows of q and k of each head in the
order in which RoPE's pairs are neighbours, a stretched RoPE as divisors of its frequencies. The tokenizer has a word
for every id and knows no text.
"""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType

from monograph.arena import Arena
from monograph.errors import ConfigError
from monograph.model.config import ModelConfig, RopeConfig
from monograph.model.gguf_source import hf_name
from monograph.model.rope import inv_freq
from monograph.model.weights import placements

KINDS = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}
TOP = ("token_embd.weight", "output_norm.weight", "output.weight")
PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def write_gguf(path: Path, config: ModelConfig, arena: Arena) -> None:
    """Write a model.

    Args:
        path: The file.
        config: The model.
        arena: Holds its weights, on any device.

    Raises:
        ConfigError: Not a Llama, or one whose RoPE is YaRN.
    """
    if config.model_type != "llama" or config.rope.rope_type == "yarn":
        kind = f"{config.model_type} with rope_type {config.rope.rope_type}"
        raise ConfigError(f"model_type: expected llama with rope_type default, linear or llama3, got {kind}")
    writer = GGUFWriter(path, "llama")
    _write_facts(writer, config)
    names = {hf_name(name): name for name in _gguf_names(config)}
    for place in placements(config):
        rows = arena.view(place.slot)[place.first_row : place.first_row + place.rows].detach().cpu()
        heads = {"q_proj": config.num_q_heads, "k_proj": config.num_kv_heads}.get(place.tensor.split(".")[-2], 0)
        if heads:
            rows = rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        _add(writer, names[place.tensor], rows.float() if rows.dim() == 1 else rows)
    if config.rope.rope_type != "default":
        plain = torch.arange(0, config.head_dim, 2, dtype=torch.float64).div(config.head_dim)
        divisors = config.rope.theta**-plain / inv_freq(config).cpu()
        _add(writer, "rope_freqs.weight", divisors.float())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    raw = tensor.contiguous().view(torch.uint8).numpy()
    if tensor.dtype == torch.float32:
        writer.add_tensor(name, tensor.contiguous().numpy())
    else:
        writer.add_tensor(name, raw, raw_dtype=KINDS[tensor.dtype])


def _gguf_names(config: ModelConfig) -> list[str]:
    layers = [
        f"blk.{i}.{part}.{kind}" for i in range(config.num_layers) for part in PARTS for kind in ("weight", "bias")
    ]
    return [*TOP, *layers]


def _write_facts(writer: GGUFWriter, config: ModelConfig) -> None:
    rope: RopeConfig = config.rope
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_q_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{i}" for i in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([TokenType.NORMAL] * config.vocab_size)
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if config.eos_token_ids:
        writer.add_eos_token_id(config.eos_token_ids[0])
    writer.add_add_bos_token(False)
