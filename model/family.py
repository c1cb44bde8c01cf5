"""The families of models that the Llama block serves, a row each: what a family fixes, and what its files leave out.

A family is what `model_type` of a config.json says. All of them are one block (RMSNorm, attention with RoPE and
grouped heads, SiLU-gated MLP) and differ in biases, in how a checkpoint stores the projections, in windows, and in the
values that stand for fields that a file does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]
# "flags": config.json says whether q, k, v and o have biases (`attention_bias`) and gate, up and down (`mlp_bias`);
# "qkv": q, k and v always have, nothing else does; "none": nothing has.
Biases = Literal["flags", "qkv", "none"]
# "none": every layer attends to everything; "every layer": all layers to the last `sliding_window` positions, if the
# file has such a number; the others need `use_sliding_window` too, and are what `layer_types` says, or where there is
# none, the layers from `max_window_layers` on, or those without RoPE.
Windows = Literal["none", "every layer", "from a layer on", "layers without RoPE"]


@dataclass(frozen=True)
class Family:
    """What models of one `model_type` have in common.

    Attributes:
        name: For people.
        architectures: Names under `architectures` in config.json; the first is the one that is written.
        max_position_embeddings: Where a file has no such field.
        rms_norm_eps: Where a file has no such field.
        num_kv_heads: Where a file has no such field at all; None for as many as there are query heads.
        biases: Which projections have biases.
        windows: Which layers attend to a window.
        sliding_window: Where a file has no such field at all, which null is not.
        fused: Checkpoints hold q, k and v as one tensor `qkv_proj`, gate and up as one `gate_up_proj`.
        rope_types: The kinds of RoPE that files of the family may ask for.
        rope_theta: The base, where a file has none.
        skips_rope: Some layers have no RoPE (`no_rope_layers`, or one in `no_rope_layer_interval`).
        tie_word_embeddings: Where a file has no such field.
        keys: Fields that are read for this family alone, or that only here have no effect.
    """

    name: str
    architectures: tuple[str, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_kv_heads: int | None = None
    biases: Biases = "none"
    windows: Windows = "none"
    sliding_window: int | None = None
    fused: bool = False
    rope_types: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
    rope_theta: float = 10000.0
    skips_rope: bool = False
    tie_word_embeddings: bool = False
    keys: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    # The second architecture is the spelling of the first conversions of Llama 1.
    "llama": Family("Llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), 2048, biases="flags"),
    "mistral": Family(
        "Mistral", ("MistralForCausalLM",), 131072, num_kv_heads=8, windows="every layer", sliding_window=4096
    ),
    "phi3": Family(
        "Phi-3", ("Phi3ForCausalLM",), 4096, 1e-5, windows="every layer", fused=True, rope_types=("default",)
    ),
    "qwen2": Family(
        "Qwen2",
        ("Qwen2ForCausalLM",),
        32768,
        num_kv_heads=32,
        biases="qkv",
        windows="from a layer on",
        sliding_window=4096,
    ),
    "smollm3": Family(
        "SmolLM3",
        ("SmolLM3ForCausalLM",),
        32768,
        num_kv_heads=4,
        biases="flags",
        windows="layers without RoPE",
        rope_theta=2000000.0,
        skips_rope=True,
        tie_word_embeddings=True,
        keys=("no_rope_layers", "no_rope_layer_interval", "pretraining_tp"),
    ),
}
