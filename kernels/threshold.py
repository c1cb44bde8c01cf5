"""Thresholds over a vocabulary, in one program: how far below the best score a token may be and still be kept.

A token's key is the bit pattern of its distance max - score >= 0: as a whole number it orders distances. The
threshold for a goal is the smallest key up to which tokens, or their masses, add up to the goal. One pass keeps the
four smallest keys of each of COLUMNS columns; unless a column held a fifth that matters, the answer is found among
them, in registers. Otherwise the pass has still raised the lower bound, a few passes narrow what is left by
interpolation, and it starts again.

Masses are whole numbers: the same on every device, in every order of addition. A token's mass is 2**-t in units of
2**-40 of the most probable token's mass, rounded down, with t = (max - score) * log2(e) / temperature. 2**-t is a
polynomial of separate fp32 multiplications and additions (relative error below 2e-7), so a CPU and a GPU agree on
every bit; and whole numbers add exactly, so that the sets kept by top-p and the token drawn depend on neither tiling
nor device. A token less than 2**-40 times as probable as the best has no mass.
"""

from __future__ import annotations

import torch

from monograph.kernels.triton_import import tl, triton

LOG2_E = 1.4426950408889634
MASS_BITS = 40  # mass of the most probable token: 2**40; 2**22 tokens of it still fit an int64
C1, C2, C3, C4, C5 = (  # 2**-f = 1 + C1 f + ... + C5 f**5 on [-0.5, 0.5], minimax
    -0.6931470036506653,
    0.24022242426872253,
    -0.05550733581185341,
    0.009671512991189957,
    -0.001326472614891827,
)
ROUNDER = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest whole number in the low bits
ROUNDER_BITS = 0x4B400000
FARTHEST = 60.0  # exponents beyond this have no mass
MAX_SHARPNESS = 3.0e38


_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in (C1, C2, C3, C4, C5))
_ROUNDER, _ROUNDER_BITS = tl.constexpr(ROUNDER), tl.constexpr(ROUNDER_BITS)
_FARTHEST = tl.constexpr(FARTHEST)
_NOTHING = tl.constexpr(0x7FFFFFFF)  # beyond every key
_INFINITE = tl.constexpr(0x7F800000)  # the key of an infinite distance
_MARGIN = tl.constexpr(1 / 32)


@triton.jit
def mass(distance, sharpness):
    """int64 masses of tokens at fp32 distances; `mass_torch` bit for bit, provided that nothing is fused."""
    exponent = tl.minimum(distance * sharpness, _FARTHEST)
    shifted = exponent + _ROUNDER
    whole = shifted.to(tl.int32, bitcast=True) - _ROUNDER_BITS
    part = exponent - (shifted - _ROUNDER)
    power = part * _C5 + _C4
    power = power * part + _C3
    power = power * part + _C2
    power = power * part + _C1
    power = power * part + 1.0
    bits = power.to(tl.int32, bitcast=True) - (whole << 23)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    return (mantissa << 17) >> (127 - (bits >> 23)).to(tl.int64)


@triton.jit
def load_distance(scores_ptr, best, offs, N: tl.constexpr):
    """Distances below the best score; infinite, so of no mass, beyond the vocabulary."""
    return best - tl.load(scores_ptr + offs, mask=offs < N, other=float("-inf"))


@triton.jit
def _weight(key, sharpness, by_mass: tl.constexpr):
    if by_mass:
        weight = mass(key.to(tl.float32, bitcast=True), sharpness)
    else:
        weight = tl.full(key.shape, 1, tl.int64)
    return weight


@triton.jit
def measure(scores_ptr, best, sharpness, by_mass: tl.constexpr, limit0, limit1, N: tl.constexpr, COLUMNS: tl.constexpr):
    """One pass: number or mass (int64) of the tokens with keys up to `limit0`, and up to `limit1`.

    A number is right for limits short of infinite distance, where what lies beyond the vocabulary would count.
    """
    offs = tl.arange(0, COLUMNS)
    total0 = tl.zeros([COLUMNS], dtype=tl.int64)
    total1 = total0
    next_distance = load_distance(scores_ptr, best, offs, N)
    start = 0
    while start < N:
        key = next_distance.to(tl.int32, bitcast=True)
        start += COLUMNS
        next_distance = load_distance(scores_ptr, best, start + offs, N)
        weight = _weight(key, sharpness, by_mass)
        total0 += tl.where(key <= limit0, weight, 0)
        total1 += tl.where(key <= limit1, weight, 0)
    return tl.sum(total0, axis=0), tl.sum(total1, axis=0)


@triton.jit
def _collect(scores_ptr, best, low, N: tl.constexpr, COLUMNS: tl.constexpr):
    """One pass: each column's four smallest keys from `low` on, the smallest key of all that were left out, and the
    largest key of a finite distance."""
    offs = tl.arange(0, COLUMNS)
    farthest = tl.zeros([COLUMNS], dtype=tl.int32)
    k0 = tl.full([COLUMNS], _NOTHING, dtype=tl.int32)
    k1 = k0
    k2 = k0
    k3 = k0
    left_out = k0
    next_distance = load_distance(scores_ptr, best, offs, N)
    start = 0
    while start < N:
        key = next_distance.to(tl.int32, bitcast=True)
        farthest = tl.maximum(farthest, tl.where(key < _INFINITE, key, 0))
        key = tl.where((start + offs < N) & (key >= low), key, _NOTHING)
        start += COLUMNS
        next_distance = load_distance(scores_ptr, best, start + offs, N)
        larger = tl.maximum(k0, key)
        k0 = tl.minimum(k0, key)
        key = tl.maximum(k1, larger)
        k1 = tl.minimum(k1, larger)
        larger = tl.maximum(k2, key)
        k2 = tl.minimum(k2, key)
        key = tl.maximum(k3, larger)
        k3 = tl.minimum(k3, larger)
        left_out = tl.minimum(left_out, key)
    return k0, k1, k2, k3, tl.min(left_out, axis=0), tl.max(farthest, axis=0)


