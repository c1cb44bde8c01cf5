"""Gate and up projection of a prefill chunk with SwiGLU: h[r] = silu(g) * u.

(g, u) = a[r] weight^T + bias, the rows of `weight` being those of the gate, then those of up;
silu(g) = g / (1 + exp(-g)). Accumulated and combined in fp32, rounded once on store (Shazeer 2020).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from monograph.kernels.checks import expect, expect_scalars, expect_weight_dtype
from monograph.kernels.device import enter
from monograph.kernels.device_rows import (
    launch_keywords,
    live_row_count,
    live_rows,
    product_grid,
    product_tile,
    product_tiles,
    rows_product,
)
from monograph.kernels.tile import Tile
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _gate_up_tile(
    a_ptr,
    w_ptr,
    bias_ptr,
    h_ptr,
    tile,
    rows,
    in_features,
    intermediate_size,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    num_m = tl.cdiv(rows, BLOCK_M)
    offs_m = tile % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = offs_m < rows
    # Columns 2 j and 2 j + 1 of the product are gate and up of one output, so that a thread holds both.
    first = tile // num_m * (BLOCK_N // 2)
    column = tl.arange(0, BLOCK_N)
    w_rows = tl.minimum(first + column // 2, intermediate_size - 1) + column % 2 * intermediate_size
    acc = rows_product(a_ptr, w_ptr, offs_m, live, w_rows, in_features, BLOCK_K, EVEN_K, NUM_STAGES)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
    shrink = tl.exp(-tl.abs(gate))  # never overflows
    h = gate * (tl.where(gate < 0, shrink, 1.0) / (1.0 + shrink)) * up
    offs_h = first + tl.arange(0, BLOCK_N // 2)
    h_ptrs = h_ptr + offs_m.to(tl.int64)[:, None] * intermediate_size + offs_h[None, :]
    mask = live[:, None] & (offs_h < intermediate_size)[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_up_rows_kernel(
    a_ptr,  # D [chunk, in_features]
    w_ptr,  # D [2 * intermediate_size, in_features]
    bias_ptr,  # D [2 * intermediate_size]; not read without HAS_BIAS
    position_ptr,  # int32 [1]
    prefill_end_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    h_ptr,  # D [chunk, intermediate_size]
    chunk,
    in_features,
    intermediate_size,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    FEW_M: tl.constexpr,
    FEW_N: tl.constexpr,
    FEW_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    rows = live_row_count(tl.load(position_ptr), prefill_end_ptr, halted_ptr, chunk)
    tiles = product_tiles(rows, 2 * intermediate_size, BLOCK_M, BLOCK_N, FEW_ROWS, FEW_M, FEW_N)
    if (tile < tiles) | (tile == 0):
        enter(PDL)
    if tile < tiles:
        if rows <= FEW_ROWS:
            _gate_up_tile(
                a_ptr, w_ptr, bias_ptr, h_ptr, tile, rows, in_features, intermediate_size,
                HAS_BIAS, FEW_M, FEW_N, BLOCK_K, EVEN_K, FEW_STAGES,
            )  # fmt: skip
        else:
            _gate_up_tile(
                a_ptr, w_ptr, bias_ptr, h_ptr, tile, rows, in_features, intermediate_size,
                HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, NUM_STAGES,
            )  # fmt: skip


def gate_up_rows(
    a: torch.Tensor,  # D [chunk, hidden_size]
    weight: torch.Tensor,  # D [2 * intermediate_size, hidden_size]
    bias: torch.Tensor | None,  # D [2 * intermediate_size]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    h: torch.Tensor,  # D [chunk, intermediate_size]
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes the gated products of the live rows into `h`; tile keys as in `product_tile`."""
    chunk, hidden_size = a.shape
    intermediate_size = h.shape[1]
    expect_weight_dtype("gate_up_rows", "weight", weight)
    expect_scalars("gate_up_rows", torch.int32, position=position, prefill_end=prefill_end, halted=halted)
    expect("gate_up_rows", "a", a, (chunk, hidden_size), weight.dtype)
    expect("gate_up_rows", "weight", weight, (2 * intermediate_size, hidden_size), weight.dtype)
    if bias is not None:
        expect("gate_up_rows", "bias", bias, (2 * intermediate_size,), weight.dtype)
    expect("gate_up_rows", "h", h, (chunk, intermediate_size), weight.dtype)
    chosen = product_tile("gate_up_rows", weight, chunk, tile)
    _gate_up_rows_kernel[product_grid(chunk, 2 * intermediate_size, chosen)](
        a,
        weight,
        weight if bias is None else bias,
        position,
        prefill_end,
        halted,
        h,
        chunk,
        hidden_size,
        intermediate_size,
        **launch_keywords(chosen, pdl, HAS_BIAS=bias is not None, EVEN_K=hidden_size % chosen["BLOCK_K"] == 0),
    )


def gate_up_rows_torch(
    a: torch.Tensor,  # D [chunk, hidden_size]
    weight: torch.Tensor,  # D [2 * intermediate_size, hidden_size]
    bias: torch.Tensor | None,  # D [2 * intermediate_size]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    h: torch.Tensor,  # D [chunk, intermediate_size]
) -> None:
    """Writes the gated products of the live rows into `h`."""
    rows = live_rows(a.shape[0], position, prefill_end, halted)
    if not rows:
        return
    product = functional.linear(a[:rows].float(), weight.float(), None if bias is None else bias.float())
    gate, up = product.chunk(2, dim=1)
    torch.mul(functional.silu(gate), up, out=h[:rows])
