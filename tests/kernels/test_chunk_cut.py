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

VOCAB = 50
SMALL = (40, 24, 3, 1, 12)  # hidden_size, intermediate_size, num_q_heads, num_kv_heads, head_dim
LARGE = (512, 1536, 12, 3, 64)  # the default tiles of real models
START = 25  # rows of the cache that were there before
PRODUCT_TILE = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "FEW_ROWS": 5, "FEW_M": 16, "FEW_N": 16}
ATTENTION_TILE = {"BLOCK_M": 16, "BLOCK_N": 16}


def layer(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    length: int,
    pieces: list[int],
    product_tile: Tile | None = None,
    attention_tile: Tile | None = None,
    pdl: bool = False,
) -> list[torch.Tensor]:
    """One layer over a prompt: keys, values, and every row of attention output, MLP and residual stream."""
    hidden, inter, num_q_heads, num_kv_heads, head_dim = shape
    slots = Slots()
    tokens = slots.copy((random(START + length).abs() * 100).int() % VOCAB)
    embedding = random(VOCAB, hidden, dtype=dtype)
    norm_weight = random(hidden, dtype=dtype)
    qkv_weight = random((num_q_heads + 2 * num_kv_heads) * head_dim, hidden, dtype=dtype, std=hidden**-0.5)
    o_weight = random(hidden, num_q_heads * head_dim, dtype=dtype, std=hidden**-0.5)
    gate_up_weight = random(2 * inter, hidden, dtype=dtype, std=hidden**-0.5)
    down_weight = random(hidden, inter, dtype=dtype, std=hidden**-0.5)
    rope_table = random(START + length, head_dim)
    k_cache, v_cache = (slots.new(num_kv_heads, START + length, head_dim, dtype=dtype) for _ in range(2))
    k_cache[:, :START] = random(num_kv_heads, START, head_dim, dtype=dtype, seed=1)
    v_cache[:, :START] = random(num_kv_heads, START, head_dim, dtype=dtype, seed=2)
    x = slots.new(length, hidden)
    a = slots.new(length, hidden, dtype=dtype)
    q, attended = (slots.new(length, num_q_heads, head_dim, dtype=dtype) for _ in range(2))
    h = slots.new(length, inter, dtype=dtype)
    seen: list[list[torch.Tensor]] = []
    start = START
    for piece in pieces:
        at = scalar(start), scalar(start + piece), scalar(0)
        start += piece
        embed_rows(tokens, *at, embedding, x)
        norm_rows(x, norm_weight, *at, a, eps=1e-5, pdl=pdl)
        qkv_rows(a, qkv_weight, None, rope_table, *at, q, k_cache, v_cache, tile=product_tile, pdl=pdl)
        attention_rows(q, k_cache, v_cache, *at, attended, scale=0.3, tile=attention_tile, pdl=pdl)
        linear_add_rows(attended.view(length, -1), o_weight, None, *at, x, tile=product_tile, pdl=pdl)
        norm_rows(x, norm_weight, *at, a, eps=1e-5, pdl=pdl)
        gate_up_rows(a, gate_up_weight, None, *at, h, tile=product_tile, pdl=pdl)
        linear_add_rows(h, down_weight, None, *at, x, tile=product_tile, pdl=pdl)
        seen.append([t[:piece].clone() for t in (attended, h, x)])
    assert start == START + length
    slots.check_guards()
    return [k_cache, v_cache, *map(torch.cat, zip(*seen, strict=True))]


def compare(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    length: int,
    cuts: list[list[int]],
    product_tile: Tile | None = None,
    attention_tile: Tile | None = None,
) -> None:
    whole = layer(dtype, shape, length, [length], product_tile, attention_tile)
    assert all(t.isfinite().all() for t in whole)
    for pieces in cuts:
        for name, one, other in zip(
            ("k_cache", "v_cache", "attention", "h", "x"),
            whole,
            layer(dtype, shape, length, pieces, product_tile, attention_tile),
            strict=True,
        ):
            assert same_bits(one, other), f"{name} in pieces of {pieces[0]}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_tiles(dtype: torch.dtype) -> None:
    compare(dtype, SMALL, 10, [[1] * 10, [7, 3]], PRODUCT_TILE, ATTENTION_TILE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_tiles(dtype: torch.dtype) -> None:
    compare(dtype, SMALL, 71, [[64, 7]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_prompt(dtype: torch.dtype) -> None:
    """The tiles that a GPU runs, where tensor cores add up in an order of their own."""
    assert ON_GPU
    compare(dtype, LARGE, 1100, [[1] * 1100, [7] * 157 + [1], [64] * 17 + [12], [100, 1000]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_dependent_launch(dtype: torch.dtype) -> None:
    """Kernels that start before the one before has ended compute the same bits."""
    pieces = [1, 64, 300, 7, 512]
    plain = layer(dtype, LARGE, sum(pieces), pieces)
    for _ in range(20):
        assert all(map(same_bits, plain, layer(dtype, LARGE, sum(pieces), pieces, pdl=True)))
