"""Masses of tokens, and thresholds over a vocabulary: how far below the best score a token may be and still be kept.

A token's key is the bit pattern of its distance max - score >= 0: as a whole number it orders distances. The
threshold for a goal is the smallest key up to which tokens, or their masses, add up to the goal. All programs of a
launch search it together, each with ids of its own in registers: a round adds up what lies in each of BINS ranges of
keys, in a histogram that all share; the programs meet, read it, and agree on the range that holds the answer, which
the next round divides. Ranges of the first round are a 32nd of an octave of distance wide, so that three rounds find
most answers; nothing is ever approximate.

Masses are whole numbers: the same on every device, in every order of addition. A token's mass is 2**-t in units of
2**-40 of the most probable token's mass, rounded down, with t = (max - score) * log2(e) / temperature. 2**-t is a
polynomial of separate fp32 multiplications and additions (relative error below 2e-7), so a CPU and a GPU agree on
every bit; and whole numbers add exactly, so that the sets kept by top-p and the token drawn depend on neither tiling
nor device. A token less than 2**-40 times as probable as the best has no mass.
"""

from __future__ import annotations

import torch

from monograph.kernels.device import meet
from monograph.kernels.tile import BINS, BUFFERS
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
_INFINITE = tl.constexpr(0x7F800000)  # the key of an infinite distance
_BINS, _BUFFERS = tl.constexpr(BINS), tl.constexpr(BUFFERS)
_MASSLESS = tl.constexpr(41.0)  # an exponent at which a token has no mass
_MIN_SHARPNESS = tl.constexpr(1.4e-37)  # below it a token at any distance has a mass
_FIRST_SHIFT = tl.constexpr(18)  # 32 bins an octave: all of them, 16 octaves


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
def search(values, goal, SIZE: tl.constexpr):
    """Where running sums of int64 [SIZE] >= 0 reach the goal: the index (SIZE if nowhere), and the sum before it.

    Row by row, then within a row, which takes fewer registers and exchanges than running sums of all.
    """
    COLUMNS: tl.constexpr = 32 if SIZE > 32 else SIZE
    ROWS: tl.constexpr = SIZE // COLUMNS
    offs_r = tl.arange(0, ROWS)
    offs_c = tl.arange(0, COLUMNS)
    grid = tl.reshape(values, [ROWS, COLUMNS])
    sums = tl.sum(grid, axis=1)
    row = tl.sum((tl.cumsum(sums, axis=0) < goal).to(tl.int32), axis=0)
    before = tl.sum(tl.where(offs_r < row, sums, 0), axis=0)
    entries = tl.sum(tl.where((offs_r == row)[:, None], grid, 0), axis=0)
    column = tl.sum((tl.cumsum(entries, axis=0) + before < goal).to(tl.int32), axis=0)
    before += tl.sum(tl.where(offs_c < column, entries, 0), axis=0)
    return tl.minimum(row * COLUMNS + column, SIZE), before


@triton.jit
def load_distance(scores_ptr, best, offs, N: tl.constexpr):
    """Distances below the best score; infinite, so of no mass, beyond the vocabulary."""
    return best - tl.load(scores_ptr + offs, mask=offs < N, other=float("-inf"))


@triton.jit
def _add_up(
    scores_ptr,
    best,
    sharpness,
    by_mass,
    limit,
    small,
    first,
    shift,
    low,
    high,
    buffer_ptr,
    program,
    N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
):
    """Adds the weights of this program's ids to the histogram.

    Those in the first bin are added up here: there lie equal scores and all that are hardly below the best, which would
    queue for it one by one. So are the small ones, in the last bin, which is beyond every possible answer.
    """
    nearest = tl.zeros([PART], dtype=tl.int64)
    rest = nearest
    start = 0
    while start < BLOCK_V:
        distance = load_distance(scores_ptr, best, program * BLOCK_V + start + tl.arange(0, PART), N)
        key = distance.to(tl.int32, bitcast=True)
        weight = mass(distance, sharpness)
        weight = tl.where(by_mass, weight, (weight > 0).to(tl.int64))
        counts = (key <= limit) & (key >= low) & (key <= high)
        weight = tl.where(counts, weight, 0)
        large = weight >= small
        place = tl.minimum(tl.maximum(key - first, 0) >> shift, _BINS - 1)
        rest += tl.where(large, 0, weight)
        nearest += tl.where(large & (place == 0), weight, 0)
        tl.atomic_add(buffer_ptr + place, weight, mask=large & (place > 0) & (weight > 0), sem="relaxed")
        start += PART
    nearest_sum = tl.sum(nearest, axis=0)
    rest_sum = tl.sum(rest, axis=0)
    tl.atomic_add(buffer_ptr, nearest_sum, mask=nearest_sum > 0, sem="relaxed")
    tl.atomic_add(buffer_ptr + (_BINS - 1), rest_sum, mask=rest_sum > 0, sem="relaxed")


