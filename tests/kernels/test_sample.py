"""sample: what each launch does to the state, what it tells the host, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from monograph.kernels.head import NO_ID
from monograph.kernels.sample import CANCELLED, FULL, NON_FINITE, STOPPED, sample, sample_torch
from monograph.kernels.tile import BINS, BUFFERS, LIST
from tests.kernels.rows import DEVICE, ON_GPU, Slots, same_bits

FUNCTIONS = [sample, sample_torch]
SMALL_TILE = {"BLOCK_V": 64}  # five programs, which only a GPU runs at once
VOCAB, MAX_SEQ_LEN, CHUNK = 300, 16, 5
NAN, INF = float("nan"), float("inf")


@dataclass
class Step:
    """The slots that a launch takes; ints and floats are device scalars."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 7
    stop_ids: tuple[int, ...] = (-1, -1)
    position_limit: int = MAX_SEQ_LEN
    cancel: int = 0
    gate: int = 1
    position: int = 3
    prefill_end: int = 2
    halted: int = 0
    scores: torch.Tensor = field(default_factory=lambda: random_scores(0))
    best: tuple[tuple[float, int], ...] | None = None  # (score, id) of each program
    max_seq_len: int = MAX_SEQ_LEN

    def run(self, function: Callable[..., None], **options: Any) -> After:
        slots = Slots()

        def scalar(value: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return slots.copy(torch.tensor([value], dtype=dtype))

        best = self.best or ((float(self.scores.max()), int(self.scores.argmax())), (-INF, NO_ID))
        host: dict[str, Any] = {"device": "cpu", "pin_memory": ON_GPU}
        cancel = torch.tensor([self.cancel], dtype=torch.int32, **{k: v for k, v in host.items() if k == "device"})
        cancel = cancel.pin_memory() if ON_GPU else cancel
        outbox_tokens = torch.full((self.max_seq_len,), -77, dtype=torch.int32, **host)
        outbox_status = torch.full((2,), -77, dtype=torch.int32, **host)
        after = After(
            tokens=slots.new(self.max_seq_len, dtype=torch.int32),
            position=scalar(self.position),
            output_counts=slots.copy(torch.arange(VOCAB, dtype=torch.int32)),
            context_counts=slots.copy(torch.arange(VOCAB, dtype=torch.int32) * 2),
            halted=scalar(self.halted),
            outbox_tokens=outbox_tokens,
            outbox_status=outbox_status,
        )
        draw_slots = (
            slots.copy(torch.zeros(2, dtype=torch.int32)),
            slots.copy(torch.zeros(BUFFERS, BINS, dtype=torch.int64)),
            slots.new(LIST, dtype=torch.int64),
            slots.new(8, dtype=torch.int64),
        )
        if function is sample and ON_GPU:
            options = {"tile": SMALL_TILE} | options
        function(
            slots.copy(self.scores),
            slots.copy(torch.tensor([score for score, _ in best])),
            slots.copy(torch.tensor([token for _, token in best], dtype=torch.int32)),
            scalar(self.temperature, torch.float32),
            scalar(self.top_k),
            scalar(self.top_p, torch.float32),
            scalar(self.min_p, torch.float32),
            scalar(self.seed, torch.int64),
            slots.copy(torch.tensor(self.stop_ids, dtype=torch.int32)),
            scalar(self.position_limit),
            cancel,
            scalar(self.gate),
            after.tokens,
            after.position,
            scalar(self.prefill_end),
            after.output_counts,
            after.context_counts,
            after.halted,
            outbox_tokens,
            outbox_status,
            *draw_slots,
            chunk=CHUNK,
            **options,
        )
        if ON_GPU:
            torch.cuda.synchronize()
        slots.check_guards()
        assert not draw_slots[0].any()  # zero again, for the next launch
        assert not draw_slots[1].any()
        return after


@dataclass
class After:
    tokens: torch.Tensor
    position: torch.Tensor
    output_counts: torch.Tensor
    context_counts: torch.Tensor
    halted: torch.Tensor
    outbox_tokens: torch.Tensor
    outbox_status: torch.Tensor

    def check(self, token: int, position: int, halted: int = 0) -> None:
        """Everything is as one new token leaves it, and nothing else has changed."""
        for tokens in (self.tokens, self.outbox_tokens):
            expected = torch.full_like(tokens, -77)
            if position < tokens.numel():
                expected[position] = token
            assert torch.equal(tokens, expected)
        once = torch.zeros(VOCAB, dtype=torch.int32)
        once[token] = 1
        ids = torch.arange(VOCAB, dtype=torch.int32)
        assert torch.equal(self.output_counts.cpu(), ids + once)
        assert torch.equal(self.context_counts.cpu(), 2 * ids + once)
        assert (int(self.position), int(self.halted)) == (position, halted)
        assert self.outbox_status.tolist() == [position, halted]

    def check_unmoved(self, position: int, halted: int, told: bool) -> None:
        assert (self.tokens == -77).all()
        assert (self.outbox_tokens == -77).all()
        assert torch.equal(self.output_counts.cpu(), torch.arange(VOCAB, dtype=torch.int32))
        assert torch.equal(self.context_counts.cpu(), 2 * torch.arange(VOCAB, dtype=torch.int32))
        assert (int(self.position), int(self.halted)) == (position, halted)
        assert self.outbox_status.tolist() == ([position, halted] if told else [-77, -77])

    @property
    def token(self) -> int:
        return int(self.tokens[int(self.position)])


def random_scores(seed: int, std: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * std


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_takes_the_best(function, temperature: float) -> None:
    step = Step(temperature=temperature)
    step.run(function).check(int(step.scores.argmax()), 4)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("best", "token"),
    [
        (((1.0, 9), (2.0, 250), (2.0, 33), (2.0, 40)), 33),
        (((-3.0, 5),), 5),
        (((-INF, NO_ID), (-8.0, 299), (-INF, NO_ID)), 299),
        (((0.0, 7), (-0.0, 3)), 3),
    ],
)
def test_greedy_needs_only_the_programs_results(function, best, token: int) -> None:
    """Ties go to the lowest id; the scores themselves, here NaN, are not read."""
    Step(best=best, scores=torch.full((VOCAB,), NAN)).run(function).check(token, 4)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("position", "prefill_end", "expected"), [(0, 1, 1), (3, 2, 4), (3, 9, 9), (8, 9, 9), (9, 9, 10)]
)
def test_next_position(function, position: int, prefill_end: int, expected: int) -> None:
    """After the prompt's last chunk the token follows the prompt; in decode it follows the last token."""
    step = Step(position=position, prefill_end=prefill_end)
    step.run(function).check(int(step.scores.argmax()), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_closed_gate_moves_on_by_a_chunk(function) -> None:
    Step(gate=0, cancel=1).run(function).check_unmoved(3 + CHUNK, 0, told=False)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("halted", [STOPPED, FULL, CANCELLED, NON_FINITE])
def test_halted_writes_nothing(function, gate: int, halted: int) -> None:
    Step(halted=halted, gate=gate, temperature=1.0, cancel=1).run(function).check_unmoved(3, halted, told=False)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "best",
    [((1.0, 4), (NAN, 9)), ((NAN, 9),), ((NAN, NO_ID), (INF, 3)), ((INF, 3), (2.0, 4)), ((-INF, NO_ID), (-INF, NO_ID))],
    ids=str,
)
def test_no_finite_best_halts_without_advancing(function, temperature: float, best) -> None:
    """NaN anywhere, an infinite best, and a vocabulary that is banned altogether."""
    Step(best=best, temperature=temperature).run(function).check_unmoved(3, NON_FINITE, told=True)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("stops", "limit", "cancel", "halted"),
    [
        (False, 6, 0, 0),
        (False, 5, 0, FULL),
        (False, 4, 0, FULL),
        (False, 6, 1, CANCELLED),
        (True, 6, 0, STOPPED),
        (True, 5, 1, STOPPED),  # a stop token says more than a full arena, and that more than a cancel
        (False, 5, 1, FULL),
    ],
)
def test_halting(function, stops: bool, limit: int, cancel: int, halted: int) -> None:
    token = int(random_scores(0).argmax())
    stop_ids = (-1, token, 5) if stops else (-1, 5, -1)
    Step(stop_ids=stop_ids, position_limit=limit, cancel=cancel).run(function).check(token, 4, halted)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_last_row_of_the_arena(function) -> None:
    step = Step(position=MAX_SEQ_LEN - 2)
    step.run(function).check(int(step.scores.argmax()), MAX_SEQ_LEN - 1, FULL)
    step = Step(position=MAX_SEQ_LEN - 1, position_limit=MAX_SEQ_LEN + 9)  # past the arena: counted, not stored
    step.run(function).check(int(step.scores.argmax()), MAX_SEQ_LEN)


