"""embed: exact widening, unknown ids, what a halted launch leaves alone, and tables beyond 2**31 elements."""

from __future__ import annotations

import pytest
import torch

from monograph.kernels.embed import embed, embed_torch
from tests.kernels.huge import huge
from tests.kernels.rows import DEVICE, DTYPES, Slots, random, same_bits, scalar

FUNCTIONS = [embed, embed_torch]
VOCAB = 97


def run(function, embedding: torch.Tensor, token: int, position: int = 3, halted: int = 0, **options) -> torch.Tensor:
    slots = Slots()
    tokens = slots.new(5, dtype=torch.int32)
    tokens[position] = token
    x = slots.new(embedding.shape[1])
    function(tokens, scalar(position), scalar(halted), embedding, x, **options)
    slots.check_guards()
    return x


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [1, 63, 64, 65, 576])
def test_row_is_widened_exactly(function, dtype: torch.dtype, hidden_size: int) -> None:
    embedding = random(VOCAB, hidden_size, dtype=dtype)
    for position, token in ((0, 0), (3, 41), (4, VOCAB - 1)):
        assert same_bits(run(function, embedding, token, position), embedding[token].float())


@pytest.mark.parametrize("block", [16, 1024])
def test_tile(block: int) -> None:
    embedding = random(VOCAB, 70)
    assert same_bits(run(embed, embedding, 7, tile={"BLOCK_N": block, "num_warps": 1}), embedding[7])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_unknown_id_becomes_nan(function, token: int) -> None:
    assert run(function, random(VOCAB, 65), token).isnan().all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_halted_writes_nothing(function) -> None:
    assert run(function, random(VOCAB, 65), 7, halted=1).isnan().all()  # as it was


def test_b13_row_beyond_2_31_elements() -> None:
    rows, hidden_size = 2**21 + 3, 1024
    embedding = huge(rows, hidden_size)
    embedding[rows - 1] = torch.arange(hidden_size, device=DEVICE)
    embedding[3] = -1.0  # what a 32-bit offset would reach
    assert torch.equal(run(embed, embedding, rows - 1), torch.arange(hidden_size, device=DEVICE).float())


def test_wrong_arguments_are_named() -> None:
    tokens, x = torch.zeros(5, dtype=torch.int32, device=DEVICE), torch.zeros(64, device=DEVICE)
    with pytest.raises(ValueError, match=r"embed: x must be contiguous float32 \[65\], got contiguous float32 \[64\]"):
        embed(tokens, scalar(0), scalar(0), random(VOCAB, 65), x)
    with pytest.raises(ValueError, match="embed: embedding must be in one of bfloat16, float16, float32, got float64"):
        embed(tokens, scalar(0), scalar(0), random(VOCAB, 64).double(), x)
    with pytest.raises(ValueError, match="embed: tile has no BLOCK_Q; it has BLOCK_N, num_warps, trigger"):
        embed(tokens, scalar(0), scalar(0), random(VOCAB, 64), x, tile={"BLOCK_Q": 3})
