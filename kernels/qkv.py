"""RMSNorm, query, key and value products, RoPE and KV append of one decode step in one launch.

y = W (x * norm_weight) / rms(x) + bias, rows of W ordered q heads, k heads, v heads. q and k are rotated by halves,
(y_i, y_{i + d/2}) -> (y_i cos - y_{i + d/2} sin, y_{i + d/2} cos + y_i sin), with the phases of the live position (Su
et al. 2021; halves as in Llama checkpoints of Hugging Face). Weights are widened, products accumulated and rotated in
fp32; k and v are rounded once, on their way into cache row `position`. A tile holds the two rows of each rotated
pair, so the rotation happens in registers.
"""

from __future__ import annotations

import torch

from monograph.kernels.checks import expect, expect_scalars, expect_weight
from monograph.kernels.device import dot_rows, enter, leave, load_rows, load_vector, normalise
from monograph.kernels.tile import (
    Tile,
    column_block,
    launch_options,
    matvec_tile,
    override,
    vector_width,
)
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _qkv_kernel(
    x_ptr,  # fp32 [K]
    norm_weight_ptr,  # D [K]
    weight_ptr,  # D [(NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, K]
    bias_ptr,  # D [(NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM], read only if HAS_BIAS
    rope_table_ptr,  # fp32 [max_seq_len, HEAD_DIM]: cos, then sin
    position_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    q_ptr,  # fp32 [NUM_Q_HEADS, HEAD_DIM]
    k_cache_ptr,  # D [NUM_KV_HEADS, max_seq_len, HEAD_DIM]
    v_cache_ptr,  # D [NUM_KV_HEADS, max_seq_len, HEAD_DIM]
    eps,
    max_seq_len,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    TILES_PER_HEAD: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    if tl.load(halted_ptr) != 0:
        leave(PDL)
        return
    head = tl.program_id(0) // TILES_PER_HEAD
    first = tl.program_id(0) % TILES_PER_HEAD * BLOCK_N
    offs_pair = tl.arange(0, 2 * BLOCK_N)  # even: i, odd: i + HALF
    live = first + offs_pair // 2 < HALF
    rows = head * HEAD_DIM + first + offs_pair // 2 + offs_pair % 2 * HALF
    weights = load_rows(weight_ptr, rows, live, K, BLOCK_K, CHUNKS, HALF % BLOCK_N != 0)
    norm_weight = load_vector(norm_weight_ptr, K, BLOCK_K, CHUNKS)
    offs_n = first + tl.arange(0, BLOCK_N)
    position = tl.load(position_ptr)  # only the graph's last kernel writes it
    inside = offs_n < tl.where(position < max_seq_len, HALF, 0)
    phases_ptr = rope_table_ptr + position.to(tl.int64) * HEAD_DIM + offs_n
    cos = tl.load(phases_ptr, mask=inside, other=0.0)
    sin = tl.load(phases_ptr + HALF, mask=inside, other=0.0)
    enter(PDL)
    x, inverse_rms = normalise(load_vector(x_ptr, K, BLOCK_K, CHUNKS), norm_weight, eps, K, CHUNKS)
    y = dot_rows(weights, x, 2 * BLOCK_N, BLOCK_K, CHUNKS, VECTOR) * inverse_rms
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=live, other=0.0).to(tl.float32)
    y0, y1 = tl.split(tl.reshape(y, [BLOCK_N, 2]))
    rotates = head < NUM_Q_HEADS + NUM_KV_HEADS
    first_half = tl.where(rotates, y0 * cos - y1 * sin, y0)
    second_half = tl.where(rotates, y1 * cos + y0 * sin, y1)
    if head < NUM_Q_HEADS:
        q_row_ptr = q_ptr + head * HEAD_DIM + offs_n
        tl.store(q_row_ptr, first_half, mask=inside)
        tl.store(q_row_ptr + HALF, second_half, mask=inside)
    else:
        kv_head = head - NUM_Q_HEADS - tl.where(rotates, 0, NUM_KV_HEADS)
        cache_row = (kv_head.to(tl.int64) * max_seq_len + position) * HEAD_DIM
        row_ptr = tl.where(rotates, k_cache_ptr, v_cache_ptr) + cache_row + offs_n
        tl.store(row_ptr, first_half.to(k_cache_ptr.dtype.element_ty), mask=inside)
        tl.store(row_ptr + HALF, second_half.to(k_cache_ptr.dtype.element_ty), mask=inside)


