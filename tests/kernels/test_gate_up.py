"""gate_up against fp64."""

from __future__ import annotations

import pytest
import torch

from monograph.kernels.gate_up import gate_up, gate_up_torch
from tests.kernels.rows import DTYPES, ON_GPU, Slots, assert_close, fails, random, same_bits, scalar

FUNCTIONS = [gate_up, gate_up_torch]
FEW_PROGRAMS = {"BLOCK_N": 16}  # each costs the interpreter tens of milliseconds
# intermediate_size, hidden_size; the last is SmolLM2's, cut to 48 of 1,536 to keep the interpreter quick
SIZES = [(1, 8), (31, 64), (33, 200), (64, 63), (48, 576)]
EPS = 1e-5


def run(function, dtype: torch.dtype, size: tuple[int, int], has_bias: bool = False, halted: int = 0, **options):
    """Returns h, its exact value and its magnitude."""
    intermediate_size, hidden_size = size
    if function is gate_up and not ON_GPU:
        options = {"tile": FEW_PROGRAMS} | options
    slots = Slots()
    x = slots.copy(random(hidden_size, std=3.0))
    norm_weight = slots.copy(1 + random(hidden_size, dtype=dtype, std=0.1))
    weight = slots.copy(random(2 * intermediate_size, hidden_size, dtype=dtype, std=hidden_size**-0.5))
    bias = slots.copy(random(2 * intermediate_size, dtype=dtype, seed=1)) if has_bias else None
    h = slots.new(intermediate_size)
    function(x, norm_weight, weight, bias, scalar(halted), h, eps=EPS, **options)
    slots.check_guards()
    added = torch.zeros((), device=x.device) if bias is None else bias.double()
    normed = x.double() * norm_weight.double() / (x.double().square().mean() + EPS).sqrt()
    gate, up = (weight.double() @ normed + added).chunk(2)
    gate_size, up_size = (weight.double().abs() @ normed.abs() + added.abs()).chunk(2)
    exact = gate * torch.sigmoid(gate) * up
    # |silu'| <= 1.1: an error of the gate passes on as it is, times up; exp and the division are the 8 roundings.
    magnitude = 1.1 * gate_size * up.abs() + (gate * torch.sigmoid(gate)).abs() * up_size + 8 * exact.abs()
    return h, exact, magnitude


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gated_unit(function, dtype: torch.dtype, size: tuple[int, int]) -> None:
    actual, exact, magnitude = run(function, dtype, size, has_bias=size[0] % 2 == 1)
    assert_close(actual, exact, magnitude, size[1], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [None, {"BLOCK_N": 4, "num_warps": 1}, {"BLOCK_N": 8, "num_warps": 4}], ids=str)
def test_tiles(dtype: torch.dtype, tile: dict[str, int] | None) -> None:
    """Tiles that do and do not divide the rows; rows that take one chunk of columns or several."""
    actual, exact, magnitude = run(gate_up, dtype, (9, 300), True, tile=tile)
    assert_close(actual, exact, magnitude, 300, torch.float32)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_halted_writes_nothing(function) -> None:
    h, _, _ = run(function, torch.float32, (33, 200), halted=3)
    assert same_bits(h, torch.full_like(h, float("nan")))


def test_wrong_scale_is_noticed() -> None:
    h, exact, magnitude = run(gate_up, torch.float16, (33, 200), has_bias=True)
    assert fails(lambda: assert_close(h, exact * 1.01, magnitude, 200, torch.float32))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_eps_counts_where_activations_are_small(function, eps: float) -> None:
    """At a mean square of 1e-6 the two usual values of eps give results 2.3 times apart."""
    x, weight = random(64, std=1e-3), random(32, 64, std=0.125)
    h = torch.zeros(16, device=x.device)
    function(x, torch.ones_like(x), weight, None, scalar(0), h, eps=eps)
    gate, up = (weight.double() @ (x.double() / (x.double().square().mean() + eps).sqrt())).chunk(2)
    assert (h - gate * torch.sigmoid(gate) * up).abs().max() < 1e-5