@pytest.mark.parametrize(
    "knobs", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}], ids=str
)
def test_kernel_samples_what_the_reference_samples(knobs: dict[str, Any]) -> None:
    for seed in range(3):
        step = Step(temperature=0.8, seed=seed, scores=random_scores(seed), **knobs)
        expected = step.run(sample_torch)
        after = step.run(sample)
        after.check(expected.token, 4)
        expected.check(expected.token, 4)


def test_default_tile() -> None:
    choices: list[dict[str, Any]] = [{}, {"top_k": 9, "top_p": 0.9}]
    for knobs in choices:
        step = Step(temperature=1.0, **knobs)
        step.run(sample, tile=None).check(step.run(sample_torch).token, 4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_top_k_of_one_is_greedy(function) -> None:
    step = Step(temperature=5.0, top_k=1)
    step.run(function).check(int(step.scores.argmax()), 4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_banned_tokens_are_never_drawn(function) -> None:
    scores = torch.full((VOCAB,), -INF)
    scores[[20, 150, 290]] = torch.tensor([1.0, 1.5, 0.5])
    drawn = {Step(temperature=2.0, seed=seed, scores=scores).run(function).token for seed in range(12)}
    assert drawn <= {20, 150, 290}
    assert len(drawn) > 1


@pytest.mark.parametrize("function", FUNCTIONS)
def test_b23_same_seed_same_token_at_any_arena_size_and_history(function) -> None:
    step = Step(temperature=1.3, seed=42)
    token = step.run(function).token
    Step(temperature=0.5, seed=1, position=9).run(function)  # another request in between
    assert step.run(function).token == token
    assert Step(temperature=1.3, seed=42, max_seq_len=1000).run(function).token == token
    prefilled = Step(temperature=1.3, seed=42, position=0, prefill_end=4)  # the same next position, reached by prefill
    assert prefilled.run(function).token == token
    assert len({Step(temperature=1.3, seed=seed).run(function).token for seed in range(8)}) > 3


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("seed", [0, 2**63 - 1, -1, -(2**63)])
def test_b23_any_seed_is_taken(function, seed: int) -> None:
    step = Step(temperature=1.0, seed=seed)
    assert step.run(function).token == step.run(sample_torch).token


@pytest.mark.parametrize("function", FUNCTIONS)
def test_b21_temperature_from_zero_to_almost_zero(function) -> None:
    scores = random_scores(1)
    scores[123] = scores.max() + 0.02
    for temperature in (0.0, 1e-4, 1e-10):
        for top_p in (1.0, 0.9):
            Step(temperature=temperature, top_p=top_p, scores=scores).run(function).check(123, 4)


def test_wrong_arguments_are_named() -> None:
    after = Step().run(sample_torch)
    assert same_bits(after.halted, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match=r"sample: tile has no BLOCK_Q"):
        Step().run(sample, tile={"BLOCK_Q": 1})
    best = torch.zeros(1, device=DEVICE)
    with pytest.raises(ValueError, match=r"sample: best_id must be contiguous int32 \[1\]"):
        sample(best, best, best, *[best] * 21, chunk=1)
