"""Query, key and value of a prefill chunk: product, bias, RoPE, KV append in one launch.

y = a weight^T + bias, its rows ordered q heads, k heads, v heads. q and k are rotated by halves,
(y_i, y_{i + d/2}) -> (y_i cos - y_{i + d/2} sin, y_{i + d/2} cos + y_i sin), with the phases of row r's absolute
position `position + r` (Su et al. 2021, halves as in Llama checkpoints of Hugging Face). Accumulated and rotated in
fp32, rounded once on store.
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
def _qkv_tile(
    a_ptr,
    w_ptr,
    bias_ptr,
    rope_table_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tile,
    rows,
    first_seq,
    max_seq_len,
    in_features,
    HAS_BIAS: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_END: tl.constexpr = NUM_Q_HEADS * HALF
    K_END: tl.constexpr = Q_END + NUM_KV_HEADS * HALF
    V_END: tl.constexpr = K_END + NUM_KV_HEADS * HALF
    num_m = tl.cdiv(rows, BLOCK_M)
    offs_m = tile % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = offs_m < rows
    # Columns 2 j and 2 j + 1 of the product are the two sides of one rotated pair, so that a thread holds both. Pairs
    # are counted through all heads, q, k, then v; a tile may begin in one head and end in another.
    first_pair = tile // num_m * (BLOCK_N // 2)
    column = tl.arange(0, BLOCK_N)
    column_pair = tl.minimum(first_pair + column // 2, V_END - 1)
    w_rows = column_pair // HALF * HEAD_DIM + column_pair % HALF + column % 2 * HALF
    acc = rows_product(a_ptr, w_ptr, offs_m, live, w_rows, in_features, BLOCK_K, EVEN_K, NUM_STAGES)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    one, two = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))

    pair = first_pair + tl.arange(0, BLOCK_N // 2)
    head = pair // HALF
    offs_d = pair % HALF
    live = live[:, None]
    seq = (first_seq + offs_m).to(tl.int64)[:, None]
    if first_pair < K_END:
        rotates = (pair < K_END)[None, :]
        phase_ptrs = rope_table_ptr + seq * HEAD_DIM + offs_d[None, :]
        cos = tl.load(phase_ptrs, mask=live & rotates, other=1.0)
        sin = tl.load(phase_ptrs + HALF, mask=live & rotates, other=0.0)
        turned = one * cos - two * sin
        two = tl.where(rotates, two * cos + one * sin, two)
        one = tl.where(rotates, turned, one)
    one = one.to(q_ptr.dtype.element_ty)
    two = two.to(q_ptr.dtype.element_ty)
    if first_pair < Q_END:
        q_ptrs = q_ptr + offs_m.to(tl.int64)[:, None] * (NUM_Q_HEADS * HEAD_DIM) + (head * HEAD_DIM + offs_d)[None, :]
        mask = live & (pair < Q_END)[None, :]
        tl.store(q_ptrs, one, mask=mask)
        tl.store(q_ptrs + HALF, two, mask=mask)
    if (first_pair < K_END) & (first_pair + BLOCK_N // 2 > Q_END):
        k_rows = (head - NUM_Q_HEADS).to(tl.int64)[None, :] * max_seq_len + seq
        k_ptrs = k_cache_ptr + k_rows * HEAD_DIM + offs_d[None, :]
        mask = live & ((pair >= Q_END) & (pair < K_END))[None, :]
        tl.store(k_ptrs, one, mask=mask)
        tl.store(k_ptrs + HALF, two, mask=mask)
    if first_pair + BLOCK_N // 2 > K_END:
        v_rows = (head - (NUM_Q_HEADS + NUM_KV_HEADS)).to(tl.int64)[None, :] * max_seq_len + seq
        v_ptrs = v_cache_ptr + v_rows * HEAD_DIM + offs_d[None, :]
        mask = live & ((pair >= K_END) & (pair < V_END))[None, :]
        tl.store(v_ptrs, one, mask=mask)
        tl.store(v_ptrs + HALF, two, mask=mask)


@triton.jit
def _qkv_rows_kernel(
    a_ptr,  # D [chunk, in_features]
    w_ptr,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim, in_features]
    bias_ptr,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim]; not read without HAS_BIAS
    rope_table_ptr,  # fp32 [max_seq_len, head_dim]
    position_ptr,  # int32 [1]
    prefill_end_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    q_ptr,  # D [chunk, num_q_heads, head_dim]
    k_cache_ptr,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache_ptr,  # D [num_kv_heads, max_seq_len, head_dim]
    chunk,
    max_seq_len,
    in_features,
    HAS_BIAS: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
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
    position = tl.load(position_ptr)
    rows = live_row_count(position, prefill_end_ptr, halted_ptr, tl.minimum(chunk, max_seq_len - position))
    weight_rows: tl.constexpr = (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    tiles = product_tiles(rows, weight_rows, BLOCK_M, BLOCK_N, FEW_ROWS, FEW_M, FEW_N)
    if (tile < tiles) | (tile == 0):
        enter(PDL)
    if tile < tiles:
        if rows <= FEW_ROWS:
            _qkv_tile(
                a_ptr, w_ptr, bias_ptr, rope_table_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
                tile, rows, position, max_seq_len, in_features,
                HAS_BIAS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, FEW_M, FEW_N, BLOCK_K, EVEN_K, FEW_STAGES,
            )  # fmt: skip
        else:
            _qkv_tile(
                a_ptr, w_ptr, bias_ptr, rope_table_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
                tile, rows, position, max_seq_len, in_features,
                HAS_BIAS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, NUM_STAGES,
            )  # fmt: skip


def qkv_rows(
    a: torch.Tensor,  # D [chunk, hidden_size]
    weight: torch.Tensor,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    bias: torch.Tensor | None,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim]
    rope_table: torch.Tensor,  # fp32 [max_seq_len, head_dim]: cos, then sin
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    q: torch.Tensor,  # D [chunk, num_q_heads, head_dim]
    k_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes the rotated queries into `q`, keys and values into rows `position + r` of the cache.

    Tile keys as in `product_tile`.
    """
    chunk, hidden_size = a.shape
    num_q_heads = q.shape[1]
    num_kv_heads, max_seq_len, head_dim = k_cache.shape
    weight_rows = (num_q_heads + 2 * num_kv_heads) * head_dim
    expect_weight_dtype("qkv_rows", "weight", weight)
    expect_scalars("qkv_rows", torch.int32, position=position, prefill_end=prefill_end, halted=halted)
    expect("qkv_rows", "a", a, (chunk, hidden_size), weight.dtype)
    expect("qkv_rows", "weight", weight, (weight_rows, hidden_size), weight.dtype)
    if bias is not None:
        expect("qkv_rows", "bias", bias, (weight_rows,), weight.dtype)
    expect("qkv_rows", "rope_table", rope_table, (max_seq_len, head_dim), torch.float32)
    expect("qkv_rows", "q", q, (chunk, num_q_heads, head_dim), weight.dtype)
    expect("qkv_rows", "k_cache", k_cache, (num_kv_heads, max_seq_len, head_dim), weight.dtype)
    expect("qkv_rows", "v_cache", v_cache, (num_kv_heads, max_seq_len, head_dim), weight.dtype)
    chosen = product_tile("qkv_rows", weight, chunk, tile)
    _qkv_rows_kernel[product_grid(chunk, weight_rows, chosen)](
        a,
        weight,
        weight if bias is None else bias,
        rope_table,
        position,
        prefill_end,
        halted,
        q,
        k_cache,
        v_cache,
        chunk,
        max_seq_len,
        hidden_size,
        **launch_keywords(
            chosen,
            pdl,
            HAS_BIAS=bias is not None,
            NUM_Q_HEADS=num_q_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            EVEN_K=hidden_size % chosen["BLOCK_K"] == 0,
        ),
    )


