"""linear_add against fp64."""

from __future__ import annotations

import pytest
import torch

from monograph.kernels.linear_add import linear_add, linear_add_torch
from tests.kernels.rows import DTYPES, ON_GPU, Slots, assert_close, fails, random, same_bits, scalar

FUNCTIONS = [linear_add, linear_add_torch]
FEW_PROGRAMS = {"BLOCK_N": 32}  # each costs the interpreter tens of milliseconds
# out_features, in_features; the last is SmolLM2's down_proj, cut to 40 rows to keep the interpreter quick
SIZES = [(1, 1), (63, 64), (65, 200), (130, 63), (40, 1536)]


def run(function, dtype: torch.dtype, size: tuple[int, int], has_bias: bool = False, halted: int = 0, **options):
    """Returns the new residual stream, its exact value, its magnitude and the old one."""
    out_features, in_features = size
    if function is linear_add and not ON_GPU:
        options = {"tile": FEW_PROGRAMS} | options
    slots = Slots()
    a = slots.copy(random(in_features))
    weight = slots.copy(random(out_features, in_features, dtype=dtype, std=0.2))
    bias = slots.copy(random(out_features, dtype=dtype, seed=1)) if has_bias else None
    x = slots.copy(random(out_features, seed=2))
    old = x.clone()
    function(a, weight, bias, scalar(halted), x, **options)
    slots.check_guards()
    added = torch.zeros((), device=x.device) if bias is None else bias.double()
    exact = old.double() + weight.double() @ a.double() + added
    magnitude = old.double().abs() + weight.double().abs() @ a.double().abs() + added.abs()
    return x, exact, magnitude, old


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_product(function, dtype: torch.dtype, size: tuple[int, int]) -> None:
    actual, exact, magnitude, _ = run(function, dtype, size, has_bias=size[0] % 2 == 1)
    assert_close(actual, exact, magnitude, size[1], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grids(dtype: torch.dtype) -> None:
    """One program for each tile, or fewer that walk over the tiles, or the default tile: the same bits."""
    tile = {"BLOCK_N": 8, "num_warps": 2}
    first, exact, magnitude, _ = run(linear_add, dtype, (27, 100), has_bias=True, tile=tile)
    assert_close(first, exact, magnitude, 100, torch.float32)
    for other in ({"programs": 1}, {"programs": 3}, {"programs": 99}, {"BLOCK_N": 2}):
        assert same_bits(run(linear_add, dtype, (27, 100), has_bias=True, tile=tile | other)[0], first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_tile(dtype: torch.dtype) -> None:
    actual, exact, magnitude, _ = run(linear_add, dtype, (9, 100), tile=None)
    assert_close(actual, exact, magnitude, 100, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(dtype: torch.dtype) -> None:
    """The longest row in use (70B: 28,672 columns) takes many chunks of columns."""
    actual, exact, magnitude, _ = run(linear_add, dtype, (3, 28_672))
    assert_close(actual, exact, magnitude, 28_672, torch.float32)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_halted_writes_nothing(function) -> None:
    actual, _, _, old = run(function, torch.float32, (65, 200), halted=2)
    assert same_bits(actual, old)


def test_wrong_scale_is_noticed() -> None:
    actual, exact, magnitude, old = run(linear_add, torch.float16, (65, 200), has_bias=True)
    wrong = old.double() + (exact - old.double()) * 1.01
    assert fails(lambda: assert_close(actual, wrong, magnitude, 200, torch.float32))


def test_wrong_arguments_are_named() -> None:
    x = random(8)
    with pytest.raises(ValueError, match=r"linear_add: a must be contiguous float32 \[16\], got .* \[15\]"):
        linear_add(random(15), random(8, 16), None, scalar(0), x)
    with pytest.raises(ValueError, match=r"linear_add: bias must be contiguous float16 \[8\], got contiguous float32"):
        linear_add(random(16), random(8, 16, dtype=torch.float16), random(8), scalar(0), x)
