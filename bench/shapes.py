"""Models by name, of the true shape and with random weights: speed does not depend on what the weights say.

The hyperparameters are those that the models' authors published. Weights are drawn so that activations keep a healthy
size through all layers: matrices with standard deviation 1 / sqrt(columns), norms around 1; the RoPE table is real.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from monograph.arena import Arena
from monograph.model.config import ModelConfig, RopeConfig
from monograph.model.decoder import Decoder
from monograph.model.layout import Capacity, plan_layout
from monograph.model.rope import inv_freq


def _llama3_rope(factor: float) -> RopeConfig:
    return RopeConfig(
        rope_type="llama3",
        theta=500000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


SHAPES = {
    "llama-3.2-1b": ModelConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=_llama3_rope(32.0),
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        bos_token_id=128000,
        eos_token_ids=(128001,),
    ),
    "llama-3.1-8b": ModelConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=_llama3_rope(8.0),
        dtype=torch.bfloat16,
        bos_token_id=128000,
        eos_token_ids=(128001,),
    ),
    "smollm2-135m": ModelConfig(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
}

_ROPE_ROWS = 1 << 18  # computed in fp64 at a time: 512 MB for 64 pairs


def random_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    max_seq_len: int,
    device: torch.device,
    *,
    seed: int = 0,
    debug: bool = False,
) -> Decoder:
    """Make a decoder with random weights, ready to run.

    Args:
        config: The model.
        dtype: Of weights and KV cache.
        max_seq_len: Capacity.
        device: Where it is to live.
        seed: Of the weights: the same seed, sizes and device give the same weights.
        debug: As for ``Decoder``.
    """
    capacity = Capacity.for_model(config, max_seq_len, dtype)
    layout = plan_layout(config, capacity)
    return Decoder(config, capacity, layout, device, lambda arena: random_fill(arena, config, seed), debug)


def random_fill(arena: Arena, config: ModelConfig, seed: int = 0) -> None:
    """Fill every weight slot of an arena, on its device."""
    generator = torch.Generator(arena.device).manual_seed(seed)
    for slot in arena.layout.entries:
        if slot.lifetime != "weight" or slot.name == "rope_table":
            continue
        view = arena.view(slot.name)
        if view.dim() == 1 and not slot.name.endswith("_bias"):
            view.normal_(1.0, 0.1, generator=generator)
        else:
            view.normal_(0.0, view.shape[-1] ** -0.5, generator=generator)
    _fill_rope_table(arena.view("rope_table"), config)


def random_cache(arena: Arena, config: ModelConfig, seed: int = 0, std: float = 1.0, rows: int | None = None) -> None:
    """Fill KV rows 0 to ``rows`` (all by default) with what keys and values of ``random_fill`` look like.

    Args:
        arena: The memory.
        config: The model.
        seed: Of the values.
        std: Standard deviation of keys; a larger one makes attention look at fewer rows. Values have 1.
        rows: How many.
    """
    generator = torch.Generator(arena.device).manual_seed(seed)
    for keys, values in caches(arena, config):
        keys[:, :rows].normal_(0.0, std, generator=generator)
        values[:, :rows].normal_(0.0, 1.0, generator=generator)


def caches(arena: Arena, config: ModelConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield keys and values of every layer, each [num_kv_heads, max_seq_len, head_dim]."""
    for i in range(config.num_layers):
        yield arena.view(f"layers.{i}.k_cache"), arena.view(f"layers.{i}.v_cache")


def _fill_rope_table(table: torch.Tensor, config: ModelConfig) -> None:
    """The table of ``monograph.model.rope``, computed where it lies: a long one takes seconds on a CPU."""
    frequencies = inv_freq(config).to(table.device)
    half = config.head_dim // 2
    for first in range(0, len(table), _ROPE_ROWS):
        rows = table[first : first + _ROPE_ROWS]
        positions = torch.arange(first, first + len(rows), dtype=torch.float64, device=table.device)
        angles = positions[:, None] * frequencies[None, :]  # [rows, head_dim / 2]
        rows[:, :half] = angles.cos()
        rows[:, half:] = angles.sin()
