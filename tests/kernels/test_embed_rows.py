"""embed_rows: exact in every dtype."""

from __future__ import annotations

import pytest
import torch

from monograph.kernels.embed_rows import embed_rows, embed_rows_torch
from tests.kernels.rows import DTYPES, Chunk, Kernel, Slots, random, same_bits, spread

VOCAB = 97


@pytest.mark.parametrize("function", [embed_rows, embed_rows_torch])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk", "hidden_size"), spread([(100,), (1,)], max_capacity=70))
def test_rows_are_copied(function: Kernel, dtype: torch.dtype, chunk: Chunk, hidden_size: int) -> None:
    slots = Slots()
    tokens = slots.new(chunk.start + chunk.rows, dtype=torch.int32)  # ends with the prompt
    tokens.copy_(random(len(tokens)).mul(1000).int() % VOCAB)
    embedding = slots.copy(random(VOCAB, hidden_size, dtype=dtype))
    x = slots.new(chunk.capacity, hidden_size)
    before = x.clone()
    function(tokens, *chunk.scalars, embedding, x)
    assert torch.equal(x[: chunk.rows], embedding.float()[tokens[chunk.start :].long()])
    assert same_bits(x[chunk.rows :], before[chunk.rows :])
    slots.check_guards()


@pytest.mark.parametrize("function", [embed_rows, embed_rows_torch])
def test_rows_end_with_the_arena(function: Kernel) -> None:
    """A prompt said to go on past the token slot must not be read there."""
    slots = Slots()
    tokens = slots.new(9, dtype=torch.int32).copy_(torch.arange(9))
    embedding = slots.copy(random(VOCAB, 8))
    x = slots.new(16, 8)
    function(tokens, *Chunk(16, 4, 16).scalars, embedding, x)
    assert torch.equal(x[:5], embedding[4:9])
    assert x[5:].isnan().all()
