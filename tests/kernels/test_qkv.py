"""qkv against fp64, and the cache rows it may and may not touch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from monograph.kernels.qkv import qkv, qkv_torch
from tests.kernels.huge import huge
from tests.kernels.rows import DEVICE, DTYPES, ON_GPU, Slots, assert_close, fails, random, same_bits, scalar

FUNCTIONS = [qkv, qkv_torch]
FEW_PROGRAMS = {"BLOCK_N": 64}  # each costs the interpreter tens of milliseconds
EPS = 1e-5
MAX_SEQ_LEN = 11


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool = False

    @property
    def out_features(self) -> int:
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim


SMALL = Shape(64, 2, 1, 32, has_bias=True)
SHAPES = [
    SMALL,
    Shape(63, 3, 3, 16),  # every query head has its own KV head
    Shape(56, 3, 1, 80),
    Shape(200, 7, 1, 18, has_bias=True),  # 9 rotated pairs in a head
    Shape(128, 4, 1, 128),
]
SMOLLM2 = Shape(576, 9, 3, 64)


@dataclass
class Result:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    exact: torch.Tensor  # fp64 [heads, head_dim], q then k then v
    magnitude: torch.Tensor
    hidden_size: int

    def check(self, position: int, factor: float = 1.0) -> None:
        heads = self.q.shape[0]
        kv_heads = self.k_cache.shape[0]
        parts = [
            (self.q, slice(0, heads), torch.float32),
            (self.k_cache[:, position], slice(heads, heads + kv_heads), self.k_cache.dtype),
            (self.v_cache[:, position], slice(heads + kv_heads, None), self.k_cache.dtype),
        ]
        for actual, rows, dtype in parts:
            assert_close(actual, self.exact[rows] * factor, self.magnitude[rows], self.hidden_size, dtype)


def run(function, dtype: torch.dtype, shape: Shape, position: int, halted: int = 0, **options) -> Result:
    if function is qkv and not ON_GPU:
        options = {"tile": FEW_PROGRAMS} | options
    slots = Slots()
    x = slots.copy(random(shape.hidden_size, std=2.0))
    norm_weight = slots.copy(1 + random(shape.hidden_size, dtype=dtype, std=0.1))
    weight = slots.copy(random(shape.out_features, shape.hidden_size, dtype=dtype, std=shape.hidden_size**-0.5))
    bias = slots.copy(random(shape.out_features, dtype=dtype, seed=1)) if shape.has_bias else None
    angles = random(MAX_SEQ_LEN, shape.head_dim // 2, std=3.0).double()
    rope_table = slots.copy(torch.cat([angles.cos(), angles.sin()], dim=-1).float())
    q = slots.new(shape.num_q_heads, shape.head_dim)
    caches = [slots.new(shape.num_kv_heads, MAX_SEQ_LEN, shape.head_dim, dtype=dtype) for _ in range(2)]
    state = rope_table, scalar(position), scalar(halted), q
    function(x, norm_weight, weight, bias, *state, *caches, eps=EPS, **options)
    slots.check_guards()

    normed = x.double() * norm_weight.double() / (x.double().square().mean() + EPS).sqrt()
    y = weight.double() @ normed
    size = weight.double().abs() @ normed.abs()
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    y, size = y.view(-1, shape.head_dim), size.view(-1, shape.head_dim)
    rotated = shape.num_q_heads + shape.num_kv_heads
    table = rope_table.double()[min(position, MAX_SEQ_LEN - 1)]
    cos, sin = table.chunk(2)
    (a, b), (a_size, b_size) = y[:rotated].chunk(2, dim=-1), size[:rotated].chunk(2, dim=-1)
    y = torch.cat([torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1), y[rotated:]])
    cos, sin = cos.abs(), sin.abs()
    size = torch.cat([torch.cat([a_size * cos + b_size * sin, b_size * cos + a_size * sin], dim=-1), size[rotated:]])
    return Result(q, caches[0], caches[1], y, size, shape.hidden_size)


def untouched(cache: torch.Tensor, position: int) -> bool:
    others = torch.cat([cache[:, :position], cache[:, position + 1 :]], dim=1)
    return same_bits(others, torch.full_like(others, float("nan")))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotated_heads_and_cache_row(function, dtype: torch.dtype, shape: Shape) -> None:
    position = shape.head_dim % MAX_SEQ_LEN
    result = run(function, dtype, shape, position)
    result.check(position)
    assert untouched(result.k_cache, position)
    assert untouched(result.v_cache, position)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("position", [0, 1, MAX_SEQ_LEN - 1])
def test_positions(function, position: int) -> None:
    result = run(function, torch.float16, SMALL, position)
    result.check(position)
    assert untouched(result.k_cache, position)


def test_smollm2() -> None:
    run(qkv, torch.float16, SMOLLM2, 7).check(7)


@pytest.mark.parametrize("tile", [None, {"BLOCK_N": 4, "num_warps": 1}, {"BLOCK_N": 16}], ids=str)
def test_tiles(tile: dict[str, int] | None) -> None:
    """Tiles that do and do not divide the 9 pairs of a head."""
    run(qkv, torch.float32, Shape(40, 2, 1, 18), 5, tile=tile).check(5)


def test_position_past_the_arena_writes_nothing() -> None:
    result = run(qkv, torch.float32, SMALL, MAX_SEQ_LEN)
    for tensor in (result.q, result.k_cache, result.v_cache):
        assert same_bits(tensor, torch.full_like(tensor, float("nan")))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_halted_writes_nothing(function) -> None:
    result = run(function, torch.float32, SMALL, 4, halted=1)
    for tensor in (result.q, result.k_cache, result.v_cache):
        assert same_bits(tensor, torch.full_like(tensor, float("nan")))


def test_wrong_scale_is_noticed() -> None:
    result = run(qkv, torch.float16, SMALL, 4)
    assert fails(lambda: result.check(4, factor=1.01))


def test_b13_cache_row_beyond_2_31_elements() -> None:
    max_seq_len, head_dim, heads = 2**21 + 8, 128, 9
    k_cache, v_cache = (huge(heads, max_seq_len, head_dim) for _ in range(2))
    rope_table = huge(max_seq_len, 2 * head_dim).view(torch.float32)
    position = 2**21 + 5  # of the last head: element (8 * max_seq_len + position) * 128 > 2**31
    rope_table[position] = torch.tensor([1.0] * 64 + [0.0] * 64, device=DEVICE)
    x, weight = random(16), random(3 * heads * head_dim, 16, dtype=torch.float16)
    q = torch.zeros(heads, head_dim, device=DEVICE)
    norm_weight = torch.ones(16, dtype=torch.float16, device=DEVICE)
    state = rope_table, scalar(position), scalar(0), q
    qkv(x, norm_weight, weight, None, *state, k_cache, v_cache, eps=EPS, tile={"BLOCK_N": 64})
    expected = weight.double() @ (x.double() / (x.double().square().mean() + EPS).sqrt())
    k, v = expected.view(3, heads, head_dim)[1:]
    assert (k_cache[:, position].double() - k).abs().max() < 0.01
    assert (v_cache[:, position].double() - v).abs().max() < 0.01


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="qkv: head_dim must be even for RoPE by halves, got 17"):
        run(qkv, torch.float32, Shape(16, 1, 1, 17), 0)
