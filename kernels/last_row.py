"""The end of a prefill chunk: hands the prompt's last row to the head, if this chunk holds it.

gate tells the head and the token choice whether they have anything to do.
"""

from __future__ import annotations

import torch

from monograph.kernels.checks import expect, expect_scalars
from monograph.kernels.device import enter
from monograph.kernels.device_rows import launch_keywords, live_row_count, live_rows
from monograph.kernels.tile import TRIGGER_FIRST, Tile, override
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _last_row_kernel(
    x_rows_ptr,  # fp32 [chunk, hidden_size]
    position_ptr,  # int32 [1]
    prefill_end_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    x_ptr,  # fp32 [hidden_size]
    gate_ptr,  # int32 [1]
    chunk,
    hidden_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    position = tl.load(position_ptr)
    rows = live_row_count(position, prefill_end_ptr, halted_ptr, chunk)
    ends_here = (rows > 0) & (position + chunk >= tl.load(prefill_end_ptr))
    enter(PDL)
    if ends_here:
        offs = block * BLOCK + tl.arange(0, BLOCK)
        row_ptr = x_rows_ptr + (rows - 1).to(tl.int64) * hidden_size
        tl.store(x_ptr + offs, tl.load(row_ptr + offs, mask=offs < hidden_size), mask=offs < hidden_size)
    if (block == 0) & (tl.load(halted_ptr) == 0):
        tl.store(gate_ptr, ends_here.to(tl.int32))


def last_row(
    x_rows: torch.Tensor,  # fp32 [chunk, hidden_size]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    x: torch.Tensor,  # fp32 [hidden_size]
    gate: torch.Tensor,  # int32 [1]
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Copies the last live row into `x` and sets `gate`, as `last_row_torch` does; tile keys BLOCK, num_warps."""
    chunk, hidden_size = x_rows.shape
    expect_scalars("last_row", torch.int32, position=position, prefill_end=prefill_end, halted=halted)
    expect("last_row", "x_rows", x_rows, (chunk, hidden_size), torch.float32)
    expect("last_row", "x", x, (hidden_size,), torch.float32)
    expect("last_row", "gate", gate, (1,), torch.int32)
    default = {"BLOCK": min(1024, triton.next_power_of_2(hidden_size)), "num_warps": 4, "trigger": TRIGGER_FIRST}
    chosen = override("last_row", default, tile)
    _last_row_kernel[(triton.cdiv(hidden_size, chosen["BLOCK"]),)](
        x_rows, position, prefill_end, halted, x, gate, chunk, hidden_size, **launch_keywords(chosen, pdl)
    )


def last_row_torch(
    x_rows: torch.Tensor,  # fp32 [chunk, hidden_size]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    x: torch.Tensor,  # fp32 [hidden_size]
    gate: torch.Tensor,  # int32 [1]
) -> None:
    """Copies the last live row into `x` and sets `gate` to 1 when the prompt ends in this chunk, else `gate` to 0.

    While halted nothing is written: the head and the token choice read `halted` themselves.
    """
    if int(halted):
        return
    rows = live_rows(x_rows.shape[0], position, prefill_end, halted)
    ends_here = int(rows > 0 and int(position) + x_rows.shape[0] >= int(prefill_end))
    if ends_here:
        x.copy_(x_rows[rows - 1])
    gate.fill_(ends_here)
