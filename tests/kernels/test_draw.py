"""Masses, thresholds and draws: the sets against an fp64 oracle, kernel and reference bit for bit."""

# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import math
import warnings

import pytest
import torch

from monograph.kernels.draw import draw, draw_torch, load_own_best
from monograph.kernels.threshold import LOG2_E, mass, mass_torch, narrow, search, sharpness_torch
from monograph.kernels.tile import BINS, BUFFERS, LIST
from monograph.kernels.triton_import import tl, triton
from tests.kernels.rows import DEVICE, ON_GPU

NO_FUSION = {"enable_fp_fusion": False}
HEAD_PROGRAMS = 40


@triton.jit
def _mass_kernel(distance_ptr, sharpness_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, mass(tl.load(distance_ptr + offs), tl.load(sharpness_ptr)))


@triton.jit
def _narrow_kernel(
    scores_ptr,
    knobs_ptr,  # fp32 [4]: best score, sharpness, share, limit
    goal_ptr,  # int64 [2]: goal, small
    arrivals_ptr,
    histogram_ptr,
    out_ptr,  # int32 [2]: key, rounds
    BY_MASS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
    CLEARS: tl.constexpr,
):
    none = tl.zeros([], dtype=tl.int32)
    goal, small = tl.load(goal_ptr), tl.load(goal_ptr + 1)
    best, sharpness, share = tl.load(knobs_ptr), tl.load(knobs_ptr + 1), tl.load(knobs_ptr + 2)
    limit = tl.load(knobs_ptr + 3).to(tl.int32, bitcast=True)
    by_mass = none < BY_MASS
    program = tl.program_id(0)
    key, _met, rounds = narrow(
        scores_ptr, best, sharpness, by_mass, goal, share, limit, small, none, none, arrivals_ptr, histogram_ptr,
        program, N, BLOCK_V, PART, 1, CLEARS,
    )  # fmt: skip
    tl.store(out_ptr, key)
    tl.store(out_ptr + 1, rounds)


@triton.jit
def _search_kernel(values_ptr, goal_ptr, out_ptr, SIZE: tl.constexpr):  # int64 [SIZE], [1], [2]
    place, before = search(tl.load(values_ptr + tl.arange(0, SIZE)), tl.load(goal_ptr), SIZE)
    tl.store(out_ptr, place.to(tl.int64))
    tl.store(out_ptr + 1, before)


@triton.jit
def _draw_kernel(
    scores_ptr,
    best_score_ptr,  # fp32 [BLOCK_P]
    knobs_ptr,  # fp32 [4]: best score, temperature, top_p, min_p
    top_k_ptr,
    seed_ptr,
    position_ptr,
    arrivals_ptr,
    histogram_ptr,
    list_ptr,
    masses_ptr,
    out_ptr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
    DRAWERS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CLEARS: tl.constexpr,
):
    best_score = tl.load(best_score_ptr + tl.arange(0, BLOCK_P))
    best, temperature = tl.load(knobs_ptr), tl.load(knobs_ptr + 1)
    top_p, min_p = tl.load(knobs_ptr + 2), tl.load(knobs_ptr + 3)
    top_k, seed, position = tl.load(top_k_ptr), tl.load(seed_ptr), tl.load(position_ptr)
    own_best = load_own_best(scores_ptr, N, BLOCK_V)
    token = draw(
        scores_ptr, best_score, best, own_best, temperature, top_k, top_p, min_p, seed, position, arrivals_ptr,
        histogram_ptr, list_ptr, masses_ptr, N, BLOCK_V, PART, DRAWERS, BLOCK_D, CLEARS,
    )  # fmt: skip
    tl.store(out_ptr, token, mask=token != -1)


def one(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype, device=DEVICE)


def head_best(scores: torch.Tensor) -> torch.Tensor:
    """The best scores of HEAD_PROGRAMS programs that take every 40th id, padded to a power of two."""
    best = torch.full((triton.next_power_of_2(HEAD_PROGRAMS),), float("-inf"), device=DEVICE)
    for program in range(min(HEAD_PROGRAMS, scores.numel())):
        best[program] = scores[program::HEAD_PROGRAMS].max()
    return best


