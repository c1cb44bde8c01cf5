"""Attention of one query token by tensor cores, for the head sizes and groups that fit one instruction.

The same function, grid, split rule and partial results as attention.py. Written in Gluon, because the time of
this kernel at short and middle lengths is latency, and three things that Triton does not say take it away:

- The first blocks of old rows are under way to shared memory before the wait.
- A warp works alone: it takes 16 rows of each block of 16 * NUM_WARPS, multiplies them with the query heads as the
  eight columns of the instruction (scores^T = K q^T, out^T = V^T weights^T), and keeps its own running maximum, so that
  no block needs an exchange between warps.
- The live row joins where the warps' results are added up, once, in the last split.

Online softmax in fp32 (Milakov and Gimelshein 2018), flash decoding (Dao et al. 2023).
"""

from __future__ import annotations

import torch

from monograph.kernels.gluon_import import async_load, barrier, commit_group, gl, gluon, mma_v2, wait_group
from monograph.kernels.tile import TRIGGER_FIRST, Tile, launch_options, override
from monograph.kernels.triton_import import tl

LOG2_E = 1.4426950408889634
LOWEST = gl.constexpr(-1.0e30)  # a score below every real one; -inf would make NaN of a difference of two


@gluon.jit
def _copy_block(keys, values, key_ptrs, value_ptrs, first_row, last, HEAD_DIM: gl.constexpr):
    """Asks for a block of rows; those behind the cache's end are replaced by its last row."""
    rows = gl.minimum(first_row, last)
    offsets = gl.expand_dims(rows.to(gl.int64) * HEAD_DIM, 2)
    async_load(keys, key_ptrs + offsets)
    async_load(values, value_ptrs + offsets)


