"""An engine without a model, for tests of the surfaces: the public API, and answers that follow from the prompt.

Run as a program, it is the ``monograph`` command with this engine behind it, on the controlling terminal that standard
input is.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import monograph
from monograph.model.chat import Chat, ChatState
from monograph.model.generate import Chunk, Completion, FinishReason, Stats
from monograph.model.transcript import Transcript
from monograph.model.turn import OnFull

END = 0


class FakeTokenizer:
    """Characters are tokens; the template puts each message on a line."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, tokenize: bool = True
    ) -> list[int] | str:
        text = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        return self.encode(text) if tokenize else text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def id_to_token(self, token_id: int) -> str | None:
        return chr(token_id)


class FakeStream:
    """Pieces of one answer."""

    def __init__(self, prompt: str, max_new_tokens: int | None, sampling: monograph.Sampling | None) -> None:
        self._prompt, self._sampling = prompt, sampling
        self._reason: FinishReason = "cancelled"
        self._token_ids: list[int] = []
        self._text = ""
        self._pieces = self._make(max_new_tokens)

    def _make(self, max_new_tokens: int | None) -> Iterator[Chunk]:
        reason: FinishReason = "stop"
        for piece in answer(self._prompt.rsplit(": ", 1)[-1], self._prompt):
            if max_new_tokens is not None and len(self._token_ids) == max_new_tokens:
                reason = "length"
                break
            self._token_ids.append(len(piece) + 1)
            self._text += piece
            yield Chunk([len(piece) + 1], piece)
        self._reason = reason

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._pieces)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._pieces.close()  # type: ignore[attr-defined]

    @property
    def completion(self) -> Completion:
        settings = (self._sampling or monograph.Sampling()).resolve({"seed": 0})
        stats = Stats(len(self._prompt), 0, len(self._token_ids), 12.5, 80.0, settings)
        return Completion(list(self._token_ids), self._text, self._reason, stats)


def answer(question: str, prompt: str) -> Iterator[str]:
    """The pieces of an answer, chosen by the question."""
    if question == "never":  # an answer that ends only when it is interrupted
        for i in itertools.count():
            yield f"{i} "
            threading.Event().wait(0.001)
    elif question == "prefill":  # a first token that does not come
        print("(reading)", flush=True)
        while True:
            threading.Event().wait(0.01)
    elif question == "too long":
        raise monograph.PromptError("prompt of 9,000 tokens exceeds\nmax_seq_len 8,192")
    elif question == "not finite":
        yield "half an "
        raise monograph.NumericsError("the logits are not finite")
    elif question == "interrupt":
        yield "half an "
        raise KeyboardInterrupt
    elif question == "steer":
        yield from ("a\x1b", "[2J\x07b", "\x9b31m\x7fc\r\n\td\x85é")
    elif question == "history":
        yield prompt.replace("\n", " | ")
    elif question == "crash":
        raise ZeroDivisionError("a bug")
    else:
        yield from ("You said: ", question, ".")


class FakeCapacity:
    """Room for any conversation of a test."""

    max_seq_len = 1 << 20


class FakeEngine:
    """What ``monograph.load`` returns here; remembers what it was asked."""

    capacity = FakeCapacity()

    def __init__(self, chat_template: str | None = "a template", **options: Any) -> None:
        self.options = options
        self.tokenizer = FakeTokenizer(chat_template)
        self.asked: list[dict[str, Any]] = []
        self.closed = False

    def stream(self, prompt: str | Sequence[int], **options: Any) -> FakeStream:
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        self.asked.append({"prompt": text, "was_ids": not isinstance(prompt, str), **options})
        return FakeStream(text, options.get("max_new_tokens"), options.get("sampling"))

    def chat(self, system: str | None = None, *, on_full: OnFull = "length") -> Chat:
        return Chat(self, system, on_full=on_full)  # type: ignore[arg-type]

    def save_chat(self, state: ChatState, path: str | Path) -> None:
        Path(path).write_text(json.dumps(state.messages))

    def load_chat(self, path: str | Path) -> Chat:
        try:
            messages = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise monograph.CheckpointError(f"{path}: No such file or directory") from None
        return Chat.of_state(self, ChatState(messages, "length", Transcript(), None))  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run_command(arguments: Sequence[str]) -> int:
    """The ``monograph`` command with a fake engine."""
    from monograph.cli import main

    setattr(monograph, "load", lambda model, **options: FakeEngine(**options))  # noqa: B010  # mypy knows the real one
    return main(arguments)


if __name__ == "__main__":
    if sys.stdin.isatty():
        import fcntl
        import termios

        fcntl.ioctl(sys.stdin, termios.TIOCSCTTY, 0)  # so that Ctrl-C typed there becomes a signal here
    sys.exit(run_command(sys.argv[1:]))
