"""monograph as it is compared: loaded by monograph.load, judged and timed as bench/decode.py does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import monograph as mg
from bench.systems.system import Judged, Task, Timed


class MonographEngine:
    """One engine, one arena, one captured step for all lengths.

    Args:
        task: What to load.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._engine = mg.load(task.model, device=task.device, dtype=task.dtype, max_seq_len=task.max_seq_len)

    def answer(self, ids: list[int], count: int, on_token: Callable[[int], None]) -> None:
        """Answer greedily."""
        for chunk in self._engine.stream(ids, count, sampling=mg.Sampling(temperature=0.0)):
            for token in chunk.token_ids:
                on_token(token)

    def judge(self, length: int) -> Judged:
        """Fill the cache, and check the graph against single launches and these against fp32."""
        from bench.kv_rows import fill_cache
        from bench.step import Step

        self._step = step = Step(self._engine._decoder)
        facts: dict[str, Any] = {"max_seq_len": step.max_seq_len, "graphs": 1 if step.device.type == "cuda" else 0}
        if not 1 <= length <= step.max_seq_len:
            return Judged(f"length outside 1..{step.max_seq_len:,}", facts)
        step.settle()
        fill_cache(step.arena, step.config, length - 1)
        verdict = step.check(length)
        facts["capture_ms"] = getattr(step.runner, "capture_ms", None)
        judged = {"error": verdict.error, "plain_error": verdict.plain_error, "argmax_agrees": verdict.argmax_agrees}
        return Judged(str(verdict), facts | judged)

    def time(self, length: int) -> Timed:
        """Time replays in batches."""
        timing = self._step.time(length, self._task.replays, alone=1)
        return Timed(timing.batched, timing.mean_seq_len)
