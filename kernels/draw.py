"""One token drawn from processed scores under temperature, top-k, top-p and min-p, exactly and reproducibly.

With distance = max - score (>= 0) the kept set is, in this order, top_k > 0: distances up to the k-th smallest; top_p
< 1: of what is left, tokens whose strictly nearer companions hold less than top_p of its mass; min_p > 0: masses of
at least min_p times the largest. Ties are kept together and the best token always stays. Dividing by the temperature
keeps the order, so it enters the masses alone.

Masses are whole numbers (threshold.py), so a draw is exact: with the mass `total` of the kept set and r, the first
two words of Philox4x32-10 (Salmon et al. 2011) under key = seed and counter = (new_position, 0, 0, 0), the token is
the first, in id order, at which the running mass exceeds floor(total * r / 2**64). Seed and position decide, whatever
came before.

All programs of a launch draw together, each with the scores of a run of ids in registers. A small top-k takes the
short way: the k-th of the head's best scores, one for each of its programs, bounds the k-th of all scores from below;
the few tokens from there on are gathered in a list, and one program compares every one with every other. The long way
searches thresholds in rounds (threshold.py), then adds up what each program keeps; the last to arrive draws.
"""

from __future__ import annotations

import math

import torch

from monograph.kernels.device import arrive, meet, philox
from monograph.kernels.threshold import (
    LOG2_E,
    MASS_BITS,
    MAX_SHARPNESS,
    load_distance,
    mass,
    mass_torch,
    narrow,
    search,
    sharpness_torch,
)
from monograph.kernels.tile import BINS, BUFFERS, LIST
from monograph.kernels.triton_import import tl, triton

SHORT_K = 128  # the largest top-k that takes the short way

_LOG2_E, _MAX_SHARPNESS = tl.constexpr(LOG2_E), tl.constexpr(MAX_SHARPNESS)
_MASS_ONE = tl.constexpr(2**MASS_BITS)
_BINS, _BUFFERS, _SHORT_K, _LIST = (tl.constexpr(n) for n in (BINS, BUFFERS, SHORT_K, LIST))
_INFINITE = tl.constexpr(0x7F800000)  # the key of an infinite distance
_PAIRS = tl.constexpr(8)
_HALVINGS = tl.constexpr(8)


@triton.jit
def _target(total, seed, new_position):
    """A whole number from 0 to total - 1, each as probable as the others."""
    zero = tl.zeros([], dtype=tl.uint32)
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low, high, _unused2, _unused3 = philox(new_position.to(tl.uint32), zero, zero, zero, key_low, key_high)
    fraction = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return tl.umulhi(total.to(tl.uint64), fraction).to(tl.int64)


@triton.jit
def _reach_of_top_k(near, top_k):
    """A distance within which there are top_k tokens: hardly more than the k-th smallest of `near`, one of each of the
    head's programs; infinite where there are not as many."""
    finite = near < float("inf")
    low = tl.zeros([], dtype=tl.float32)
    high = tl.max(tl.where(finite, near, 0.0), axis=0)
    there = tl.sum(finite.to(tl.int32), axis=0)
    halving = 0
    while halving < _HALVINGS:
        middle = low + (high - low) * 0.5
        enough = tl.sum((near <= middle).to(tl.int32), axis=0) >= top_k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
        halving += 1
    return tl.where(there >= top_k, high, float("inf"))


