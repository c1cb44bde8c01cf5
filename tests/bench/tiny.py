"""A model small enough to be measured on a CPU in a moment."""

from __future__ import annotations

import torch

from bench.shapes import random_cache, random_decoder
from bench.step import Step
from monograph.model.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=211,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    dtype=torch.float32,
)


def tiny_step(max_seq_len: int = 64) -> Step:
    """A decode step whose cache is full of random rows."""
    decoder = random_decoder(CONFIG, torch.float32, max_seq_len, torch.device("cpu"))
    random_cache(decoder.arena, CONFIG)
    return Step(decoder)
