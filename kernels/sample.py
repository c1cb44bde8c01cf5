"""The last launch of every graph: choose the next token, advance the state, tell the host.

temperature <= 0 takes the lowest id among the best scores, from the head's partial results alone: the first program
does it, the others leave at once. Above 0 all programs draw the token together (draw.py), and one goes on. Then the
token joins the sequence and its counts, the position moves on, and `halted` is set by a stop token, the end of the
arena or a cancel, in this order. A score that is not a number, or no finite best one, halts without advancing.

This kernel is the only reader of the host's cancel flag and the only writer of the live state, which every other
kernel may therefore read before its wait. The host reads the token and the status from its own pinned memory.
"""

from __future__ import annotations

import torch

from monograph.kernels.checks import expect, expect_scalars
from monograph.kernels.device import enter, leave, opaque
from monograph.kernels.draw import draw, draw_torch, load_own_best
from monograph.kernels.tile import (
    BINS,
    BUFFERS,
    LIST,
    TRIGGER_AT_EXIT,
    Tile,
    ceil_power_of_two,
    draw_block,
    launch_options,
    override,
)
from monograph.kernels.triton_import import tl, triton

STOPPED, FULL, CANCELLED, NON_FINITE = 1, 2, 3, 4  # values of `halted`

_STOPPED, _FULL, _CANCELLED, _NON_FINITE = (tl.constexpr(v) for v in (STOPPED, FULL, CANCELLED, NON_FINITE))


