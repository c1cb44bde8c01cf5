"""The real model: SmolLM2-135M-Instruct against answers that transformers gave in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import monograph as mg
from tests import smollm2

DATA = Path(__file__).parent.parent / "data"
GOLDENS: list[dict[str, Any]] = json.loads((DATA / "smollm2_greedy.json").read_text())
LONG: list[dict[str, Any]] = json.loads((DATA / "long_prompt_top10.json").read_text())


@pytest.fixture(scope="module")
def engine() -> Iterator[mg.Engine]:
    with mg.load(str(smollm2.path()), device="cpu", dtype="float32") as loaded:
        yield loaded


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["prompt"][:30])
def test_greedy_answers_token_for_token(engine: mg.Engine, golden: dict[str, Any]) -> None:
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": golden["prompt"]}])
    assert ids == golden["prompt_ids"]
    answer = engine.generate(ids, max_new_tokens=len(golden["greedy_ids"]))
    assert answer.token_ids == golden["greedy_ids"]
    assert answer.text == golden["greedy_text"]


@pytest.mark.parametrize("golden", GOLDENS[:3], ids=lambda golden: golden["prompt"][:30])
def test_first_logits(engine: mg.Engine, golden: dict[str, Any]) -> None:
    top = engine.logits(golden["prompt_ids"])[-1].topk(10)
    assert top.indices.tolist() == golden["first_top10_ids"]
    torch.testing.assert_close(top.values, torch.tensor(golden["first_top10_logits"]), rtol=0, atol=2e-3)


@pytest.mark.parametrize("golden", LONG, ids=lambda golden: str(golden["num_tokens"]))
def test_long_prompts(engine: mg.Engine, golden: dict[str, Any]) -> None:
    """Thousands of positions: RoPE phases, the order of chunks and the cache over all of them."""
    ids = engine.tokenizer.encode((DATA / "alice.txt").read_text())[: golden["num_tokens"]]
    answer = engine.generate(ids, max_new_tokens=1)
    assert answer.token_ids == golden["top10_ids"][:1]
    top = engine.arena.view("logits").topk(10)
    assert top.indices.tolist() == golden["top10_ids"]
    torch.testing.assert_close(top.values, torch.tensor(golden["top10_logits"]), rtol=0, atol=5e-3)
