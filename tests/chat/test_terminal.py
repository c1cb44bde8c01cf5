"""Chat on a real terminal: typed keys go through a pseudo-terminal, so Ctrl-C is the signal that users send."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

from monograph.chat.terminal import Interrupts, LoadLine, complain, printable, show

ROOT = Path(__file__).parents[2]
CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE_S = 60.0
HINT = "(Ctrl-C again or Ctrl-D to leave)"


class Terminal:
    """A terminal with ``monograph chat`` on it, an engine without a model behind."""

    def __init__(self, *arguments: str) -> None:
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TERM": "dumb"}
        self._screen, terminal = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "fake_engine.py"), "chat", "m", *arguments],
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._unread = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._screen)

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def ask(self, question: str) -> str:
        """Type a question at the prompt and return what is shown until the next one."""
        self.type(question + "\n")
        self.read_until(question + "\r\n")
        return self.read_until("> ").removesuffix("> ")

    def read_until(self, text: str) -> str:
        """Everything shown up to and with ``text``."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._unread:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; shown: {self._unread!r}"
            try:
                self._unread += os.read(self._screen, 4096).decode()
            except OSError:  # Linux says so when the program has ended
                pytest.fail(f"the program ended before {text!r}; shown: {self._unread!r}")
        head, _, self._unread = self._unread.partition(text)
        return head + text

    def status(self) -> int:
        """The exit status, once the program has ended; what it still shows is dropped."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                if not os.read(self._screen, 4096):
                    break
            except OSError:
                break
        return self._process.wait(PATIENCE_S)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal("--system", "Be brief.", "--stats") as terminal:
        assert terminal.read_until("> ") == "> "
        yield terminal


def test_conversation(terminal: Terminal) -> None:
    """Turns build on each other; empty lines are no turns; a fault is one line and costs its turn only."""
    stats = "prompt 29 tokens, first token 12.5 ms, answer 3 tokens at 25.0 tokens/s"
    assert terminal.ask("hello") == f"You said: hello.\r\n{stats}\r\n"
    assert terminal.ask("  ") == ""
    assert terminal.ask("too long") == "monograph: prompt of 9,000 tokens exceeds max_seq_len 8,192\r\n"
    assert terminal.ask("not finite") == "half an \r\nmonograph: the logits are not finite\r\n"
    assert terminal.ask("steer").startswith("a[2Jb31mc\r\n\tdé\r\n")
    history = "system: Be brief. | user: hello | assistant: You said: hello. | user: steer | "
    assert terminal.ask("history").startswith(history)
    terminal.type(CTRL_D)
    assert terminal.status() == 0


def test_commands(terminal: Terminal) -> None:
    """An answer comes with its stats, a note without; a fault costs nothing; Ctrl-C cuts an answer, which can go on."""
    stats = "prompt 29 tokens, first token 12.5 ms, answer 3 tokens at 25.0 tokens/s\r\n"
    assert terminal.ask("hello") == f"You said: hello.\r\n{stats}"
    assert terminal.ask("/regenerate") == f"You said: hello.\r\n{stats}"
    assert terminal.ask("/edit 1 halls") == f"You said: halls.\r\n{stats}"
    assert terminal.ask("/undo 2") == "monograph: rewind: expected a number of turns from 1 to 1, got 2\r\n"
    assert terminal.ask("/save /missing/f") == "monograph: /missing/f: No such file or directory\r\n"
    assert terminal.ask("/undo") == "(took back 1 turn; 0 turns left)\r\n"
    assert terminal.ask("/what").startswith("monograph: there is no command /what; /help lists them")
    assert "/continue" in terminal.ask("/help")
    terminal.type(CTRL_D)
    assert terminal.status() == 0


def test_a_cut_answer_says_how_to_go_on() -> None:
    with Terminal("--max-new-tokens", "2") as terminal:
        terminal.read_until("> ")
        assert terminal.ask("hello") == "You said: hello\r\n(cut off: /continue goes on)\r\n"


def test_b33_interrupted_answers(terminal: Terminal) -> None:
    """Ctrl-C in prefill leaves no trace of the turn; in an answer it keeps what was said; the session goes on."""
    terminal.type("prefill\n")
    terminal.read_until("(reading)")
    terminal.type(CTRL_C)
    terminal.read_until("> ")
    assert terminal.ask("history").startswith("system: Be brief. | user: history\r\n")

    terminal.type("never\n")
    terminal.read_until("0 1 2 ")
    terminal.type(CTRL_C)
    rest = terminal.read_until("\r\n> ")
    shown = ("0 1 2 " + rest.removesuffix("\r\n> ")).replace("^C", "")
    history = terminal.ask("history")
    # Pieces made after the last one shown may be in the conversation: Ctrl-C can strike between the two.
    said = history.partition("user: never | assistant: ")[2].partition(" | user: history")[0]
    assert said.startswith(shown.rstrip())
    assert len(said.split()) <= len(shown.split()) + 1

    terminal.type("never\n")
    terminal.read_until("0 1 2 ")
    terminal.type(CTRL_C + CTRL_C)
    terminal.read_until("\r\n> ")
    terminal.type("hello\n")
    terminal.read_until("You said: hello.\r\n")


def test_b33_at_the_prompt(terminal: Terminal) -> None:
    """The first Ctrl-C asks, the second leaves with 130; a question in between starts over."""
    terminal.type(CTRL_C)
    terminal.read_until(f"{HINT}\r\n> ")
    terminal.ask("hello")
    terminal.type(CTRL_C)
    terminal.read_until(f"{HINT}\r\n> ")
    terminal.type(CTRL_C)
    assert terminal.status() == 130


def test_printable() -> None:
    every = "".join(map(chr, range(0x200))) + "\u2028é漢🙂"
    kept = printable(every)
    assert kept == "\t\n" + "".join(map(chr, range(0x20, 0x7F))) + "".join(map(chr, range(0xA0, 0x200))) + "\u2028é漢🙂"


def test_show_ends_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    show(["a", "", "b\n"])
    show(["c\x07"])
    show([])
    with pytest.raises(KeyboardInterrupt):
        show(_interrupted())
    assert capsys.readouterr().out == "ab\nc\nd\n"


def _interrupted() -> Iterator[str]:
    yield "d"
    raise KeyboardInterrupt


def test_complaints_are_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    complain("template says:\n  \x1b[31mno\x9b")
    assert capsys.readouterr().err == "monograph: template says: [31mno\n"


def test_interrupts_strike_once_and_only_inside_a_span() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.span():  # noqa: PT012
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)  # a second one while the first unwinds
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.span():
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_load_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in the first half second, then a line at most ten times a second, and at the end none."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with LoadLine() as line:
        for i in range(21):  # half a gigabyte every twentieth of a second
            now = 100 + i / 20
            line(i * 10**9 // 2, 16 * 10**9)
    shown = capsys.readouterr().err
    lines = [part.removesuffix("\x1b[K") for part in shown.split("\r") if part]
    assert lines[0] == "weights: 5.0 of 16.0 GB, 10.0 GB/s"
    assert lines[-2] == "weights: 10.0 of 16.0 GB, 10.0 GB/s"
    assert lines[-1] == ""
    assert 5 <= len(lines) - 1 <= 6
    assert shown.endswith("\r\x1b[K")
    with LoadLine() as line:
        for done in (1, 2):
            line(done, 2)
    assert capsys.readouterr().err == ""
