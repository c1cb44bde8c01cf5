"""Attention of one query token over the live rows of the cache, split over programs on the device.

out[h] = sum_t softmax_t(scale * q[h] . k[t]) v[t] for t = 0 .. position, query head h reading KV head h // group.
Online softmax in fp32 (Milakov and Gimelshein 2018); a KV head's query heads share its rows as the rows of one
matrix.

The grid (num_kv_heads, num_splits) is fixed. Each program reads the live length and works out its share: `active` =
min(num_splits, blocks // MIN_BLOCKS) splits, at least one, take consecutive runs of blocks of BLOCK_T rows, the
others leave. Nothing but the live length and num_splits decides, so `max_seq_len` changes neither the bits nor the
time. A program asks for its first block before it waits: those rows are older than the live one, which is not final
yet and which the last split reads after the wait as the first state of its softmax. With one active split the result
goes straight out; else the last program to arrive for a KV head combines all splits in their order (flash decoding,
Dao et al. 2023).
"""

from __future__ import annotations

import torch

from monograph.kernels.attention_mma import LOG2_E, attention_mma, attention_mma_torch
from monograph.kernels.checks import expect, expect_scalars, expect_weight_dtype
from monograph.kernels.device import enter, leave
from monograph.kernels.tile import (
    TRIGGER_FIRST,
    Tile,
    ceil_power_of_two,
    launch_options,
    one_instruction_fits,
    override,
)
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _load_block(block_ptr, first_row, position, last_row, head_dim, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_T, BLOCK_D] rows older than the live one and before last_row; zero elsewhere, where nothing is read."""
    offs_t = first_row + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    old = (offs_t < position) & (offs_t < last_row)
    if head_dim == BLOCK_D:
        mask = old[:, None]
    else:
        mask = old[:, None] & (offs_d < head_dim)[None, :]
    return tl.load(block_ptr + offs_t.to(tl.int64)[:, None] * head_dim + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    q,
    keys,
    values,
    old,  # bool [BLOCK_T]: rows that count
    scale_log2,
    top,
    total,
    mixed,
    TENSOR_CORES: tl.constexpr,
):
    """Takes a block of rows into the online softmax: running maximum, sum of exponentials, weighted values."""
    if TENSOR_CORES:
        scores = tl.dot(q, tl.trans(keys)) * scale_log2
    else:  # fma, because Triton makes a sum of plain products a dot in TF32 once it has 16 rows
        scores = tl.sum(tl.fma(q[:, None, :], keys[None, :, :], 0.0), axis=2) * scale_log2
    scores = tl.where(old[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, axis=1)
    mixed = mixed * fade[:, None]
    if TENSOR_CORES:
        mixed = tl.dot(weights.to(values.dtype), values, mixed)
    else:
        mixed += tl.sum(tl.fma(weights[:, :, None], values[None, :, :], 0.0), axis=1)
    return new_top, total, mixed


@triton.jit
def _combine(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    kv_head,
    active,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STEP: tl.constexpr,
):
    """Weighs the partial outputs of all active splits by their share of the softmax, split 0 first.

    The outputs of a KV head's query heads lie side by side, and a thread takes the same few columns of every split: no
    exchange between threads, and the loads of STEP splits in flight together.
    """
    offs_w = tl.arange(0, BLOCK_W)
    live = GROUP * HEAD_DIM
    lse_ptr = partial_lse_ptr + kv_head * GROUP + offs_w // HEAD_DIM
    part_ptr = partial_out_ptr + kv_head * live + offs_w
    top = tl.where(offs_w < live, float("-inf"), 0.0)
    total = tl.where(offs_w < live, 0.0, tl.full([BLOCK_W], 1.0, tl.float32))
    mixed = tl.zeros([BLOCK_W], dtype=tl.float32)
    first = 0
    while first < active:
        lses = ()
        parts = ()
        for i in tl.static_range(STEP):
            mask = offs_w < tl.where(first + i < active, live, 0)
            split = first + i
            # .cg: other programs wrote them during this launch
            lse = tl.load(lse_ptr + split * NUM_Q_HEADS, mask=mask, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(part_ptr + split * (NUM_Q_HEADS * HEAD_DIM), mask=mask, other=0.0, cache_modifier=".cg")
            lses += (lse,)  # type: ignore[assignment]
            parts += (part,)  # type: ignore[assignment]
        new_top = top
        for i in tl.static_range(STEP):
            new_top = tl.maximum(new_top, lses[i])
        fade = tl.exp2(top - new_top)
        total = total * fade
        mixed = mixed * fade
        for i in tl.static_range(STEP):
            share = tl.exp2(lses[i] - new_top)
            total += share
            mixed += parts[i] * share
        top = new_top
        first += STEP
    tl.store(out_ptr + kv_head * live + offs_w, mixed / total, mask=offs_w < live)


@triton.jit
def _attention_kernel(
    q_ptr,  # fp32 [NUM_Q_HEADS, HEAD_DIM]
    k_cache_ptr,  # D [NUM_KV_HEADS, max_seq_len, HEAD_DIM]
    v_cache_ptr,  # D [NUM_KV_HEADS, max_seq_len, HEAD_DIM]
    position_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    partial_out_ptr,  # fp32 [NUM_SPLITS, NUM_Q_HEADS, HEAD_DIM]
    partial_lse_ptr,  # fp32 [NUM_SPLITS, NUM_Q_HEADS], log2 of the sum of exponentials
    arrivals_ptr,  # int32 [NUM_KV_HEADS], zero before and after
    out_ptr,  # fp32 [NUM_Q_HEADS, HEAD_DIM]
    scale_log2,  # softmax scale times log2(e)
    max_seq_len,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    COMBINE_STEP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    PDL: tl.constexpr,
):
    if tl.load(halted_ptr) != 0:
        leave(PDL)
        return
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    position = tl.minimum(tl.load(position_ptr), max_seq_len - 1)
    blocks = position // BLOCK_T + 1
    active = tl.minimum(tl.maximum(blocks // MIN_BLOCKS, 1), NUM_SPLITS)
    if split >= active:  # goes without waiting: split 0 of every head is active and waits
        return
    block = split * blocks // active
    end = (split + 1) * blocks // active
    last_row = end * BLOCK_T
    head_offset = kv_head.to(tl.int64) * max_seq_len * HEAD_DIM
    keys_ptr = k_cache_ptr + head_offset
    values_ptr = v_cache_ptr + head_offset
    keys = _load_block(keys_ptr, block * BLOCK_T, position, last_row, HEAD_DIM, BLOCK_T, BLOCK_D)
    values = _load_block(values_ptr, block * BLOCK_T, position, last_row, HEAD_DIM, BLOCK_T, BLOCK_D)

    enter(PDL)
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    offs_t = tl.arange(0, BLOCK_T)
    heads = kv_head * GROUP + offs_g
    q_mask = (offs_g < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + heads[:, None] * HEAD_DIM + offs_d[None, :], mask=q_mask, other=0.0)
    q = q.to(k_cache_ptr.dtype.element_ty)
    # The live row opens the last split's softmax. Every other split has only whole blocks of older rows: none is empty.
    owns_live = split == active - 1
    live_offset = position.to(tl.int64) * HEAD_DIM + offs_d
    live_mask = offs_d < tl.where(owns_live, HEAD_DIM, 0)
    live_key = tl.load(keys_ptr + live_offset, mask=live_mask, other=0.0).to(tl.float32)
    live_value = tl.load(values_ptr + live_offset, mask=live_mask, other=0.0).to(tl.float32)
    live_score = tl.sum(q.to(tl.float32) * live_key[None, :], axis=1) * scale_log2
    top = tl.where(owns_live, live_score, float("-inf"))  # running maximum, log2 domain
    total = tl.where(owns_live, tl.full([BLOCK_G], 1.0, tl.float32), 0.0)  # running sum of exponentials
    mixed = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32) + live_value[None, :]  # running sum of weighted values
    rest = block + 1
    if NUM_STAGES == 1:
        while rest < end:
            offs_rest = rest * BLOCK_T + offs_t
            more_keys = _load_block(keys_ptr, rest * BLOCK_T, position, last_row, HEAD_DIM, BLOCK_T, BLOCK_D)
            more_values = _load_block(values_ptr, rest * BLOCK_T, position, last_row, HEAD_DIM, BLOCK_T, BLOCK_D)
            old = offs_rest < position
            top, total, mixed = _attend(q, more_keys, more_values, old, scale_log2, top, total, mixed, TENSOR_CORES)
            rest += 1
    else:
        for later in tl.range(rest, end, num_stages=NUM_STAGES):
            offs_rest = later * BLOCK_T + offs_t
            more_keys = _load_block(keys_ptr, later * BLOCK_T, position, last_row, HEAD_DIM, BLOCK_T, BLOCK_D)
            more_values = _load_block(values_ptr, later * BLOCK_T, position, last_row, HEAD_DIM, BLOCK_T, BLOCK_D)
            old = offs_rest < position
            top, total, mixed = _attend(q, more_keys, more_values, old, scale_log2, top, total, mixed, TENSOR_CORES)
    old = block * BLOCK_T + offs_t < position
    top, total, mixed = _attend(q, keys, values, old, scale_log2, top, total, mixed, TENSOR_CORES)

    mixed = mixed / total[:, None]
    if active == 1:
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + offs_d[None, :], mixed, mask=q_mask)
    else:
        part = split * NUM_Q_HEADS + heads
        tl.store(partial_out_ptr + part[:, None] * HEAD_DIM + offs_d[None, :], mixed, mask=q_mask)
        tl.store(partial_lse_ptr + part, top + tl.log2(total), mask=offs_g < GROUP)
        tl.debug_barrier()  # the partials of all threads come before the arrival that one thread announces
        earlier = tl.atomic_add(arrivals_ptr + kv_head, 1, sem="acq_rel", scope="gpu")
        if earlier == active - 1:
            _combine(
                partial_out_ptr,
                partial_lse_ptr,
                out_ptr,
                kv_head,
                active,
                NUM_Q_HEADS,
                GROUP,
                HEAD_DIM,
                BLOCK_W,
                COMBINE_STEP,
            )
            tl.store(arrivals_ptr + kv_head, 0)


def attention(
    q: torch.Tensor,  # fp32 [num_q_heads, head_dim]
    k_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    position: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    partial_out: torch.Tensor,  # fp32 [num_splits, num_q_heads, head_dim]
    partial_lse: torch.Tensor,  # fp32 [num_splits, num_q_heads]
    arrivals: torch.Tensor,  # int32 [num_kv_heads], zero
    out: torch.Tensor,  # fp32 [num_q_heads, head_dim]
    *,
    scale: float,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes the attention of rows 0 .. position into `out`.

    num_splits has to be a constant of the model and the GPU, never of `max_seq_len`: it decides the bits.

    Args:
        scale: multiplies the scores before the softmax.
        pdl: launch before the predecessor has ended; needs sm_90.
        tile: overrides of BLOCK_T (rows of a block), MIN_BLOCKS (of a split), COMBINE_STEP (splits), NUM_STAGES
            (blocks in flight; 1: no pipeline), num_warps, trigger.

    Raises:
        ValueError: an argument of the wrong shape, dtype or layout.
    """
    num_q_heads, head_dim = q.shape
    num_kv_heads, max_seq_len, _ = k_cache.shape
    num_splits = partial_out.shape[0]
    if num_q_heads % num_kv_heads:
        raise ValueError(f"attention: {num_q_heads} query heads do not divide among {num_kv_heads} KV heads")
    expect_weight_dtype("attention", "k_cache", k_cache)
    expect("attention", "q", q, (num_q_heads, head_dim), torch.float32)
    expect("attention", "k_cache", k_cache, (num_kv_heads, max_seq_len, head_dim), k_cache.dtype)
    expect("attention", "v_cache", v_cache, (num_kv_heads, max_seq_len, head_dim), k_cache.dtype)
    expect_scalars("attention", torch.int32, position=position, halted=halted)
    expect("attention", "partial_out", partial_out, (num_splits, num_q_heads, head_dim), torch.float32)
    expect("attention", "partial_lse", partial_lse, (num_splits, num_q_heads), torch.float32)
    expect("attention", "arrivals", arrivals, (num_kv_heads,), torch.int32)
    expect("attention", "out", out, (num_q_heads, head_dim), torch.float32)
    group = num_q_heads // num_kv_heads
    if (
        k_cache.device.type != "cpu"
        and one_instruction_fits(head_dim, group, k_cache.dtype)
        and "BLOCK_T" not in (tile or {})
    ):
        tensors = (q, k_cache, v_cache, position, halted, partial_out, partial_lse, arrivals, out)
        attention_mma(*tensors, scale=scale, pdl=pdl, tile=tile)
        return
    block_d = max(ceil_power_of_two(head_dim), 16)
    block_w = ceil_power_of_two(group * head_dim)
    tensor_cores = k_cache.dtype != torch.float32  # which would round fp32 to TF32
    block_g = max(ceil_power_of_two(group), 16 if tensor_cores else 1)  # 16: the smallest tile of a dot
    rows = 8192 // (block_d * k_cache.dtype.itemsize)  # 8 KiB each of keys and values
    if not tensor_cores:
        rows = min(rows, 16384 // (block_g * block_d))  # 64 products a thread
    block_t = max(16 if tensor_cores else 8, min(128, rows))
    default = {
        "BLOCK_T": block_t,
        "MIN_BLOCKS": max(1, 128 // block_t),
        "COMBINE_STEP": 8,
        # The interpreter cannot iterate over device values, and fp32 has no registers for a pipeline.
        "NUM_STAGES": 3 if tensor_cores and k_cache.device.type != "cpu" else 1,
        # With 4, so many programs share a multiprocessor that their shared memory takes room from its L1: all kernels
        # of the step slow down (Llama 1B on an H200 at length 64: 0.81 ms a step against 0.71).
        "num_warps": 8,
        "trigger": TRIGGER_FIRST,
    }
    t = override("attention", default, tile)
    _attention_kernel[(num_kv_heads, num_splits)](
        q,
        k_cache,
        v_cache,
        position,
        halted,
        partial_out,
        partial_lse,
        arrivals,
        out,
        scale * LOG2_E,
        max_seq_len,
        NUM_Q_HEADS=num_q_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        NUM_SPLITS=num_splits,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        BLOCK_W=block_w,
        BLOCK_T=t["BLOCK_T"],
        MIN_BLOCKS=t["MIN_BLOCKS"],
        COMBINE_STEP=t["COMBINE_STEP"],
        NUM_STAGES=t["NUM_STAGES"],
        TENSOR_CORES=tensor_cores,
        PDL=t["trigger"] if pdl else 0,
        num_warps=t["num_warps"],
        **launch_options(pdl),
    )


def attention_torch(
    q: torch.Tensor,  # fp32 [num_q_heads, head_dim]
    k_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    position: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    partial_out: torch.Tensor,  # fp32 [num_splits, num_q_heads, head_dim]
    partial_lse: torch.Tensor,  # fp32 [num_splits, num_q_heads]
    arrivals: torch.Tensor,  # int32 [num_kv_heads]
    out: torch.Tensor,  # fp32 [num_q_heads, head_dim]
    *,
    scale: float,
) -> None:
    """Writes the attention of rows 0 .. position into `out`; the partials and arrivals are the kernel's alone."""
    attention_mma_torch(q, k_cache, v_cache, position, halted, partial_out, partial_lse, arrivals, out, scale=scale)
