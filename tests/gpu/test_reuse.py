"""B28: the KV cache is reused by token ids, never by count: what follows equals a cold run within numerical bounds.

A row that decoding wrote may differ in its last bits from one that prefill writes, so the comparison is of logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from monograph.model.decoder import Decoder
from tests.gpu import tiny

pytestmark = pytest.mark.gpu

# fp32: the order of sums; bf16: a row of the cache rounded the other way, once in a while, by one unit of 2^-8.
RELATIVE_ERROR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=["fp32", "bf16"])
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    found: Decoder = request.getfixturevalue(request.param)
    found.remember(())
    yield found
    found.remember(())


def turn(decoder: Decoder, ids: list[int], count: int, reuse: bool, closed_after: int | None = None) -> list[int]:
    """An answer whose history the decoder remembers, cut short after some tokens if asked for."""
    limit = len(ids) + count
    run = decoder.answer(ids, reuse=reuse, position_limit=limit, stop_ids=(), sampling=tiny.GREEDY)
    tokens = run.tokens()
    for i, _ in enumerate(tokens):
        if i + 1 == closed_after:
            tokens.close()  # many steps have been run ahead
            break
    decoder.remember(run.cached_ids())
    return run.token_ids


def first_logits(decoder: Decoder, ids: list[int], reuse: bool) -> tuple[torch.Tensor, int]:
    """Logits of a prompt's first new token, and how many of its rows were reused."""
    run = decoder.answer(ids, reuse=reuse, position_limit=len(ids) + 1, stop_ids=(), sampling=tiny.GREEDY)
    list(run.tokens())
    return decoder.arena.view("logits").clone(), run.stats().reused_tokens


PROMPT = tiny.random_ids(700, seed=1)
NEXT = tiny.random_ids(30, seed=2)


def second_turns(answer: list[int]) -> dict[str, tuple[list[int], int]]:
    """Prompts of the second turn, with the rows of them that the cache holds after PROMPT and this answer."""
    whole = [*PROMPT, *answer]
    other = (answer[10] + 1) % tiny.CONFIG.vocab_size
    return {
        "continued": ([*whole, *NEXT], len(whole) - 1),  # the last token was chosen, and read by no launch yet
        "two tokens merged into one": ([*whole[:-2], 7, *NEXT], len(whole) - 2 + (whole[-2] == 7)),
        "edited in the middle": ([*PROMPT, *answer[:10], other, *answer[11:], *NEXT], len(PROMPT) + 10),
        "system prompt changed": ([(PROMPT[0] + 1) % tiny.CONFIG.vocab_size, *whole[1:], *NEXT], 0),
        "shorter": (whole[:300], 299),  # the last token is always read anew: its logits are wanted
        "the same prompt again": (PROMPT, len(PROMPT) - 1),
        "another token in the last place": ([*whole[:-1], (whole[-1] + 1) % tiny.CONFIG.vocab_size], len(whole) - 1),
    }


@pytest.mark.parametrize("case", second_turns([0] * 20))
@pytest.mark.parametrize("cut", [None, 20], ids=["ended by length", "closed by its reader"])
def test_b28_second_turn(decoder: Decoder, case: str, cut: int | None) -> None:
    tiny.clean(decoder)
    answer = turn(decoder, PROMPT, 20 if cut is None else 1000, reuse=False, closed_after=cut)
    assert len(answer) == 20
    ids, rows = second_turns(answer)[case]
    warm, reused = first_logits(decoder, ids, reuse=True)
    assert reused == rows
    tiny.clean(decoder)
    cold, none = first_logits(decoder, ids, reuse=False)
    assert none == 0
    assert tiny.relative_error(warm, cold) < RELATIVE_ERROR[decoder.capacity.dtype]


def test_b28_one_wrong_row_shows(fp32: Decoder) -> None:
    """The bound is tight enough to see the least that reuse by count could get wrong."""
    turn(fp32, PROMPT, 20, reuse=False)
    other = [(PROMPT[0] + 1) % tiny.CONFIG.vocab_size, *PROMPT[1:]]
    fp32.remember(other)
    warm, reused = first_logits(fp32, other, reuse=True)
    assert reused == len(PROMPT) - 1
    cold, _ = first_logits(fp32, other, reuse=False)
    fp32.remember(())
    assert tiny.relative_error(warm, cold) > 10 * RELATIVE_ERROR[torch.float32]


def test_b28_text_is_the_same_with_and_without_reuse(fp32: Decoder) -> None:
    """Three turns, greedy."""
    histories = []
    for reuse in (True, False):
        fp32.remember(())
        ids: list[int] = []
        for i in range(3):
            ids = [*ids, *tiny.random_ids(40, seed=10 + i)]
            ids += turn(fp32, ids, 30, reuse)
        histories.append(ids)
    assert histories[0] == histories[1]
