"""RMSNorm of a prefill chunk: out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * norm_weight.

All in fp32, rounded once to the model's dtype on store: `out` feeds the tensor cores (Zhang and Sennrich 2019).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from monograph.kernels.checks import expect, expect_scalars, expect_weight_dtype
from monograph.kernels.device import enter
from monograph.kernels.device_rows import launch_keywords, live_row_count, live_rows
from monograph.kernels.tile import TRIGGER_FIRST, Tile, override
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _norm_rows_kernel(
    x_ptr,  # fp32 [chunk, hidden_size]
    norm_weight_ptr,  # D [hidden_size]
    position_ptr,  # int32 [1]
    prefill_end_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    out_ptr,  # D [chunk, hidden_size]
    eps,
    chunk,
    hidden_size,
    BLOCK: tl.constexpr,  # the whole row
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    rows = live_row_count(tl.load(position_ptr), prefill_end_ptr, halted_ptr, chunk)
    offs = tl.arange(0, BLOCK)
    weight = tl.load(norm_weight_ptr + offs, mask=offs < hidden_size, other=0.0).to(tl.float32)
    if (row < rows) | (row == 0):
        enter(PDL)
    if row < rows:
        start = row.to(tl.int64) * hidden_size
        x = tl.load(x_ptr + start + offs, mask=offs < hidden_size, other=0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden_size + eps)
        tl.store(out_ptr + start + offs, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=offs < hidden_size)


def norm_rows(
    x: torch.Tensor,  # fp32 [chunk, hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    out: torch.Tensor,  # D [chunk, hidden_size]
    *,
    eps: float,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes the normalised live rows of `x` into `out`; tile key num_warps."""
    chunk, hidden_size = x.shape
    expect_weight_dtype("norm_rows", "norm_weight", norm_weight)
    expect_scalars("norm_rows", torch.int32, position=position, prefill_end=prefill_end, halted=halted)
    expect("norm_rows", "x", x, (chunk, hidden_size), torch.float32)
    expect("norm_rows", "norm_weight", norm_weight, (hidden_size,), out.dtype)
    expect("norm_rows", "out", out, (chunk, hidden_size), out.dtype)
    block = triton.next_power_of_2(hidden_size)
    chosen = override("norm_rows", {"num_warps": min(16, max(1, block // 512)), "trigger": TRIGGER_FIRST}, tile)
    _norm_rows_kernel[(chunk,)](
        x,
        norm_weight,
        position,
        prefill_end,
        halted,
        out,
        eps,
        chunk,
        hidden_size,
        **launch_keywords(chosen, pdl, BLOCK=block),
    )


def norm_rows_torch(
    x: torch.Tensor,  # fp32 [chunk, hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    out: torch.Tensor,  # D [chunk, hidden_size]
    *,
    eps: float,
) -> None:
    """Writes the normalised live rows of `x` into `out`."""
    rows = live_rows(x.shape[0], position, prefill_end, halted)
    if rows:
        out[:rows] = functional.rms_norm(x[:rows], (x.shape[1],), norm_weight.float(), eps)
