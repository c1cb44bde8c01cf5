"""Commands of a chat: what each does to the conversation, and what is said when it cannot be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import monograph
from monograph.chat.commands import HELP, Prompt
from tests.fake_engine import FakeEngine


class Talk:
    """A prompt over an engine without a model."""

    def __init__(self, **sampling: Any) -> None:
        self.engine = FakeEngine()
        options: dict[str, Any] = {"max_new_tokens": None, "stop": [], "sampling": monograph.Sampling(**sampling)}
        self.prompt = Prompt(self.engine.chat("Be brief."), options, self.engine.load_chat)

    def __call__(self, line: str) -> str:
        pieces = self.prompt.take(line)
        return "" if pieces is None else "".join(pieces)

    @property
    def contents(self) -> list[str]:
        return [message["content"] for message in self.prompt.chat.messages]


@pytest.fixture
def talk() -> Talk:
    return Talk()


def test_undo(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("one", "two", "three"):
        assert talk(text) == f"You said: {text}."
    assert talk("/undo") == ""
    assert talk("/undo 2 ") == ""
    assert capsys.readouterr().out == "(took back 1 turn; 2 turns left)\n(took back 2 turns; 0 turns left)\n"
    assert talk.contents == ["Be brief."]


def test_edit(talk: Talk) -> None:
    talk("one")
    talk("two")
    assert talk("/edit 1 another  one") == "You said: another  one."
    assert talk.contents == ["Be brief.", "another  one", "You said: another  one."]
    assert talk("/edit -1 2 things") == "You said: 2 things."


def test_regenerate_takes_the_next_seed() -> None:
    talk = Talk(seed=2**64 - 1)
    talk("one")
    talk("/regenerate")
    talk("/regenerate")
    talk("two")
    talk("/regenerate")
    seeds = [asked["sampling"].seed for asked in talk.engine.asked]
    assert seeds == [2**64 - 1, 0, 1, 2**64 - 1, 0]
    assert talk.contents == ["Be brief.", "one", "You said: one.", "two", "You said: two."]
    unseeded = Talk()
    unseeded("one")
    unseeded("/regenerate")
    assert [asked["sampling"].seed for asked in unseeded.engine.asked] == [None, None]


def test_continue(talk: Talk) -> None:
    with pytest.raises(monograph.PromptError, match="there is no answer to go on with"):
        talk("/continue")
    pieces = talk.prompt.take("one")
    assert pieces is not None
    assert next(pieces) == "You said: "
    pieces.close()
    assert talk("/continue")
    assert talk.engine.asked[-1]["answered"] == 1
    with pytest.raises(monograph.PromptError, match="had ended by itself"):
        talk("/continue")


def test_save_and_load(talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a file"
    talk("one")
    talk(f"/save {path}")
    talk("two")
    talk(f"/load {path}")
    assert talk.contents == ["Be brief.", "one", "You said: one."]
    assert capsys.readouterr().out == "(saved 1 turn)\n(loaded 1 turn)\n"
    with pytest.raises(monograph.CheckpointError, match="No such file"):
        talk(f"/load {path}.missing")
    with pytest.raises(monograph.PromptError, match="a file/below: Not a directory"):
        talk(f"/save {path}/below")
    assert talk.contents == ["Be brief.", "one", "You said: one."]


def test_history_and_help(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    talk("one\x1b[2J")
    talk("x" * 100)
    talk("/history")
    assert capsys.readouterr().out.splitlines() == [
        "    system: Be brief.",
        "  1 user: one[2J",
        "    assistant: You said: one[2J.",
        f"  2 user: {'x' * 57}...",
        f"    assistant: You said: {'x' * 47}...",
    ]
    talk("/help")
    assert capsys.readouterr().out == HELP + "\n"


def test_a_message_with_a_slash(talk: Talk) -> None:
    assert talk("//etc/hosts") == "You said: /etc/hosts."


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/etc/hosts is what?", "there is no command /etc/hosts; /help lists them"),
        ("/", "there is no command /;"),
        ("/undo one", r"expected a number, got 'one'; usage: /undo \[N\]"),
        ("/undo 2", "expected a number of turns from 1 to 1"),
        ("/edit 1", "usage: /edit N TEXT"),
        ("/edit", "usage: /edit N TEXT"),
        ("/edit two words", "expected a number, got 'two'"),
        ("/edit 2 words", "expected a turn from 1 to 1"),
        ("/regenerate now", "/regenerate takes nothing after it"),
        ("/save", "usage: /save FILE"),
        ("/load ", "usage: /load FILE"),
    ],
)
def test_faults(talk: Talk, line: str, text: str) -> None:
    talk("one")
    before = talk.contents
    with pytest.raises(monograph.PromptError, match=text):
        talk(line)
    assert talk.contents == before
