"""Rotary position embedding: the table of angles that every layer shares.

The pair (i, i + head_dim / 2) of a head at position p is turned by the angle p * inv_freq[i]. Frequencies and angles
are computed in fp64: at position 100,000 an angle in fp32 is off by up to 0.004 rad. The scaling of Llama 3.1 follows
its published description: wavelengths that fit the original context many times are kept, those that do not fit it are
stretched by `factor`, and between the two the frequency is interpolated linearly in original length / wavelength.
YaRN (https://arxiv.org/abs/2309.00071) interpolates linearly in the number of the pair instead, and multiplies cosines
and sines by a factor, so that attention scores grow by its square.
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
    if rope.rope_type == "yarn":
        stretched = _yarn_stretched(config)
        return stretched * frequencies / rope.factor + (1.0 - stretched) * frequencies
    return frequencies


def _yarn_stretched(config: ModelConfig) -> torch.Tensor:
    """How far each pair is stretched, from 0 (fast ones) to 1 (slow ones), fp64 [head_dim / 2]."""
    rope = config.rope
    assert rope.beta_fast is not None
    assert rope.beta_slow is not None
    assert rope.original_max_position_embeddings is not None

    def pair_that_turns(turns: float, length: int) -> float:
        """The number of the pair, a fraction too, that turns so many times within a length."""
        # As a difference of logarithms nothing overflows, whatever a file says.
        fits = math.log(length) - math.log(turns) - math.log(2 * math.pi)
        return config.head_dim * fits / (2 * math.log(rope.theta))

    first = pair_that_turns(rope.beta_fast, rope.original_max_position_embeddings)
    last = pair_that_turns(rope.beta_slow, rope.original_max_position_embeddings)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    if first == last:
        last += 0.001  # a step, as wide as in transformers
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float64)
    return ((pairs - first) / (last - first)).clamp(0.0, 1.0)


def rope_table(config: ModelConfig, max_seq_len: int, first: int = 0) -> torch.Tensor:
    """Return cosines and sines of the positions first..max_seq_len - 1, times YaRN's attention factor.

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
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    if config.rope.attention_factor is not None:
        table *= config.rope.attention_factor
    return table.to(torch.float32)
