"""A process under a limit: what it found counts, how it ended is said, nothing of it is left."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import pytest

from bench.child import Outcome, run_child

HEAD = "import fcntl, json, os, subprocess, sys, time\nout = open(sys.argv[sys.argv.index('--out') + 1], 'w')\n"


def run(folder: Path, body: str, limit_s: float = 30) -> Outcome:
    script = folder / "script.py"
    script.write_text(HEAD + body)
    return run_child(script, ["first"], folder / "child", limit_s, {"COLOUR": "red"})


def test_rows(tmp_path: Path) -> None:
    body = "print(json.dumps({'argument': sys.argv[1], 'colour': os.environ['COLOUR']}), file=out)\n"
    body += "print(json.dumps({'age': time.time() - float(sys.argv[-1])}), file=out)\n"
    outcome = run(tmp_path, body)
    assert outcome.fault is None
    assert outcome.rows[0] == {"argument": "first", "colour": "red"}
    assert 0 < outcome.rows[1]["age"] < 30


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("raise ValueError('why not')", "exit status 1: ValueError: why not"),
        ("os.kill(os.getpid(), 9)", "exit status -9: it printed nothing"),
    ],
)
def test_a_crash_says_its_last_words(tmp_path: Path, body: str, fault: str) -> None:
    outcome = run(
        tmp_path, "print('{\"ms\": 1}', file=out, flush=True)\nprint('{\"ms', end='', file=out, flush=True)\n" + body
    )
    assert outcome.rows == [{"ms": 1}]
    assert outcome.fault == fault


def test_the_limit_ends_it_and_what_it_started(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    body = f"held = open({str(lock)!r}, 'w')\nfcntl.flock(held, fcntl.LOCK_EX)\n"
    body += "subprocess.Popen(['sleep', '60'], pass_fds=[held.fileno()])\nprint('{}', file=out, flush=True)\n"
    started = time.monotonic()
    outcome = run(tmp_path, body + "time.sleep(60)", limit_s=1)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits until nobody holds it
    assert time.monotonic() - started < 30
    assert outcome == Outcome([{}], "not done within 1 s")
