"""gate_up_rows against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from monograph.kernels.gate_up_rows import gate_up_rows, gate_up_rows_torch
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

SIZES = [(64, 64), (200, 72), (33, 131)]  # hidden_size, inter_size


def run(
    function: Kernel,
    dtype: torch.dtype,
    chunk: Chunk,
    hidden_size: int,
    inter_size: int,
    has_bias: bool,
    **options: Any,
) -> Case:
    """Returns h, its exact value and the magnitude of its terms, for the live rows."""
    slots = Slots()
    a = slots.new(chunk.capacity, hidden_size, dtype=dtype)
    a[: chunk.rows] = random(chunk.rows, hidden_size, dtype=dtype)
    weight = slots.copy(random(2 * inter_size, hidden_size, dtype=dtype, std=0.2))
    bias = slots.copy(random(2 * inter_size, dtype=dtype, seed=1)) if has_bias else None
    h = slots.new(chunk.capacity, inter_size, dtype=dtype)
    before = h.clone()
    function(a, weight, bias, *chunk.scalars, h, **options)
    assert same_bits(h[chunk.rows :], before[chunk.rows :])
    slots.check_guards()
    (gate, up), (gate_magnitude, up_magnitude) = (t.chunk(2, dim=1) for t in linear_fp64(a[: chunk.rows], weight, bias))
    # d h = u silu'(g) d g + silu(g) d u, and |silu'| < 1.1
    return h[: chunk.rows], silu(gate) * up, 1.1 * up.abs() * gate_magnitude + silu(gate).abs() * up_magnitude


@pytest.mark.parametrize("function", [gate_up_rows, gate_up_rows_torch])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk", "hidden_size", "inter_size"), spread(SIZES))
def test_gated_product(function: Kernel, dtype: torch.dtype, chunk: Chunk, hidden_size: int, inter_size: int) -> None:
    case = run(function, dtype, chunk, hidden_size, inter_size, has_bias=inter_size == 72)
    if chunk.rows:
        assert_close(*case, terms=hidden_size, rounded_to=dtype)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("rows", [5, 40])
def test_tiles(stages: int, rows: int) -> None:
    """Several tiles and steps in both tilings, pipelined or not."""
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "NUM_STAGES": stages, "FEW_STAGES": stages}
    tile |= {"FEW_ROWS": 20, "FEW_M": 16, "FEW_N": 16, "num_warps": 4}
    case = run(gate_up_rows, torch.float16, Chunk(50, 3, rows), 100, 72, has_bias=True, tile=tile)
    assert_close(*case, terms=100, rounded_to=torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_scale_or_order_is_noticed(dtype: torch.dtype) -> None:
    actual, exact, magnitude = run(gate_up_rows, dtype, Chunk(70, 3, 65), 200, 72, has_bias=True)
    assert fails(assert_close, actual, exact * 1.01, magnitude, 200, dtype)
    assert fails(assert_close, actual, exact.roll(1, dims=1), magnitude, 200, dtype)


def test_large_gates() -> None:
    """silu saturates: exp of a large gate overflows to a quotient of 0, and nothing becomes NaN."""
    a = torch.ones_like(random(1, 16))
    weight = torch.cat([random(1, 16).sign() * 0 + value for value in (-20.0, 20.0, 1.0, 1.0)])
    h = Slots().new(1, 2)
    gate_up_rows(a, weight, None, *Chunk(1, 0, 1).scalars, h)
    assert h.tolist() == [[0.0, 320.0 * 16.0]]