@triton.jit
def _gather(
    scores_ptr,
    best,
    sharpness,
    reach,
    list_ptr,
    length_ptr,
    program,
    N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
):
    """Appends this program's tokens within reach as key * 2**32 + id, in any order; a full list is only counted on."""
    start = 0
    while start < BLOCK_V:
        offs = program * BLOCK_V + start + tl.arange(0, PART)
        distance = load_distance(scores_ptr, best, offs, N)
        listed = (distance <= reach) & (mass(distance, sharpness) > 0)
        ones = tl.full([PART], 1, tl.int32)
        slot = tl.atomic_add(length_ptr + tl.zeros([PART], tl.int32), ones, mask=listed, sem="relaxed")
        entry = (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | offs.to(tl.int64)
        tl.store(list_ptr + slot, entry, mask=listed & (slot < _LIST))
        start += PART


@triton.jit
def _keep(
    scores_ptr,
    best,
    sharpness,
    limit,
    least_mass,
    program,
    N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
):
    """int64: what this program keeps."""
    kept = tl.zeros([PART], dtype=tl.int64)
    start = 0
    while start < BLOCK_V:
        distance = load_distance(scores_ptr, best, program * BLOCK_V + start + tl.arange(0, PART), N)
        masses = mass(distance, sharpness)
        kept += tl.where((distance.to(tl.int32, bitcast=True) <= limit) & (masses >= least_mass), masses, 0)
        start += PART
    return tl.sum(kept, axis=0)


@triton.jit
def _load_list(list_ptr, offs, length):
    """Keys and ids of listed tokens; beyond the list, tokens of no mass."""
    entry = tl.load(list_ptr + offs, mask=offs < length, other=_INFINITE << 32, cache_modifier=".cg")
    return (entry >> 32).to(tl.int32), entry.to(tl.int32)


@triton.jit
def _draw_from_list(list_ptr, length, sharpness, top_k, top_p, least_mass, seed, new_position):
    """The short way's end: each listed token (a column) beside every other (_PAIRS rows at a time)."""
    key, token = _load_list(list_ptr, tl.arange(0, _LIST), length)
    own = mass(key.to(tl.float32, bitcast=True), sharpness)
    nearer = tl.zeros([_LIST], dtype=tl.int32)  # tokens strictly nearer than this one
    nearer_mass = tl.zeros([_LIST], dtype=tl.int64)
    offs_r = tl.arange(0, _PAIRS)
    start = 0
    while start < length:
        other, _id = _load_list(list_ptr, start + offs_r, length)
        other_mass = mass(other.to(tl.float32, bitcast=True), sharpness)
        is_nearer = other[:, None] < key[None, :]
        nearer += tl.sum(is_nearer.to(tl.int32), axis=0)
        nearer_mass += tl.sum(tl.where(is_nearer, other_mass[:, None], 0), axis=0)
        start += _PAIRS
    kept = (nearer < top_k) & (own > 0)
    if top_p < 1:
        left = tl.sum(tl.where(kept, own, 0), axis=0)
        goal = tl.maximum(tl.ceil(top_p.to(tl.float64) * left.to(tl.float64)).to(tl.int64), 1)
        kept = kept & (nearer_mass < goal)
    limit = tl.max(tl.where(kept, key, 0), axis=0)
    kept_mass = tl.where(kept & (own >= least_mass), own, 0)
    target = _target(tl.sum(kept_mass, axis=0), seed, new_position)
    before = tl.zeros([_LIST], dtype=tl.int64)  # mass of kept tokens of lower ids
    start = 0
    while start < length:
        other, other_id = _load_list(list_ptr, start + offs_r, length)
        other_mass = mass(other.to(tl.float32, bitcast=True), sharpness)
        other_mass = tl.where((other <= limit) & (other_mass >= least_mass), other_mass, 0)
        before += tl.sum(tl.where(other_id[:, None] < token[None, :], other_mass[:, None], 0), axis=0)
        start += _PAIRS
    hit = (before <= target) & (target < before + kept_mass)
    return tl.max(tl.where(hit, token, -1), axis=0)


@triton.jit
def _draw_from_masses(
    scores_ptr,
    masses_ptr,
    best,
    sharpness,
    limit,
    least_mass,
    seed,
    new_position,
    N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DRAWERS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The long way's end: the program whose kept mass holds the target, then the token among its ids."""
    offs_d = tl.arange(0, BLOCK_D)
    sums = tl.load(masses_ptr + offs_d, mask=offs_d < DRAWERS, other=0, cache_modifier=".cg")
    target = _target(tl.sum(sums, axis=0), seed, new_position)
    chosen, before = search(sums, target + 1, BLOCK_D)
    distance = load_distance(scores_ptr, best, chosen * BLOCK_V + tl.arange(0, BLOCK_V), N)
    masses = mass(distance, sharpness)
    masses = tl.where((distance.to(tl.int32, bitcast=True) <= limit) & (masses >= least_mass), masses, 0)
    place, _before = search(masses, target + 1 - before, BLOCK_V)
    return chosen * BLOCK_V + place


@triton.jit
def load_own_best(scores_ptr, N: tl.constexpr, BLOCK_V: tl.constexpr):
    """The best score of this program's ids, which are asked for all at once.

    What follows takes them in parts, from the L1 cache, so that its code is short: like all code of the step it comes
    from memory every time.
    """
    offs = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    return tl.max(tl.load(scores_ptr + offs, mask=offs < N, other=float("-inf")), axis=0)


@triton.jit
def draw(
    scores_ptr,  # fp32 [N]
    best_score,  # fp32 [BLOCK_P]: of the head's programs, -inf where there is none
    best,  # fp32: the largest
    own_best,  # fp32: the largest of this program's ids
    temperature,  # > 0
    top_k,
    top_p,
    min_p,
    seed,
    new_position,
    arrivals_ptr,  # int32 [2]: arrivals, length of the list; zero before and after
    histogram_ptr,  # int64 [BUFFERS, BINS], zero before and after
    list_ptr,  # int64 [LIST]
    masses_ptr,  # int64 [*]: kept mass of each program
    N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
    DRAWERS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CLEARS: tl.constexpr,
):
    """Every program of the launch calls it, with the ids program * BLOCK_V on; one gets the token, the others -1."""
    program = tl.program_id(0)
    sharpness = tl.minimum(tl.div_rn(tl.full([], _LOG2_E, tl.float32), temperature), _MAX_SHARPNESS)
    least_mass = tl.ceil(min_p.to(tl.float64) * _MASS_ONE).to(tl.int64)
    least_mass = tl.minimum(tl.maximum(least_mass, 1), _MASS_ONE)
    token = tl.full([], -1, tl.int32)
    met = tl.zeros([], dtype=tl.int32)
    long_way = top_k >= 0
    if (top_k > 0) & (top_k <= _SHORT_K) & (top_k < N):
        reach = _reach_of_top_k(best - best_score, top_k)
        if best - own_best <= reach:
            _gather(scores_ptr, best, sharpness, reach, list_ptr, arrivals_ptr + 1, program, N, BLOCK_V, PART)
        met += 1
        meet(arrivals_ptr, met * DRAWERS)
        length = tl.load(arrivals_ptr + 1, cache_modifier=".cg")
        long_way = length > _LIST
        if length <= _LIST:
            if arrive(arrivals_ptr) == (met + 1) * DRAWERS - 1:  # everyone has read the length
                tl.store(arrivals_ptr + tl.arange(0, 2), tl.zeros([2], dtype=tl.int32))
            if program == 0:
                token = _draw_from_list(list_ptr, length, sharpness, top_k, top_p, least_mass, seed, new_position)
    if long_way:
        rounds = tl.zeros([], dtype=tl.int32)
        limit = tl.zeros([], dtype=tl.int32) + _INFINITE
        stage = 0
        while stage < 2:  # first top-k, then top-p: one search in the code for both
            by_mass = stage == 1
            if ((top_k > 0) & (top_k < N) & (stage == 0)) | ((top_p < 1) & by_mass):
                # All tokens of less than `small` together have less than half of what top-p may leave out.
                small = ((1.0 - top_p.to(tl.float64)) * (_MASS_ONE / (2 * N))).to(tl.int64)
                small = tl.where(by_mass, small, 0)
                goal = tl.where(by_mass, 0, top_k.to(tl.int64))
                limit, met, rounds = narrow(
                    scores_ptr,
                    best,
                    sharpness,
                    by_mass,
                    goal,
                    top_p,
                    limit,
                    small,
                    met,
                    rounds,
                    arrivals_ptr,
                    histogram_ptr,
                    program,
                    N,
                    BLOCK_V,
                    PART,
                    DRAWERS,
                    CLEARS,
                )
            stage += 1
        kept = _keep(scores_ptr, best, sharpness, limit, least_mass, program, N, BLOCK_V, PART)
        tl.store(masses_ptr + program, kept)
        if arrive(arrivals_ptr) == (met + 1) * DRAWERS - 1:
            token = _draw_from_masses(
                scores_ptr,
                masses_ptr,
                best,
                sharpness,
                limit,
                least_mass,
                seed,
                new_position,
                N,
                BLOCK_V,
                DRAWERS,
                BLOCK_D,
            )
            tl.store(arrivals_ptr + tl.arange(0, 2), tl.zeros([2], dtype=tl.int32))
            if rounds > 0:
                offs_b = tl.arange(0, _BINS)
                last_ptr = histogram_ptr + ((rounds - 1) % _BUFFERS) * _BINS
                tl.store(last_ptr + offs_b, tl.zeros([_BINS], dtype=tl.int64))
    return token


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
