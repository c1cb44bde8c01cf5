"""Plain matrix product of some rows of a prefill chunk: out[i] = a[first_row + i] weight^T, in fp32.

Serves teacher-forced logits, which come in pieces of `out`'s row count.
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
def _linear_tile(
    a_ptr,
    w_ptr,
    out_ptr,
    tile,
    first_row,
    rows,
    in_features,
    out_features,
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
    acc = rows_product(a_ptr, w_ptr, first_row + offs_m, live, w_rows, in_features, BLOCK_K, EVEN_K, NUM_STAGES)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * out_features + offs_n[None, :]
    tl.store(out_ptrs, acc, mask=live[:, None] & (offs_n < out_features)[None, :])


@triton.jit
def _linear_rows_kernel(
    a_ptr,  # D [chunk, in_features]
    w_ptr,  # D [out_features, in_features]
    position_ptr,  # int32 [1]
    prefill_end_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    first_row_ptr,  # int32 [1]
    out_ptr,  # fp32 [piece, out_features]
    chunk,
    piece,
    in_features,
    out_features,
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
    first_row = tl.load(first_row_ptr)
    rows = live_row_count(tl.load(position_ptr), prefill_end_ptr, halted_ptr, chunk)
    rows = tl.maximum(tl.minimum(rows - first_row, piece), 0)
    tiles = product_tiles(rows, out_features, BLOCK_M, BLOCK_N, FEW_ROWS, FEW_M, FEW_N)
    if (tile < tiles) | (tile == 0):
        enter(PDL)
    if tile < tiles:
        if rows <= FEW_ROWS:
            _linear_tile(
                a_ptr, w_ptr, out_ptr, tile, first_row, rows, in_features, out_features,
                FEW_M, FEW_N, BLOCK_K, EVEN_K, FEW_STAGES,
            )  # fmt: skip
        else:
            _linear_tile(
                a_ptr, w_ptr, out_ptr, tile, first_row, rows, in_features, out_features,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, NUM_STAGES,
            )  # fmt: skip


def linear_rows(
    a: torch.Tensor,  # D [chunk, in_features]
    weight: torch.Tensor,  # D [out_features, in_features]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    first_row: torch.Tensor,  # int32 [1]
    out: torch.Tensor,  # fp32 [piece, out_features]
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes the products of the live rows `first_row` to `first_row + piece - 1` into `out`.

    `first_row` is read before the wait of a dependent launch: no kernel of a graph may write it. Tile keys as in
    `product_tile`.
    """
    chunk, in_features = a.shape
    piece, out_features = out.shape
    expect_weight_dtype("linear_rows", "weight", weight)
    expect_scalars(
        "linear_rows", torch.int32, position=position, prefill_end=prefill_end, halted=halted, first_row=first_row
    )
    expect("linear_rows", "a", a, (chunk, in_features), weight.dtype)
    expect("linear_rows", "weight", weight, (out_features, in_features), weight.dtype)
    expect("linear_rows", "out", out, (piece, out_features), torch.float32)
    chosen = product_tile("linear_rows", weight, piece, tile)
    _linear_rows_kernel[product_grid(piece, out_features, chosen)](
        a,
        weight,
        position,
        prefill_end,
        halted,
        first_row,
        out,
        chunk,
        piece,
        in_features,
        out_features,
        **launch_keywords(chosen, pdl, EVEN_K=in_features % chosen["BLOCK_K"] == 0),
    )


def linear_rows_torch(
    a: torch.Tensor,  # D [chunk, in_features]
    weight: torch.Tensor,  # D [out_features, in_features]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    first_row: torch.Tensor,  # int32 [1]
    out: torch.Tensor,  # fp32 [piece, out_features]
) -> None:
    """Writes the products of the live rows `first_row` to `first_row + piece - 1` into `out`."""
    first = int(first_row)
    rows = min(out.shape[0], live_rows(a.shape[0], position, prefill_end, halted) - first)
    if rows > 0:
        torch.mm(a[first : first + rows].float(), weight.float().T, out=out[:rows])
