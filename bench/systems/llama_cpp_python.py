"""llama.cpp through its Python binding: tokens one by one from a GGUF file of the same weights.

It fills its cache by reading a prompt of the length, so the cache does not hold the rows of the others; it is judged by
its logits after the prompt of the start-up. Its keys and values are float16, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from bench.systems.system import BATCH, Judged, Task, Timed


class LlamaCpp:
    """One context, as long as the longest length.

    Args:
        task: What to load: its ``gguf``.
    """

    def __init__(self, task: Task) -> None:
        if not task.gguf:
            raise ValueError(f"{task.model}: llama.cpp needs a GGUF file")
        self._task = task
        self._room = max([*task.lengths, len(task.prompt)]) + 2 * BATCH
        self._llama: Any = import_module("llama_cpp").Llama(
            task.gguf,
            n_gpu_layers=-1 if task.device.startswith("cuda") else 0,
            n_ctx=self._room,
            flash_attn=True,
            verbose=False,
        )

    def answer(self, ids: list[int], count: int, on_token: Callable[[int], None]) -> None:
        """Answer greedily."""
        tokens = self._tokens(ids)
        for _ in range(count):
            on_token(next(tokens))

    def judge(self, length: int) -> Judged:
        """Compare its logits after the prompt of the start-up with the reference."""
        import numpy as np
        import torch

        from bench.judge import CAP, relative_error, token_fault

        self._llama.reset()
        self._llama.eval(self._task.prompt)
        want = torch.load(self._task.reference)["prompt"]
        raw = self._llama._ctx.get_logits_ith(-1)
        got = torch.from_numpy(np.ctypeslib.as_array(raw, shape=(len(want),)).copy())
        error = relative_error(got, want)
        fault = token_fault(int(got.argmax()), want)
        if not error <= CAP:
            fault = f"error {error:.1e} above {CAP:.1e}"
        facts = {"max_seq_len": self._room, "error": error, "argmax_agrees": int(got.argmax()) == int(want.argmax())}
        return Judged(fault or "ok", facts | {"judged_at": len(self._task.prompt)})

    def time(self, length: int) -> Timed:
        """Time batches of tokens in a row. Between them the prompt is asked anew, which reads its last token only."""
        import torch

        from bench.common import Clock

        # The first token comes with the prompt; those that are timed have one more row each.
        ids = [(5 + 37 * i) % self._llama.n_vocab() for i in range(max(length - 1, 1))]
        clock = Clock(torch.device("cpu"))  # every token waits for the device
        for _ in range(2 + -(-self._task.replays // BATCH)):
            tokens = self._tokens(ids)
            next(tokens)
            with clock.span():
                for _ in range(BATCH):
                    next(tokens)
        return Timed([span / BATCH for span in clock.times_ms()[2:]], len(ids) + 1 + (BATCH - 1) / 2)

    def _tokens(self, ids: list[int]) -> Iterator[int]:
        tokens: Iterator[int] = self._llama.generate(ids, temp=0.0, repeat_penalty=1.0)
        return tokens
