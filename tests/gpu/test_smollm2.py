"""The real model on the GPU: in bfloat16 against answers that transformers gave in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import monograph as mg
from tests import smollm2

pytestmark = pytest.mark.gpu

GOLDENS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
AGREEMENT = 0.97  # of the tokens; where the two best logits are closer than bf16 resolves, either may win
CLEAR_MARGIN = 0.5  # of logits around 30, which bf16 resolves to 0.1: with such a margin no token may differ


@pytest.fixture(scope="module")
def engine() -> Iterator[mg.Engine]:
    with mg.load(str(smollm2.path()), device="cuda", dtype="bfloat16") as loaded:
        yield loaded


@pytest.mark.parametrize("through", ["prefill", "decode"])
def test_teacher_forced_tokens_agree(engine: mg.Engine, through: Literal["prefill", "decode"]) -> None:
    """Each answer's tokens, given all before them."""
    agreeing = total = 0
    for golden in GOLDENS:
        answer = golden["greedy_ids"]
        ids = [*golden["prompt_ids"], *answer]
        chosen = engine.logits(ids, through=through).argmax(dim=-1)[len(ids) - len(answer) - 1 : -1].tolist()
        agreeing += sum(one == other for one, other in zip(chosen, answer, strict=True))
        total += len(answer)
    assert total > 300
    assert agreeing / total >= AGREEMENT, f"{agreeing} of {total}"


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["prompt"][:30])
def test_first_logits(engine: mg.Engine, golden: dict[str, Any]) -> None:
    """Prefill by the graph: the ten best first tokens are near what float32 gives them."""
    engine.generate(golden["prompt_ids"], 1)
    logits = engine.arena.view("logits").cpu()[golden["first_top10_ids"]]
    error = (logits - torch.tensor(golden["first_top10_logits"])).abs().max()
    assert float(error) < CLEAR_MARGIN


def test_the_answer_about_france(engine: mg.Engine) -> None:
    golden = GOLDENS[0]
    assert golden["margin_min"] > CLEAR_MARGIN
    chat = engine.chat()
    assert "".join(chat.send(golden["prompt"], sampling=mg.Sampling(temperature=0))) == golden["greedy_text"]
    assert golden["greedy_text"] == "The capital of France is Paris."
    answer = engine.generate(golden["prompt_ids"], 64, sampling=mg.Sampling(temperature=0))
    assert answer.token_ids == golden["greedy_ids"]
    assert answer.finish_reason == "stop"


def test_answers_repeat(engine: mg.Engine) -> None:
    """Whatever was asked between, an answer and its logits come out the same, greedy and drawn."""
    for sampling in (mg.Sampling(temperature=0), mg.Sampling(temperature=0.8, top_p=0.9, seed=7)):
        found = []
        for golden in (GOLDENS[1], GOLDENS[3], GOLDENS[1]):
            answer = engine.generate(golden["prompt_ids"], 40, sampling=sampling)
            found.append((answer.token_ids, engine.arena.view("logits").cpu()))
        assert found[0][0] == found[2][0]
        assert torch.equal(found[0][1], found[2][1])
        assert found[0][0] != found[1][0]


def test_speed_of_the_chat_loop(engine: mg.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Said, not judged: tokens a second of a conversation, text included."""
    chat = engine.chat()
    list(chat.send("Tell me a long story about a lighthouse.", max_new_tokens=300))
    list(chat.send("Go on.", max_new_tokens=300))
    assert chat.completion is not None
    stats = chat.completion.stats
    assert stats.reused_tokens > 0
    assert stats.tokens_per_s > 0
    with capsys.disabled():
        print(
            f"\nSmolLM2 bfloat16, chat loop: {stats.tokens_per_s:,.0f} tokens/s, "
            f"first token after {stats.first_token_ms:.1f} ms ({stats.reused_tokens} of {stats.prompt_tokens} reused)"
        )
