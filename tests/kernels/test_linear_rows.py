"""linear_rows against fp64."""

from __future__ import annotations

import pytest
import torch

from monograph.kernels.linear_rows import linear_rows, linear_rows_torch
from tests.kernels.rows import (
    DTYPES,
    Chunk,
    Kernel,
    Slots,
    assert_close,
    linear_fp64,
    random,
    same_bits,
    scalar,
    spread,
)


@pytest.mark.parametrize("function", [linear_rows, linear_rows_torch])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk", "first_row", "piece"), spread([(0, 200), (3, 61), (0, 1), (64, 66), (128, 7)]))
def test_piece(function: Kernel, dtype: torch.dtype, chunk: Chunk, first_row: int, piece: int) -> None:
    slots = Slots()
    a = slots.new(chunk.capacity, 100, dtype=dtype)
    a[: chunk.rows] = random(chunk.rows, 100, dtype=dtype)
    weight = slots.copy(random(77, 100, dtype=dtype))
    out = slots.new(piece, 77)
    before = out.clone()
    function(a, weight, *chunk.scalars, scalar(first_row), out)
    wanted = a[first_row : chunk.rows][:piece]
    if len(wanted):
        assert_close(out[: len(wanted)], *linear_fp64(wanted, weight), terms=100, rounded_to=torch.float32)
    assert same_bits(out[len(wanted) :], before[len(wanted) :])
    slots.check_guards()
