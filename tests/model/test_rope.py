"""The RoPE table, against formulas written out in Python floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from monograph.errors import ConfigError
from monograph.model.config import ModelConfig, RopeConfig
from monograph.model.rope import inv_freq, rope_table
from tests.checkpoints import tiny_config

# A cosine rounded to fp32 is off by at most half a unit in the last place of 1.
TABLE_TOLERANCE = 2.0**-24
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(**overrides))


def llama3_frequency(frequency: float, factor: float, low: float, high: float, original: int) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def test_default() -> None:
    expected = [500000.0 ** (-i / 32) for i in range(0, 32, 2)]
    actual = inv_freq(read(head_dim=32, rope_theta=500000.0))
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_linear() -> None:
    stretched = inv_freq(read(rope_scaling={"type": "linear", "factor": 4.0}))
    torch.testing.assert_close(stretched * 4, inv_freq(read()), rtol=1e-15, atol=0)


@pytest.mark.parametrize("original", [64, 8192])
def test_llama3(original: int) -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": original}
    plain = inv_freq(read(head_dim=128, rope_theta=500000.0))
    expected = [llama3_frequency(frequency, 8.0, 1.0, 4.0, original) for frequency in plain.tolist()]
    actual = inv_freq(read(head_dim=128, rope_theta=500000.0, rope_scaling=scaling))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)
    ratio = plain / actual
    assert {"kept": (ratio == 1).any(), "between": ((ratio > 1) & (ratio < 8)).any(), "full": (ratio == 8).any()} == {
        "kept": True,
        "between": True,
        "full": True,
    }


def test_explicit_divisors() -> None:
    divisors = tuple(1.0 + i for i in range(8))
    fields = {**vars(read()), "rope": RopeConfig(frequencies=divisors)}
    actual = inv_freq(ModelConfig(**fields))
    torch.testing.assert_close(
        actual * torch.tensor(divisors, dtype=torch.float64), inv_freq(read()), rtol=1e-14, atol=0
    )
    with pytest.raises(ConfigError, match="rope frequencies: expected 8 values"):
        ModelConfig(**{**fields, "rope": RopeConfig(frequencies=divisors[:7])})
    with pytest.raises(ConfigError, match="rope frequencies: expected a finite number above 0"):
        RopeConfig(frequencies=(0.0,))
    with pytest.raises(ConfigError, match="beside explicit frequencies"):
        RopeConfig("llama3", 10000.0, 8.0, 1.0, 4.0, 64, divisors)


def test_table_is_exact_far_out() -> None:
    config = read(rope_theta=500000.0)
    table = rope_table(config, 131072, first=131000)
    assert table.shape == (72, 16)
    assert table.dtype == torch.float32
    worst = 0.0
    for row, position in enumerate(range(131000, 131072)):
        for pair in range(8):
            angle = position * 500000.0 ** (-2 * pair / 16)
            worst = max(worst, abs(table[row, pair].item() - math.cos(angle)))
            worst = max(worst, abs(table[row, 8 + pair].item() - math.sin(angle)))
    assert worst <= TABLE_TOLERANCE
    # The same in fp32 throughout is wrong by far more: the tolerance can tell.
    careless = (torch.arange(131000, 131072).float()[:, None] * inv_freq(config).float()[None, :]).cos()
    assert (careless - table[:, :8]).abs().max() > 100 * TABLE_TOLERANCE


@pytest.mark.parametrize("max_seq_len", [1, 63, 64, 65, 200])
def test_table_does_not_depend_on_its_size(max_seq_len: int) -> None:
    config = read()
    table = rope_table(config, max_seq_len)
    assert torch.equal(table[0], torch.cat([torch.ones(8), torch.zeros(8)]))
    assert torch.equal(table, rope_table(config, 256)[:max_seq_len])
    assert torch.equal(table[max_seq_len // 2 :], rope_table(config, max_seq_len, first=max_seq_len // 2))


@pytest.mark.parametrize(("max_seq_len", "first"), [(0, 0), (-1, 0), (4, 5), (4, -1)])
def test_table_refusals(max_seq_len: int, first: int) -> None:
    with pytest.raises(ConfigError, match="rope_table: expected"):
        rope_table(read(), max_seq_len, first)
