"""Which keys of a config.json matter, and what becomes of those that are not read.

A config in the wild carries dozens of keys. Some are read; some say nothing about the computation; some would change
it, and are accepted only at the value that leaves the computation as it is. A key that nobody has listed is
refused when its name speaks of the computation and its value is not an "off": a wrong answer is worse than an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from monograph.errors import ConfigError
from monograph.model.json_file import describe


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Read by config.py, rope_config.py and config_window.py, and checked there.
READ = _names(
    """model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias
    mlp_bias rope_theta rope_scaling rope_parameters original_max_position_embeddings torch_dtype dtype bos_token_id
    eos_token_id sliding_window use_sliding_window layer_types max_window_layers"""
)

# Bookkeeping, training and generation settings: no effect on the logits of a given text.
HARMLESS = _names(
    """auto_map attn_implementation attention_implementation begin_suppress_tokens bad_words_ids chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task flash_attention forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_range is_decoder is_llama_config keys_to_ignore_at_inference label2id
    length_penalty max_length max_new_tokens max_sequence_length min_length model_max_length
    name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id pad_vocab_size_multiple pad_vocab_size_multiple_of prefix
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torchscript
    transformers_version typical_p unk_token_id use_bfloat16 use_cache use_flash_attention use_flash_attention_2
    use_flash_attn use_flash_attn_2"""
)
HARMLESS_PREFIXES = ("_", "transformers.js", "unsloth")
HARMLESS_PARTS = ("dropout", "pdrop", "layerdrop")

# Changes the computation, except at these values; null is always one of them.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "compression_config": ({},),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "hidden_activation": ("silu",),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "lm_head_bias": (False,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
    "quantization_config": ({},),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rope_scaling_factor": (1,),
    "rotary_pct": (1,),
    "text_config": ({},),
    "use_mrope": (False,),
    "use_rms_norm": (True,),
    "use_rope": (True,),
    "vision_config": ({},),
}

# Beginnings of words that make an unlisted key suspect.
SUSPECT = _names(
    """activation adapter alibi alpha attention attn audio beta bias bits clip compress conv depth dim draft eagle embd
    embed epsilon eps expert factor ffn freq gate gating head hidden image kv latent layer linear logit lora mamba
    medusa mlp moe multiplier mup norm ntk parallel position projector qk quant query rank recurrent residual retention
    rms rope rotary router scal sink skip sliding softcap soft sparse sparsity ssm state theta vision vocab width window
    yarn"""
)

_WAY_OUT = {
    "quantization_config": "use the unquantised checkpoint of the same model, or a GGUF file of it",
    "compression_config": "use the unquantised checkpoint of the same model, or a GGUF file of it",
    "text_config": "this is a multimodal model; only text-only models are supported",
    "vision_config": "this is a multimodal model; only text-only models are supported",
}


def check_keys(values: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Refuse every key that would change the computation and is not followed. Raises ConfigError naming it.

    Args:
        values: The content of a config.json.
        known: Keys that are read, or have no effect, for the model's family alone.
    """
    for key, value in values.items():
        if value is None or key in READ or key in known or key in HARMLESS or key.startswith(HARMLESS_PREFIXES):
            continue
        if any(part in key for part in HARMLESS_PARTS):
            continue
        if key in NEUTRAL:
            if not any(_same(value, neutral) for neutral in NEUTRAL[key]):
                raise ConfigError(_refusal(key, value))
        elif _is_suspect(key) and value not in (False, 0, "", [], {}):
            raise ConfigError(
                f"{key}: expected only known keys, got {describe(value)} under a key that may change the "
                "computation and is not supported; if it has no effect on this model, remove it from the file"
            )


def _refusal(key: str, value: object) -> str:
    supported = " or ".join(["null", *(describe(neutral).split(" (")[0] for neutral in NEUTRAL[key])])
    if isinstance(value, dict) and isinstance(value.get("quant_method"), str):
        value = f"quant_method {value['quant_method']}"
    way_out = _WAY_OUT.get(key)
    return f"{key}: expected {supported}, got {describe(value)}, which is not supported" + (
        f"; {way_out}" if way_out else ""
    )


def _same(value: object, neutral: object) -> bool:
    # 1 and 1.0 are the same setting, 1 and true are not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _is_suspect(key: str) -> bool:
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
    return any(word.startswith(SUSPECT) for word in words)
