"""Final RMSNorm, output head and score processing; each program also leaves the best of its own tiles.

logits = W (x * norm_weight) / rms(x), in fp32. scores = logits, then + logit_bias, then the repetition penalty on
every id seen in prompt or output (a negative score is multiplied, another divided: Keskar et al. 2019), then -
frequency_penalty * output_count - presence_penalty * (output_count > 0).
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

LOGIT_BIAS = 1  # bits of `processors`
PENALTIES = 2
NO_ID = 2**31 - 1  # the id of a program without a tile


@triton.jit
def _process(
    score,  # fp32 [BLOCK_N]
    offs_n,
    processors,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    logit_bias_ptr,
    context_counts_ptr,
    output_counts_ptr,
    N: tl.constexpr,
):
    biased = offs_n < tl.where((processors & 1) != 0, N, 0)
    penalised = offs_n < tl.where((processors & 2) != 0, N, 0)
    score += tl.load(logit_bias_ptr + offs_n, mask=biased, other=0.0)
    seen = tl.load(context_counts_ptr + offs_n, mask=penalised, other=0) > 0
    repeated = tl.where(score < 0, score * repetition_penalty, tl.div_rn(score, repetition_penalty))
    score = tl.where(seen, repeated, score)
    count = tl.load(output_counts_ptr + offs_n, mask=penalised, other=0).to(tl.float32)
    return tl.where(count > 0, score - (frequency_penalty * count + presence_penalty), score)


@triton.jit
def _head_kernel(
    x_ptr,  # fp32 [K]
    norm_weight_ptr,  # D [K]
    weight_ptr,  # D [N, K]
    processors_ptr,  # int32 [1]
    repetition_penalty_ptr,  # fp32 [1]
    presence_penalty_ptr,  # fp32 [1]
    frequency_penalty_ptr,  # fp32 [1]
    logit_bias_ptr,  # fp32 [N]
    context_counts_ptr,  # int32 [N]
    output_counts_ptr,  # int32 [N]
    gate_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    logits_ptr,  # fp32 [N]
    scores_ptr,  # fp32 [N]
    best_score_ptr,  # fp32 [GRID]
    best_id_ptr,  # int32 [GRID]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GRID: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    NO_TOKEN: tl.constexpr = 2147483647
    if tl.load(halted_ptr) != 0:
        leave(PDL)
        return
    program = tl.program_id(0)
    offs_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    weights = load_rows(weight_ptr, offs_n, offs_n < N, K, BLOCK_K, CHUNKS, True)
    norm_weight = load_vector(norm_weight_ptr, K, BLOCK_K, CHUNKS)
    processors = tl.load(processors_ptr)
    repetition_penalty = tl.load(repetition_penalty_ptr)
    presence_penalty = tl.load(presence_penalty_ptr)
    frequency_penalty = tl.load(frequency_penalty_ptr)
    enter(PDL)
    if tl.load(gate_ptr) == 0:  # in a prefill graph the launch before this one writes it
        return
    x, inverse_rms = normalise(load_vector(x_ptr, K, BLOCK_K, CHUNKS), norm_weight, eps, K, CHUNKS)
    best = tl.full([BLOCK_N], float("-inf"), dtype=tl.float32)
    best_id = tl.full([BLOCK_N], NO_TOKEN, dtype=tl.int32)
    broken = tl.zeros([BLOCK_N], dtype=tl.int32)
    tile = program
    while tile * BLOCK_N < N:
        next_n = offs_n + GRID * BLOCK_N
        next_weights = load_rows(weight_ptr, next_n, next_n < N, K, BLOCK_K, CHUNKS, True)
        logit = dot_rows(weights, x, BLOCK_N, BLOCK_K, CHUNKS, VECTOR) * inverse_rms
        score = _process(
            logit,
            offs_n,
            processors,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias_ptr,
            context_counts_ptr,
            output_counts_ptr,
            N,
        )
        inside = offs_n < N
        tl.store(logits_ptr + offs_n, logit, mask=inside)
        tl.store(scores_ptr + offs_n, score, mask=inside)
        finite = (tl.abs(logit) < float("inf")) & (score == score)
        broken = tl.where(inside & (finite == 0), 1, broken)
        better = inside & (score > best)  # strictly: the earlier, lower id stays on a tie
        best = tl.where(better, score, best)
        best_id = tl.where(better, offs_n, best_id)
        weights = next_weights
        offs_n = next_n
        tile += GRID
    top = tl.max(best, axis=0)
    top_id = tl.min(tl.where(best == top, best_id, NO_TOKEN), axis=0)
    tl.store(best_score_ptr + program, tl.where(tl.max(broken, axis=0) > 0, float("nan"), top))
    tl.store(best_id_ptr + program, top_id)


def head(
    x: torch.Tensor,  # fp32 [hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    weight: torch.Tensor,  # D [vocab_size, hidden_size]
    processors: torch.Tensor,  # int32 [1], bits
    repetition_penalty: torch.Tensor,  # fp32 [1]
    presence_penalty: torch.Tensor,  # fp32 [1]
    frequency_penalty: torch.Tensor,  # fp32 [1]
    logit_bias: torch.Tensor,  # fp32 [vocab_size]
    context_counts: torch.Tensor,  # int32 [vocab_size]: how often each id stands in prompt and output
    output_counts: torch.Tensor,  # int32 [vocab_size]: how often it was sampled
    gate: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    logits: torch.Tensor,  # fp32 [vocab_size]
    scores: torch.Tensor,  # fp32 [vocab_size]
    best_score: torch.Tensor,  # fp32 [num_programs]
    best_id: torch.Tensor,  # int32 [num_programs]
    *,
    eps: float,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes raw logits, processed scores and every program's best (score, lowest id of it).

    The grid is as long as `best_score`; a program walks the tiles program, program + grid, ... and asks for the next
    one early. Its best score is NaN where one of its logits is not finite, and -inf (with NO_ID) where it has no tile.

    Args:
        eps: added to the mean square.
        pdl: launch before the predecessor has ended; needs sm_90.
        tile: overrides of BLOCK_N, num_warps, trigger, max_registers (of a thread, with pdl; 0: no limit).

    Raises:
        ValueError: an argument of the wrong shape, dtype or layout.
    """
    expect_weight("head", "weight", weight)
    vocab_size, hidden_size = weight.shape
    expect("head", "x", x, (hidden_size,), torch.float32)
    expect("head", "norm_weight", norm_weight, (hidden_size,), weight.dtype)
    expect_scalars("head", torch.int32, processors=processors, gate=gate, halted=halted)
    expect_scalars(
        "head",
        torch.float32,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    for name, vector in (("logit_bias", logit_bias), ("logits", logits), ("scores", scores)):
        expect("head", name, vector, (vocab_size,), torch.float32)
    expect("head", "context_counts", context_counts, (vocab_size,), torch.int32)
    expect("head", "output_counts", output_counts, (vocab_size,), torch.int32)
    grid = best_score.numel()
    expect("head", "best_score", best_score, (grid,), torch.float32)
    expect("head", "best_id", best_id, (grid,), torch.int32)
    default = matvec_tile(vocab_size, hidden_size, weight.dtype, num_warps=4, bytes_per_thread=128)
    # Four programs fill a multiprocessor; with rows of 2 to 4 KiB they can leave registers for a program of `sample`,
    # which is then resident, its state read and its instructions fetched, before the head ends. 0: as many as it takes.
    default["max_registers"] = 104 if 2048 <= hidden_size * weight.dtype.itemsize <= 4096 else 0
    t = override("head", default, tile)
    limits = {"maxnreg": t["max_registers"]} if pdl and t["max_registers"] else {}
    block_k = column_block(hidden_size, weight.dtype, t["num_warps"])
    _head_kernel[(grid,)](
        x,
        norm_weight,
        weight,
        processors,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        context_counts,
        output_counts,
        gate,
        halted,
        logits,
        scores,
        best_score,
        best_id,
        eps,
        N=vocab_size,
        K=hidden_size,
        GRID=grid,
        BLOCK_N=t["BLOCK_N"],
        BLOCK_K=block_k,
        CHUNKS=triton.cdiv(hidden_size, block_k),
        VECTOR=vector_width(weight.dtype),
        PDL=t["trigger"] if pdl else 0,
        num_warps=t["num_warps"],
        **launch_options(pdl),
        **limits,
    )


def head_torch(
    x: torch.Tensor,  # fp32 [hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    weight: torch.Tensor,  # D [vocab_size, hidden_size]
    processors: torch.Tensor,  # int32 [1], bits
    repetition_penalty: torch.Tensor,  # fp32 [1]
    presence_penalty: torch.Tensor,  # fp32 [1]
    frequency_penalty: torch.Tensor,  # fp32 [1]
    logit_bias: torch.Tensor,  # fp32 [vocab_size]
    context_counts: torch.Tensor,  # int32 [vocab_size]: how often each id stands in prompt and output
    output_counts: torch.Tensor,  # int32 [vocab_size]: how often it was sampled
    gate: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    logits: torch.Tensor,  # fp32 [vocab_size]
    scores: torch.Tensor,  # fp32 [vocab_size]
    best_score: torch.Tensor,  # fp32 [num_programs]
    best_id: torch.Tensor,  # int32 [num_programs]
    *,
    eps: float,
) -> None:
    """Writes raw logits, processed scores and the best (score, lowest id); NaN as best where a logit is not finite.

    The reference is one program: the best of all is in entry 0, the other entries say that they had no tile.
    """
    if int(halted) or not int(gate):
        return
    normed = x * torch.rsqrt(x.square().mean() + eps) * norm_weight.float()
    torch.mv(weight.float(), normed, out=logits)  # .float() of an fp32 weight is the weight itself
    scores.copy_(logits)
    if int(processors) & LOGIT_BIAS:
        scores += logit_bias
    if int(processors) & PENALTIES:
        penalised = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
        scores.copy_(torch.where(context_counts > 0, penalised, scores))
        scores -= frequency_penalty * output_counts + presence_penalty * (output_counts > 0)
    best_score.fill_(float("-inf"))
    best_id.fill_(NO_ID)
    best = torch.argmax(scores)
    best_score[0] = scores[best]
    best_id[0] = (scores == scores[best]).nonzero()[0, 0] if scores[best] == scores[best] else best
    if not bool(torch.isfinite(logits).all()):
        best_score[0] = float("nan")