def qkv_rows_torch(
    a: torch.Tensor,  # D [chunk, hidden_size]
    weight: torch.Tensor,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    bias: torch.Tensor | None,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim]
    rope_table: torch.Tensor,  # fp32 [max_seq_len, head_dim]: cos, then sin
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    q: torch.Tensor,  # D [chunk, num_q_heads, head_dim]
    k_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
) -> None:
    """Writes the rotated queries into `q`, keys and values into rows `position + r` of the cache."""
    start = int(position)
    num_kv_heads, max_seq_len, head_dim = k_cache.shape
    rows = live_rows(min(a.shape[0], max_seq_len - start), position, prefill_end, halted)
    if not rows:
        return
    num_q_heads = q.shape[1]
    y = functional.linear(a[:rows].float(), weight.float(), None if bias is None else bias.float())
    y = y.view(rows, num_q_heads + 2 * num_kv_heads, head_dim)
    rotated, values = y.split([num_q_heads + num_kv_heads, num_kv_heads], dim=1)
    cos, sin = rope_table[start : start + rows, None].chunk(2, dim=-1)  # [rows, 1, head_dim / 2]
    first, second = rotated.chunk(2, dim=-1)  # [rows, num_q_heads + num_kv_heads, head_dim / 2]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    q[:rows] = rotated[:, :num_q_heads]
    k_cache[:, start : start + rows] = rotated[:, num_q_heads:].transpose(0, 1)
    v_cache[:, start : start + rows] = values.transpose(0, 1)
