"""Systems that can only be asked for whole answers: timed by what a longer answer takes more than a short one.

They fill their own cache, by reading a prompt of the length, so it does not hold the rows of the others; nothing about
the time depends on what the rows say. They are judged by their first token after the prompt of the start-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from bench.systems.system import BATCH, Judged, Task, Timed

ROUNDS = 5


class Generating:
    """What such systems share.

    Args:
        task: What to load.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._room = max([*task.lengths, len(task.prompt)]) + 5 * BATCH  # prompt and the longest answer
        self._load()

    def answer(self, ids: list[int], count: int, on_token: Callable[[int], None]) -> None:
        """Answer greedily: once with one token, so that it is known when it came, then whole."""
        on_token(self._generate(ids, 1)[0])
        for token in self._generate(ids, count)[1:]:
            on_token(token)

    def judge(self, length: int) -> Judged:
        """Compare the first token after the prompt of the start-up with the reference."""
        import torch

        from bench.judge import token_fault

        token, want = self._generate(self._task.prompt, 1)[0], torch.load(self._task.reference)["prompt"]
        facts = {"max_seq_len": self._room, "argmax_agrees": token == int(want.argmax())}
        facts["judged_at"] = len(self._task.prompt)
        return Judged(token_fault(token, want) or "ok", facts)

    def time(self, length: int) -> Timed:
        """Time answers of one token and of many in turn; the first of each warms up."""
        ids = [(5 + 37 * i) % 1000 for i in range(max(length - 1, 1))]
        more = 4 * BATCH
        spans = []
        for _ in range(ROUNDS + 1):
            took = []
            for count in (1, 1 + more):
                started = time.perf_counter()
                tokens = self._generate(ids, count)
                took.append((time.perf_counter() - started) * 1e3)
                if len(tokens) != count:
                    raise RuntimeError(f"{len(tokens)} tokens came, expected {count}")
            spans.append((took[1] - took[0]) / more)
        return Timed(spans[1:], len(ids) + 1 + (more - 1) / 2)

    def _load(self) -> None:
        raise NotImplementedError

    def _generate(self, ids: list[int], count: int) -> list[int]:
        """The first ``count`` tokens of a greedy answer that no stop token ends."""
        raise NotImplementedError


class Vllm(Generating):
    """vLLM in this process, by its offline interface as documented. Never run by its author."""

    def _load(self) -> None:
        vllm: Any = import_module("vllm")
        self._sampling = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=self._task.model, dtype=self._task.dtype, max_model_len=self._room, skip_tokenizer_init=True
        )

    def _generate(self, ids: list[int], count: int) -> list[int]:
        how = self._sampling(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        (answer,) = self._engine.generate([{"prompt_token_ids": ids}], how, use_tqdm=False)
        return list(answer.outputs[0].token_ids)


class Sglang(Generating):
    """SGLang in this process, by its offline engine as documented. Never run by its author."""

    def _load(self) -> None:
        sglang: Any = import_module("sglang")
        self._engine = sglang.Engine(
            model_path=self._task.model, dtype=self._task.dtype, context_length=self._room, skip_tokenizer_init=True
        )

    def _generate(self, ids: list[int], count: int) -> list[int]:
        how = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        answer = self._engine.generate(input_ids=ids, sampling_params=how)
        return list(answer["output_ids"])
