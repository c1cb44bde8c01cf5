"""norm_rows against fp64."""

from __future__ import annotations

import pytest
import torch

from monograph.kernels.norm_rows import norm_rows, norm_rows_torch
from tests.kernels.rows import DTYPES, Chunk, Kernel, Slots, assert_close, fails, random, same_bits, spread

# The root halves the error of a sum of squares; that grows with the depth of the summation tree, 10 for 576 elements.
TERMS = 12

SIZES = [(576, 30.0, 1e-5), (100, 1e-3, 1e-5), (1, 1.0, 1e-6)]  # hidden_size, standard deviation of x, eps


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("function", [norm_rows, norm_rows_torch])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk", "hidden_size", "std", "eps"), spread(SIZES, max_capacity=70))
def test_norm(function: Kernel, dtype: torch.dtype, chunk: Chunk, hidden_size: int, std: float, eps: float) -> None:
    slots = Slots()
    x = slots.new(chunk.capacity, hidden_size)
    x[: chunk.rows] = random(chunk.rows, hidden_size, std=std)
    weight = slots.copy(1 + random(hidden_size, std=0.1, seed=1).to(dtype))
    out = slots.new(chunk.capacity, hidden_size, dtype=dtype)
    before = out.clone()
    function(x, weight, *chunk.scalars, out, eps=eps)
    if chunk.rows:
        expected = exact(x[: chunk.rows], weight, eps)
        assert_close(out[: chunk.rows], expected, expected.abs(), TERMS, dtype)
    assert same_bits(out[chunk.rows :], before[chunk.rows :])
    slots.check_guards()


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_eps_or_scale_is_noticed(dtype: torch.dtype) -> None:
    chunk = Chunk(70, 3, 65)
    x, weight = random(70, 100, std=1e-3), random(100).to(dtype)
    out = Slots().new(70, 100, dtype=dtype)
    norm_rows(x, weight, *chunk.scalars, out, eps=1e-6)
    for wrong in (exact(x, weight, 1e-5), exact(x, weight, 1e-6) * 1.01):
        assert fails(assert_close, out[:65], wrong[:65], wrong[:65].abs(), TERMS, dtype)