@triton.jit
def _rank(score, token):
    """int64 that orders (score, token): NaN, then the larger score, then the lower id. -0 and 0 are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _publish(
    outbox_tokens_ptr, outbox_status_ptr, token_index, token, tells, position, halted, ON_DEVICE: tl.constexpr
):
    """Host memory: the token (unless its index is negative), then position and halted as one 8-byte word, if `tells`.

    One thread stores both, the second with release semantics for the whole system: a host that sees the new status
    finds the token.
    """
    status = (halted.to(tl.int64) << 32) | position.to(tl.int64)
    if ON_DEVICE:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first, counts;
            .reg .b32 thread;
            .reg .b64 address;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            setp.ge.and.s32 counts, $3, 0, first;
            setp.ne.and.s32 first, $5, 0, first;
            mad.wide.s32 address, $3, 4, $1;
            @counts st.relaxed.sys.global.b32 [address], $4;
            @first st.release.sys.global.b64 [$2], $6;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r,r,r,l",
            [outbox_tokens_ptr.to(tl.int64), outbox_status_ptr.to(tl.int64), token_index, token, tells, status],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(outbox_tokens_ptr + token_index, token, mask=token_index >= 0)
        tl.store(outbox_status_ptr.to(tl.pointer_type(tl.int64)), status, mask=tells != 0)


@triton.jit
def _load_best(gate_ptr, best_score_ptr, best_id_ptr, live, PROGRAMS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Whether the gate is open; scores of the head's programs, the largest of them, and its lowest id."""
    opened = tl.load(gate_ptr, mask=live, other=0) != 0
    offs_p = tl.arange(0, BLOCK_P)
    known = offs_p < tl.where(live, PROGRAMS, 0)
    best_score = tl.load(best_score_ptr + offs_p, mask=known, other=float("-inf"))
    best_id = tl.load(best_id_ptr + offs_p, mask=known, other=0x7FFFFFFF)
    best_score = tl.where(opened, best_score, float("-inf"))  # here, so that the gate is asked for before, not after
    top = tl.max(_rank(best_score, best_id), axis=0)
    key = (top >> 32).to(tl.int32)
    best = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return opened, best_score, best, 0x7FFFFFFF - (top & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _conclude(
    acts,  # whether anything is stored at all
    opened,  # whether the gate is open
    moves,  # whether there is a token
    token,
    cancelled,
    position,
    new_position,
    position_limit,
    stop_ids,
    tokens_ptr,
    position_ptr,
    output_counts_ptr,
    context_counts_ptr,
    halted_ptr,
    outbox_tokens_ptr,
    outbox_status_ptr,
    max_seq_len,
    chunk,
    ON_DEVICE: tl.constexpr,
):
    """Everything that a launch leaves behind. Only the status waits, until the host can see the token."""
    stops = tl.max((stop_ids == token).to(tl.int32), axis=0) > 0
    halted = tl.where(cancelled != 0, _CANCELLED, 0)
    halted = tl.where(new_position + 1 >= position_limit, _FULL, halted)
    halted = tl.where(stops, _STOPPED, halted)
    halted = tl.where(moves, halted, _NON_FINITE)
    reached = tl.where(moves, new_position, tl.where(opened, position, position + chunk))
    counted = acts & moves
    stored = counted & (new_position < max_seq_len)
    tells = acts & opened
    tl.store(tokens_ptr + new_position, token, mask=stored)
    tl.atomic_add(output_counts_ptr + token, 1, mask=counted, sem="relaxed")
    tl.atomic_add(context_counts_ptr + token, 1, mask=counted, sem="relaxed")
    tl.store(position_ptr, reached, mask=acts)
    tl.store(halted_ptr, halted, mask=tells)
    index = tl.where(stored, new_position, -1)
    _publish(outbox_tokens_ptr, outbox_status_ptr, index, token, tells.to(tl.int32), reached, halted, ON_DEVICE)


@triton.jit
def _sample_kernel(
    scores_ptr,  # fp32 [N]
    best_score_ptr,  # fp32 [PROGRAMS]
    best_id_ptr,  # int32 [PROGRAMS]
    temperature_ptr,  # fp32 [1]
    top_k_ptr,  # int32 [1]
    top_p_ptr,  # fp32 [1]
    min_p_ptr,  # fp32 [1]
    seed_ptr,  # int64 [1]
    stop_ids_ptr,  # int32 [STOP_IDS]
    position_limit_ptr,  # int32 [1]
    cancel_ptr,  # int32 [1], host memory
    gate_ptr,  # int32 [1]
    tokens_ptr,  # int32 [max_seq_len]
    position_ptr,  # int32 [1]
    prefill_end_ptr,  # int32 [1]
    output_counts_ptr,  # int32 [N]
    context_counts_ptr,  # int32 [N]
    halted_ptr,  # int32 [1]
    outbox_tokens_ptr,  # int32 [max_seq_len], host memory
    outbox_status_ptr,  # int32 [2], host memory
    draw_arrivals_ptr,  # int32 [2]
    draw_histogram_ptr,  # int64 [BUFFERS, BINS]
    draw_list_ptr,  # int64 [LIST]
    draw_masses_ptr,  # int64 [*]
    max_seq_len,
    chunk,
    rehearsals,
    N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STOP_IDS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
    DRAWERS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CLEARS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    temperature = tl.load(temperature_ptr)
    if tl.load(halted_ptr) != 0:
        leave(PDL)
        return
    program = tl.program_id(0)
    draws = temperature > 0
    if (program > 0) & (draws == 0):  # goes without waiting: program 0 waits
        return
    # All that only this kernel or the host writes is asked for at once, and before the wait. But for the cancel flag
    # where many programs draw: a read of host memory takes a microsecond, one after another (on an H200, 126 programs
    # of four warps: 490 us), so that only the one that goes on asks for it.
    cancelled = tl.load(cancel_ptr, mask=draws == 0, other=0, volatile=True)
    position = tl.load(position_ptr)
    prefill_end = tl.load(prefill_end_ptr)
    position_limit = tl.load(position_limit_ptr)
    offs_i = tl.arange(0, BLOCK_I)
    stop_ids = tl.load(stop_ids_ptr + offs_i, mask=offs_i < STOP_IDS, other=-1)
    new_position = tl.maximum(prefill_end, position + 1)
    if draws:
        top_k = tl.load(top_k_ptr)
        top_p = tl.load(top_p_ptr)
        min_p = tl.load(min_p_ptr)
        seed = tl.load(seed_ptr)
        enter(PDL)
        own_best = load_own_best(scores_ptr, N, BLOCK_V)
        opened, best_score, best, token = _load_best(gate_ptr, best_score_ptr, best_id_ptr, draws, PROGRAMS, BLOCK_P)
        moves = opened & (tl.abs(best) < float("inf"))
        acts = program == 0
        if moves:
            token = draw(
                scores_ptr,
                best_score,
                best,
                own_best,
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
                new_position,
                draw_arrivals_ptr,
                draw_histogram_ptr,
                draw_list_ptr,
                draw_masses_ptr,
                N,
                BLOCK_V,
                PART,
                DRAWERS,
                BLOCK_D,
                CLEARS,
            )
            acts = token >= 0
        cancelled = tl.load(cancel_ptr, mask=acts, other=0, volatile=True)
        _conclude(
            acts,
            opened,
            moves,
            token,
            cancelled,
            position,
            new_position,
            position_limit,
            stop_ids,
            tokens_ptr,
            position_ptr,
            output_counts_ptr,
            context_counts_ptr,
            halted_ptr,
            outbox_tokens_ptr,
            outbox_status_ptr,
            max_seq_len,
            chunk,
            ON_DEVICE,
        )
    else:
        # The instructions of the way on have left every cache since the last step. The program goes it for nothing
        # before the wait, all loads and stores masked, so that they are not fetched piece by piece after it.
        left = rehearsals
        while left >= 0:
            live = left == 0
            if live:
                enter(PDL)
            opened, _score, best, token = _load_best(gate_ptr, best_score_ptr, best_id_ptr, live, PROGRAMS, BLOCK_P)
            moves = opened & (tl.abs(best) < float("inf"))
            _conclude(
                live,
                opened,
                moves,
                token,
                cancelled,
                position,
                new_position,
                position_limit,
                stop_ids,
                tokens_ptr,
                position_ptr,
                output_counts_ptr,
                context_counts_ptr,
                halted_ptr,
                outbox_tokens_ptr,
                outbox_status_ptr,
                max_seq_len,
                chunk,
                ON_DEVICE,
            )
            left = opaque(left - 1, ON_DEVICE)


def sample(
    scores: torch.Tensor,  # fp32 [vocab_size]
    best_score: torch.Tensor,  # fp32 [num_programs]
    best_id: torch.Tensor,  # int32 [num_programs]
    temperature: torch.Tensor,  # fp32 [1]
    top_k: torch.Tensor,  # int32 [1]
    top_p: torch.Tensor,  # fp32 [1]
    min_p: torch.Tensor,  # fp32 [1]
    seed: torch.Tensor,  # int64 [1]
    stop_ids: torch.Tensor,  # int32 [n], padded with -1
    position_limit: torch.Tensor,  # int32 [1]
    cancel: torch.Tensor,  # int32 [1], pinned host memory on a GPU
    gate: torch.Tensor,  # int32 [1], 0: this prefill chunk was not the prompt's last
    tokens: torch.Tensor,  # int32 [max_seq_len]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    output_counts: torch.Tensor,  # int32 [vocab_size]
    context_counts: torch.Tensor,  # int32 [vocab_size]
    halted: torch.Tensor,  # int32 [1]
    outbox_tokens: torch.Tensor,  # int32 [max_seq_len], pinned host memory on a GPU
    outbox_status: torch.Tensor,  # int32 [2], pinned host memory on a GPU
    draw_arrivals: torch.Tensor,  # int32 [2], zero
    draw_histogram: torch.Tensor,  # int64 [BUFFERS, BINS], zero
    draw_list: torch.Tensor,  # int64 [LIST]
    draw_masses: torch.Tensor,  # int64 [at least the number of programs that draw]
    *,
    chunk: int,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Advances the state by one token (or by `chunk` rows of prefill while `gate` is 0), then publishes it.

    Args:
        chunk: rows of a prefill chunk.
        pdl: launch before the predecessor has ended; needs sm_90.
        tile: overrides of BLOCK_V (ids of a program that draws), num_warps, trigger, rehearsals (of the way after the
            wait, before it).

    Raises:
        ValueError: an argument of the wrong shape, dtype or layout.
    """
    vocab_size = scores.numel()
    programs = best_score.numel()
    max_seq_len = tokens.numel()
    expect("sample", "scores", scores, (vocab_size,), torch.float32)
    expect("sample", "best_score", best_score, (programs,), torch.float32)
    expect("sample", "best_id", best_id, (programs,), torch.int32)
    expect_scalars("sample", torch.float32, temperature=temperature, top_p=top_p, min_p=min_p)
    expect_scalars("sample", torch.int64, seed=seed)
    expect_scalars(
        "sample",
        torch.int32,
        top_k=top_k,
        position_limit=position_limit,
        cancel=cancel,
        gate=gate,
        position=position,
        prefill_end=prefill_end,
        halted=halted,
    )
    expect("sample", "stop_ids", stop_ids, (stop_ids.numel(),), torch.int32)
    expect("sample", "tokens", tokens, (max_seq_len,), torch.int32)
    expect("sample", "output_counts", output_counts, (vocab_size,), torch.int32)
    expect("sample", "context_counts", context_counts, (vocab_size,), torch.int32)
    expect("sample", "outbox_tokens", outbox_tokens, (max_seq_len,), torch.int32)
    expect("sample", "outbox_status", outbox_status, (2,), torch.int32)
    expect("sample", "draw_arrivals", draw_arrivals, (2,), torch.int32)
    expect("sample", "draw_histogram", draw_histogram, (BUFFERS, BINS), torch.int64)
    expect("sample", "draw_list", draw_list, (LIST,), torch.int64)
    expect("sample", "draw_masses", draw_masses, (draw_masses.numel(),), torch.int64)
    default = {
        "BLOCK_V": draw_block(vocab_size, draw_masses.numel(), scores.device),
        "num_warps": 4,
        "trigger": TRIGGER_AT_EXIT,
        "rehearsals": 1,
    }
    t = override("sample", default, tile)
    drawing = triton.cdiv(vocab_size, t["BLOCK_V"])
    if drawing > draw_masses.numel():
        raise ValueError(
            f"sample: {drawing} programs of {t['BLOCK_V']} ids need draw_masses of as many, got {draw_masses.numel()}; "
            f"choose a larger BLOCK_V"
        )
    _sample_kernel[(drawing,)](
        scores,
        best_score,
        best_id,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        stop_ids,
        position_limit,
        cancel,
        gate,
        tokens,
        position,
        prefill_end,
        output_counts,
        context_counts,
        halted,
        outbox_tokens,
        outbox_status,
        draw_arrivals,
        draw_histogram,
        draw_list,
        draw_masses,
        max_seq_len,
        chunk,
        t["rehearsals"] if pdl else 0,
        N=vocab_size,
        PROGRAMS=programs,
        STOP_IDS=stop_ids.numel(),
        BLOCK_P=ceil_power_of_two(programs),
        BLOCK_I=ceil_power_of_two(max(stop_ids.numel(), 1)),
        BLOCK_V=t["BLOCK_V"],
        PART=min(t["BLOCK_V"], 64 * t["num_warps"]),
        DRAWERS=drawing,
        BLOCK_D=ceil_power_of_two(drawing),
        CLEARS=ceil_power_of_two(triton.cdiv(BINS, drawing)),
        ON_DEVICE=scores.device.type != "cpu",
        PDL=t["trigger"] if pdl else 0,
        num_warps=t["num_warps"],
        **launch_options(pdl, fp_fusion=False),  # masses are the reference's bit for bit
    )


def sample_torch(
    scores: torch.Tensor,  # fp32 [vocab_size]
    best_score: torch.Tensor,  # fp32 [num_programs]
    best_id: torch.Tensor,  # int32 [num_programs]
    temperature: torch.Tensor,  # fp32 [1]
    top_k: torch.Tensor,  # int32 [1]
    top_p: torch.Tensor,  # fp32 [1]
    min_p: torch.Tensor,  # fp32 [1]
    seed: torch.Tensor,  # int64 [1]
    stop_ids: torch.Tensor,  # int32 [n], padded with -1
    position_limit: torch.Tensor,  # int32 [1]
    cancel: torch.Tensor,  # int32 [1], pinned host memory on a GPU
    gate: torch.Tensor,  # int32 [1], 0: this prefill chunk was not the prompt's last
    tokens: torch.Tensor,  # int32 [max_seq_len]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    output_counts: torch.Tensor,  # int32 [vocab_size]
    context_counts: torch.Tensor,  # int32 [vocab_size]
    halted: torch.Tensor,  # int32 [1]
    outbox_tokens: torch.Tensor,  # int32 [max_seq_len], pinned host memory on a GPU
    outbox_status: torch.Tensor,  # int32 [2], pinned host memory on a GPU
    draw_arrivals: torch.Tensor,  # int32 [2], zero
    draw_histogram: torch.Tensor,  # int64 [BUFFERS, BINS], zero
    draw_list: torch.Tensor,  # int64 [LIST]
    draw_masses: torch.Tensor,  # int64 [at least the number of programs that draw]
    *,
    chunk: int,
) -> None:
    """Advances the state by one token (or by `chunk` rows of prefill while `gate` is 0), then publishes it."""
    if int(halted):
        return
    if not int(gate):
        position += chunk
        return
    best = best_score.max()  # NaN if any is
    if not bool(torch.isfinite(best)):
        halted.fill_(NON_FINITE)
        outbox_status.copy_(torch.cat([position, halted]))
        return
    new_position = max(int(prefill_end), int(position) + 1)
    if float(temperature) > 0:
        token, _ = draw_torch(scores, temperature, top_k, top_p, min_p, seed, new_position)
    else:
        token = int(best_id[best_score == best].min())
    output_counts[token] += 1
    context_counts[token] += 1
    position.fill_(new_position)
    if bool((stop_ids == token).any()):
        halted.fill_(STOPPED)
    elif new_position + 1 >= int(position_limit):
        halted.fill_(FULL)
    elif int(cancel):
        halted.fill_(CANCELLED)
    if new_position < tokens.shape[0]:
        tokens[new_position] = token
        outbox_tokens[new_position] = token
    outbox_status.copy_(torch.cat([position, halted]))