@triton.jit
def _sum_up_to(limit, k0, k1, k2, k3, w0, w1, w2, w3):
    total = tl.where(k0 <= limit, w0, 0) + tl.where(k1 <= limit, w1, 0)
    total += tl.where(k2 <= limit, w2, 0) + tl.where(k3 <= limit, w3, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _between(low, high, end, fraction):
    """The key at a fraction of the distance from key low to key end, but from low on and before high."""
    near = low.to(tl.float32, bitcast=True)
    far = tl.maximum(end, low).to(tl.float32, bitcast=True)
    distance = near + (far - near) * tl.minimum(tl.maximum(fraction, 0.0), 1.0)
    return tl.minimum(tl.maximum(distance.to(tl.int32, bitcast=True), low), high - 1)


@triton.jit
def threshold(
    scores_ptr, best, sharpness, by_mass: tl.constexpr, goal, everything, N: tl.constexpr, COLUMNS: tl.constexpr
):
    """The smallest key up to which tokens, or masses, add up to `goal`; all together add up to `everything`."""
    zero = tl.zeros([], dtype=tl.int32)
    low = zero  # the answer is in [low, high]; keys before low measure `below`, keys up to high `reached`
    high = zero + _INFINITE
    below = tl.zeros([], dtype=tl.int64)
    reached = everything
    while low < high:
        k0, k1, k2, k3, left_out, farthest = _collect(scores_ptr, best, low, N, COLUMNS)
        w0 = _weight(k0, sharpness, by_mass)
        w1 = _weight(k1, sharpness, by_mass)
        w2 = _weight(k2, sharpness, by_mass)
        w3 = _weight(k3, sharpness, by_mass)
        last = tl.minimum(left_out - 1, _INFINITE)
        before = below + _sum_up_to(last, k0, k1, k2, k3, w0, w1, w2, w3)
        if before >= goal:  # no token that was left out matters
            high = tl.minimum(high, last)
            while low < high:
                middle = low + (high - low) // 2
                enough = below + _sum_up_to(middle, k0, k1, k2, k3, w0, w1, w2, w3) >= goal
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle + 1)
        else:
            tie = left_out == low  # more equal tokens than a column keeps: see first whether they are the answer
            low = left_out
            below = before
            narrowing = 0
            while (low < high) & (narrowing < 4):
                # In thirds, twice; then a little to either side of where a straight line would reach the goal.
                line = (goal - below).to(tl.float32) / (reached - below).to(tl.float32)
                end = tl.minimum(high, farthest)
                limit0 = _between(low, high, end, tl.where(narrowing < 2, 0.333, line - _MARGIN))
                limit1 = _between(low, high, end, tl.where(narrowing < 2, 0.667, line + _MARGIN))
                limit0 = tl.where(tie & (narrowing == 0), low, limit0)
                sum0, sum1 = measure(scores_ptr, best, sharpness, by_mass, limit0, limit1, N, COLUMNS)
                enough0 = sum0 >= goal
                enough1 = sum1 >= goal
                low = tl.where(enough0, low, tl.where(enough1, limit0, limit1) + 1)
                below = tl.where(enough0, below, tl.where(enough1, sum0, sum1))
                high = tl.where(enough0, limit0, tl.where(enough1, limit1, high))
                reached = tl.where(enough0, sum0, tl.where(enough1, sum1, reached))
                narrowing += 1
    return low


def sharpness_torch(temperature: torch.Tensor) -> torch.Tensor:
    """log2(e) / temperature, kept finite so that 0 * sharpness is 0 at any temperature above 0."""
    log2_e = torch.full_like(temperature, LOG2_E)
    return torch.clamp(log2_e / temperature, max=MAX_SHARPNESS)


def mass_torch(distance: torch.Tensor, sharpness: torch.Tensor) -> torch.Tensor:
    """Masses of tokens `distance` below the best score.

    Args:
        distance: fp32, max - score, >= 0.
        sharpness: fp32 [1], log2(e) / temperature.

    Returns:
        int64 of the shape of `distance`, from 0 to 2**40.
    """
    exponent = torch.clamp(distance * sharpness, max=FARTHEST)
    shifted = exponent + ROUNDER
    whole = shifted.view(torch.int32) - ROUNDER_BITS
    part = exponent - (shifted - ROUNDER)  # [-0.5, 0.5], exact
    power = part * C5 + C4
    for coefficient in (C3, C2, C1, 1.0):
        power = power * part + coefficient
    bits = power.view(torch.int32) - (whole << 23)  # the fp32 bits of 2**-exponent
    mantissa = ((bits & 0x7FFFFF) | 0x800000).long()
    return (mantissa << (MASS_BITS - 23)) >> (127 - (bits >> 23)).long()
