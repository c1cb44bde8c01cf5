"""The device helpers: Philox against its published vectors, weight tiles far into a matrix."""

# ruff: noqa: N803, N806 (constants of a kernel are in capitals)

from __future__ import annotations

import pytest
import torch

from monograph.kernels.device import dot_rows, load_activations, load_rows, philox
from monograph.kernels.draw import philox_torch
from monograph.kernels.triton_import import tl, triton
from tests.kernels.huge import huge
from tests.kernels.rows import DEVICE, random

# Known answers of Random123 for philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@triton.jit
def _philox_kernel(words_ptr, out_ptr):  # int64 [6], int64 [4]
    c0 = tl.load(words_ptr).to(tl.uint32)
    c1 = tl.load(words_ptr + 1).to(tl.uint32)
    c2 = tl.load(words_ptr + 2).to(tl.uint32)
    c3 = tl.load(words_ptr + 3).to(tl.uint32)
    k0 = tl.load(words_ptr + 4).to(tl.uint32)
    k1 = tl.load(words_ptr + 5).to(tl.uint32)
    r0, r1, r2, r3 = philox(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr, r0.to(tl.int64))
    tl.store(out_ptr + 1, r1.to(tl.int64))
    tl.store(out_ptr + 2, r2.to(tl.int64))
    tl.store(out_ptr + 3, r3.to(tl.int64))


def philox_triton(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    _philox_kernel[(1,)](torch.tensor([*counter, *key], device=DEVICE), out)
    return tuple(out.tolist())


@pytest.mark.parametrize("function", [philox_triton, philox_torch])
@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_known_answers(function, counter, key, output) -> None:
    assert function(counter, key) == output


def test_philox_agrees_on_random_inputs() -> None:
    words = torch.randint(0, 2**32, (20, 6), generator=torch.Generator().manual_seed(0)).tolist()
    for row in words:
        assert philox_triton(row[:4], row[4:]) == philox_torch(tuple(row[:4]), tuple(row[4:]))


@triton.jit
def _dot_kernel(weight_ptr, vector_ptr, out_ptr, first, K: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rows = first + tl.arange(0, 2)
    tiles = load_rows(weight_ptr, rows, rows >= 0, K, BLOCK_K, CHUNKS, False)
    vector = load_activations(vector_ptr, K, BLOCK_K, CHUNKS, VECTOR)
    tl.store(out_ptr + tl.arange(0, 2), dot_rows(tiles, vector, 2, BLOCK_K, CHUNKS, VECTOR))


def test_b13_weight_rows_beyond_2_31_elements() -> None:
    columns, first = 1000, 2_147_490  # row * 1000 > 2**31
    weight, vector = huge(first + 2, columns), random(columns)
    weight[first:] = random(2, columns, dtype=torch.float16)
    out = torch.zeros(2, device=DEVICE)
    _dot_kernel[(1,)](weight, vector, out, first, K=columns, BLOCK_K=256, VECTOR=8)
    assert torch.allclose(out.double(), weight[first:].double() @ vector.double(), atol=1e-4)
