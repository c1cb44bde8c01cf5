"""Rotary position embedding: the table of angles that every layer shares.

The pair (i, i + head_dim / 2) of a head at position p is turned by the angle p * inv_freq[i]. Frequencies and angles
are computed in fp64: at position 100,000 an angle in fp32 is off by up to 0.004 rad. The scaling of Llama 3.1 follows
its published description: wavelengths that fit the original context many times are kept, those that do not fit it are
stretched by `factor`, and between the two the frequency is interpolated linearly in original length / wavelength.
"""

from __future__ import annotations

import math

import torch

from monograph.errors import ConfigError
from monograph.model.config import ModelConfig


def inv_freq(config: ModelConfig) -> torch.Tensor:
    """Return the angle by which each pair turns from one position to the next, fp64 [head_dim / 2]."""
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = torch.pow(torch.tensor(rope.theta, dtype=torch.float64), -exponents)  # [head_dim / 2]
    if rope.frequencies is not None:
        frequencies = frequencies / torch.tensor(rope.frequencies, dtype=torch.float64)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        assert rope.low_freq_factor is not None
        assert rope.high_freq_factor is not None
        assert rope.original_max_position_embeddings is not None
        fits = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # wavelengths in the original length
        kept = (fits - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / rope.factor
    return frequencies


def rope_table(config: ModelConfig, max_seq_len: int, first: int = 0) -> torch.Tensor:
    """Return cosines and sines of the positions first..max_seq_len - 1.

    Args:
        config: The model.
        max_seq_len: The position after the last row.
        first: Position of the first row.

    Returns:
        fp32 [max_seq_len - first, head_dim]: cosines in the first half of each row, sines in the second.

    Raises:
        ConfigError: `max_seq_len` is not positive, or `first` lies outside 0..max_seq_len.
    """
    if max_seq_len < 1 or not 0 <= first <= max_seq_len:
        raise ConfigError(f"rope_table: expected 0 <= first <= max_seq_len >= 1, got {first} and {max_seq_len}")
    positions = torch.arange(first, max_seq_len, dtype=torch.float64)
    angles = positions[:, None] * inv_freq(config)[None, :]  # [rows, head_dim / 2]
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(torch.float32)
