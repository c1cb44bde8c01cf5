"""The bits of prefill do not depend on how a prompt is cut into chunks.

A layer runs over a prompt in one piece and in pieces, behind a cache that is partly filled; cache, attention, MLP and
residual stream must be the same to the bit. The tilings for few and for many rows both take part, and key blocks end
inside pieces and between them.
"""

from __future__ import annotations

import pytest
import torch

from monograph.kernels.attention_rows import attention_rows
from monograph.kernels.embed_rows import embed_rows
from monograph.kernels.gate_up_rows import gate_up_rows
from monograph.kernels.linear_add_rows import linear_add_rows
from monograph.kernels.norm_rows import norm_rows
from monograph.kernels.qkv_rows import qkv_rows
from monograph.kernels.tile import Tile
from tests.kernels.rows import DTYPES, ON_GPU, Slots, random, same_bits, scalar

HIDDEN, INTER, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 40, 24, 3, 1, 12, 50
START = 25  # rows of the cache that were there before
PRODUCT_TILE = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "FEW_ROWS": 5, "FEW_M": 16, "FEW_N": 16}
ATTENTION_TILE = {"BLOCK_M": 16, "BLOCK_N": 16}


def layer(
    dtype: torch.dtype, length: int, pieces: list[int], product_tile: Tile | None, attention_tile: Tile | None
) -> list[torch.Tensor]:
    """One layer over a prompt: keys, values, and every row of attention output, MLP and residual stream."""
    slots = Slots()
    tokens = slots.copy((random(START + length).abs() * 100).int() % VOCAB)
    embedding = random(VOCAB, HIDDEN, dtype=dtype)
    norm_weight = random(HIDDEN, dtype=dtype)
    qkv_weight = random((NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN, dtype=dtype, std=0.2)
    o_weight = random(HIDDEN, NUM_Q_HEADS * HEAD_DIM, dtype=dtype, std=0.2)
    gate_up_weight = random(2 * INTER, HIDDEN, dtype=dtype, std=0.2)
    down_weight = random(HIDDEN, INTER, dtype=dtype, std=0.2)
    rope_table = random(START + length, HEAD_DIM)
    k_cache, v_cache = (slots.new(NUM_KV_HEADS, START + length, HEAD_DIM, dtype=dtype) for _ in range(2))
    k_cache[:, :START] = random(NUM_KV_HEADS, START, HEAD_DIM, dtype=dtype, seed=1)
    v_cache[:, :START] = random(NUM_KV_HEADS, START, HEAD_DIM, dtype=dtype, seed=2)
    x = slots.new(length, HIDDEN)
    a = slots.new(length, HIDDEN, dtype=dtype)
    q, attended = (slots.new(length, NUM_Q_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
    h = slots.new(length, INTER, dtype=dtype)
    seen: list[list[torch.Tensor]] = []
    start = START
    for piece in pieces:
        at = scalar(start), scalar(start + piece), scalar(0)
        start += piece
        embed_rows(tokens, *at, embedding, x)
        norm_rows(x, norm_weight, *at, a, eps=1e-5)
        qkv_rows(a, qkv_weight, None, rope_table, *at, q, k_cache, v_cache, tile=product_tile)
        attention_rows(q, k_cache, v_cache, *at, attended, scale=0.3, tile=attention_tile)
        linear_add_rows(attended.view(length, -1), o_weight, None, *at, x, tile=product_tile)
        norm_rows(x, norm_weight, *at, a, eps=1e-5)
        gate_up_rows(a, gate_up_weight, None, *at, h, tile=product_tile)
        linear_add_rows(h, down_weight, None, *at, x, tile=product_tile)
        seen.append([t[:piece].clone() for t in (attended, h, x)])
    assert start == START + length
    slots.check_guards()
    return [k_cache, v_cache, *map(torch.cat, zip(*seen, strict=True))]


def compare(
    dtype: torch.dtype,
    length: int,
    cuts: list[list[int]],
    product_tile: Tile | None = None,
    attention_tile: Tile | None = None,
) -> None:
    whole = layer(dtype, length, [length], product_tile, attention_tile)
    assert all(t.isfinite().all() for t in whole)
    for pieces in cuts:
        for name, one, other in zip(
            ("k_cache", "v_cache", "attention", "h", "x"),
            whole,
            layer(dtype, length, pieces, product_tile, attention_tile),
            strict=True,
        ):
            assert same_bits(one, other), f"{name} in pieces of {pieces[0]}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_tiles(dtype: torch.dtype) -> None:
    compare(dtype, 10, [[1] * 10, [7, 3]], PRODUCT_TILE, ATTENTION_TILE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_tiles(dtype: torch.dtype) -> None:
    compare(dtype, 71, [[64, 7]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_prompt(dtype: torch.dtype) -> None:
    assert ON_GPU
    compare(dtype, 1100, [[1] * 1100, [7] * 157 + [1], [64] * 17 + [12], [1000, 100]])
