"""A product added to the residual stream: x[n] += W[n, :] . a + bias[n]. Used for `o_proj` and `down_proj`.

Weights are widened to fp32 and products accumulate in fp32; every output has one owner, so nothing is atomic.
"""

from __future__ import annotations

import torch

from monograph.kernels.checks import expect, expect_scalars, expect_weight
from monograph.kernels.device import dot_rows, enter, leave, load_activations, load_rows
from monograph.kernels.tile import Tile, column_block, launch_options, linear_tile, override, vector_width
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _add_tile(
    weights,
    a,
    bias_ptr,
    x_ptr,
    offs_n,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    y = tl.load(x_ptr + offs_n, mask=offs_n < N, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    y += dot_rows(weights, a, BLOCK_N, BLOCK_K, CHUNKS, VECTOR)
    tl.store(x_ptr + offs_n, y, mask=offs_n < N)


@triton.jit
def _linear_add_kernel(
    a_ptr,  # fp32 [K]
    weight_ptr,  # D [N, K]
    bias_ptr,  # D [N], read only if HAS_BIAS
    halted_ptr,  # int32 [1]
    x_ptr,  # fp32 [N]
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GRID: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if tl.load(halted_ptr) != 0:
        leave(PDL)
        return
    tile = tl.program_id(0)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weights = load_rows(weight_ptr, offs_n, offs_n < N, K, BLOCK_K, CHUNKS, N % BLOCK_N != 0)
    enter(PDL)
    a = load_activations(a_ptr, K, BLOCK_K, CHUNKS, VECTOR)
    if GRID == TILES:
        _add_tile(weights, a, bias_ptr, x_ptr, offs_n, N, HAS_BIAS, BLOCK_N, BLOCK_K, CHUNKS, VECTOR)
    else:  # persistent: the next tile is on its way while this one is multiplied
        while tile < TILES:
            next_n = offs_n + GRID * BLOCK_N
            next_weights = load_rows(weight_ptr, next_n, next_n < N, K, BLOCK_K, CHUNKS, True)
            _add_tile(weights, a, bias_ptr, x_ptr, offs_n, N, HAS_BIAS, BLOCK_N, BLOCK_K, CHUNKS, VECTOR)
            weights = next_weights
            offs_n = next_n
            tile += GRID


def linear_add(
    a: torch.Tensor,  # fp32, in_features elements of any shape
    weight: torch.Tensor,  # D [out_features, in_features]
    bias: torch.Tensor | None,  # D [out_features]
    halted: torch.Tensor,  # int32 [1]
    x: torch.Tensor,  # fp32 [out_features]
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Adds the product (and the bias) to `x` in place.

    Args:
        pdl: launch before the predecessor has ended; needs sm_90.
        tile: overrides of BLOCK_N, num_warps, trigger and programs (0: one for each tile).

    Raises:
        ValueError: an argument of the wrong shape, dtype or layout.
    """
    expect_weight("linear_add", "weight", weight)
    out_features, in_features = weight.shape
    expect("linear_add", "a", a.view(-1), (in_features,), torch.float32)
    if bias is not None:
        expect("linear_add", "bias", bias, (out_features,), weight.dtype)
    expect_scalars("linear_add", torch.int32, halted=halted)
    expect("linear_add", "x", x, (out_features,), torch.float32)
    t = override("linear_add", linear_tile(out_features, in_features, weight.dtype, x.device), tile)
    tiles = triton.cdiv(out_features, t["BLOCK_N"])
    grid = min(t["programs"] or tiles, tiles)
    block_k = column_block(in_features, weight.dtype, t["num_warps"])
    _linear_add_kernel[(grid,)](
        a,
        weight,
        weight if bias is None else bias,
        halted,
        x,
        N=out_features,
        K=in_features,
        HAS_BIAS=bias is not None,
        GRID=grid,
        BLOCK_N=t["BLOCK_N"],
        BLOCK_K=block_k,
        CHUNKS=triton.cdiv(in_features, block_k),
        VECTOR=vector_width(weight.dtype),
        PDL=t["trigger"] if pdl else 0,
        num_warps=t["num_warps"],
        **launch_options(pdl),
    )


def linear_add_torch(
    a: torch.Tensor,  # fp32, in_features elements of any shape
    weight: torch.Tensor,  # D [out_features, in_features]
    bias: torch.Tensor | None,  # D [out_features]
    halted: torch.Tensor,  # int32 [1]
    x: torch.Tensor,  # fp32 [out_features]
) -> None:
    """Adds the product (and the bias) to `x` in place."""
    if int(halted):
        return
    x += torch.mv(weight.float(), a.view(-1))  # .float() of an fp32 weight is the weight itself
    if bias is not None:
        x += bias.float()
