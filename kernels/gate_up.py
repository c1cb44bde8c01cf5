"""RMSNorm, gate and up products, and the gated unit, in one launch.

h = silu(g) * u, where [g; u] = W (x * norm_weight) / rms(x) + bias and silu(g) = g / (1 + exp(-g)) (Shazeer 2020).
Rows of W: gate, then up. Weights are widened and products accumulated in fp32. A tile holds a gate row beside its up
row, so the unit is applied in registers.
"""

from __future__ import annotations

import torch

from monograph.kernels.checks import expect, expect_scalars, expect_weight
from monograph.kernels.device import dot_rows, enter, leave, load_rows, load_vector, normalise
from monograph.kernels.tile import Tile, column_block, launch_options, matvec_tile, override, vector_width
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _gate_up_kernel(
    x_ptr,  # fp32 [K]
    norm_weight_ptr,  # D [K]
    weight_ptr,  # D [2 * N, K]
    bias_ptr,  # D [2 * N], read only if HAS_BIAS
    halted_ptr,  # int32 [1]
    h_ptr,  # fp32 [N]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    if tl.load(halted_ptr) != 0:
        leave(PDL)
        return
    first = tl.program_id(0) * BLOCK_N
    offs_pair = tl.arange(0, 2 * BLOCK_N)  # even: gate rows, odd: up rows
    live = first + offs_pair // 2 < N
    rows = first + offs_pair // 2 + offs_pair % 2 * N
    weights = load_rows(weight_ptr, rows, live, K, BLOCK_K, CHUNKS, N % BLOCK_N != 0)
    norm_weight = load_vector(norm_weight_ptr, K, BLOCK_K, CHUNKS)
    enter(PDL)
    x, inverse_rms = normalise(load_vector(x_ptr, K, BLOCK_K, CHUNKS), norm_weight, eps, K, CHUNKS)
    y = dot_rows(weights, x, 2 * BLOCK_N, BLOCK_K, CHUNKS, VECTOR) * inverse_rms
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=live, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(y, [BLOCK_N, 2]))
    offs_n = first + tl.arange(0, BLOCK_N)
    tl.store(h_ptr + offs_n, gate / (1.0 + tl.exp(-gate)) * up, mask=offs_n < N)


def gate_up(
    x: torch.Tensor,  # fp32 [hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    weight: torch.Tensor,  # D [2 * intermediate_size, hidden_size]
    bias: torch.Tensor | None,  # D [2 * intermediate_size]
    halted: torch.Tensor,  # int32 [1]
    h: torch.Tensor,  # fp32 [intermediate_size]
    *,
    eps: float,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes the gated activations into `h`.

    Args:
        eps: added to the mean square.
        pdl: launch before the predecessor has ended; needs sm_90.
        tile: overrides of BLOCK_N (pairs of rows), num_warps, trigger.

    Raises:
        ValueError: an argument of the wrong shape, dtype or layout.
    """
    expect_weight("gate_up", "weight", weight)
    hidden_size = weight.shape[1]
    intermediate_size = weight.shape[0] // 2
    expect("gate_up", "x", x, (hidden_size,), torch.float32)
    expect("gate_up", "norm_weight", norm_weight, (hidden_size,), weight.dtype)
    expect("gate_up", "weight", weight, (2 * intermediate_size, hidden_size), weight.dtype)
    if bias is not None:
        expect("gate_up", "bias", bias, (2 * intermediate_size,), weight.dtype)
    expect_scalars("gate_up", torch.int32, halted=halted)
    expect("gate_up", "h", h, (intermediate_size,), torch.float32)
    num_warps = 8 if hidden_size * weight.dtype.itemsize <= 4096 else 4
    default = matvec_tile(
        2 * intermediate_size, hidden_size, weight.dtype, num_warps=num_warps, bytes_per_thread=128, paired=True
    )
    t = override("gate_up", default, tile)
    block_k = column_block(hidden_size, weight.dtype, t["num_warps"])
    _gate_up_kernel[(triton.cdiv(intermediate_size, t["BLOCK_N"]),)](
        x,
        norm_weight,
        weight,
        weight if bias is None else bias,
        halted,
        h,
        eps,
        N=intermediate_size,
        K=hidden_size,
        HAS_BIAS=bias is not None,
        BLOCK_N=t["BLOCK_N"],
        BLOCK_K=block_k,
        CHUNKS=triton.cdiv(hidden_size, block_k),
        VECTOR=vector_width(weight.dtype),
        PDL=t["trigger"] if pdl else 0,
        num_warps=t["num_warps"],
        **launch_options(pdl),
    )


def gate_up_torch(
    x: torch.Tensor,  # fp32 [hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    weight: torch.Tensor,  # D [2 * intermediate_size, hidden_size]
    bias: torch.Tensor | None,  # D [2 * intermediate_size]
    halted: torch.Tensor,  # int32 [1]
    h: torch.Tensor,  # fp32 [intermediate_size]
    *,
    eps: float,
) -> None:
    """Writes the gated activations into `h`."""
    if int(halted):
        return
    normed = x * torch.rsqrt(x.square().mean() + eps) * norm_weight.float()
    y = torch.mv(weight.float(), normed)  # .float() of an fp32 weight is the weight itself
    if bias is not None:
        y += bias.float()
    gate, up = y.chunk(2)
    torch.mul(torch.nn.functional.silu(gate), up, out=h)
