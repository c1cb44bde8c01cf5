"""attention_rows against fp64 softmax attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monograph.kernels.attention_rows import attention_rows, attention_rows_torch
from tests.kernels.huge import huge
from tests.kernels.rows import (
    DTYPES,
    ON_GPU,
    TINIEST,
    UNIT,
    Chunk,
    Kernel,
    Slots,
    assert_close,
    fails,
    random,
    same_bits,
    spread,
)

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]  # q, k_cache, v_cache, start

SHAPES = [(2, 2, 32), (3, 1, 80), (8, 2, 64), (8, 1, 128), (6, 2, 20)]  # num_q_heads, num_kv_heads, head_dim


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float, beyond: int = 0
) -> tuple[torch.Tensor, ...]:
    """fp64 [rows, num_q_heads, head_dim], and the three bounds of `assert_close`.

    `beyond` moves the causal mask. An error d of a score scales its weight by 1 + d, and so errors of scores move the
    result by at most twice the largest of them times the weighted magnitude of the values. Weights are rounded to the
    cache's dtype, each at most by one unit of itself or half the smallest subnormal number.
    """
    rows, num_q_heads, head_dim = q.shape
    group = num_q_heads // k.shape[0]
    k, v = (t[:, : start + rows].double().repeat_interleave(group, dim=0) for t in (k, v))
    q_rows = q.double().transpose(0, 1)
    seen = torch.ones(rows, start + rows, dtype=torch.bool, device=q.device).tril(start + beyond)
    weights = (scale * q_rows @ k.mT).masked_fill(~seen, float("-inf")).softmax(dim=-1)
    largest_score = (scale * q_rows.abs() @ k.abs().mT).masked_fill(~seen, 0).amax(dim=-1, keepdim=True)
    out = weights @ v
    magnitude = weights @ v.abs()
    terms = 2 * (head_dim + 8) * largest_score + start + rows
    unit, tiny = UNIT[q.dtype], TINIEST[q.dtype] / 2 * seen.double() @ v.abs()
    also_worst = UNIT[torch.float32] * terms * magnitude + unit * magnitude + tiny
    also_rms = UNIT[torch.float32] * terms.sqrt() * magnitude + unit * (weights.square() @ v.square()).sqrt() + tiny
    return tuple(t.transpose(0, 1) for t in (out, magnitude, also_worst, also_rms))


def inputs(
    dtype: torch.dtype, chunk: Chunk, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Slots, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Live rows random, everything else NaN."""
    slots = Slots()
    end = chunk.start + chunk.rows
    q = slots.new(chunk.capacity, num_q_heads, head_dim, dtype=dtype)
    q[: chunk.rows] = random(chunk.rows, num_q_heads, head_dim, dtype=dtype, std=2.0)
    k, v = (slots.new(num_kv_heads, end + 37, head_dim, dtype=dtype) for _ in range(2))
    k[:, :end] = random(num_kv_heads, end, head_dim, dtype=dtype, seed=1)
    v[:, :end] = random(num_kv_heads, end, head_dim, dtype=dtype, seed=2)
    out = slots.new(chunk.capacity, num_q_heads, head_dim, dtype=dtype)
    return slots, q, k, v, out


def run(
    function: Kernel, dtype: torch.dtype, chunk: Chunk, shape: tuple[int, int, int], **options: Any
) -> tuple[torch.Tensor, Arguments]:
    slots, q, k, v, out = inputs(dtype, chunk, *shape)
    before = [t.clone() for t in (q, k, v)]
    function(q, k, v, *chunk.scalars, out, scale=shape[2] ** -0.5, **options)
    assert all(map(same_bits, (q, k, v), before))
    assert out[chunk.rows :].isnan().all()
    slots.check_guards()
    return out[: chunk.rows], (q[: chunk.rows], k, v, chunk.start)


def check(out: torch.Tensor, arguments: Arguments, scale: float, beyond: int = 0) -> None:
    expected, magnitude, also_worst, also_rms = exact(*arguments, scale, beyond)
    assert_close(out, expected, magnitude, 0, out.dtype, also_worst, also_rms)


@pytest.mark.parametrize("function", [attention_rows, attention_rows_torch])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk", "shape"), spread([(shape,) for shape in SHAPES]))
def test_attention(function: Kernel, dtype: torch.dtype, chunk: Chunk, shape: tuple[int, int, int]) -> None:
    out, arguments = run(function, dtype, chunk, shape)
    if chunk.rows:
        check(out, arguments, shape[2] ** -0.5)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("shape", [(3, 1, 20), (8, 1, 16), (2, 2, 64)])
