"""A model in memory that turns token ids into token ids: arena, program, and what runs it. No text, no files."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import torch

from monograph.arena import Arena, HostMemory, Layout
from monograph.model.config import ModelConfig
from monograph.model.generate import Answer
from monograph.model.layout import Capacity, plan_host_layout
from monograph.model.program import build_program, run, with_tiles
from monograph.model.runner import LaunchRunner, Runner
from monograph.model.sampling import Sampling
from monograph.model.state import StepState

Result = TypeVar("Result")


class Decoder:
    """One sequence, its KV cache, and the passes that extend it.

    Args:
        config: The model.
        capacity: What ``layout`` was planned for.
        layout: The memory map.
        device: Where to allocate it.
        fill: Writes the weight slots of the arena that it is given.
        debug: On a GPU, check guards and addresses before every replay: slow, and finds what strays.
        tiles: Of decode kernels by use, where they are not to choose their own.

    Attributes:
        arena: The memory.
        program: The launches over it.
        runner: What runs them: launch by launch on a CPU, captured graphs on a GPU.
        arena_s: Seconds that allocating took.
        weights_s: Seconds that ``fill`` took.
        runner_s: Seconds until the runner was ready beside those: on a GPU, for the kernels and their capture.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        layout: Layout,
        device: torch.device,
        fill: Callable[[Arena], None],
        debug: bool = False,
        tiles: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self.config, self.capacity = config, capacity
        started = time.perf_counter()
        self.arena = Arena(layout, device)
        try:
            self._host = HostMemory(plan_host_layout(capacity), device)
            self.state = StepState(self.arena, self._host)
            self.program = with_tiles(build_program(config, capacity, self.arena, self._host), tiles or {})
            self.arena_s = time.perf_counter() - started
            self.runner = self._make_runner(fill, debug)
            self.runner_s = time.perf_counter() - started - self.arena_s - self.weights_s
        except BaseException:
            self.close()
            raise
        self._cached: list[int] = []  # the tokens whose keys and values the cache holds, from position 0

    def _make_runner(self, fill: Callable[[Arena], None], debug: bool) -> Runner:
        def timed_fill() -> None:
            started = time.perf_counter()
            fill(self.arena)
            self.weights_s = time.perf_counter() - started

        if self.arena.device.type == "cpu":
            timed_fill()
            return LaunchRunner(self.program, self.state)
        from monograph.model.graph import GraphRunner

        return GraphRunner(self.program, self.state, self.arena, timed_fill, debug)

    def set_tiles(self, tiles: Mapping[str, Mapping[str, int]]) -> None:
        """Give decode kernels other tiles, by use. Their variants are compiled, and no answer is under way.

        On a GPU both passes are captured anew. The KV cache is as good as before, but for last bits.
        """
        self.runner.drain()
        self.program = with_tiles(self.program, tiles)
        if isinstance(self.runner, LaunchRunner):
            return  # references have no tiles
        from monograph.model.graph import GraphRunner

        assert isinstance(self.runner, GraphRunner), self.runner
        with self.runner.context():
            self.state.halt()
        self.runner.capture_all(self.program)

    def answer(
        self,
        ids: list[int],
        *,
        reuse: bool,
        position_limit: int,
        stop_ids: Sequence[int],
        sampling: Sampling,
        answered: int = 0,
    ) -> Answer:
        """Prepare an answer; nothing runs until its tokens are asked for.

        Args:
            ids: The prompt.
            reuse: Keep the KV rows of the longest prefix that the cache holds.
            position_limit: Prompt and answer together end here.
            stop_ids: Token ids that end the answer.
            sampling: Effective settings.
            answered: How many of the last ``ids`` are the answer's beginning.
        """
        return Answer(
            self.runner,
            self.state,
            ids,
            reused=(lambda: min(self.cached_prefix(ids), len(ids) - 1)) if reuse else 0,
            position_limit=position_limit,
            chunk_rows=self.capacity.chunk_rows,
            stop_ids=stop_ids,
            sampling=sampling,
            answered=answered,
        )

    def cached_prefix(self, ids: Sequence[int]) -> int:
        """For how many leading tokens of ``ids`` the cache holds keys and values."""
        return longest_common_prefix(ids, self._cached)

    def remember(self, ids: Sequence[int]) -> None:
        """Say which tokens' keys and values the cache holds; () if it cannot be trusted."""
        self._cached = list(ids)

    def logits(self, ids: list[int], through: Literal["prefill", "decode"]) -> torch.Tensor:
        """All rows of teacher-forced logits: [len(ids), vocab_size] float32 on the CPU. See ``logits_pieces``."""
        out = torch.empty(len(ids), self.config.vocab_size, dtype=torch.float32)
        first = 0
        for piece in self.logits_pieces(ids, through):
            out[first : first + len(piece)] = piece
            first += len(piece)
        return out

    def logits_pieces(
        self, ids: list[int], through: Literal["prefill", "decode"]
    ) -> Generator[torch.Tensor, None, None]:
        """Teacher-forced logits, launch by launch, in pieces. Nothing else may run until the iterator has ended.

        Args:
            ids: At least one token, at most ``max_seq_len``.
            through: Which pass makes them.

        Yields:
            [rows, vocab_size] float32 on the CPU, at most ``logits_rows`` rows at a time, in order.
        """
        self._cached = []
        work = self._prefill_logits(len(ids)) if through == "prefill" else self._decode_logits(len(ids))
        try:
            self._beside_passes(lambda: self.state.begin_rows(ids, 0))
            while (piece := self._beside_passes(lambda: next(work, None))) is not None:
                yield piece
            self._cached = ids
        finally:
            if "state" in self.__dict__:  # closed meanwhile: nothing to halt
                self._beside_passes(self.state.halt)

    def _beside_passes(self, work: Callable[[], Result]) -> Result:
        """Do work in order with the passes. Not inference mode: a caller may go on computing with the result."""
        with self.runner.context(), torch.no_grad():
            return work()

    def _prefill_logits(self, count: int) -> Iterator[torch.Tensor]:
        chunk, piece = self.capacity.chunk_rows, self.capacity.logits_rows
        made = self.arena.view("logits_rows")
        for start in range(0, count, chunk):
            self.state.set_position(start)
            run(self.program.prefill_layers, self.runner.pdl)
            for first in range(0, min(chunk, count - start), piece):
                self.state.set_first_row(first)
                run(self.program.prefill_logits, self.runner.pdl)
                yield made[: min(piece, chunk - first, count - start - first)].to("cpu", copy=True)

    def _decode_logits(self, count: int) -> Iterator[torch.Tensor]:
        made, piece = self.arena.view("logits"), self.capacity.logits_rows
        for first in range(0, count, piece):
            rows = torch.empty(min(piece, count - first), self.config.vocab_size, dtype=torch.float32)
            for i, row in enumerate(rows):
                self.state.set_position(first + i)
                run(self.program.decode_logits, self.runner.pdl)
                row.copy_(made)
            yield rows

    def close(self) -> None:
        """End what is in flight and free everything. Twice does no harm."""
        if "runner" in self.__dict__:
            self.state.cancel()
            self.runner.drain()
        for name in ("program", "runner", "state"):
            self.__dict__.pop(name, None)
        if "_host" in self.__dict__:
            self._host.close()
        self.arena.close()


def longest_common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    limit = min(len(left), len(right))
    for i in range(limit):
        if left[i] != right[i]:
            return i
    return limit
