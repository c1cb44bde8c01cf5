"""Runs a script in a process of its own, under a time limit, and reads what it found before it ended.

The process gives back all memory when it ends, its crash is its own, and the time until its first word counts all that
a user waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Outcome:
    """What came of a process.

    Attributes:
        rows: The lines of JSON that it wrote, in order.
        fault: Why there may be fewer than expected; None if it ended well.
    """

    rows: list[dict[str, Any]]
    fault: str | None


def run_child(
    script: Path, arguments: Sequence[str], stem: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a Python script to its end, or to the limit.

    Args:
        script: The script; it is told ``--out FILE`` and ``--started SECONDS`` beside the arguments.
        arguments: Of the script.
        stem: Its rows go to this path with .jsonl, what it prints to the same with .log.
        limit_s: After so many seconds it is ended, with all processes that it has started.
        environment: Variables set for it beside those of this process.
    """
    out, log = stem.with_name(f"{stem.name}.jsonl"), stem.with_name(f"{stem.name}.log")
    out.unlink(missing_ok=True)
    command = [sys.executable, str(script), *arguments, "--out", str(out), "--started", repr(time.time())]
    with log.open("wb") as printed:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also what it has left running
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = out.read_text().splitlines() if out.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut off
    if code == 0:
        return Outcome(rows, None)
    if code is None:
        return Outcome(rows, f"not done within {limit_s:g} s")
    return Outcome(rows, f"exit status {code}: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