@gluon.jit
def _combine(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    kv_head,
    active,
    NUM_Q_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_W: gl.constexpr,
    STEP: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Weighs the partial outputs of all active splits by their share of the softmax, split 0 first."""
    LIVE: gl.constexpr = GROUP * HEAD_DIM
    LW: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    offs_w = gl.arange(0, BLOCK_W, layout=LW)
    inside = offs_w < LIVE
    lse_ptr = partial_lse_ptr + kv_head * GROUP + offs_w // HEAD_DIM
    part_ptr = partial_out_ptr + kv_head * LIVE + offs_w
    top = gl.full([BLOCK_W], LOWEST, gl.float32, layout=LW)
    total = gl.zeros([BLOCK_W], gl.float32, layout=LW)
    mixed = gl.zeros([BLOCK_W], gl.float32, layout=LW)
    first = active * 0
    while first < active:
        lses = ()
        parts = ()
        for i in gl.static_range(STEP):
            split = first + i
            mask = inside & (split < active)
            # .cg: other programs wrote them during this launch
            lse = gl.load(lse_ptr + split * NUM_Q_HEADS, mask=mask, other=LOWEST, cache_modifier=".cg")
            part = gl.load(part_ptr + split * (NUM_Q_HEADS * HEAD_DIM), mask=mask, other=0.0, cache_modifier=".cg")
            lses += (lse,)  # type: ignore[assignment]
            parts += (part,)  # type: ignore[assignment]
        new_top = top
        for i in gl.static_range(STEP):
            new_top = gl.maximum(new_top, lses[i])
        fade = gl.exp2(top - new_top)
        total = total * fade
        mixed = mixed * fade
        for i in gl.static_range(STEP):
            share = gl.where(first + i < active, gl.exp2(lses[i] - new_top), 0.0)
            total += share
            mixed += parts[i] * share
        top = new_top
        first += STEP
    gl.store(out_ptr + kv_head * LIVE + offs_w, mixed / total, mask=inside)


@gluon.jit
def _attention_mma_kernel(
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
    NUM_Q_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    NUM_SPLITS: gl.constexpr,
    BLOCK_W: gl.constexpr,
    MIN_BLOCKS: gl.constexpr,
    COMBINE_STEP: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    D: gl.constexpr = k_cache_ptr.dtype.element_ty
    BLOCK_T: gl.constexpr = 16 * NUM_WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    QT: gl.constexpr = gl.SliceLayout(0, RIGHT)  # [HEAD_DIM, 8 heads], the same for every warp
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // HEAD_DIM, HEAD_DIM // 8], [NUM_WARPS, 1, 1], [2, 1, 0])
    # the warps' results [NUM_WARPS, HEAD_DIM, 8 heads]: a thread adds up all warps for some columns
    ADD: gl.constexpr = gl.BlockedLayout([NUM_WARPS, 1, 1], [1, 4, 8], [1, NUM_WARPS, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, ADD)  # [HEAD_DIM, 8]
    OUT_D: gl.constexpr = gl.SliceLayout(1, OUT)
    OUT_G: gl.constexpr = gl.SliceLayout(0, OUT)
    STATS: gl.constexpr = gl.SliceLayout(1, ADD)  # [NUM_WARPS, 8]
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLANE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])

    if gl.load(halted_ptr) != 0:
        first = (gl.program_id(0) == 0) & (gl.program_id(1) == 0)
        if PDL > 0 and first:
            tl.extra.cuda.gdc_wait()
        return
    kv_head = gl.program_id(0)
    split = gl.program_id(1)
    position = gl.minimum(gl.load(position_ptr), max_seq_len - 1)
    blocks = (position + BLOCK_T - 1) // BLOCK_T  # of rows older than the live one
    active = gl.minimum(gl.maximum(blocks // MIN_BLOCKS, 1), NUM_SPLITS)
    if split >= active:  # goes without waiting: split 0 of every head is active and waits
        return
    block = split * blocks // active
    count = (split + 1) * blocks // active - block
    head_offset = kv_head.to(gl.int64) * max_seq_len * HEAD_DIM

    ring_k = gl.allocate_shared_memory(D, [NUM_STAGES, NUM_WARPS, 16, HEAD_DIM], ROWS)
    ring_v = gl.allocate_shared_memory(D, [NUM_STAGES, NUM_WARPS, 16, HEAD_DIM], ROWS)
    warp_c = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    row_c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    offs_c = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, COPY)))
    rows_c = block * BLOCK_T + warp_c[:, None] * 16 + row_c[None, :]
    offs_c3 = gl.expand_dims(gl.expand_dims(offs_c, 0), 0)
    key_ptrs = k_cache_ptr + head_offset + offs_c3
    value_ptrs = v_cache_ptr + head_offset + offs_c3
    last = max_seq_len - 1
    for i in gl.static_range(NUM_STAGES):
        if i < count:
            _copy_block(ring_k.index(i), ring_v.index(i), key_ptrs, value_ptrs, rows_c + i * BLOCK_T, last, HEAD_DIM)
        commit_group()

    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, QT))
    offs_g = gl.arange(0, 8, layout=gl.SliceLayout(0, QT))
    heads = kv_head * GROUP + gl.minimum(offs_g, GROUP - 1)
    q = (gl.load(q_ptr + heads[None, :] * HEAD_DIM + offs_d[:, None]) * scale_log2).to(D)
    live_offset = head_offset + position.to(gl.int64) * HEAD_DIM
    live_key = gl.load(k_cache_ptr + live_offset + offs_d).to(gl.float32)
    live_value = gl.load(v_cache_ptr + live_offset + gl.arange(0, HEAD_DIM, layout=OUT_D)).to(gl.float32)
    live_scores = gl.allocate_shared_memory(gl.float32, [8], LINE)
    live_scores.store(gl.sum(q.to(gl.float32) * live_key[:, None], axis=0))
    queries, _ = gl.broadcast(gl.expand_dims(q, 0), gl.zeros([NUM_WARPS, HEAD_DIM, 8], D, layout=RIGHT))

    top = gl.full([NUM_WARPS, 8], LOWEST, gl.float32, layout=gl.SliceLayout(1, MMA))  # running maximum, log2 domain
    total = gl.zeros([NUM_WARPS, 16, 8], gl.float32, layout=MMA)  # running sums of exponentials
    mixed = gl.zeros([NUM_WARPS, HEAD_DIM, 8], gl.float32, layout=MMA)  # running sum of weighted values
    warp_s = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    row_s = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    rows_s = warp_s[:, None] * 16 + row_s[None, :]
    warp_v = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, LEFT)))
    row_v = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))
    rows_v = warp_v[:, None] * 16 + row_v[None, :]
    stage = block * 0
    for i in range(count):
        rest = position - (block + i) * BLOCK_T
        wait_group(NUM_STAGES - 1)
        keys = ring_k.index(stage).load(LEFT)
        values = ring_v.index(stage).permute((0, 2, 1)).load(LEFT)
        if i + NUM_STAGES < count:
            next_rows = rows_c + (i + NUM_STAGES) * BLOCK_T
            _copy_block(ring_k.index(stage), ring_v.index(stage), key_ptrs, value_ptrs, next_rows, last, HEAD_DIM)
        commit_group()
        stage = gl.where(stage == NUM_STAGES - 1, 0, stage + 1)
        old = gl.expand_dims(rows_s < rest, 2)
        scores = mma_v2(keys, queries, gl.zeros([NUM_WARPS, 16, 8], gl.float32, layout=MMA))
        scores = gl.where(old, scores, LOWEST)
        new_top = gl.maximum(top, gl.max(scores, axis=1))
        fade = gl.exp2(top - new_top)
        weights = gl.where(old, gl.exp2(scores - gl.expand_dims(new_top, 1)), 0.0)
        total = total * gl.expand_dims(fade, 1) + weights
        mixed = mixed * gl.expand_dims(fade, 1)
        top = new_top
        if rest < BLOCK_T:  # what lies behind the live row may be anything, and 0 * NaN is NaN
            values = gl.where(gl.expand_dims(rows_v < rest, 1), values, 0.0)
        mixed = mma_v2(values, gl.convert_layout(weights.to(D), RIGHT), mixed)

    # the warps and the live row
    wait_group(0)
    results = gl.allocate_shared_memory(gl.float32, [NUM_WARPS, HEAD_DIM, 8], CUBE)  # over the ring, no longer needed
    tops = gl.allocate_shared_memory(gl.float32, [NUM_WARPS, 8], PLANE)
    totals = gl.allocate_shared_memory(gl.float32, [NUM_WARPS, 8], PLANE)
    results.store(mixed)
    tops.store(top)
    totals.store(gl.sum(total, axis=1))
    owns_live = split == active - 1
    live_score = gl.where(owns_live, live_scores.load(OUT_G), LOWEST)
    warp_tops = tops.load(STATS)
    best = gl.maximum(gl.convert_layout(gl.max(warp_tops, axis=0), OUT_G, assert_trivial=True), live_score)
    shares = gl.exp2(warp_tops - gl.convert_layout(best, gl.SliceLayout(0, STATS), assert_trivial=True)[None, :])
    live_share = gl.where(owns_live, gl.exp2(live_score - best), 0.0)
    sums = gl.sum(totals.load(STATS) * shares, axis=0)
    sums = gl.convert_layout(sums, OUT_G, assert_trivial=True) + live_share
    out = gl.sum(results.load(ADD) * gl.expand_dims(shares, 1), axis=0)
    out = (out + live_value[:, None] * live_share[None, :]) / sums[None, :]
    out_d = gl.arange(0, HEAD_DIM, layout=OUT_D)
    out_g = gl.arange(0, 8, layout=OUT_G)
    live_head = (out_g < GROUP)[None, :] & (out_d >= 0)[:, None]
    if active == 1:
        out_ptrs = out_ptr + (kv_head * GROUP + out_g)[None, :] * HEAD_DIM + out_d[:, None]
        gl.store(out_ptrs, out, mask=live_head)
    else:
        part = split * NUM_Q_HEADS + kv_head * GROUP + out_g
        gl.store(partial_out_ptr + part[None, :] * HEAD_DIM + out_d[:, None], out, mask=live_head)
        gl.store(partial_lse_ptr + part, best + gl.log2(sums), mask=out_g < GROUP)
        barrier()  # the partials of all threads come before the arrival that one thread announces
        earlier = gl.atomic_add(arrivals_ptr + kv_head, 1, sem="acq_rel", scope="gpu")
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
                NUM_WARPS,
            )
            gl.store(arrivals_ptr + kv_head, 0)


def attention_mma(
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
    """The launch behind `attention.attention` where `one_instruction_fits` says yes; the arguments are checked there.

    Args:
        scale: multiplies the scores before the softmax.
        pdl: launch before the predecessor has ended; needs sm_90.
        tile: overrides of MIN_BLOCKS (of a split), COMBINE_STEP (splits), NUM_STAGES (blocks in flight), num_warps (16
            rows of a block each), trigger.
    """
    num_q_heads, head_dim = q.shape
    num_kv_heads, max_seq_len, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    default = {
        "MIN_BLOCKS": 2,
        "COMBINE_STEP": 8,
        # With 2, the 64 KiB of shared memory make every multiprocessor change its division of L1 between the launches
        # of a layer, which waits for all of its programs (Llama 1B on an H200 at length 1,024: 0.84 ms a step, not
        # 0.75). With 1 the next block is asked for while the registers hold this one.
        "NUM_STAGES": 1,
        "num_warps": 512 // head_dim,
        "trigger": TRIGGER_FIRST,
    }
    t = override("attention", default, tile)
    _attention_mma_kernel[(num_kv_heads, partial_out.shape[0])](
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
        NUM_SPLITS=partial_out.shape[0],
        BLOCK_W=max(32 * t["num_warps"], 1 << (group * head_dim - 1).bit_length()),
        MIN_BLOCKS=t["MIN_BLOCKS"],
        COMBINE_STEP=t["COMBINE_STEP"],
        NUM_STAGES=t["NUM_STAGES"],
        NUM_WARPS=t["num_warps"],
        PDL=t["trigger"] if pdl else 0,
        num_warps=t["num_warps"],
        **launch_options(pdl),
    )


def attention_mma_torch(
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
    if int(halted):
        return
    num_kv_heads, max_seq_len, head_dim = k_cache.shape
    seq_len = min(int(position) + 1, max_seq_len)
    # A KV head is a batch entry and its query heads are the rows of a matrix: nothing is repeated or copied.
    grouped = q.view(num_kv_heads, 1, -1, head_dim)
    keys = k_cache[:, None, :seq_len].float()  # [num_kv_heads, 1, seq_len, head_dim]
    values = v_cache[:, None, :seq_len].float()
    out.copy_(torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=scale).view_as(out))
