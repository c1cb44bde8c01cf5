"""The config.json files of published Llama models, in the spelling of their time."""

from __future__ import annotations

from typing import Any

# Every model below adds to or replaces these.
_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": 32000,
}
_LLAMA_3: dict[str, Any] = {
    **_COMMON,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_LLAMA_3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA_31 = {
    **_LLAMA_3,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": _LLAMA_3_SCALING,
}
_LLAMA_32_1B = {
    **_LLAMA_31,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**_LLAMA_3_SCALING, "factor": 32.0},
    "tie_word_embeddings": True,
}

LLAMA_CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 1 7B": {
        **_COMMON,
        "architectures": ["LLaMAForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_sequence_length": 2048,
        "pad_token_id": -1,
        "transformers_version": "4.27.0.dev0",
    },
    "Vicuna 7B": {**_COMMON, "_name_or_path": "vicuna-7b", "pad_token_id": 0, "rms_norm_eps": 1e-6},
    "Llama 2 7B": {
        **_COMMON,
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
    },
    "CodeLlama 7B": {**_COMMON, "max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016},
    "DeepSeek Coder 6.7B": {
        **_COMMON,
        "bos_token_id": 32013,
        "eos_token_id": 32014,
        "max_position_embeddings": 16384,
        "pretraining_tp": 1,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 100000,
        "vocab_size": 32256,
    },
    "LLaMA-2 7B 32K": {
        **_COMMON,
        "auto_map": {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"},
        "max_position_embeddings": 32768,
        "pad_token_id": 0,
        "rope_scaling": {"factor": 8.0, "type": "linear"},
    },
    "TinyLlama 1.1B": {
        **_COMMON,
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
    },
    "Llama 3 8B": _LLAMA_3,
    "Llama 3.1 8B Instruct": _LLAMA_31,
    "Llama 3.2 1B Instruct": _LLAMA_32_1B,
    "Llama 3.2 1B, a copy": {
        **_LLAMA_32_1B,
        "eos_token_id": 128009,
        "pad_token_id": 128004,
        "rope_scaling": {**_LLAMA_3_SCALING, "factor": 32.0, "type": "llama3"},
        "unsloth_fixed": True,
        "unsloth_version": "2025.1.5",
    },
    "Llama 3.2 1B, saved by transformers 5": {
        **{
            name: value
            for name, value in _LLAMA_32_1B.items()
            if name not in ("rope_theta", "rope_scaling", "torch_dtype")
        },
        "dtype": "bfloat16",
        "rope_parameters": {**_LLAMA_3_SCALING, "factor": 32.0, "rope_theta": 500000.0},
        "pad_token_id": None,
        "transformers_version": "5.17.0",
    },
    "SmolLM2 135M Instruct": {
        **_COMMON,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "vocab_size": 49152,
    },
    "DeepSeek R1 Distill Llama 8B": {**_LLAMA_31, "eos_token_id": 128001, "transformers_version": "4.43.0.dev0"},
}
