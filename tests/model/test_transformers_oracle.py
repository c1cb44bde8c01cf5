"""What transformers makes of the same files: configuration, frequencies and parameters. No logits here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monograph.model.config import ModelConfig
from monograph.model.manifest import read_manifest
from monograph.model.rope import inv_freq
from monograph.model.safetensors_source import SafetensorsSource
from monograph.model.weights import load_weights
from tests.checkpoints import ABSENT, WeightSlots, fused_parameters, load_oracle, tiny_config, write_checkpoint
from tests.model.llama_configs import LLAMA_CONFIGS

# transformers computes frequencies in fp32: a power, a division and a blend, each rounded.
FREQUENCY_TOLERANCE = 8 * 2.0**-23
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE: dict[str, dict[str, Any]] = {
    "b01 top": {"rope_theta": 500000},
    "b01 nested": {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "b01 both": {"rope_theta": 20000, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "b01 null scaling": {"rope_theta": 500000, "rope_scaling": None},
    "b01 neither": {"rope_theta": ABSENT},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, new spelling": {
        "rope_theta": ABSENT,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4},
    },
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "head_dim": 64},
    "llama3, new spelling": {"rope_theta": ABSENT, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    "llama3, length at the top": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32, "head_dim": 64},
    "llama3, no length": {"rope_scaling": {k: v for k, v in LLAMA3.items() if not k.startswith("original")}},
}


def oracle_inv_freq(facts: dict[str, Any]) -> torch.Tensor:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(LlamaConfig.from_dict(facts)).inv_freq


@pytest.mark.parametrize("case", ROPE)
def test_b01_frequencies(case: str) -> None:
    facts = tiny_config(**ROPE[case])
    actual = inv_freq(ModelConfig.from_dict(facts))
    torch.testing.assert_close(actual, oracle_inv_freq(facts).double(), rtol=FREQUENCY_TOLERANCE, atol=0)


@pytest.mark.parametrize("name", LLAMA_CONFIGS)
def test_published_models(name: str) -> None:
    from transformers import LlamaConfig

    facts = LLAMA_CONFIGS[name]
    ours, theirs = ModelConfig.from_dict(facts), LlamaConfig.from_dict(facts)
    torch.testing.assert_close(inv_freq(ours), oracle_inv_freq(facts).double(), rtol=FREQUENCY_TOLERANCE, atol=0)
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.rms_norm_eps, ours.max_position_embeddings) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert (ours.attention_bias, ours.mlp_bias) == (theirs.attention_bias, theirs.mlp_bias)
    assert (ours.tie_word_embeddings, ours.dtype) == (theirs.tie_word_embeddings, theirs.dtype)
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))


def test_b01_file_saved_by_transformers_itself(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    facts = LLAMA_CONFIGS["Llama 3.1 8B Instruct"]
    LlamaConfig.from_dict(facts).save_pretrained(tmp_path)
    assert "rope_parameters" in (tmp_path / "config.json").read_text()
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_dict(facts)


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "b02 wide heads": ("LlamaForCausalLM", {"head_dim": 32}, {}),
    "b02 null head size": ("LlamaForCausalLM", {"head_dim": None}, {}),
    "b02 three heads": (
        "MistralForCausalLM",
        {"hidden_size": 56, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32},
        {},
    ),
    "b03 biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, {}),
    "b06 tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}, {}),
    "b06 only the head": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True},
        {"omit": ["model.embed_tokens.weight"], "extra": {"lm_head.weight": torch.arange(96.0 * 64).reshape(96, 64)}},
    ),
    "b07 shards": ("LlamaForCausalLM", {}, {"shards": 3}),
    "b09 bfloat16": ("LlamaForCausalLM", {"torch_dtype": "bfloat16"}, {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("case", MODELS)
def test_slots_hold_the_parameters_that_transformers_loads(case: str, tmp_path: Path) -> None:
    architecture, overrides, arguments = MODELS[case]
    write_checkpoint(tmp_path, tiny_config(**overrides), **arguments)
    oracle = load_oracle(tmp_path, dtype="auto", architecture=architecture)
    config = ModelConfig.from_folder(tmp_path)
    assert config.dtype == oracle.dtype
    slots = WeightSlots(config, oracle.dtype)
    load_weights(SafetensorsSource(read_manifest(tmp_path)), config, slots)
    for name, tensor in fused_parameters(config, oracle.state_dict()).items():
        assert torch.equal(slots.view(name), tensor), name
    assert config.scale == oracle.model.layers[0].self_attn.scaling