def qkv(
    x: torch.Tensor,  # fp32 [hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    weight: torch.Tensor,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    bias: torch.Tensor | None,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim]
    rope_table: torch.Tensor,  # fp32 [max_seq_len, head_dim]: cos, then sin
    position: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    q: torch.Tensor,  # fp32 [num_q_heads, head_dim]
    k_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    *,
    eps: float,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes the rotated query into `q`, key and value into row `position` of the cache.

    Args:
        eps: added to the mean square.
        pdl: launch before the predecessor has ended; needs sm_90.
        tile: overrides of BLOCK_N (pairs of rows), num_warps, trigger.

    Raises:
        ValueError: an argument of the wrong shape, dtype or layout.
    """
    expect_weight("qkv", "weight", weight)
    hidden_size = weight.shape[1]
    num_q_heads, head_dim = q.shape
    num_kv_heads, max_seq_len, _ = k_cache.shape
    out_features = (num_q_heads + 2 * num_kv_heads) * head_dim
    if head_dim % 2:
        raise ValueError(f"qkv: head_dim must be even for RoPE by halves, got {head_dim}")
    expect("qkv", "x", x, (hidden_size,), torch.float32)
    expect("qkv", "norm_weight", norm_weight, (hidden_size,), weight.dtype)
    expect("qkv", "weight", weight, (out_features, hidden_size), weight.dtype)
    if bias is not None:
        expect("qkv", "bias", bias, (out_features,), weight.dtype)
    expect("qkv", "rope_table", rope_table, (max_seq_len, head_dim), torch.float32)
    expect_scalars("qkv", torch.int32, position=position, halted=halted)
    expect("qkv", "q", q, (num_q_heads, head_dim), torch.float32)
    expect("qkv", "k_cache", k_cache, (num_kv_heads, max_seq_len, head_dim), weight.dtype)
    expect("qkv", "v_cache", v_cache, (num_kv_heads, max_seq_len, head_dim), weight.dtype)
    default = matvec_tile(out_features, hidden_size, weight.dtype, num_warps=4, bytes_per_thread=128, paired=True)
    t = override("qkv", default, tile)
    block_k = column_block(hidden_size, weight.dtype, t["num_warps"])
    grid = (num_q_heads + 2 * num_kv_heads) * triton.cdiv(head_dim // 2, t["BLOCK_N"])
    _qkv_kernel[(grid,)](
        x,
        norm_weight,
        weight,
        weight if bias is None else bias,
        rope_table,
        position,
        halted,
        q,
        k_cache,
        v_cache,
        eps,
        max_seq_len,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
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


def qkv_torch(
    x: torch.Tensor,  # fp32 [hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    weight: torch.Tensor,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    bias: torch.Tensor | None,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim]
    rope_table: torch.Tensor,  # fp32 [max_seq_len, head_dim]: cos, then sin
    position: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    q: torch.Tensor,  # fp32 [num_q_heads, head_dim]
    k_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    *,
    eps: float,
) -> None:
    """Writes the rotated query into `q`, key and value into row `position` of the cache."""
    if int(halted):
        return
    row = int(position)
    num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[0]
    normed = x * torch.rsqrt(x.square().mean() + eps) * norm_weight.float()
    y = torch.mv(weight.float(), normed)  # .float() of an fp32 weight is the weight itself
    if bias is not None:
        y += bias.float()
    y = y.view(-1, head_dim)  # [num_q_heads + 2 * num_kv_heads, head_dim]
    rotated, values = y.split([num_q_heads + num_kv_heads, num_kv_heads])
    cos, sin = rope_table[row].chunk(2)  # [head_dim / 2]
    first, second = rotated.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    q.copy_(rotated[:num_q_heads])
    k_cache[:, row] = rotated[num_q_heads:]
    v_cache[:, row] = values
