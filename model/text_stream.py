"""The text of an answer while it is being made: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from monograph.errors import ConfigError, EngineError
from monograph.model.incremental_decoder import IncrementalDecoder, Piece

if TYPE_CHECKING:
    from monograph.model.tokenizer import Tokenizer


class TextStream:
    """Turns ids into text as they come.

    Without stop strings, what ``push`` and ``finish`` return adds up to ``tokenizer.decode`` of all ids. With them, it
    adds up to that text before the first place where a stop string begins, however the ids came. Text is held back only
    while it may be the beginning of a stop string, or while later ids may still change it.

    Where a stop string is complete but a longer one that began earlier may still be on its way, the stream waits for
    that one; so the answer does not depend on how its text was cut into tokens.

    Args:
        tokenizer: Whose ids they are.
        stop: Strings that end the text.

    Attributes:
        stopped: Whether a stop string was found; later ids are ignored then.
        stop_string: The one that was found.
        tokens_until_stop: How many ids it took to get the text before the stop string; the last of them may hold the
            stop string's beginning too. None until it was found.
        tokens_through_stop: How many ids it took to complete the stop string.

    Raises:
        ConfigError: ``stop`` is not a list of strings, or one is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self.stop_string: str | None = None
        self.tokens_until_stop: int | None = None
        self.tokens_through_stop: int | None = None
        self._stops = checked_stop(stop)
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = IncrementalDecoder(tokenizer)
        self._released: list[str] = []
        self._num_released = 0
        self._held = ""  # the text from _num_released on
        self._ends: deque[tuple[int, int]] = deque()  # (characters of text, ids that they took), for the held text
        self._finished = False

    @property
    def text(self) -> str:
        """All the text that was returned so far."""
        return "".join(self._released)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids.

        Returns:
            The text that can be shown now; may be empty.

        Raises:
            PromptError: An id is negative.
            EngineError: The stream was finished.
        """
        if self._finished:
            raise EngineError("push: the stream was finished; a new answer takes a new TextStream")
        if self.stopped:
            return ""
        self._hold(piece for token_id in ids for piece in self._decoder.push(token_id))
        return self._release(final=False)

    def finish(self) -> str:
        """End the answer.

        Returns:
            The text that was held back and belongs to the answer after all.
        """
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        self._hold(self._decoder.finish())
        return self._release(final=True)

    def _hold(self, pieces: Iterable[Piece]) -> None:
        texts = [self._held]
        end = self._num_released + len(self._held)
        for num_ids, text in pieces:
            texts.append(text)
            end += len(text)
            self._ends.append((end, num_ids))
        self._held = "".join(texts)

    def _release(self, *, final: bool) -> str:
        start, stop_string = _first_stop(self._held, self._stops)
        hold_from = len(self._held) if final else self._possible_stop()
        if stop_string and start <= hold_from:
            self._stop_at(start, stop_string)
            out, self._held = self._held[:start], ""
        else:
            out, self._held = self._held[:hold_from], self._held[hold_from:]
        self._num_released += len(out)
        while self._ends and self._ends[0][0] < self._num_released:
            self._ends.popleft()
        if out:
            self._released.append(out)
        return out

    def _possible_stop(self) -> int:
        """The first place in the held text whose rest begins a stop string, or is one."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            rest = self._held[start:]
            if any(stop.startswith(rest) for stop in self._stops):
                return start
        return len(self._held)

    def _stop_at(self, start: int, stop_string: str) -> None:
        self.stopped, self.stop_string = True, stop_string
        self.tokens_until_stop = self._num_ids_of(self._num_released + start)
        self.tokens_through_stop = self._num_ids_of(self._num_released + start + len(stop_string))

    def _num_ids_of(self, num_chars: int) -> int:
        return next(num_ids for end, num_ids in self._ends if end >= num_chars) if num_chars else 0


def checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Check stop strings.

    Raises:
        ConfigError: Names the argument and the entry.
    """
    if isinstance(stop, str):
        raise ConfigError(f"stop: expected a list of strings, got the string {stop!r}; write [{stop!r}]")
    if not isinstance(stop, Sequence):
        raise ConfigError(f"stop: expected a list of strings, got {type(stop).__name__}")
    for i, string in enumerate(stop):
        if not isinstance(string, str):
            raise ConfigError(f"stop[{i}]: expected a string, got {type(string).__name__}")
        if not string:
            raise ConfigError(f"stop[{i}]: expected at least one character, got an empty string")
    return tuple(dict.fromkeys(stop))


def _first_stop(text: str, stops: Iterable[str]) -> tuple[int, str]:
    """Where a stop string first begins, and which; of several that begin there, the shortest."""
    found = [(start, len(stop), stop) for stop in stops if (start := text.find(stop)) >= 0]
    start, _, stop = min(found, default=(-1, 0, ""))
    return start, stop
