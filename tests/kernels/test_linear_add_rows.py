"""linear_add_rows against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monograph.kernels.linear_add_rows import linear_add_rows, linear_add_rows_torch
from tests.kernels.rows import (
    DTYPES,
    Case,
    Chunk,
    Kernel,
    Slots,
    assert_close,
    fails,
    linear_fp64,
    random,
    same_bits,
    spread,
)

SIZES = [(64, 64), (200, 77), (33, 130)]  # in_features, out_features


def run(
    function: Kernel, dtype: torch.dtype, chunk: Chunk, num_in: int, num_out: int, has_bias: bool, **options: Any
) -> Case:
    """Returns what was added, its exact value and its magnitude, for the live rows."""
    slots = Slots()
    a = slots.new(chunk.capacity, num_in, dtype=dtype)
    a[: chunk.rows] = random(chunk.rows, num_in, dtype=dtype)
    weight = slots.copy(random(num_out, num_in, dtype=dtype, std=0.2))
    bias = slots.copy(random(num_out, dtype=dtype, seed=1)) if has_bias else None
    x = slots.copy(random(chunk.capacity, num_out, seed=2))
    before = x.clone()
    function(a, weight, bias, *chunk.scalars, x, **options)
    assert same_bits(x[chunk.rows :], before[chunk.rows :])
    slots.check_guards()
    product, magnitude = linear_fp64(a[: chunk.rows], weight, bias)
    old = before[: chunk.rows].double()
    return x[: chunk.rows], old + product, old.abs() + magnitude


@pytest.mark.parametrize("function", [linear_add_rows, linear_add_rows_torch])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk", "in_features", "out_features"), spread(SIZES))
def test_product(function: Kernel, dtype: torch.dtype, chunk: Chunk, in_features: int, out_features: int) -> None:
    case = run(function, dtype, chunk, in_features, out_features, has_bias=out_features == 77)
    if chunk.rows:
        assert_close(*case, terms=in_features, rounded_to=torch.float32)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("rows", [5, 40])
def test_tiles(stages: int, rows: int) -> None:
    """Several tiles and steps in both tilings, pipelined or not."""
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "NUM_STAGES": stages, "FEW_STAGES": stages}
    tile |= {"FEW_ROWS": 20, "FEW_M": 16, "FEW_N": 16, "num_warps": 4}
    case = run(linear_add_rows, torch.float16, Chunk(50, 3, rows), 100, 130, has_bias=True, tile=tile)
    assert_close(*case, terms=100, rounded_to=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_scale_or_missing_term_is_noticed(dtype: torch.dtype) -> None:
    actual, exact, magnitude = run(linear_add_rows, dtype, Chunk(70, 3, 65), 200, 77, has_bias=True)
    old = random(70, 77, seed=2)[:65].double()
    assert fails(assert_close, actual, old + (exact - old) * 1.01, magnitude, 200, torch.float32)
    short = exact.clone()
    short[:, 40] -= 0.01 * old[:, 40]
    assert fails(assert_close, actual, short, magnitude, 200, torch.float32)
