"""The terminal: a conversation line by line, answers streamed as they are made, Ctrl-C and Ctrl-D as people expect.

Ctrl-C during an answer ends that answer only; what was said of it stays in the conversation. At the prompt the first
Ctrl-C asks, a second one leaves. Ctrl-D leaves.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from monograph.errors import MonographError

if TYPE_CHECKING:
    from monograph.chat.commands import Prompt
    from monograph.model.generate import Stats

PROMPT = "> "
INTERRUPTED = 130
# A second Ctrl-C this soon after the first is the same impatience, not a new wish.
UNWIND_S = 1.0
TICK_S = 0.1
LOAD_LINE_AFTER_S = 0.5
_CONTROL = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Drop the control characters (C0, DEL, C1) through which text could steer a terminal; newline and tab stay."""
    return text.translate(_CONTROL)


def complain(message: object) -> None:
    """Write one line about a fault to stderr."""
    line = " ".join(printable(str(message)).split())
    print(f"monograph: {line}", file=sys.stderr, flush=True)


def show(pieces: Iterable[str]) -> None:
    """Write pieces of an answer as they come, and end the line, also when the answer is cut short."""
    last = "\n"
    try:
        for piece in pieces:
            text = printable(piece)
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()
                last = text[-1]
    finally:
        if last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()


def show_stats(stats: Stats) -> None:
    """Write what an answer took to stderr, in a line."""
    reused = f" ({stats.reused_tokens:,} reused)" if stats.reused_tokens else ""
    print(
        f"prompt {stats.prompt_tokens:,} tokens{reused}, first token {stats.first_token_ms:,.1f} ms, "
        f"answer {stats.completion_tokens:,} tokens at {stats.tokens_per_s:,.1f} tokens/s",
        file=sys.stderr,
        flush=True,
    )


class LoadLine:
    """Says on stderr, in one line that is written over and over and wiped at the end, how far a load is.

    Nothing shows where the weights are read in no time.
    """

    def __init__(self) -> None:
        self._started = self._next = 0.0
        self._shown = False

    def __enter__(self) -> LoadLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            print(end="\r\x1b[K", file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        """Take note of bytes read so far and in all."""
        now = time.monotonic()
        if not self._started:
            self._started, self._next = now, now + LOAD_LINE_AFTER_S
        if now < self._next:
            return
        self._next = now + TICK_S
        self._shown = True
        speed = done / 1e9 / (now - self._started)
        line = f"weights: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed:.1f} GB/s"
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)


class Interrupts:
    """Turns Ctrl-C into a KeyboardInterrupt inside ``span`` only, and there once while the first one unwinds.

    So a second Ctrl-C in a hurry cannot strike the code that winds an answer up.
    """

    def __init__(self) -> None:
        self._inside = False
        self._raised_at = -UNWIND_S

    def __enter__(self) -> Interrupts:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Where Ctrl-C interrupts."""
        self._raised_at = -UNWIND_S
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._inside and now - self._raised_at >= UNWIND_S:
            self._raised_at = now
            raise KeyboardInterrupt


@contextlib.contextmanager
def _ticks() -> Iterator[None]:
    """Wake a blocking read now and then.

    Python notices a signal when a system call is interrupted; one that comes between the prompt and the read that
    waits for keys would go unnoticed until the next key.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return
    previous = signal.signal(signal.SIGALRM, lambda signum, frame: None)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def converse(prompt: Prompt, *, stats: bool = False) -> int:
    """Talk until the user leaves.

    Args:
        prompt: Takes the lines.
        stats: Whether to say after each answer what it took.

    Returns:
        The exit status: 0 after Ctrl-D, 130 after a second Ctrl-C at the prompt.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it gives input() line editing and history
    asked = False
    with Interrupts() as interrupts:
        while True:
            try:
                with interrupts.span(), _ticks():
                    line = input(PROMPT)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                if asked:
                    return INTERRUPTED
                asked = True
                print("(Ctrl-C again or Ctrl-D to leave)")
                continue
            asked = False
            if line.strip():
                _turn(prompt, line, interrupts, stats)


def _turn(prompt: Prompt, line: str, interrupts: Interrupts, stats: bool) -> None:
    with contextlib.ExitStack() as cleanup:
        try:
            with interrupts.span():
                pieces = prompt.take(line)
                if pieces is None:
                    return
                cleanup.callback(pieces.close)
                show(pieces)
        except KeyboardInterrupt:
            return
        except MonographError as error:
            complain(error)  # the turn left no trace in the conversation, which goes on
            return
    completion = prompt.chat.completion
    if completion is not None and completion.finish_reason == "length":
        full = "max_seq_len is reached: /undo takes turns back, --on-full trim drops the oldest"
        print(f"({full if prompt.chat.is_full else 'cut off: /continue goes on'})", file=sys.stderr, flush=True)
    if stats and completion is not None:
        show_stats(completion.stats)
