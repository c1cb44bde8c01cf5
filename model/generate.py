"""One answer: prefill, then decode steps until something ends it; tokens and text come out as they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from monograph.errors import ConfigError
from monograph.model.runner import Runner
from monograph.model.sampling import Sampling
from monograph.model.state import StepState

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Stats:
    """What an answer took.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Those of them whose keys and values were in the cache already.
        completion_tokens: Tokens of the answer, the stop token included.
        first_token_ms: From the call to the first token on the host.
        decode_ms: From the first token to the last.
        sampling: The settings in force, the seed included.
    """

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    first_token_ms: float
    decode_ms: float
    sampling: Sampling

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of the prompt that were read for this answer: all that were not reused."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first over the time they took; 0.0 when there were none."""
        return (self.completion_tokens - 1) / (self.decode_ms / 1e3) if self.decode_ms > 0 else 0.0


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    Attributes:
        token_ids: The answer's tokens, the stop token included; with a stop string, up to the token that completed it.
        text: The answer's text, without stop token and stop string.
        finish_reason: "stop" (a stop token or string), "length" (max_new_tokens or the arena's end) or "cancelled".
        stats: What it took.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer: the tokens since the last piece, and the text that became certain with them.

    Text can lag behind: bytes of an unfinished character and the beginning of a possible stop string are held back.
    """

    token_ids: list[int]
    text: str


class Answer:
    """One run of the program over a prompt, token by token.

    Args:
        runner: Runs the passes.
        state: The step state they read.
        ids: The prompt, at least one token.
        reused: Its first tokens that the KV cache holds already, fewer than ``len(ids)``; or what tells their number,
            asked when the answer starts: another one may have used the cache by then.
        position_limit: Prompt and answer together end here.
        chunk_rows: Prompt tokens of one prefill pass.
        stop_ids: Token ids that end the answer.
        sampling: Effective settings.
        answered: How many of the last ``ids`` are the answer's beginning. Where the cache holds all but the newest of
            them, the answer goes on with a decode step, to the bit as if it had never stopped.

    Attributes:
        token_ids: The answer so far, without what it began with.
        finish_reason: Why it ended; None while it has not.
    """

    def __init__(
        self,
        runner: Runner,
        state: StepState,
        ids: list[int],
        *,
        reused: int | Callable[[], int],
        position_limit: int,
        chunk_rows: int,
        stop_ids: Sequence[int],
        sampling: Sampling,
        answered: int = 0,
    ) -> None:
        assert 0 < len(ids) < position_limit, (len(ids), position_limit)
        assert 0 <= answered < len(ids), (answered, len(ids))
        self._runner, self._state = runner, state
        self._ids, self._sampling = ids, sampling
        self._ask_reused = reused if callable(reused) else lambda: reused
        self._reused = 0
        self._position_limit, self._chunk_rows, self._stop_ids = position_limit, chunk_rows, tuple(stop_ids)
        self._answered = answered
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._started = self._first = self._last = 0.0

    def tokens(self) -> Generator[int, None, None]:
        """Run the answer, ahead of its reader where that pays. Closing the iterator cancels what was run ahead.

        Yields:
            Each token as it reaches the host, the stop token included.

        Raises:
            NumericsError: A logit was not finite.
        """
        self._started = time.perf_counter()
        self._reused = self._ask_reused()
        assert 0 <= self._reused < len(self._ids), (self._reused, len(self._ids))
        try:
            with self._runner.context():
                self._state.begin(
                    self._ids, self._reused, self._position_limit, self._stop_ids, self._sampling, self._answered
                )
                submitted = self._prefill()
            ahead = _RunAhead(self._runner, submitted, self._position_limit - 1)
            newest = 0  # position of the newest token that was seen in the outbox
            for position in range(len(self._ids), self._position_limit):
                ahead.keep(position)
                if newest < position:
                    newest = self._state.status()[0]
                if newest < position:
                    self._runner.wait(position)
                    newest = self._state.status()[0]
                    ahead.awoke(newest)
                token = self._state.token(position)
                self.token_ids.append(token)
                self._last = time.perf_counter()
                self._first = self._first or self._last
                if token in self._stop_ids:
                    self.finish_reason = "stop"
                elif position + 1 == self._position_limit:
                    self.finish_reason = "length"
                yield token
                if self.finish_reason is not None:
                    return
        finally:
            self._state.cancel()
            self._runner.drain()

    def _prefill(self) -> int:
        """Submit the prompt. Returns the position of the newest token that a submitted pass will make."""
        if self._answered and self._reused == len(self._ids) - 1:
            return self._reused  # the first decode step reads the newest token, as it would have done then
        for _ in range(self._reused, len(self._ids), self._chunk_rows):
            self._runner.prefill()
        return len(self._ids)

    def ready(self) -> bool:
        """Whether the next token has reached the host already, so that asking for it waits for nothing."""
        next_position = len(self._ids) + len(self.token_ids)
        return self.finish_reason is None and self._state.status()[0] >= next_position

    def cached_ids(self) -> list[int]:
        """The tokens whose keys and values are in the cache: all but the newest, which no launch has read yet."""
        return [*self._ids, *self.token_ids][:-1]

    def stats(self) -> Stats:
        """What the answer has taken so far."""
        return Stats(
            prompt_tokens=len(self._ids),
            reused_tokens=self._reused,
            completion_tokens=len(self.token_ids),
            first_token_ms=(self._first - self._started) * 1e3,
            decode_ms=(self._last - self._first) * 1e3,
            sampling=self._sampling,
        )


def check_max_new_tokens(value: object) -> None:
    """Refuse what ``max_new_tokens`` cannot be.

    Raises:
        ConfigError: Neither None nor an integer of at least 1.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"max_new_tokens: expected an integer of at least 1, got {value!r}")


class _RunAhead:
    """Keeps decode steps in flight ahead of the tokens that are read.

    Steps are submitted several at a time, a quarter of those in flight: a thread that is busy in Python has to be asked
    for the interpreter's lock less often, and never for a single step.

    Args:
        runner: Runs them.
        submitted: Position of the newest token that a submitted pass will make.
        last: That of the last token of the answer.
    """

    def __init__(self, runner: Runner, submitted: int, last: int) -> None:
        self._runner, self._submitted, self._last = runner, submitted, last
        self._steps, self._most = runner.run_ahead, runner.max_run_ahead

    def keep(self, position: int) -> None:
        """Have enough in flight for a reader who asks for the token at ``position``."""
        target = min(position + self._steps, self._last)
        count = target - self._submitted
        if count > 0 and (count >= self._steps // 4 or target == self._last):
            self._runner.decode(count)
            self._submitted = target

    def awoke(self, newest: int) -> None:
        """Learn what was left when the host had waited and found the token at ``newest``: little of it means that the
        next wait, no longer than this, could leave the machine idle."""
        if self._submitted < self._last and self._submitted - newest < self._steps // 3:
            self._steps = min(2 * self._steps, self._most)
