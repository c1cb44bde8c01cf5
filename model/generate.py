"""One answer: prefill, then decode steps until something ends it; tokens and text come out as they are made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from monograph.errors import NumericsError
from monograph.model.program import Program, run
from monograph.model.sampling import Sampling
from monograph.model.state import Halted, StepState

FinishReason = Literal["stop", "length", "cancelled"]
_REASONS: dict[Halted, FinishReason] = {
    Halted.STOP: "stop",
    Halted.LENGTH: "length",
    Halted.CANCELLED: "cancelled",
}


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
        program: The launches.
        state: The step state they read.
        ids: The prompt, at least one token.
        reused: Its first tokens that the KV cache holds already; fewer than ``len(ids)``.
        position_limit: Prompt and answer together end here.
        stop_ids: Token ids that end the answer.
        sampling: Effective settings.
    """

    def __init__(
        self,
        program: Program,
        state: StepState,
        ids: Sequence[int],
        *,
        reused: int,
        position_limit: int,
        stop_ids: Sequence[int],
        sampling: Sampling,
    ) -> None:
        assert 0 <= reused < len(ids) < position_limit, (reused, len(ids), position_limit)
        self._program, self._state = program, state
        self._ids, self._reused, self._sampling = ids, reused, sampling
        self._position_limit, self._stop_ids = position_limit, stop_ids
        self.token_ids: list[int] = []
        self.halted = Halted.RUNNING
        self._started = self._first = self._last = 0.0

    def tokens(self) -> Iterator[int]:
        """Run the answer. Closing the iterator leaves it where it is.

        Yields:
            Each token as it reaches the host, the stop token included.

        Raises:
            NumericsError: A logit was not finite.
        """
        self._started = time.perf_counter()
        self._state.begin(self._ids, self._reused, self._position_limit, self._stop_ids, self._sampling)
        end = len(self._ids)
        position = 0
        while position < end and self.halted is Halted.RUNNING:
            run(self._program.prefill)
            position, self.halted = self._state.status()
        while True:
            self._raise_if_not_finite(position)
            if position < end:
                return
            token = self._state.token(position)
            self.token_ids.append(token)
            self._last = time.perf_counter()
            self._first = self._first or self._last
            yield token
            if self.halted is not Halted.RUNNING:
                return
            end = position + 1
            run(self._program.decode)
            position, self.halted = self._state.status()

    def _raise_if_not_finite(self, position: int) -> None:
        if self.halted is Halted.NOT_FINITE:
            raise NumericsError(
                f"the logits after token {position + 1} are not finite; the weights may be damaged, or the dtype too "
                f"narrow for this model (bfloat16 or float32 have a wider range than float16: pass dtype=)"
            )

    def finish_reason(self) -> FinishReason:
        """Why the answer ended; "cancelled" when nothing but the caller ended it."""
        return _REASONS.get(self.halted, "cancelled")

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
