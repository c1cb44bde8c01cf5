"""Teacher-forced logits of the real model, every row of them, against transformers in float32 on the same file."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

import monograph as mg
from tests import smollm2
from tests.make_teacher_forced import FILE, summary

# fp32 sums of 576 and 1,536 terms in another order, through 30 layers; logits reach 30.
ABSOLUTE_ERROR = 5e-3
RMS_ERROR = 5e-4

GOLDEN = json.loads(FILE.read_text())
IDS: list[int] = GOLDEN["ids"]


@pytest.fixture(scope="module")
def engine() -> Iterator[mg.Engine]:
    with mg.load(str(smollm2.path()), device="cpu", dtype="float32", max_seq_len=1024) as loaded:
        yield loaded


def errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Largest difference, and root of the mean square."""
    assert got.shape == want.shape
    difference = got.double() - want.double()
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def golden(first: int, end: int) -> torch.Tensor:
    return torch.tensor(GOLDEN["rows"][first:end], dtype=torch.float64)


def test_every_row_in_pieces(engine: mg.Engine) -> None:
    first = 0
    for piece in engine.logits_pieces(IDS):
        assert piece.dtype == torch.float32
        end = first + len(piece)
        worst, rms = errors(summary(piece, IDS, first), golden(first, end))
        assert worst < ABSOLUTE_ERROR
        assert rms < RMS_ERROR
        first = end
    assert first == len(IDS) > engine.capacity.chunk_rows


def test_decode_rows(engine: mg.Engine) -> None:
    worst, rms = errors(summary(engine.logits(IDS[:41], through="decode"), IDS)[:40], golden(0, 40))
    assert worst < ABSOLUTE_ERROR
    assert rms < RMS_ERROR


def test_a_text_without_its_first_token_does_not_pass(engine: mg.Engine) -> None:
    worst, rms = errors(summary(engine.logits(IDS[1:100]), IDS, 1), golden(1, 100))
    assert worst > 100 * ABSOLUTE_ERROR
    assert rms > 100 * RMS_ERROR


def test_turn_20_of_a_chat_equals_a_cold_run(engine: mg.Engine) -> None:
    """With the real template and tokenizer: each turn reads its own tokens only."""
    engine.generate([0], 1)
    chat = engine.chat(system="Be brief.")
    assert chat.completion is None
    live, stats = 0, None
    for turn in range(1, 21):
        list(chat.send(f"Number {turn}?", max_new_tokens=3, sampling=mg.Sampling(temperature=1.0, seed=11)))
        assert chat.completion is not None
        stats = chat.completion.stats
        assert stats.reused_tokens == live
        live = stats.prompt_tokens + stats.completion_tokens - 1
    assert stats is not None
    turn_text = "<|im_end|>\n<|im_start|>user\nNumber 20?<|im_end|>\n<|im_start|>assistant\n"
    assert stats.prefilled_tokens <= 1 + len(engine.tokenizer.encode(turn_text))
    list(chat.regenerate(max_new_tokens=1, sampling=mg.Sampling(temperature=0)))
    assert stats.prompt_tokens > 300
    warm = engine.arena.view("logits").clone()
    # The tokens that the chat has read say the conversation, whichever way an encoder would spell it.
    read = engine.arena.view("tokens")[: stats.prompt_tokens].tolist()
    text = engine.tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False)
    assert engine.tokenizer.decode(read, skip_special_tokens=False) == text
    engine.generate(read, 1)
    worst, rms = errors(warm, engine.arena.view("logits"))
    assert worst < ABSOLUTE_ERROR
    assert rms < RMS_ERROR