@pytest.mark.parametrize("chunk", [Chunk(50, 0, 50), Chunk(50, 37, 33), Chunk(50, 16, 1)], ids=str)
def test_tiles(stages: int, shape: tuple[int, int, int], chunk: Chunk) -> None:
    """Several tiles and key blocks, pipelined or not."""
    tile = {"BLOCK_M": 16, "BLOCK_N": 16, "NUM_STAGES": stages, "num_warps": 4}
    out, arguments = run(attention_rows, torch.float16, chunk, shape, tile=tile)
    check(out, arguments, shape[2] ** -0.5)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_b14_trip_counts_shorter_than_the_pipeline(stages: int) -> None:
    """Lengths from one key to more than the pipeline holds give the bits of the loop that is not pipelined."""
    lengths = range(1, (stages + 1) * 16 + 2) if ON_GPU else (1, 2, 15, 16, 17, 31, 32, 33, 49)
    for length in lengths:
        chunk = Chunk(4, max(0, length - 3), min(length, 3))
        outs = []
        for num_stages in (1, stages):
            tile = {"BLOCK_M": 16, "BLOCK_N": 16, "NUM_STAGES": num_stages, "num_warps": 4}
            out, arguments = run(attention_rows, torch.float16, chunk, (2, 1, 16), tile=tile)
            check(out, arguments, 0.25)
            outs.append(out)
        assert same_bits(*outs), length


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 40])
def test_wrong_scale_or_mask_is_noticed(dtype: torch.dtype, start: int) -> None:
    out, arguments = run(attention_rows, dtype, Chunk(70, start, 65), (3, 1, 80))
    scale = 80**-0.5
    q, k, v, _ = arguments
    without_first = (q[1:], k, v, start + 1)  # row 0 may see nothing when the mask moves back
    for wrong, beyond in ((scale * 1.01, 0), (scale, -1), (scale, 1)):
        assert fails(check, out[1:], without_first, wrong, beyond)
    check(out, arguments, scale)


@pytest.mark.parametrize("function", [attention_rows, attention_rows_torch])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 60.0])
def test_flat_and_sharp_softmax(function: Kernel, dtype: torch.dtype, size: float) -> None:
    """Scores near zero, and scores in the thousands: the running maximum keeps every exponent in range."""
    chunk = Chunk(20, 30, 20)
    slots, q, k, v, out = inputs(dtype, chunk, 4, 2, 32)
    q[:20] *= size
    function(q, k, v, *chunk.scalars, out, scale=1.0)
    check(out, (q[:20], k, v, 30), 1.0)
    slots.check_guards()


@pytest.mark.parametrize("function", [attention_rows, attention_rows_torch])
def test_rows_end_with_the_cache(function: Kernel) -> None:
    """A prompt said to go on past the cache must not be read there."""
    slots = Slots()
    q, k, v = slots.copy(random(16, 2, 8)), slots.copy(random(1, 9, 8)), slots.copy(random(1, 9, 8, seed=1))
    out = slots.new(16, 2, 8)
    function(q, k, v, *Chunk(16, 4, 16).scalars, out, scale=0.3)
    check(out[:5], (q[:5], k, v, 4), 0.3)
    assert out[5:].isnan().all()


def test_b13_offsets_beyond_31_bits() -> None:
    """A cache of more than 2**31 elements: the last head's rows are read where they lie."""
    num_heads, max_seq_len, head_dim, start, rows = 17, 2**20, 128, 14, 5
    k_cache, v_cache = (huge(num_heads, max_seq_len, head_dim) for _ in range(2))
    assert k_cache.numel() > 2**31
    for seed, cache in enumerate((k_cache, v_cache)):
        cache[:, : start + rows] = random(num_heads, start + rows, head_dim, dtype=torch.float16, seed=seed)
    q = random(rows, num_heads, head_dim, dtype=torch.float16, seed=3)
    out = Slots().new(rows, num_heads, head_dim, dtype=torch.float16)
    attention_rows(q, k_cache, v_cache, *Chunk(rows, start, rows).scalars, out, scale=0.1)
    check(out, (q, k_cache[:, : start + rows], v_cache[:, : start + rows], start), 0.1)


def test_arguments_are_checked() -> None:
    chunk = Chunk(4, 0, 4)
    _, q, k, v, out = inputs(torch.float32, chunk, 4, 2, 16)
    with pytest.raises(ValueError, match="attention_rows: v_cache must be contiguous float32"):
        attention_rows(q, k, v.half(), *chunk.scalars, out, scale=1.0)
    with pytest.raises(ValueError, match="scale must be positive"):
        attention_rows(q, k, v, *chunk.scalars, out, scale=0.0)
    with pytest.raises(ValueError, match="tile has no BLOCK_Q"):
        attention_rows(q, k, v, *chunk.scalars, out, scale=1.0, tile={"BLOCK_Q": 16})