@triton.jit
def narrow(
    scores_ptr,  # fp32 [N]
    best,  # the largest of them
    sharpness,
    by_mass,  # whether masses add up, or tokens that have a mass
    goal,  # int64, or 0: `share` of the sum
    share,  # fp32, below 1
    limit,  # no token with a key beyond it counts
    small,  # int64: tokens of less mass are beyond every possible answer
    met,  # int32: how often the programs have met in this launch
    rounds,  # int32: how many of these were rounds
    arrivals_ptr,  # int32 [1]
    histogram_ptr,  # int64 [BUFFERS, BINS], zero but for the last round's
    program,
    N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
    DRAWERS: tl.constexpr,  # programs of the launch
    CLEARS: tl.constexpr,  # bins that each of them clears
):
    """The smallest key up to which weights add up to the goal (that of an infinite distance where they never do).

    Every program of the launch has to call it. A round's buffer is cleared after the next meeting, when all have read
    it, and used again after another: three take turns.

    Returns:
        the key, and `met` and `rounds` as they are now.
    """
    reach = tl.div_rn(tl.full([], _MASSLESS, tl.float32), tl.maximum(sharpness, _MIN_SHARPNESS))
    shift = tl.zeros([], dtype=tl.int32) + _FIRST_SHIFT
    first = reach.to(tl.int32, bitcast=True) - ((_BINS - 2) << _FIRST_SHIFT)  # `reach` is in the last but one
    low = tl.zeros([], dtype=tl.int32)
    high = tl.zeros([], dtype=tl.int32) + (_INFINITE - 1)
    below = tl.zeros([], dtype=tl.int64)  # the sum of weights before `low`
    searching = goal >= 0
    while searching:
        buffer_ptr = histogram_ptr + (rounds % _BUFFERS) * _BINS
        _add_up(
            scores_ptr,
            best,
            sharpness,
            by_mass,
            limit,
            small,
            first,
            shift,
            low,
            high,
            buffer_ptr,
            program,
            N,
            BLOCK_V,
            PART,
        )
        met += 1
        meet(arrivals_ptr, met * DRAWERS)
        sums = tl.load(buffer_ptr + tl.arange(0, _BINS), cache_modifier=".cg")
        clear_ptr = histogram_ptr + ((rounds + _BUFFERS - 1) % _BUFFERS) * _BINS
        offs_z = program * CLEARS + tl.arange(0, CLEARS)
        tl.store(clear_ptr + offs_z, tl.zeros([CLEARS], dtype=tl.int64), mask=offs_z < _BINS)
        total = tl.sum(sums, axis=0)  # what `share` is of, in the first round
        wanted = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        goal = tl.where(goal == 0, wanted, goal)
        chosen, before = search(sums, goal - below, _BINS)
        below += before
        high = tl.where(chosen < _BINS - 1, tl.minimum(high, first + ((chosen + 1) << shift) - 1), high)
        low = tl.maximum(low, tl.where(chosen > 0, first + (chosen << shift), 0))
        low = tl.where(chosen == _BINS, _INFINITE, low)
        high = tl.where(chosen == _BINS, _INFINITE, high)
        first = low
        small = tl.zeros([], dtype=tl.int64)
        shift = tl.zeros([], dtype=tl.int32)
        while ((high - low) >> shift) >= _BINS:
            shift += 1
        rounds += 1
        searching = low < high
    return low, met, rounds


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
