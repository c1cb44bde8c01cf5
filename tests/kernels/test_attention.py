"""attention against fp64, at every length around its blocks, with NaN wherever it must not look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from monograph.kernels.attention import attention, attention_torch
from tests.kernels.huge import huge
from tests.kernels.rows import DEVICE, DTYPES, ON_GPU, UNIT, Slots, assert_close, fails, random, same_bits, scalar

FUNCTIONS = [attention, attention_torch]
BLOCK = 16
SMALL_BLOCKS = {"BLOCK_T": BLOCK, "MIN_BLOCKS": 1, "COMBINE_STEP": 2}
LENGTHS = range(1, 3 * BLOCK + 2)


@dataclass(frozen=True)
class Heads:
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass
class Result:
    out: torch.Tensor
    q: torch.Tensor
    keys: torch.Tensor  # live rows
    values: torch.Tensor

    def check(self, scale: float) -> None:
        """Rounding explains the error: of q and of the weights to the cache's dtype, of sums in fp32.

        A score that is off by d changes its weight by a factor within 2 d, so the output by at most 2 d of the mean
        magnitude of the values under these weights.
        """
        num_kv_heads, seq_len, head_dim = self.keys.shape
        q = self.q.double().view(num_kv_heads, -1, head_dim)
        k, v = self.keys.double(), self.values.double()
        weights = torch.softmax(scale * q @ k.transpose(1, 2), dim=-1)  # [num_kv_heads, group, seq_len]
        exact, magnitude = weights @ v, weights @ v.abs()
        unit = 0.0 if self.keys.dtype == torch.float32 else UNIT[self.keys.dtype]
        fp32 = UNIT[torch.float32]
        score_size = abs(scale) * (q.abs() @ k.abs().transpose(1, 2))
        score_error = (unit + (head_dim + 8) * fp32) * score_size.amax(dim=-1, keepdim=True)
        squares = (scale * scale) * (q.square() @ k.square().transpose(1, 2))
        score_rms = (unit**2 / 3 + 8 * fp32**2) * squares + (4 * fp32 * score_size) ** 2
        rms = (weights.square() * (2 * score_rms + unit**2 / 3)) @ v.square()
        worst = (2 * score_error + unit) * magnitude
        actual = self.out.view_as(exact)
        assert_close(actual, exact, magnitude, seq_len, torch.float32, also_worst=worst, also_rms=rms.sqrt())


def run(
    function,
    dtype: torch.dtype,
    heads: Heads,
    seq_len: int,
    *,
    num_splits: int = 4,
    max_seq_len: int = 64,
    scale: float | None = None,
    halted: int = 0,
    seed: int = 0,
    **options,
) -> Result:
    """Runs over a cache whose rows beyond the live length, like all results before, are NaN."""
    slots = Slots()
    q = slots.copy(random(heads.num_q_heads, heads.head_dim, std=2.0, seed=seed))
    k_cache, v_cache = (slots.new(heads.num_kv_heads, max_seq_len, heads.head_dim, dtype=dtype) for _ in range(2))
    rows = random(2, heads.num_kv_heads, seq_len, heads.head_dim, dtype=dtype, seed=seed)
    k_cache[:, :seq_len], v_cache[:, :seq_len] = rows
    cache_before = k_cache.clone(), v_cache.clone()
    partial_out = slots.new(num_splits, heads.num_q_heads, heads.head_dim)
    partial_lse = slots.new(num_splits, heads.num_q_heads)
    arrivals = slots.copy(torch.zeros(heads.num_kv_heads, dtype=torch.int32))
    out = slots.new(heads.num_q_heads, heads.head_dim)
    scratch = partial_out, partial_lse, arrivals, out
    scale = heads.head_dim**-0.5 if scale is None else scale
    function(q, k_cache, v_cache, scalar(seq_len - 1), scalar(halted), *scratch, scale=scale, **options)
    slots.check_guards()
    assert not arrivals.any()
    assert same_bits(k_cache, cache_before[0])
    assert same_bits(v_cache, cache_before[1])
    return Result(out, q, rows[0], rows[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_b12_every_length_with_a_fixed_number_of_splits(dtype: torch.dtype, num_splits: int) -> None:
    """The grid stays as captured while the length grows: most splits are empty at first, none may leave a NaN."""
    heads = Heads(3, 1, 32)
    for seq_len in LENGTHS:
        result = run(
            attention, dtype, heads, seq_len, num_splits=num_splits, max_seq_len=4096, seed=seq_len, tile=SMALL_BLOCKS
        )
        result.check(heads.head_dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b12_reference_at_every_length(dtype: torch.dtype) -> None:
    for seq_len in LENGTHS:
        run(attention_torch, dtype, Heads(4, 2, 16), seq_len, seed=seq_len).check(0.25)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(9, 3, 64),
        Heads(2, 2, 80),
        Heads(8, 2, 128),
        Heads(7, 1, 32),
        Heads(8, 1, 64),
        Heads(3, 3, 10),
        Heads(17, 1, 16),
    ],
    ids=str,
)
def test_heads(dtype: torch.dtype, heads: Heads) -> None:
    """Groups of 1, 3, 4, 7, 8 and 17 query heads; head sizes that are and are not powers of two."""
    for seq_len in (1, 2 * BLOCK, 3 * BLOCK - 1):
        run(attention, dtype, heads, seq_len, num_splits=3, tile=SMALL_BLOCKS).check(heads.head_dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_len", [1, 63, 65, 129, 700])
def test_default_tile(dtype: torch.dtype, seq_len: int) -> None:
    """700 rows are several blocks for each of 3 splits."""
    run(attention, dtype, Heads(3, 1, 64), seq_len, num_splits=3, max_seq_len=701).check(0.125)


@pytest.mark.parametrize("min_blocks", [2, 3])
def test_short_sequences_use_fewer_splits(min_blocks: int) -> None:
    tile = SMALL_BLOCKS | {"MIN_BLOCKS": min_blocks}
    for seq_len in (BLOCK, 2 * BLOCK, 5 * BLOCK, 6 * BLOCK + 1):
        run(attention, torch.float32, Heads(2, 1, 16), seq_len, num_splits=5, max_seq_len=128, tile=tile).check(0.25)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_len", [1, 40, 64])
def test_arena_size_does_not_change_a_bit(dtype: torch.dtype, seq_len: int) -> None:
    outs = [
        run(attention, dtype, Heads(4, 1, 32), seq_len, max_seq_len=max_seq_len, tile=SMALL_BLOCKS).out
        for max_seq_len in (64, 65, 4096)
    ]
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0], outs[2])


def test_every_run_gives_the_same_bits() -> None:
    """Splits arrive in any order on a GPU, but combine in theirs."""
    runs = [
        run(attention, torch.float32, Heads(4, 2, 64), 48, num_splits=5, tile=SMALL_BLOCKS).out
        for _ in range(200 if ON_GPU else 2)
    ]
    assert all(same_bits(out, runs[0]) for out in runs)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_score_towers_over_the_rest(function, dtype: torch.dtype) -> None:
    """Weights from 1 down to nothing: the running maximum moves by hundreds."""
    options: dict[str, Any] = {"tile": SMALL_BLOCKS} if function is attention else {}
    run(function, dtype, Heads(3, 1, 32), 45, scale=6.0, **options).check(6.0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_halted_writes_nothing(function) -> None:
    result = run(function, torch.float32, Heads(3, 1, 32), 40, halted=1)
    assert same_bits(result.out, torch.full_like(result.out, float("nan")))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_scale_is_noticed(dtype: torch.dtype) -> None:
    result = run(attention, dtype, Heads(9, 3, 64), 45, scale=0.125 * 1.01, tile=SMALL_BLOCKS)
    result.check(0.125 * 1.01)
    assert fails(lambda: result.check(0.125))


def test_a_position_past_the_arena_reads_only_the_arena() -> None:
    heads = Heads(2, 1, 16)
    slots = Slots()
    rows = random(2, 1, 20, 16)
    k_cache, v_cache = slots.copy(rows[0]), slots.copy(rows[1])
    q, out = random(2, 16), slots.new(2, 16)
    scratch = slots.new(2, 2, 16), slots.new(2, 2), torch.zeros(1, dtype=torch.int32, device=DEVICE), out
    attention(q, k_cache, v_cache, scalar(1000), scalar(0), *scratch, scale=0.25, tile=SMALL_BLOCKS)
    Result(out, q, *rows).check(heads.head_dim**-0.5)


def test_b13_head_beyond_2_31_elements() -> None:
    max_seq_len, head_dim, kv_heads, seq_len = 2**21 + 8, 128, 9, 19  # head 8 starts at element 2**31 + 8192
    k_cache, v_cache = (huge(kv_heads, max_seq_len, head_dim) for _ in range(2))
    rows = random(2, kv_heads, seq_len, head_dim, dtype=torch.float16)
    k_cache[:, :seq_len], v_cache[:, :seq_len] = rows
    q, out = random(kv_heads, head_dim), torch.empty(kv_heads, head_dim, device=DEVICE)
    scratch = torch.empty(2, kv_heads, head_dim, device=DEVICE), torch.empty(2, kv_heads, device=DEVICE)
    arrivals = torch.zeros(kv_heads, dtype=torch.int32, device=DEVICE)
    state = scalar(seq_len - 1), scalar(0)
    attention(q, k_cache, v_cache, *state, *scratch, arrivals, out, scale=0.1, tile=SMALL_BLOCKS)
    Result(out, q, *rows).check(0.1)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="attention: 5 query heads do not divide among 2 KV heads"):
        run(attention, torch.float32, Heads(5, 2, 16), 3)
    with pytest.raises(ValueError, match="attention: k_cache must be in one of"):
        run(attention, torch.float64, Heads(4, 2, 16), 3)
