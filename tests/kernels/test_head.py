"""head against fp64: logits, processed scores, the best of each program, and logits that are not finite."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from monograph.kernels.head import LOGIT_BIAS, NO_ID, PENALTIES, head, head_torch
from tests.kernels.rows import DEVICE, DTYPES, ON_GPU, Slots, assert_close, fails, random, same_bits, scalar

FUNCTIONS = [head, head_torch]
FEW_PROGRAMS = {"BLOCK_N": 32}  # steps cost the interpreter tens of milliseconds
EPS = 1e-5


@dataclass
class Result:
    logits: torch.Tensor
    scores: torch.Tensor
    best_score: torch.Tensor
    best_id: torch.Tensor

    @property
    def best(self) -> tuple[float, int]:
        """What `sample` makes of the programs' results: the lowest id of the best score."""
        top = self.best_score.max()
        return float(top), int(self.best_id[self.best_score == top].min()) if not top.isnan() else -1


def run(
    function,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    *,
    programs: int = 3,
    processors: int = 0,
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0),
    logit_bias: torch.Tensor | None = None,
    context_counts: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
    gate: int = 1,
    halted: int = 0,
    eps: float = EPS,
    **options,
) -> Result:
    if function is head and not ON_GPU:
        options = {"tile": FEW_PROGRAMS} | options
    vocab_size = weight.shape[0]
    slots = Slots()
    # What is switched off must not be read: it is NaN, or counts nothing.
    bias = slots.new(vocab_size) if logit_bias is None else slots.copy(logit_bias)
    counts = [
        slots.new(vocab_size, dtype=torch.int32) if c is None else slots.copy(c.int())
        for c in (context_counts, output_counts)
    ]
    logits, scores = slots.new(vocab_size), slots.new(vocab_size)
    best_score, best_id = slots.new(programs), slots.new(programs, dtype=torch.int32)
    knobs = [torch.tensor([p], device=DEVICE) for p in penalties]
    state = bias, *counts, scalar(gate), scalar(halted)
    results = logits, scores, best_score, best_id
    function(x, norm_weight, weight, scalar(processors), *knobs, *state, *results, eps=eps, **options)
    slots.check_guards()
    return Result(*results)


def raw(function, logits: list[float], **options) -> Result:
    """Runs with a head whose logits are these numbers: one column, and a normed x of 1."""
    weight = torch.tensor(logits, device=DEVICE)[:, None].contiguous()
    one = torch.ones(1, device=DEVICE)
    return run(function, one, one, weight, eps=0.0, **options)


def model(vocab_size: int, hidden_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, norm_weight = random(hidden_size, std=2.0), 1 + random(hidden_size, dtype=dtype, std=0.1)
    return x, norm_weight, random(vocab_size, hidden_size, dtype=dtype, std=0.1)


def exact_logits(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    normed = x.double() * norm_weight.double() / (x.double().square().mean() + EPS).sqrt()
    return weight.double() @ normed, weight.double().abs() @ normed.abs()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(96, 64), (1000, 63), (97, 576), (1, 8)], ids=str)
def test_logits_and_best(function, dtype: torch.dtype, size: tuple[int, int]) -> None:
    weights = model(*size, dtype)
    result = run(function, *weights)
    assert_close(result.logits, *exact_logits(*weights), size[1], torch.float32)
    assert same_bits(result.scores, result.logits)
    assert result.best == (float(result.logits.max()), int(result.logits.argmax()))


@pytest.mark.parametrize("programs", [1, 2, 7, 40])
@pytest.mark.parametrize("block_n", [1, 8])
def test_every_program_reports_its_own_tiles(programs: int, block_n: int) -> None:
    result = run(head, *model(33, 40, torch.float16), programs=programs, tile={"BLOCK_N": block_n, "num_warps": 1})
    owner = torch.arange(33, device=DEVICE) // block_n % programs
    for program in range(programs):
        mine = result.logits[owner == program]
        if mine.numel():
            assert float(result.best_score[program]) == float(mine.max())
            assert float(result.logits[result.best_id[program]]) == float(mine.max())
        else:
            assert float(result.best_score[program]) == float("-inf")
            assert int(result.best_id[program]) == NO_ID


