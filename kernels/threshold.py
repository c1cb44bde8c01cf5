"""Probability masses as whole numbers: the same on every device, in every order of addition.

A token's mass is 2**-t in units of 2**-40 of the most probable token's mass, rounded down, with t = (max - score) *
log2(e) / temperature. 2**-t is a polynomial of separate fp32 multiplications and additions (relative error below
2e-7), so a CPU and a GPU agree on every bit; and whole numbers add exactly, so that sums, and with them the sets kept
by top-p and the token drawn, depend on neither tiling nor device. A token less than 2**-40 times as probable as the
best has no mass.
"""

from __future__ import annotations

import torch

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