def draw_triton(scores, temperature, top_k, top_p, min_p, seed, position, drawers: int = 1, part: int = 128) -> int:
    """Draws by that many programs; leaves the state that they share as it was."""
    n = scores.numel()
    knobs = torch.cat([scores.max()[None], temperature, top_p, min_p])
    arrivals = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    histogram = torch.zeros(BUFFERS, BINS, dtype=torch.int64, device=DEVICE)
    listed = torch.full((LIST,), -77, dtype=torch.int64, device=DEVICE)
    masses = torch.full((drawers,), -77, dtype=torch.int64, device=DEVICE)
    out = torch.full((1,), -77, dtype=torch.int32, device=DEVICE)
    block = triton.next_power_of_2(-(-n // drawers))
    drawers = -(-n // block)
    sizes = {"N": n, "BLOCK_P": triton.next_power_of_2(HEAD_PROGRAMS), "BLOCK_V": block, "PART": min(part, block)}
    sizes |= {"DRAWERS": drawers, "BLOCK_D": triton.next_power_of_2(drawers)}
    sizes["CLEARS"] = triton.next_power_of_2(-(-BINS // drawers))
    shared = arrivals, histogram, listed, masses
    best = head_best(scores)
    _draw_kernel[(drawers,)](
        scores, best, knobs, top_k, seed, one(position, torch.int32), *shared, out, **sizes, **NO_FUSION
    )
    assert not arrivals.any()
    assert not histogram.any()
    return int(out)


def random_scores(n: int, std: float, seed: int, decimals: int | None = None) -> torch.Tensor:
    scores = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * std
    return (scores if decimals is None else scores.round(decimals=decimals)).to(DEVICE)


def oracle(scores: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Probabilities in fp64 after the three limits, from the definition: one token at a time, ties together."""
    values = scores.double().cpu()
    p = torch.softmax((values - values.max()) / temperature, dim=0)
    if top_k > 0:
        p[values < values.sort(descending=True).values[min(top_k, len(values)) - 1]] = 0
    if top_p < 1:
        p = p / p.sum()
        larger = torch.stack([p[values > v].sum() for v in values])
        p[(larger >= top_p) & (values < values.max())] = 0
    if min_p > 0:
        p[p < min_p * p.max()] = 0
    return p / p.sum()


LIMITS = [  # top_k, top_p, min_p
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (35, 0.6, 0.0),
    (300, 1.0, 0.0),
    (5000, 1.0, 0.0),
    (0, 0.5, 0.0),
    (0, 0.95, 0.0),
    (0, 0.0, 0.0),
    (0, 1.0, 0.02),
    (0, 1.0, 1.0),
    (40, 0.8, 0.05),
]


def test_mass_is_a_power_of_two_in_fixed_point() -> None:
    distance = torch.cat([torch.linspace(0, 40, 4093), torch.tensor([1e-30, 1e30, float("inf")])]).to(DEVICE)
    for temperature in (0.3, 1.0, 7.5):
        sharpness = sharpness_torch(one(temperature))
        masses = mass_torch(distance, sharpness)
        exact = torch.exp(-distance.double() / temperature) * 2.0**40
        # rounded down by less than 1; t carries two roundings of at most 60 * 2**-24 each, the polynomial 2e-7
        assert ((masses - exact).abs() <= 1 + exact * (2e-7 + 2 * 60 * 2.0**-24)).all()
        assert int(masses[0]) == 2**40
        assert int(masses[-1]) == 0
        out = torch.zeros_like(masses)
        _mass_kernel[(1,)](distance, sharpness, out, BLOCK=4096, **NO_FUSION)
        assert torch.equal(out, masses)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("decimals", [None, 1], ids=["distinct", "ties"])
def test_kept_set_is_the_oracles(limits: tuple[int, float, float], decimals: int | None) -> None:
    top_k, top_p, min_p = limits
    for temperature in (0.4, 1.0, 3.0):
        scores = random_scores(1000, 2.0, seed=3, decimals=decimals)
        knobs = one(temperature), one(top_k, torch.int32), one(top_p), one(min_p), one(1, torch.int64)
        _, masses = draw_torch(scores, *knobs, 5)
        expected = oracle(scores, temperature, top_k, top_p, min_p)
        kept, probable = masses.cpu() > 0, expected > expected.max() * 2.0**-39.9  # less than 2**-40 has no mass
        assert not (kept & (expected == 0)).any()
        assert not (probable & ~kept).any()
        share = masses.double().cpu() / masses.sum().double().cpu()
        assert (share - expected).abs().max() < 1e-6


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("n", "std", "decimals"), [(96, 2.0, None), (1000, 3.0, None), (333, 1.0, 1), (1001, 0.05, 2)])
def test_kernel_draws_what_the_reference_draws(limits, n: int, std: float, decimals: int | None) -> None:
    """Peaked, wide and flat scores, with and without ties; flat ones overflow the list and take the long way."""
    top_k, top_p, min_p = limits
    for seed in range(20 if ON_GPU else 2):
        scores = random_scores(n, std, seed, decimals)
        knobs = one(0.8), one(top_k, torch.int32), one(top_p), one(min_p), one(seed * 2**40 + 7, torch.int64)
        assert draw_triton(scores, *knobs, 9 + seed) == draw_torch(scores, *knobs, 9 + seed)[0]


@pytest.mark.parametrize("by_mass", [False, True])
@pytest.mark.parametrize("decimals", [None, 0])
def test_narrow_finds_the_smallest_key_that_reaches_the_goal(by_mass: bool, decimals: int | None) -> None:
    """Goals from the first token to the last, and one that all together do not reach."""
    scores = random_scores(700, 1.5, seed=1, decimals=decimals)
    sharpness = sharpness_torch(one(1.3))
    distance = scores.max() - scores
    order = distance.argsort()
    masses = mass_torch(distance, sharpness)
    weight = masses if by_mass else (masses > 0).long()
    running = weight[order].cumsum(0)
    for goal in (1, 2**40, *(int(running[rank]) for rank in (0, 1, 5, 60, 300, 699)), int(running[-1]) + 1):
        if goal > int(running[-1]):
            expected = float("inf")
        else:
            expected = float(distance[order[int(torch.searchsorted(running, goal))]])
        key, rounds = narrow_triton(scores, sharpness, by_mass, goal=goal)
        assert torch.tensor(key, dtype=torch.int32).view(torch.float32) == expected
        assert rounds <= 5


@pytest.mark.parametrize("share", [0.0, 1e-7, 0.3, 0.9, 1 - 2**-24])
@pytest.mark.parametrize("limit", [0.0, 2.5, float("inf")])
def test_narrow_finds_a_share_of_what_is_within_a_limit(share: float, limit: float) -> None:
    """Tokens beyond every answer are added to the sum alone."""
    scores = random_scores(900, 3.0, seed=2)
    sharpness = sharpness_torch(one(0.7))
    distance = scores.max() - scores
    order = distance.argsort()
    running = torch.where(distance <= limit, mass_torch(distance, sharpness), 0)[order].cumsum(0)
    share = float(torch.tensor(share))
    goal = max(math.ceil(share * float(running[-1])), 1)
    expected = distance[order[int(torch.searchsorted(running, goal))]]
    small = int((1 - share) * 2**40 / 1800)
    key, _ = narrow_triton(scores, sharpness, True, share=share, limit=limit, small=small)
    assert key == int(expected.view(torch.int32))


def narrow_triton(
    scores, sharpness, by_mass: bool, goal: int = 0, share: float = 0.5, limit: float = float("inf"), small: int = 0
) -> tuple[int, int]:
    arrivals = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    histogram = torch.zeros(BUFFERS, BINS, dtype=torch.int64, device=DEVICE)
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    goals = torch.tensor([goal, small], device=DEVICE)
    sizes = {"BY_MASS": by_mass, "N": scores.numel(), "BLOCK_V": 1024, "PART": 256, "CLEARS": BINS}
    knobs = torch.cat([scores.max()[None], sharpness, one(share), one(limit)])
    _narrow_kernel[(1,)](scores, knobs, goals, arrivals, histogram, out, **sizes, **NO_FUSION)
    return int(out[0]), int(out[1])


@pytest.mark.parametrize("size", [1, 2, 32, 64, 512])
def test_search_is_a_search_in_running_sums(size: int) -> None:
    values = torch.randint(0, 2**40, (size,), generator=torch.Generator().manual_seed(size)).to(DEVICE)
    values[size // 3 : size // 2] = 0
    running = values.cumsum(0)
    goals = {
        1,
        int(running[0]),
        int(running[0]) + 1,
        int(running[-1]),
        int(running[-1]) + 1,
        int(running[size // 2]) + 1,
    }
    for goal in goals:
        out = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        _search_kernel[(1,)](values, torch.tensor([goal], device=DEVICE), out, SIZE=size)
        place = int(torch.searchsorted(running, goal))
        assert out.tolist() == [place, int(running[place - 1]) if place else 0]


@pytest.mark.gpu
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("n", "std", "decimals"), [(3000, 3.0, None), (128_256, 2.5, None), (128_256, 0.05, 2), (262_144, 0.05, None)]
)
def test_many_programs_draw_what_the_reference_draws(limits, n: int, std: float, decimals: int | None) -> None:
    top_k, top_p, min_p = limits
    for seed in range(6):
        scores = random_scores(n, std, seed, decimals)
        knobs = one(0.8), one(top_k, torch.int32), one(top_p), one(min_p), one(seed * 2**40 + 7, torch.int64)
        drawn = [draw_triton(scores, *knobs, 9 + seed, drawers=drawers, part=256) for drawers in (1, 5, 126)]
        assert drawn == [draw_torch(scores, *knobs, 9 + seed)[0]] * 3


def test_equal_scores_are_one_tie() -> None:
    scores = torch.full((500,), -3.25, device=DEVICE)
    for top_k, top_p in ((1, 1.0), (0, 0.1), (3, 0.5)):
        knobs = one(1.0), one(top_k, torch.int32), one(top_p), one(0.0), one(11, torch.int64)
        token, masses = draw_torch(scores, *knobs, 3)
        assert int((masses > 0).sum()) == 500
        assert draw_triton(scores, *knobs, 3) == token


def test_frequencies_follow_the_probabilities() -> None:
    """Chi-square over 20,000 positions under one seed: 11 kept tokens, 10 degrees of freedom."""
    scores = random_scores(50, 1.0, seed=2)
    knobs = one(0.9), one(11, torch.int32), one(1.0), one(0.0), one(1234, torch.int64)
    expected = oracle(scores, 0.9, 11, 1.0, 0.0)
    counts = torch.zeros(50, dtype=torch.float64)
    temperature, top_k, top_p, min_p, seed = (knob.cpu() for knob in knobs)
    for position in range(1, 20_001):
        counts[draw_torch(scores.cpu(), temperature, top_k, top_p, min_p, seed, position)[0]] += 1
    kept = expected > 0
    assert int(counts[~kept].sum()) == 0
    chi_square = ((counts - 20_000 * expected)[kept].square() / (20_000 * expected[kept])).sum()
    assert float(chi_square) < 29.6  # 99.9 % point


@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 1e-38, 1e-45])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_b21_cold_draws_take_the_best(temperature: float, top_p: float) -> None:
    scores = random_scores(200, 3.0, seed=4)
    scores[17] = scores.max() + 0.02
    knobs = one(temperature), one(0, torch.int32), one(top_p), one(0.0), one(5, torch.int64)
    assert draw_torch(scores, *knobs, 8)[0] == 17
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, for the infinities that the GPU makes in silence
        assert draw_triton(scores, *knobs, 8) == 17


def test_b21_hot_draws_stay_finite() -> None:
    scores = random_scores(200, 3.0, seed=4)
    knobs = one(1e6), one(0, torch.int32), one(1.0), one(0.0), one(5, torch.int64)
    token, masses = draw_torch(scores, *knobs, 8)
    assert int((masses > 0).sum()) == 200
    assert draw_triton(scores, *knobs, 8) == token
    assert math.isclose(float(sharpness_torch(one(1e6))), LOG2_E / 1e6, rel_tol=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (150, 1.0), (150, 0.97), (5, 0.7)])
def test_b21_scores_as_far_apart_as_numbers_go(top_k: int, top_p: float) -> None:
    scores = random_scores(200, 5e37, seed=4)
    scores[[3, 60]] = torch.tensor([-1.8e38, float("-inf")], device=DEVICE)
    for temperature in (3e37, 3e38):
        knobs = one(temperature), one(top_k, torch.int32), one(top_p), one(0.0)
        for seed in range(4):
            drawn = draw_torch(scores, *knobs, one(seed, torch.int64), 8)[0]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, as above
                assert draw_triton(scores, *knobs, one(seed, torch.int64), 8) == drawn


def test_b23_seed_and_position_alone_decide() -> None:
    """Same seed and position: same token. Seeds of any sign and size count in full, all 64 bits of them."""
    scores = random_scores(5000, 0.1, seed=6)
    knobs = one(1.0), one(0, torch.int32), one(1.0), one(0.0)
    before = torch.get_rng_state()
    seeds = [0, 1, 42, -1, 2**62, 2**63 - 1, -(2**63), 2**32, 42 + 2**32]
    drawn = [draw_torch(scores, *knobs, one(seed, torch.int64), 8)[0] for seed in seeds]
    assert drawn == [draw_triton(scores, *knobs, one(seed, torch.int64), 8, part=1024) for seed in seeds]
    assert drawn == [draw_torch(scores, *knobs, one(seed, torch.int64), 8)[0] for seed in seeds]
    assert len(set(drawn)) == len(seeds)
    assert len({draw_torch(scores, *knobs, one(42, torch.int64), position)[0] for position in range(1, 50)}) > 40
    assert torch.equal(torch.get_rng_state(), before)
