"""last_row: exact."""

from __future__ import annotations

import pytest
import torch

from monograph.kernels.last_row import last_row, last_row_torch
from tests.kernels.rows import Kernel, Slots, random, same_bits, scalar


@pytest.mark.parametrize("function", [last_row, last_row_torch])
@pytest.mark.parametrize("hidden_size", [1, 100, 1100])
@pytest.mark.parametrize(
    ("start", "end", "row"),
    [(0, 1, 0), (0, 63, 62), (0, 64, 63), (0, 65, None), (64, 65, 0), (64, 128, 63), (64, 129, None), (7, 71, 63)],
)
def test_chunk_that_ends_the_prompt(function: Kernel, hidden_size: int, start: int, end: int, row: int | None) -> None:
    slots = Slots()
    x_rows = slots.copy(random(64, hidden_size))
    x_rows[end - start :] = float("nan")
    x, gate = slots.new(hidden_size), slots.new(1, dtype=torch.int32)
    before = x.clone()
    function(x_rows, scalar(start), scalar(end), scalar(0), x, gate)
    assert same_bits(x, before if row is None else x_rows[row])
    assert gate.item() == (row is not None)
    slots.check_guards()


@pytest.mark.parametrize("function", [last_row, last_row_torch])
@pytest.mark.parametrize(("end", "halted", "gate_after"), [(40, 1, -77), (40, 4, -77), (8, 0, 0), (3, 0, 0)])
def test_nothing_to_hand_over(function: Kernel, end: int, halted: int, gate_after: int) -> None:
    slots = Slots()
    x_rows, x, gate = random(64, 10), slots.new(10), slots.new(1, dtype=torch.int32)
    function(x_rows, scalar(8), scalar(end), scalar(halted), x, gate)
    assert x.isnan().all()
    assert gate.item() == gate_after
    slots.check_guards()
