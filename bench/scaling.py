"""How the step's time follows the live length: at lengths spread over the whole range and beside every change of split.

Every length is judged and timed as bench/decode.py does. No point may be more than 5 % above the line through its
neighbours: with the points in order of their mean live length, a point's time is compared with the straight line, in
length and time, between the point before and the point after it. The first and the last have no such line. A point that
is too high is timed again, with its neighbours, and only the second figures count.

A batch of replays covers 16 lengths. Beside a change of split one batch ends at the last length before it and one
begins at the first after it, so neither mixes the two.

Run: python bench/scaling.py --model llama-3.2-1b --max-seq-len 131072
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ceiling import trusted_ceiling_gb_s
from bench.common import machine_facts, print_table, spread, write_results
from bench.decode import build
from bench.shapes import SHAPES, random_cache
from bench.splits import split_changes
from bench.step import BATCH, Step
from monograph.model.config import DTYPES

POINTS = 40
ALLOWED = 0.05  # above the line
COLUMNS = {
    "seq_len": "length:,",
    "ms": "ms:.4f",
    "p20_ms": "p20:.4f",
    "p80_ms": "p80:.4f",
    "floor_ms": "floor:.4f",
    "ratio": "ratio:.3f",
    "above_line": "above line:+.1%",
    "verdict": "verdict:",
}


def spread_lengths(longest: int, count: int) -> list[int]:
    """``count`` lengths from 1 to ``longest``, as evenly spread in their logarithm as whole numbers can be.

    Where the short ones would fall together, each is one more than the last, and the rest is spread anew.
    """
    lengths = [1]
    for left in range(min(count, longest) - 1, 0, -1):
        lengths.append(max(lengths[-1] + 1, round(lengths[-1] * (longest / lengths[-1]) ** (1 / left))))
    return lengths


def first_lengths(longest: int, changes: Sequence[int], count: int) -> dict[int, bool]:
    """The first live length of the batch of every point.

    Args:
        longest: Capacity.
        changes: Lengths at which the split changes.
        count: Points beside those.

    Returns:
        In ascending order, and whether the point is the first after a change.
    """
    batch = min(BATCH, longest)
    last = longest - batch + 1
    points = {min(length, last): False for length in spread_lengths(longest, count)}
    points |= {change - batch: False for change in changes if change - batch >= 1}
    points |= {change: True for change in changes if change <= last}
    return dict(sorted(points.items()))


def above_line(points: Sequence[tuple[float, float]]) -> list[float | None]:
    """By how much each point is above the straight line between its two neighbours, relative to that line.

    Args:
        points: (length, time), lengths ascending.

    Returns:
        0.05 for 5 %, negative below; None for the first and the last point.
    """
    excess: list[float | None] = [None] * len(points)
    for i in range(1, len(points) - 1):
        (before, low), (here, found), (after, high) = points[i - 1 : i + 2]
        line = low + (high - low) * (here - before) / (after - before)
        excess[i] = found / line - 1
    return excess


def measure(
    step: Step, model: str, lengths: dict[int, bool], replays: int, ceiling: float | None
) -> list[dict[str, Any]]:
    """Judge and time every point, and hold each against its neighbours.

    Args:
        step: The step, its cache filled.
        model: Its name, for the rows.
        lengths: From ``first_lengths``.
        replays: At each length, at least.
        ceiling: GB/s.
    """
    rows = []
    for length, changed in lengths.items():
        row = _row(step, model, length, changed)
        try:
            verdict = step.check(length)
            row |= {"verdict": str(verdict), "error": verdict.error, "plain_error": verdict.plain_error}
            if row["verdict"] == "ok":
                row |= _times(step, length, replays, ceiling)
        except Exception as fault:  # the other lengths are still worth having
            row["verdict"] = f"{type(fault).__name__}: {fault}".partition("\n")[0]
        rows.append(row)
    timed = [row for row in rows if row["ms"] is not None]
    hold(timed)
    again = {j for i, row in enumerate(timed) if not row["in_line"] for j in (i - 1, i, i + 1)}
    for i in sorted(again):
        first = {"first_ms": timed[i]["ms"]}
        timed[i] |= _times(step, timed[i]["seq_len"], replays, ceiling) | first
    hold(timed)
    return rows


def hold(rows: Sequence[dict[str, Any]]) -> None:
    """Say of every row by how much it is "above_line", and whether it is "in_line"."""
    for row, excess in zip(rows, above_line([(row["mean_seq_len"], row["ms"]) for row in rows]), strict=True):
        row["above_line"] = None if excess is None else round(excess, 5)
        row["in_line"] = excess is None or excess <= ALLOWED


def _times(step: Step, length: int, replays: int, ceiling: float | None) -> dict[str, Any]:
    timing = step.time(length, replays, alone=1)
    nbytes, found = step.nbytes(timing.mean_seq_len), spread(timing.batched)
    floor = None if ceiling is None else nbytes / ceiling / 1e6
    return {
        **found,
        "mean_seq_len": timing.mean_seq_len,
        "nbytes": round(nbytes),
        "floor_ms": None if floor is None else round(floor, 5),
        "ratio": None if floor is None else round(found["ms"] / floor, 4),
    }


def _row(step: Step, model: str, length: int, changed: bool) -> dict[str, Any]:
    return {
        "bench": "scaling",
        "model": model,
        "system": "monograph",
        "dtype": str(step.dtype).removeprefix("torch."),
        "seq_len": length,
        "max_seq_len": step.max_seq_len,
        "ms": None,
        "p20_ms": None,
        "p80_ms": None,
        "floor_ms": None,
        "graphs": 1 if step.device.type == "cuda" else 0,
        "verdict": "not run",
        "splits_change": changed,
        "above_line": None,
        "in_line": True,
    }


def main() -> None:
    """Measure, print the table, write JSON; exit with status 1 if a point is too high or wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=f"{', '.join(SHAPES)}, or a model; several with commas")
    parser.add_argument("--max-seq-len", type=int, default=None)
    parser.add_argument("--points", type=int, default=POINTS, help="lengths beside those at changes of the split")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--ceiling", type=float, default=None, help="GB/s, instead of measuring it")
    parser.add_argument("--json", type=Path, default=None, help="where to write, instead of bench/results")
    args = parser.parse_args()
    started, facts, ceiling = time.perf_counter(), machine_facts(args.device), args.ceiling
    if ceiling is None and args.device.type == "cuda":
        ceiling = trusted_ceiling_gb_s(args.device)
        print(f"{facts['device']}, read ceiling {ceiling:,.0f} GB/s", flush=True)
    rows: list[dict[str, Any]] = []
    for model in args.model.split(","):
        with build(model, args.max_seq_len, args.dtype, args.device) as built:
            random_cache(built.step.arena, built.step.config)
            changes = split_changes(built.step.decoder)
            lengths = first_lengths(built.step.max_seq_len, changes, args.points)
            print(f"{model}: {len(lengths)} lengths, {len(changes)} changes of the split", flush=True)
            found = measure(built.step, model, lengths, args.replays, ceiling)
        print_table(found, COLUMNS)
        rows += found
    path = write_results("scaling", facts, ceiling, rows, args.json)
    high = [row for row in rows if not row["in_line"]]
    worst = max((row["above_line"] for row in rows if row["above_line"] is not None), default=0.0)
    print(f"{len(high)} of {len(rows)} points more than {ALLOWED:.0%} above the line; worst {worst:+.1%}")
    print(f"{time.perf_counter() - started:.0f} s -> {path}")
    if high or any(row["verdict"] != "ok" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
