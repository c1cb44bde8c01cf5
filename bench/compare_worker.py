"""One system of a comparison in a process of its own: its start-up, then every length, a line of JSON each.

Nothing that the system does not need itself is imported before its first token.

Run by bench/compare.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.systems.system import OURS, SYSTEMS, System, Task

# By then whatever compiles or captures has done so: a first call warms up, a second records, a third replays.
SETTLED_TOKENS = 4


def start(load: Callable[[Task], System], task: Task, started: float) -> tuple[System, dict[str, Any]]:
    """Load a system and have it answer.

    Args:
        load: Makes the system.
        task: The comparison.
        started: When the process was started, in seconds of ``time.time``.

    Returns:
        The system, and of its start-up "first_ms", "settled_ms" (until its fourth token), "token" and "verdict".

    Raises:
        RuntimeError: It gave no token.
    """
    times: list[float] = []
    tokens: list[int] = []

    def arrived(token: int) -> None:
        times.append(time.time())
        tokens.append(token)

    system = load(task)
    system.answer(task.prompt, SETTLED_TOKENS, arrived)
    if not tokens:
        raise RuntimeError(f"no token came after a prompt of {len(task.prompt)} tokens")

    import torch

    from bench.judge import token_fault

    fault = token_fault(tokens[0], torch.load(task.reference)["prompt"])
    found = {
        "kind": "start",
        "first_ms": (times[0] - started) * 1e3,
        "settled_ms": (times[-1] - started) * 1e3,
        "token": tokens[0],
        "verdict": fault or "ok",
    }
    return system, found


def measure(system: System, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Judge and time a system at every length; a length that fails is a row that says why."""
    from bench.common import spread

    for length in lengths:
        row: dict[str, Any] = {"kind": "decode", "seq_len": length}
        try:
            judged = system.judge(length)
            row |= {**judged.facts, "verdict": judged.verdict}
            if judged.verdict == "ok":
                timed = system.time(length)
                row |= {**spread(timed.ms), "mean_seq_len": timed.mean_seq_len}
        except Exception as fault:  # the other lengths are still worth having
            row["verdict"] = f"{type(fault).__name__}: {fault}".partition("\n")[0]
            yield row
            if "CUDA error" in str(fault):  # nothing works in this process from here on
                return
            continue
        yield row


def main() -> None:
    """Run one system."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--started", type=float, required=True)
    parser.add_argument("--start-only", action="store_true")
    args = parser.parse_args()
    task = Task.from_json(json.loads(args.task.read_text()))
    with args.out.open("w") as out:

        def say(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        system, found = start(SYSTEMS[args.system].load, task, args.started)
        say(found)
        if not args.start_only:
            lengths = [*task.lengths, *(task.long_lengths if args.system == OURS else ())]
            for row in measure(system, lengths):
                say(row)


if __name__ == "__main__":
    main()
