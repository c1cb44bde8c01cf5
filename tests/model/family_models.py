"""Tiny random models of each family, made by transformers itself: its configuration class, its module, its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.engines import write_tokenizer

# Odd sizes and ratios of query to KV heads of 3, 7 and 24; head sizes given and derived, tied heads and not.
# The class names are of transformers: the model is <name>ForCausalLM, its configuration <name>Config.
COMMON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SIZES: list[dict[str, Any]] = [
    {
        "vocab_size": 97,
        "hidden_size": 66,
        "intermediate_size": 77,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
    },
    {
        "vocab_size": 101,
        "hidden_size": 84,
        "intermediate_size": 129,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    {
        "vocab_size": 93,
        "hidden_size": 48,
        "intermediate_size": 51,
        "num_attention_heads": 24,
        "num_key_value_heads": 1,
        "head_dim": 18,
        "rms_norm_eps": 1e-6,
    },
]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _cases(family: str, *extra: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        f"{family} {number}": (family, {**COMMON, **sizes, **more})
        for number, (sizes, more) in enumerate(zip(SIZES, extra, strict=True), 1)
    }


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta}}


# What transformers' class is given beside sizes: three of each family.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **_cases(
        "Llama",
        {"attention_bias": True, "mlp_bias": True, **_rope(5e5, **LLAMA3)},
        _rope(1e6),  # as CodeLlama
        _rope(1e4, rope_type="linear", factor=4.0),  # as DeepSeek Coder; Yi, TinyLlama and DeepSeek-LLM are plainer
    ),
    **_cases(
        "Mistral",
        {"sliding_window": None, **_rope(1e6)},
        {"sliding_window": 128, **_rope(1e4)},
        {"sliding_window": 4096, **_rope(1e4, **YARN)},
    ),
    **_cases(
        "Qwen2",
        _rope(1e6),
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1, **_rope(1e4)},
        {"use_sliding_window": False, "sliding_window": 16, **_rope(1e4, **YARN, attention_factor=1.5)},
    ),
    **_cases(
        "Phi3",
        _rope(1e4),
        {"sliding_window": 131, **_rope(2e4)},
        {"sliding_window": None, "hidden_size": 144, **_rope(1e4)},
    ),
    **_cases(
        "SmolLM3",
        {"no_rope_layer_interval": 2, **_rope(5e6)},
        {"no_rope_layers": [0, 1], "attention_bias": True, **_rope(1e4, **YARN)},
        {"use_sliding_window": True, "sliding_window": 100, "no_rope_layers": [1, 0], "mlp_bias": True, **_rope(1e4)},
    ),
}
del MODELS["Phi3 3"][1]["head_dim"]  # transformers derives it: 144 / 24


def make_model(family: str, facts: Mapping[str, Any], std: float = 0.15, bias_std: float = 1.0) -> Any:
    """Return transformers' module with random weights, norms around 1."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**facts)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".bias"):
                parameter.copy_(bias_std * noise)
            else:
                parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else std * noise)
    return model


def save_model(model: Any, folder: Path, spelling: str = "newer") -> Path:
    """Write a model as transformers does, with a tokenizer; "older": config.json in the spelling before version 5."""
    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
    if spelling == "older":
        path = folder / "config.json"
        path.write_text(json.dumps(older_spelling(json.loads(path.read_text()))))
    return folder


def older_spelling(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json that transformers 5 has written, as transformers 4 would have."""
    older = dict(facts)
    rope = dict(older.pop("rope_parameters"))
    older["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    older["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    older["torch_dtype"] = older.pop("dtype")
    return older


def oracle_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of every position, float32 [len(ids), vocab_size]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]
