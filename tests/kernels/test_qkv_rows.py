"""qkv_rows against fp64: product, bias, rotation, and where rows are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monograph.kernels.qkv_rows import qkv_rows, qkv_rows_torch
from tests.kernels.huge import huge
from tests.kernels.rows import (
    DTYPES,
    UNIT,
    Case,
    Chunk,
    Kernel,
    Slots,
    assert_close,
    fails,
    linear_fp64,
    random,
    spread,
)

# hidden_size, num_q_heads, num_kv_heads, head_dim
SHAPES = [(64, 4, 4, 32), (100, 3, 1, 80), (72, 8, 2, 64), (33, 8, 1, 128), (96, 6, 2, 20)]


def rotate(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    first, second = y.chunk(2, dim=-1)
    return torch.cat([first * cos + sign * second * sin, second * cos + first * sin], dim=-1)


def run(
    function: Kernel, dtype: torch.dtype, chunk: Chunk, shape: tuple[int, int, int, int], has_bias: bool, **options: Any
) -> Case:
    """Returns [rows, heads, head_dim] as written, its exact value, and its magnitude."""
    hidden_size, num_q_heads, num_kv_heads, head_dim = shape
    num_heads = num_q_heads + 2 * num_kv_heads
    max_seq_len = chunk.start + chunk.rows + 3
    slots = Slots()
    a = slots.new(chunk.capacity, hidden_size, dtype=dtype)
    a[: chunk.rows] = random(chunk.rows, hidden_size, dtype=dtype)
    weight = slots.copy(random(num_heads * head_dim, hidden_size, dtype=dtype, std=0.2))
    bias = slots.copy(random(num_heads * head_dim, dtype=dtype, seed=1)) if has_bias else None
    rope_table = slots.new(max_seq_len, head_dim)
    angle = random(chunk.rows, head_dim // 2, std=3.0)
    rope_table[chunk.start : chunk.start + chunk.rows] = torch.cat([angle.cos(), angle.sin()], dim=1)
    q = slots.new(chunk.capacity, num_q_heads, head_dim, dtype=dtype)
    cache = [slots.new(num_kv_heads, max_seq_len, head_dim, dtype=dtype) for _ in range(2)]
    function(a, weight, bias, rope_table, *chunk.scalars, q, *cache, **options)

    end = chunk.start + chunk.rows
    assert q[chunk.rows :].isnan().all()
    assert all(c[:, : chunk.start].isnan().all() and c[:, end:].isnan().all() for c in cache)
    slots.check_guards()
    written = torch.cat([q[: chunk.rows], *(c[:, chunk.start : end].transpose(0, 1) for c in cache)], dim=1)
    exact, magnitude = (t.view(written.shape) for t in linear_fp64(a[: chunk.rows], weight, bias))
    cos, sin = rope_table[chunk.start : end, None].double().chunk(2, dim=-1)
    turned = num_q_heads + num_kv_heads
    exact[:, :turned] = rotate(exact[:, :turned], cos, sin, -1)
    magnitude[:, :turned] = rotate(magnitude[:, :turned], cos.abs(), sin.abs(), 1)
    return written, exact, magnitude


@pytest.mark.parametrize("function", [qkv_rows, qkv_rows_torch])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk", "shape"), spread([(shape,) for shape in SHAPES]))
def test_heads(function: Kernel, dtype: torch.dtype, chunk: Chunk, shape: tuple[int, int, int, int]) -> None:
    case = run(function, dtype, chunk, shape, has_bias=shape[0] == 100)
    if chunk.rows:
        assert_close(*case, terms=shape[0], rounded_to=dtype)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("shape", [(100, 3, 1, 20), (33, 2, 2, 80)])
def test_tiles(stages: int, rows: int, shape: tuple[int, int, int, int]) -> None:
    """Several tiles, which end inside a head, between heads and across q, k and v; both tilings; pipelined or not."""
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "NUM_STAGES": stages, "FEW_STAGES": stages}
    tile |= {"FEW_ROWS": 20, "FEW_M": 16, "FEW_N": 16, "num_warps": 4}
    case = run(qkv_rows, torch.float16, Chunk(50, 3, rows), shape, has_bias=True, tile=tile)
    assert_close(*case, terms=shape[0], rounded_to=torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_scale_or_rotation_is_noticed(dtype: torch.dtype) -> None:
    written, expected, magnitude = run(qkv_rows, dtype, Chunk(70, 3, 65), SHAPES[2], has_bias=True)
    assert fails(assert_close, written, expected * 1.01, magnitude, 72, dtype)
    for wrong in (expected.roll(1, dims=0), expected.roll(32, dims=2)):
        assert fails(assert_close, written, wrong, magnitude, 72, dtype)


@pytest.mark.parametrize("function", [qkv_rows, qkv_rows_torch])
def test_rows_end_with_the_cache(function: Kernel) -> None:
    """A prompt said to go on past the cache must not be written there."""
    slots = Slots()
    q, k, v = slots.new(16, 2, 8), slots.new(1, 9, 8), slots.new(1, 9, 8)
    function(random(16, 12), random(32, 12), None, random(9, 8), *Chunk(16, 4, 16).scalars, q, k, v)
    for written, outside in ((q[:5], q[5:]), (k[:, 4:], k[:, :4]), (v[:, 4:], v[:, :4])):
        assert written.isfinite().all()
        assert outside.isnan().all()
    slots.check_guards()


def test_b13_offsets_beyond_31_bits() -> None:
    """A cache of more than 2**31 elements: its last rows are written where they lie."""
    num_heads, max_seq_len, head_dim, rows = 17, 2**20, 128, 3
    start = max_seq_len - rows
    k_cache, v_cache = (huge(num_heads, max_seq_len, head_dim) for _ in range(2))
    assert k_cache.numel() > 2**31
    rope_table = huge(max_seq_len, 2 * head_dim).view(torch.float32)
    angle = random(rows, head_dim // 2, std=3.0)
    rope_table[start:] = torch.cat([angle.cos(), angle.sin()], dim=1)
    a = random(rows, 16, dtype=torch.float16)
    weight = random(3 * num_heads * head_dim, 16, dtype=torch.float16)
    results = []
    for function in (qkv_rows, qkv_rows_torch):
        q = Slots().new(rows, num_heads, head_dim, dtype=torch.float16)
        k_cache[:, start - 1 :], v_cache[:, start - 1 :] = -77, -77
        function(a, weight, None, rope_table, *Chunk(rows, start, rows).scalars, q, k_cache, v_cache)
        assert (k_cache[:, start - 1] == -77).all()
        assert (v_cache[:, start - 1] == -77).all()
        results.append(torch.cat([q.transpose(0, 1), k_cache[:, start:], v_cache[:, start:]]))
    assert (results[0] - results[1]).abs().max() <= 2 * UNIT[torch.float16] * results[1].abs().max()
