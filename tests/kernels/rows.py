"""What the tests of the prefill kernels share: where they run, guarded tensors, chunks, and how errors are judged.

Expected values are fp64, from inputs that are already rounded to the dtype. A bound is made of two parts, each from the
theory of rounding and none from what was observed: the last rounding, at most UNIT[D] of the value, and the
accumulation of a sum of n terms in fp32, at most n UNIT[fp32] of the sum of their magnitudes (Higham 2002, chapter 3).
The worst element must stay within that; the RMS within what independent roundings leave of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

Kernel = Callable[..., None]  # a Triton wrapper or its reference
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # actual, exact, magnitude of the terms

ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter adds bf16 numbers as bit patterns and truncates on store: bf16 is tested on a GPU alone.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINIEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}  # smallest subnormal
GUARD = 96  # elements


@dataclass(frozen=True)
class Chunk:
    """A chunk of `capacity` rows, `rows` of which live, the first at absolute position `start`."""

    capacity: int
    start: int
    rows: int
    halted: int = 0

    @property
    def scalars(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """position, prefill_end, halted."""
        end = self.start + (self.rows or self.capacity)  # what halts is `halted`, not the length
        return scalar(self.start), scalar(end), scalar(self.halted)

    def __str__(self) -> str:
        return f"{self.start}+{self.rows}of{self.capacity}" + ("-halted" if self.halted else "")


# Live rows 0, 1, 63, 64, 65, 129 and all; starts 0, 1, 63, 64, 100; one tile of 128 rows and two.
CHUNKS = [
    Chunk(70, 5, 0, halted=1),
    Chunk(70, 0, 1),
    Chunk(70, 0, 70),
    Chunk(70, 1, 63),
    Chunk(70, 63, 64),
    Chunk(70, 64, 65),
    Chunk(130, 100, 130),
    Chunk(140, 63, 129),
    Chunk(1, 64, 1),
]


def spread(sizes: Sequence[tuple[Any, ...]], max_capacity: int = 140) -> list[Any]:
    """Every chunk with one of the sizes, so that each size meets several chunks: parameters (chunk, *sizes)."""
    chunks = [chunk for chunk in CHUNKS if chunk.capacity <= max_capacity]
    cases = [(chunk, *sizes[i % len(sizes)]) for i, chunk in enumerate(chunks)]
    return [pytest.param(*case, id="-".join(map(str, case))) for case in cases]


def scalar(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def random(*shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Normal numbers, rounded to the dtype."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + math.prod(shape))
    return (torch.randn(*shape, generator=generator) * std).to(dtype).to(DEVICE)


class Slots:
    """Tensors with a guard on either side; all start as NaN (integers as a pattern), guards must stay so."""

    def __init__(self) -> None:
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] = []

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        fill = float("nan") if dtype.is_floating_point else -77
        whole = torch.full((math.prod(shape) + 2 * GUARD,), fill, dtype=dtype, device=DEVICE)
        self._whole.append((whole, whole.clone()))
        return whole[GUARD:-GUARD].view(*shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        slot = self.new(*tensor.shape, dtype=tensor.dtype)
        return slot.copy_(tensor)

    def check_guards(self) -> None:
        for whole, before in self._whole:
            assert same_bits(whole[:GUARD], before[:GUARD])
            assert same_bits(whole[-GUARD:], before[-GUARD:])


def linear_fp64(
    a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """a weight^T + bias in fp64, and the sum of the magnitudes of its terms."""
    a, weight = a.double(), weight.double()
    added = torch.zeros_like(weight[:, 0]) if bias is None else bias.double()
    return a @ weight.T + added, a.abs() @ weight.abs().T + added.abs()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that tells NaN from NaN and -0 from 0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def assert_close(
    actual: torch.Tensor,  # D or fp32
    exact: torch.Tensor,  # fp64
    magnitude: torch.Tensor,  # fp64: sum of magnitudes of the terms
    terms: int,
    rounded_to: torch.dtype,
    also_worst: torch.Tensor | float = 0.0,
    also_rms: torch.Tensor | float = 0.0,
) -> None:
    """Fails when the worst element or the RMS of the error exceeds what rounding explains.

    `also_worst` and `also_rms` bound what further roundings inside a kernel add.
    """
    assert torch.isfinite(actual).all()
    error = (actual.double() - exact).abs()
    last = UNIT[rounded_to] * exact.abs() + TINIEST[rounded_to]
    accumulation = UNIT[torch.float32] * magnitude
    worst = last + (terms + 8) * accumulation + also_worst
    excess = (error / worst).max().item()
    assert excess <= 1, f"worst element: {excess:.2f} of the bound"
    # Independent errors add up by their squares; one rounding is uniform within a unit.
    bound = (
        (last.square() / 3 + (terms + 8) * accumulation.square() + (accumulation * 0 + also_rms).square()).mean().sqrt()
    )
    share = (error.square().mean().sqrt() / bound).item()
    assert share <= 1.2, f"RMS: {share:.2f} of the bound"


def fails(check: Callable[..., None], *args: Any) -> bool:
    """Whether a check notices: for tests of the tests."""
    try:
        check(*args)
    except AssertionError:
        return True
    return False
