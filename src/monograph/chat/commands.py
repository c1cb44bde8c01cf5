"""What can be typed at the prompt of a chat: a message, or a command that begins with a slash."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monograph.errors import PromptError

if TYPE_CHECKING:
    from monograph.model.chat import Chat

HELP = """\
/undo [N]       take back the last turn, or the last N
/regenerate     answer the last message again; with a seed, by the next one
/edit N TEXT    put TEXT in the place of message N (-1: the last), forget what followed, and answer
/continue       go on with an answer that was cut off
/history        show the messages by number
/save FILE      write the conversation to a file, with all that the model has read
/load FILE      go on with a conversation from a file
/help           show this
Ctrl-C ends an answer, Ctrl-D leaves. A message that begins with a slash is typed with two."""
_EXCERPT = 60
_SEEDS = 2**64


class Prompt:
    """Takes the lines that are typed in a chat.

    Args:
        chat: The conversation to begin with.
        send_options: Keyword arguments of ``chat.send``.
        load: Reads a conversation from a file.

    Attributes:
        chat: The conversation now.
    """

    def __init__(self, chat: Chat, send_options: Mapping[str, Any], load: Callable[[str], Chat]) -> None:
        self.chat = chat
        self._options, self._load = dict(send_options), load
        self._redrawn = 0  # how often the last message has been answered again

    def take(self, line: str) -> Generator[str, None, None] | None:
        """Do what a line says.

        Args:
            line: As it was typed, not empty.

        Returns:
            Pieces of an answer to show; None where there is none.

        Raises:
            MonographError: It cannot be done; the conversation is as it was.
        """
        if not line.startswith("/") or line.startswith("//"):
            self._redrawn = 0
            return self.chat.send(line.removeprefix("/"), **self._options)
        name, _, rest = line[1:].strip().partition(" ")
        command = _COMMANDS.get(name)
        if command is None:
            raise PromptError(f"there is no command /{name}; /help lists them, and // begins a message with a slash")
        return command(self, rest.strip())

    def _undo(self, rest: str) -> None:
        turns = _number(rest or "1", "/undo [N]")
        self.chat.rewind(turns)
        print(f"(took back {_turns(turns)}; {_turns(self.chat.num_turns)} left)")

    def _regenerate(self, rest: str) -> Generator[str, None, None]:
        _nothing(rest, "/regenerate")
        options, sampling = dict(self._options), self._options.get("sampling")
        if sampling is not None and sampling.seed is not None:  # the same seed would draw the same answer
            seed = (sampling.seed + self._redrawn + 1) % _SEEDS
            options["sampling"] = dataclasses.replace(sampling, seed=seed)
        answer = self.chat.regenerate(**options)
        self._redrawn += 1
        return answer

    def _edit(self, rest: str) -> Generator[str, None, None]:
        number, _, text = rest.partition(" ")
        if not text.strip():
            raise PromptError("usage: /edit N TEXT")
        self._redrawn = 0
        return self.chat.edit(_number(number, "/edit N TEXT"), text.strip(), **self._options)

    def _continue(self, rest: str) -> Generator[str, None, None]:
        _nothing(rest, "/continue")
        return self.chat.resume(max_new_tokens=self._options["max_new_tokens"], stop=self._options["stop"])

    def _history(self, rest: str) -> None:
        from monograph.chat.terminal import printable

        _nothing(rest, "/history")
        number = 0
        for message in self.chat.messages:
            number += message["role"] == "user"
            label = f"{number:>3}" if message["role"] == "user" else "   "
            text = " ".join(printable(str(message["content"])).split())
            excerpt = text if len(text) <= _EXCERPT else text[: _EXCERPT - 3] + "..."
            print(f"{label} {message['role']}: {excerpt}")

    def _save(self, rest: str) -> None:
        if not rest:
            raise PromptError("usage: /save FILE")
        save(self.chat, rest)
        print(f"(saved {_turns(self.chat.num_turns)})")

    def _load_file(self, rest: str) -> None:
        if not rest:
            raise PromptError("usage: /load FILE")
        self.chat = self._load(rest)
        self._redrawn = 0
        print(f"(loaded {_turns(self.chat.num_turns)})")

    def _help(self, rest: str) -> None:
        _nothing(rest, "/help")
        print(HELP)


def save(chat: Chat, path: str) -> None:
    """Save a conversation.

    Raises:
        PromptError: The file cannot be written.
    """
    try:
        chat.save(path)
    except OSError as error:
        raise PromptError(f"{path}: {error.strerror or error}") from error


def check_place(path: str) -> None:
    """Refuse a file that a conversation could not be saved to, before there is one to lose.

    Raises:
        PromptError: Its folder is missing or cannot be written, or its name is that of something else.
    """
    place = Path(os.path.realpath(path))
    if not path:
        reason = "expected the name of a file, got ''"
    elif place.is_dir():
        reason = "Is a directory"
    elif not place.parent.is_dir():
        reason = f"there is no folder {place.parent}"
    elif not os.access(place.parent, os.W_OK | os.X_OK):
        reason = f"the folder {place.parent} cannot be written"
    elif place.exists() and not place.is_file():
        reason = "is no regular file"
    else:
        return
    raise PromptError(f"{path}: {reason}; the conversation could not be saved there")


_COMMANDS: dict[str, Callable[[Prompt, str], Generator[str, None, None] | None]] = {
    "undo": Prompt._undo,
    "regenerate": Prompt._regenerate,
    "edit": Prompt._edit,
    "continue": Prompt._continue,
    "history": Prompt._history,
    "save": Prompt._save,
    "load": Prompt._load_file,
    "help": Prompt._help,
}


def _number(text: str, usage: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise PromptError(f"expected a number, got {text!r}; usage: {usage}") from None


def _nothing(rest: str, name: str) -> None:
    if rest:
        raise PromptError(f"{name} takes nothing after it, got {rest!r}")


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"
