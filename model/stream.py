"""An answer as an iterator of pieces, with its text, its end and what it leaves in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from types import TracebackType

from monograph.model.generate import Answer, Chunk, Completion, FinishReason
from monograph.model.text_stream import TextStream


class Stream(Iterator[Chunk]):
    """Pieces of one answer as they are made. The answer starts at the first ``next``.

    Args:
        answer: The run.
        text: Turns its tokens into text and watches for stop strings.
        enter: Called when the answer starts: takes hold of the engine.
        check: Called before each further token; raises if the engine is gone.
        leave: Called when it has ended, was closed or failed, with the answer and whether the KV cache can be trusted.
    """

    def __init__(
        self,
        answer: Answer,
        text: TextStream,
        enter: Callable[[], None],
        check: Callable[[], None],
        leave: Callable[[Answer, bool], None],
    ) -> None:
        self._answer, self._text = answer, text
        self._ended: FinishReason | None = None
        self._pieces = _pieces(answer, text, enter, check, leave)

    def __next__(self) -> Chunk:
        try:
            return next(self._pieces)
        except StopIteration:
            self._ended = self._ended or ("stop" if self._text.stopped else self._answer.finish_reason)
            raise

    def close(self) -> None:
        """Cancel the answer. What was made so far stays available through ``completion``."""
        self._pieces.close()
        self._ended = self._ended or "cancelled"

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def completion(self) -> Completion:
        """The answer so far; final once the stream has ended. ``finish_reason`` is "cancelled" until then."""
        return Completion(
            token_ids=list(self._answer.token_ids),
            text=self._text.text,
            finish_reason=self._ended or "cancelled",
            stats=self._answer.stats(),
        )


def _pieces(
    answer: Answer,
    text: TextStream,
    enter: Callable[[], None],
    check: Callable[[], None],
    leave: Callable[[Answer, bool], None],
) -> Generator[Chunk, None, None]:
    def show(token: int) -> str:
        # The stop token ends the answer and is no part of its text, whatever the tokenizer would show for it.
        return "" if answer.finish_reason == "stop" else text.push([token])

    enter()
    trusted = False
    try:
        with closing(answer.tokens()) as tokens:  # closed before the engine is let go: nothing is in flight then
            for token in tokens:
                ids, piece = [token], show(token)
                while answer.ready() and not text.stopped:  # the reader was away: one piece for all that came
                    ids.append(next(tokens))
                    piece += show(ids[-1])
                trusted = True
                yield Chunk(ids, piece)
                check()
                trusted = False
                if text.stopped:
                    break
        trusted = True
        rest = text.finish()
        if rest:
            yield Chunk([], rest)
    except GeneratorExit:
        text.finish()  # what was held back belongs to the text of the cut answer
        raise
    finally:
        leave(answer, trusted)


def collect(stream: Stream) -> Completion:
    """Run a stream to its end."""
    for _ in stream:
        pass
    return stream.completion
