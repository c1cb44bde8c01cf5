"""One token drawn from processed scores under temperature, top-k, top-p and min-p, exactly and reproducibly.

With distance = max - score (>= 0) the kept set is, in this order, top_k > 0: distances up to the k-th smallest; top_p
< 1: of what is left, tokens whose strictly nearer companions hold less than top_p of its mass; min_p > 0: masses of
at least min_p times the largest. Ties are kept together and the best token always stays. Dividing by the temperature
keeps the order, so it enters the masses alone.

Masses are whole numbers (threshold.py), so a draw is exact: with the mass `total` of the kept set and r, the first
two words of Philox4x32-10 (Salmon et al. 2011) under key = seed and counter = (new_position, 0, 0, 0), the token is
the first, in id order, at which the running mass exceeds floor(total * r / 2**64). Seed and position decide, whatever
came before.
"""

from __future__ import annotations

import math

import torch

from monograph.kernels.device import philox
from monograph.kernels.threshold import (
    LOG2_E,
    MASS_BITS,
    MAX_SHARPNESS,
    load_distance,
    mass,
    mass_torch,
    measure,
    sharpness_torch,
    threshold,
)
from monograph.kernels.triton_import import tl, triton

_LOG2_E, _MAX_SHARPNESS = tl.constexpr(LOG2_E), tl.constexpr(MAX_SHARPNESS)
_MASS_ONE = tl.constexpr(2**MASS_BITS)


@triton.jit
def _kept_mass(scores_ptr, best, sharpness, limit, least_mass, start, N: tl.constexpr, BLOCK_V: tl.constexpr):
    """int64 [BLOCK_V]: masses of a run of ids, zero where the token is not kept."""
    distance = load_distance(scores_ptr, best, start + tl.arange(0, BLOCK_V), N)
    masses = mass(distance, sharpness)
    kept = (distance.to(tl.int32, bitcast=True) <= limit) & (masses >= least_mass)
    return tl.where(kept, masses, 0)


@triton.jit
def draw(
    scores_ptr,
    best,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    new_position,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    sharpness = tl.minimum(tl.div_rn(tl.full([], _LOG2_E, tl.float32), temperature), _MAX_SHARPNESS)
    limit = 0x7F800000
    if (top_k > 0) & (top_k < N):
        tokens = tl.zeros([], dtype=tl.int64) + N
        limit = threshold(scores_ptr, best, sharpness, False, top_k.to(tl.int64), tokens, N, COLUMNS)
    if top_p < 1:
        left, _left = measure(scores_ptr, best, sharpness, True, limit, limit, N, COLUMNS)
        goal = tl.maximum(tl.ceil(top_p.to(tl.float64) * left.to(tl.float64)).to(tl.int64), 1)
        limit = threshold(scores_ptr, best, sharpness, True, goal, left, N, COLUMNS)
    least_mass = tl.ceil(min_p.to(tl.float64) * _MASS_ONE).to(tl.int64)
    least_mass = tl.minimum(tl.maximum(least_mass, 0), _MASS_ONE)

    offs_b = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], dtype=tl.int64)
    block = 0
    while block * BLOCK_V < N:
        masses = _kept_mass(scores_ptr, best, sharpness, limit, least_mass, block * BLOCK_V, N, BLOCK_V)
        sums = tl.where(offs_b == block, tl.sum(masses, axis=0), sums)
        block += 1
    zero = tl.zeros([], dtype=tl.uint32)
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low, high, _unused2, _unused3 = philox(new_position.to(tl.uint32), zero, zero, zero, key_low, key_high)
    fraction = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    target = tl.umulhi(tl.sum(sums, axis=0).to(tl.uint64), fraction).to(tl.int64)  # 0 .. total - 1
    chosen = tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32), axis=0)
    target -= tl.sum(tl.where(offs_b < chosen, sums, 0), axis=0)
    masses = _kept_mass(scores_ptr, best, sharpness, limit, least_mass, chosen * BLOCK_V, N, BLOCK_V)
    return chosen * BLOCK_V + tl.sum((tl.cumsum(masses, axis=0) <= target).to(tl.int32), axis=0)


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