@pytest.mark.parametrize("function", FUNCTIONS)
def test_lowest_id_wins_a_tie(function) -> None:
    for logits in ([0.0, 3.0, 1.0, 3.0, 3.0], [-2.0] * 70, [-5.0, *[0.5] * 3, *[-1.0] * 60, 0.5]):
        for programs in (1, 3):
            assert raw(function, logits, programs=programs).best[1] == logits.index(max(logits))


def test_default_tile() -> None:
    weights = model(40, 576, torch.float16)
    assert_close(run(head, *weights, tile=None).logits, *exact_logits(*weights), 576, torch.float32)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("processors", [0, LOGIT_BIAS, PENALTIES, LOGIT_BIAS | PENALTIES])
def test_processors(function, processors: int) -> None:
    """All of them in their order, each only when its bit is set; penalties apply to ids of each combination."""
    weights = model(97, 64, torch.float32)
    generator = torch.Generator().manual_seed(5)
    output = torch.randint(0, 3, (97,), generator=generator)
    context = output + torch.randint(0, 2, (97,), generator=generator)  # what was sampled stands in the context
    bias = torch.randn(97, generator=generator)
    result = run(
        function,
        *weights,
        processors=processors,
        penalties=(1.3, 0.25, 0.125),
        logit_bias=bias if processors & LOGIT_BIAS else None,
        context_counts=context if processors & PENALTIES else None,
        output_counts=output if processors & PENALTIES else None,
    )
    expected = result.logits.double().cpu()
    if processors & LOGIT_BIAS:
        expected = expected + bias.double()
    if processors & PENALTIES:
        expected = torch.where(context > 0, torch.where(expected < 0, expected * 1.3, expected / 1.3), expected)
        expected = expected - 0.125 * output - 0.25 * (output > 0)
    assert (result.scores.double().cpu() - expected).abs().max() < 4e-6
    assert result.best == (float(result.scores.max()), int(result.scores.argmax()))
    assert_close(result.logits, *exact_logits(*weights), 64, torch.float32)  # raw, whatever the processors


@pytest.mark.parametrize("function", FUNCTIONS)
def test_b22_repetition_penalty_lowers_negative_scores_too(function) -> None:
    logits = [2.0, -2.0, 1.0, 0.0]
    seen = torch.tensor([1, 2, 0, 0])  # ids 0, 1, 1: how often does not matter
    options = {"processors": PENALTIES, "context_counts": seen, "output_counts": torch.zeros(4)}
    scores = raw(function, logits, penalties=(1.5, 0.0, 0.0), **options).scores
    assert torch.allclose(scores.cpu(), torch.tensor([1.33333, -3.0, 1.0, 0.0]), atol=1e-5)
    assert same_bits(raw(function, logits, penalties=(1.0, 0.0, 0.0), **options).scores.cpu(), torch.tensor(logits))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 40, 69])
def test_logit_that_is_not_finite_is_reported(function, bad: float, where: int) -> None:
    logits = [1.0] * 70
    logits[where] = bad
    result = raw(function, logits, programs=3)
    assert result.best_score.isnan().any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bias_may_ban_a_token(function) -> None:
    """An infinite bias is no fault of the model: the token is out, the others stay."""
    bias = torch.tensor([0.0, float("-inf"), 0.0])
    result = raw(function, [1.0, 9.0, 2.0], processors=LOGIT_BIAS, logit_bias=bias)
    assert result.best == (2.0, 2)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("gate", "halted"), [(0, 0), (1, 1), (0, 2)])
def test_closed_gate_or_halted_writes_nothing(function, gate: int, halted: int) -> None:
    result = raw(function, [1.0, 2.0], gate=gate, halted=halted)
    for tensor in (result.logits, result.scores, result.best_score):
        assert same_bits(tensor, torch.full_like(tensor, float("nan")))
    assert (result.best_id == -77).all()


def test_wrong_scale_is_noticed() -> None:
    weights = model(97, 576, torch.float16)
    result = run(head, *weights)
    exact, magnitude = exact_logits(*weights)
    assert fails(lambda: assert_close(result.logits, exact * 1.01, magnitude, 576, torch.float32))
