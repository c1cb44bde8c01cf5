"""Matrix product of a prefill chunk added to the residual stream: x[r] += a[r] weight^T + bias.

Used for the attention's output and the MLP's down projection. Accumulated in fp32 and added in fp32: nothing is rounded
to the model's dtype.
"""

from __future__ import annotations

import torch

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
def _linear_add_tile(
    a_ptr,
    w_ptr,
    bias_ptr,
    x_ptr,
    tile,
    rows,
    in_features,
    out_features,
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
    offs_n = tile // num_m * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = tl.minimum(offs_n, out_features - 1)
    acc = rows_product(a_ptr, w_ptr, offs_m, live, w_rows, in_features, BLOCK_K, EVEN_K, NUM_STAGES)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * out_features + offs_n[None, :]
    mask = live[:, None] & (offs_n < out_features)[None, :]
    tl.store(x_ptrs, tl.load(x_ptrs, mask=mask, other=0.0) + acc, mask=mask)


@triton.jit
def _linear_add_rows_kernel(
    a_ptr,  # D [chunk, in_features]
    w_ptr,  # D [out_features, in_features]
    bias_ptr,  # D [out_features]; not read without HAS_BIAS
    position_ptr,  # int32 [1]
    prefill_end_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    x_ptr,  # fp32 [chunk, out_features]
    chunk,
    in_features,
    out_features,
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
    tiles = product_tiles(rows, out_features, BLOCK_M, BLOCK_N, FEW_ROWS, FEW_M, FEW_N)
    if (tile < tiles) | (tile == 0):
        enter(PDL)
    if tile < tiles:
        if rows <= FEW_ROWS:
            _linear_add_tile(
                a_ptr, w_ptr, bias_ptr, x_ptr, tile, rows, in_features, out_features,
                HAS_BIAS, FEW_M, FEW_N, BLOCK_K, EVEN_K, FEW_STAGES,
            )  # fmt: skip
        else:
            _linear_add_tile(
                a_ptr, w_ptr, bias_ptr, x_ptr, tile, rows, in_features, out_features,
                HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, NUM_STAGES,
            )  # fmt: skip


def linear_add_rows(
    a: torch.Tensor,  # D [chunk, in_features]
    weight: torch.Tensor,  # D [out_features, in_features]
    bias: torch.Tensor | None,  # D [out_features]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    x: torch.Tensor,  # fp32 [chunk, out_features]
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Adds the product of the live rows to `x`; tile keys as in `product_tile`."""
    chunk, in_features = a.shape
    out_features = weight.shape[0]
    expect_weight_dtype("linear_add_rows", "weight", weight)
    expect_scalars("linear_add_rows", torch.int32, position=position, prefill_end=prefill_end, halted=halted)
    expect("linear_add_rows", "a", a, (chunk, in_features), weight.dtype)
    expect("linear_add_rows", "weight", weight, (out_features, in_features), weight.dtype)
    if bias is not None:
        expect("linear_add_rows", "bias", bias, (out_features,), weight.dtype)
    expect("linear_add_rows", "x", x, (chunk, out_features), torch.float32)
    chosen = product_tile("linear_add_rows", weight, chunk, tile)
    _linear_add_rows_kernel[product_grid(chunk, out_features, chosen)](
        a,
        weight,
        weight if bias is None else bias,
        position,
        prefill_end,
        halted,
        x,
        chunk,
        in_features,
        out_features,
        **launch_keywords(chosen, pdl, HAS_BIAS=bias is not None, EVEN_K=in_features % chosen["BLOCK_K"] == 0),
    )


def linear_add_rows_torch(
    a: torch.Tensor,  # D [chunk, in_features]
    weight: torch.Tensor,  # D [out_features, in_features]
    bias: torch.Tensor | None,  # D [out_features]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    x: torch.Tensor,  # fp32 [chunk, out_features]
) -> None:
    """Adds the product of the live rows to `x`."""
    rows = live_rows(x.shape[0], position, prefill_end, halted)
    if not rows:
        return
    x[:rows].addmm_(a[:rows].float(), weight.float().T)
    if bias is not None:
        x[:rows] += bias
