"""Writes the weights of an arena as a checkpoint folder in Hugging Face's form, so that other systems can load them.

The fused slots are cut into the tensors that they were made of. The tokenizer has a word for every id and knows no
text: it is there because a model without one is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from monograph.arena import Arena
from monograph.errors import ConfigError
from monograph.model.config import ModelConfig
from monograph.model.manifest import INDEX_FILE
from monograph.model.weights import placements

SHARD_NBYTES = 4 << 30


def write_checkpoint(folder: Path, config: ModelConfig, arena: Arena, shard_nbytes: int = SHARD_NBYTES) -> None:
    """Write config.json, safetensors shards with their index, and a tokenizer.

    Args:
        folder: Made if need be.
        config: The model.
        arena: Holds its weights, on any device; all matrices have one dtype.
        shard_nbytes: A shard is ended once it holds this much.

    Raises:
        ConfigError: The model stretches RoPE by explicit frequencies, which config.json cannot say, or has layers that
            differ: some without RoPE, or with a sliding window.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = config_json(config, arena.view("embed").dtype)
    (folder / "config.json").write_text(json.dumps(facts, indent=1))
    _write_tokenizer(folder, config.vocab_size)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    places = list(placements(config))
    for number, place in enumerate(places, 1):
        rows = arena.view(place.slot)[place.first_row : place.first_row + place.rows]
        shard[place.tensor] = rows.detach().to("cpu", copy=True)
        if number == len(places) or sum(tensor.nbytes for tensor in shard.values()) >= shard_nbytes:
            name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(shard, folder / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, name)
            shard = {}
    total = sum((folder / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json for a model, in the spelling that old and new readers understand."""
    rope = config.rope
    if rope.frequencies is not None:
        raise ConfigError(
            "rope: expected default, linear, llama3 or yarn, got explicit frequencies; config.json has no key"
        )
    if config.sliding_window is not None:
        raise ConfigError(f"sliding_window: expected null, got {config.sliding_window}; not written")
    if config.layers_without_rope:
        raise ConfigError(f"layers_without_rope: expected none, got {config.layers_without_rope}; not written")
    scaling: dict[str, Any] | None = None
    if rope.rope_type != "default":
        scaling = {"rope_type": rope.rope_type, "factor": rope.factor}
    if rope.rope_type == "llama3":
        scaling = {
            **(scaling or {}),
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    if rope.rope_type == "yarn":
        scaling = {
            **(scaling or {}),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
    return {
        "architectures": [config.family.architectures[0]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "sliding_window": None,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "w0"}))
