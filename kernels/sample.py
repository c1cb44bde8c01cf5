"""The last launch of every graph: choose the next token, advance the state, tell the host.

With distance = max - score (>= 0): temperature <= 0 takes the lowest id at distance 0. Otherwise the kept set is, in
this order, top_k > 0: distances up to the k-th smallest; top_p < 1: of what is left, tokens whose strictly nearer
companions hold less than top_p of its mass; min_p > 0: masses of at least min_p times the largest. Ties are always
kept together and the best token always stays. Dividing by the temperature keeps the order, so it enters the masses
alone. Masses are whole numbers (threshold.py), so a draw is exact: with the mass of the kept set `total` and r the
first two words of Philox4x32-10 (Salmon et al. 2011) under key = seed and counter = (new_position, 0, 0, 0), the next
token is the first, in id order, at which the running mass exceeds floor(total * r / 2**64).
"""

from __future__ import annotations

import math

import torch

from monograph.kernels.threshold import MASS_BITS, mass_torch, sharpness_torch

STOPPED, FULL, CANCELLED, NON_FINITE = 1, 2, 3, 4  # values of `halted`


def philox_torch(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words for a 128-bit counter under a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def draw_torch(
    scores: torch.Tensor,  # fp32 [vocab_size], the largest of them finite
    temperature: torch.Tensor,  # fp32 [1], > 0
    top_k: torch.Tensor,  # int32 [1], 0: off
    top_p: torch.Tensor,  # fp32 [1], 1: off
    min_p: torch.Tensor,  # fp32 [1], 0: off
    seed: torch.Tensor,  # int64 [1]
    new_position: int,
) -> tuple[int, torch.Tensor]:
    """The token drawn for `new_position`, and the mass of each id after the three limits (0: not kept)."""
    distance = scores.max() - scores
    mass = mass_torch(distance, sharpness_torch(temperature))
    if 0 < int(top_k) < scores.shape[0]:
        mass[distance > torch.kthvalue(distance, int(top_k)).values] = 0
    if float(top_p) < 1:
        order = torch.argsort(distance)
        running = mass[order].cumsum(0)
        goal = max(math.ceil(float(top_p) * float(running[-1])), 1)
        last = order[int(torch.searchsorted(running, goal))]  # the first at which the running mass reaches the goal
        mass[distance > distance[last]] = 0
    if float(min_p) > 0:
        mass[mass < min(math.ceil(float(min_p) * 2.0**MASS_BITS), 2**MASS_BITS)] = 0
    running = mass.cumsum(0)
    word = int(seed) % 2**64
    low, high, _, _ = philox_torch((new_position, 0, 0, 0), (word & 0xFFFFFFFF, word >> 32))
    target = int(running[-1]) * (high << 32 | low) >> 64
    return int(torch.searchsorted(running, target, right=True)), mass


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
