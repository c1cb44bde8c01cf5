"""Synthetic Llama checkpoints: small, random, and with weights large enough that a wrong computation shows.

Weights of two dimensions are drawn with a standard deviation of 0.15, norms around 1. With the 0.02 of an untrained
model, a wrong RoPE base changes the logits by less than bfloat16 does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from monograph.model.checkpoint import LM_HEAD, wanted_tensors
from monograph.model.config import ModelConfig

# As a value of `tiny_config`: leave the field out of the file, which null does not.
ABSENT = object()


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """Return the content of a config.json in the older spelling; `overrides` replace fields, or drop them (ABSENT)."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **overrides,
    }
    return {name: value for name, value in config.items() if value is not ABSENT}


def tiny_ids(config: Mapping[str, Any], count: int = 100, seed: int = 0) -> list[int]:
    """Return random token ids of a model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config["vocab_size"], (count,), generator=generator).tolist()


def tiny_tensors(
    config: Mapping[str, Any],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    std: float = 0.15,
    bias_std: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Return random tensors for a config.json, all that the configuration asks for, under their names in a file."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in wanted_tensors(ModelConfig.from_dict(config)).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(".bias"):
            noise *= bias_std
        elif len(shape) == 1:
            noise = 1 + 0.1 * noise
        else:
            noise *= std
        tensors[name] = noise.to(dtype)
    return tensors


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    std: float = 0.15,
    bias_std: float = 1.0,
    omit: Collection[str] = (),
    extra: Mapping[str, torch.Tensor] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Write config.json and safetensors files.

    Args:
        folder: Made if need be.
        config: Content of config.json; `tiny_config()` by default.
        seed: Of the random tensors.
        shards: 1 for model.safetensors, more for that many files and an index.
        dtype: Of the tensors in the files.
        std: Standard deviation of tensors of two dimensions.
        bias_std: Standard deviation of biases.
        omit: Names of tensors that are left out.
        extra: Further tensors, or others in the place of those drawn.
        tensors: Exactly these, instead of random ones.
        generation_config: Content of generation_config.json; no such file by default.

    Returns:
        The tensors written.
    """
    config = tiny_config() if config is None else config
    written = dict(tiny_tensors(config, seed, dtype, std, bias_std) if tensors is None else tensors)
    written.update(extra or {})
    written = {name: tensor.contiguous() for name, tensor in written.items() if name not in omit}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    if shards == 1:
        save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        write_shards(folder, written, shards)
    return written


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    """Write tensors in several files of about as many tensors each, and the index of them."""
    names = list(tensors)
    per_shard = math.ceil(len(names) / shards)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = names[shard * per_shard : (shard + 1) * per_shard]
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_oracle(folder: Path, dtype: torch.dtype | str = torch.float32, architecture: str = "LlamaForCausalLM") -> Any:
    """Return transformers' own model of a folder, in eval mode. Importing transformers takes seconds.

    MistralForCausalLM without its window computes what Llama does, and takes hidden sizes that are no multiple of the
    number of heads, which LlamaForCausalLM refuses.
    """
    import transformers

    without_window = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    model_class = getattr(transformers, architecture)
    return model_class.from_pretrained(folder, dtype=dtype, local_files_only=True, **without_window).eval()


def fused_parameters(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what each weight slot must hold, concatenated from tensors under their names in a file."""

    def cat(layer: int, block: str, parts: str, kind: str) -> torch.Tensor:
        return torch.cat([tensors[f"model.layers.{layer}.{block}.{part}_proj.{kind}"] for part in parts.split()])

    slots = {"embed": tensors["model.embed_tokens.weight"], "final_norm": tensors["model.norm.weight"]}
    for layer in range(config.num_layers):
        prefix, source = f"layers.{layer}", f"model.layers.{layer}"
        slots[f"{prefix}.attn_norm"] = tensors[f"{source}.input_layernorm.weight"]
        slots[f"{prefix}.mlp_norm"] = tensors[f"{source}.post_attention_layernorm.weight"]
        for slot, block, parts, bias in (
            ("qkv", "self_attn", "q k v", config.attention_bias),
            ("o", "self_attn", "o", config.output_bias),
            ("gate_up", "mlp", "gate up", config.mlp_bias),
            ("down", "mlp", "down", config.mlp_bias),
        ):
            parts = parts.replace(" ", "") if parts == "q k v" and config.family.fused else parts
            parts = parts.replace(" ", "_") if config.family.fused else parts
            slots[f"{prefix}.{slot}"] = cat(layer, block, parts, "weight")
            if bias:
                slots[f"{prefix}.{slot}_bias"] = cat(layer, block, parts, "bias")
    if not config.tie_word_embeddings:
        slots["lm_head"] = tensors[LM_HEAD]
    return slots


class WeightSlots:
    """The weight slots of a model in one allocation of NaN bytes, with a gap before and after each.

    Stands for an arena where a test is about loading alone.
    """

    GAP = 256

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_seq_len: int = 8, device: str = "cpu") -> None:
        q_width, kv_width = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inter = config.hidden_size, config.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "final_norm": (hidden,)}
        for layer in range(config.num_layers):
            per_layer = {
                "attn_norm": (hidden,),
                "qkv": (q_width + 2 * kv_width, hidden),
                "o": (hidden, q_width),
                "mlp_norm": (hidden,),
                "gate_up": (2 * inter, hidden),
                "down": (hidden, inter),
            }
            biased = ("qkv",) * config.attention_bias + ("o",) * config.output_bias
            biased += ("gate_up", "down") * config.mlp_bias
            shapes.update({f"layers.{layer}.{name}": shape for name, shape in per_layer.items()})
            shapes.update({f"layers.{layer}.{name}_bias": per_layer[name][:1] for name in biased})
        if not config.tie_word_embeddings:
            shapes["lm_head"] = (config.vocab_size, hidden)
        for table in ("rope_table", "no_rope_table")[: 1 + bool(config.layers_without_rope)]:
            shapes[table] = (max_seq_len, config.head_dim)
        places, offset = {}, self.GAP
        for name, shape in shapes.items():
            slot_dtype = torch.float32 if name.endswith("rope_table") else dtype
            nbytes = math.prod(shape) * slot_dtype.itemsize
            places[name] = (offset, nbytes, slot_dtype, shape)
            offset += -(-nbytes // self.GAP) * self.GAP + self.GAP
        self._storage = torch.full((offset,), 0xFF, dtype=torch.uint8, device=device)
        self.views = {
            name: self._storage[start : start + nbytes].view(slot_dtype).view(shape)
            for name, (start, nbytes, slot_dtype, shape) in places.items()
        }
        self._used = torch.zeros(offset, dtype=torch.bool)
        for start, nbytes, _, _ in places.values():
            self._used[start : start + nbytes] = True

    def view(self, name: str) -> torch.Tensor:
        return self.views[name]

    def gaps_intact(self) -> bool:
        """Whether nothing was written outside the slots."""
        return bool((self._storage.cpu()[~self._used] == 0xFF).all())
