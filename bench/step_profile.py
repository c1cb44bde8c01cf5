"""Where the time of one replay goes: a table of its kernels, from the profiler and from what each one's absence saves.

Launches overlap, so a kernel's own duration counts time in which it only waits. "us" is therefore the time by which a
kernel's end comes after the end of the one before it: these add up to the replay. "saved" is how much shorter a step
is that was captured without the kernel, in all its layers; it needs no profiler, and the two should tell one story.

(Not called profile.py, which would hide Python's own module of that name from every script in this folder.)

Run: python bench/step_profile.py --model llama-3.2-1b --max-seq-len 131072 --length 1024
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ceiling import trusted_ceiling_gb_s
from bench.common import machine_facts, percentile, print_table, write_results
from bench.decode import build
from bench.shapes import SHAPES, random_cache
from bench.step import BATCH, Step
from monograph.model.config import DTYPES
from monograph.model.program import Launch, run
from monograph.model.step_nbytes import kv_row_nbytes, weight_nbytes

COLUMNS = {
    "kernel": "kernel:",
    "launches": "launches:",
    "us": "us:.2f",
    "share": "share:.1%",
    "saved_us": "saved us:.2f",
    "floor_us": "floor us:.2f",
    "us_each": "us each:.2f",
    "floor_us_each": "floor each:.2f",
}
PROFILED = 24  # replays


def family(launch: Launch) -> str:
    """The kernel that a launch is one of: "layers.3.qkv" is "qkv"."""
    return launch.name.rpartition(".")[2]


def end_to_end(spans: Sequence[tuple[float, float]], per_replay: int) -> list[float]:
    """Share out the time of replays among their kernels.

    Args:
        spans: Start and end of every kernel, in the order of their launches, replay after replay.
        per_replay: Kernels of a replay.

    Returns:
        For each kernel of a replay, the median over replays of the time from the end of the kernel before it (for the
        first: from its own start) to its own end.
    """
    times: list[list[float]] = [[] for _ in range(per_replay)]
    previous = 0.0
    for i, (start, end) in enumerate(spans):
        place = i % per_replay
        times[place].append(end - (start if place == 0 else previous))
        previous = end
    return [percentile(values, 50) for values in times]


def profiled_us(step: Step, seq_len: int) -> list[float] | None:
    """Time of every launch of the step by the profiler; None where it does not show every kernel."""
    from torch.profiler import ProfilerActivity, profile

    step.begin(seq_len)
    with profile(activities=[ProfilerActivity.CUDA]) as trace, step.context():
        for _ in range(PROFILED):
            step.runner.decode()
        step.settle()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type.name == "CUDA" and event.name.startswith("_") and "_kernel" in event.name
    )
    per_replay = len(step.program.decode)
    if len(spans) != PROFILED * per_replay:
        print(f"  the profiler shows {len(spans):,} kernels, expected {PROFILED * per_replay:,}", flush=True)
        return None
    return end_to_end(spans[per_replay:], per_replay)


def saved_us(step: Step, seq_len: int, count: int = 12) -> dict[str, float]:
    """By how much the step is shorter without each kernel: medians of batches of replays."""
    medians: dict[str, float] = {}
    for left_out in ("", *dict.fromkeys(map(family, step.program.decode[:-1]))):
        kept = [launch for launch in step.program.decode if family(launch) != left_out]
        step.begin(seq_len)
        with step.context():
            run(kept, step.pdl)  # compiles where another launch than usual is the first
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=step.runner.stream, capture_error_mode="thread_local"):  # type: ignore[attr-defined]
            run(kept, step.pdl)
        spans = step.time_runs([graph.replay] * BATCH, seq_len, count)
        if int(step.arena.view("halted")):
            print(f"  without {left_out} the step halts: no time", flush=True)
        else:
            medians[left_out] = percentile(spans, 50) / BATCH * 1e3
    return {name: medians[""] - median for name, median in medians.items() if name}


def least_nbytes(step: Step, seq_len: int) -> dict[str, int]:
    """The fewest bytes that all launches of each kernel must read."""
    addresses = {address: name for name, address in step.arena.addresses().items()}
    layout = step.arena.layout
    sums: dict[str, int] = defaultdict(int)
    for launch in step.program.decode:
        sums[family(launch)] += 0
        for tensor in launch.args:
            name = addresses.get(tensor.data_ptr()) if tensor is not None else None
            if name is None or layout[name].lifetime != "weight":
                continue
            looked_up = launch.name == "embed" and name == "embed"  # tied: only the head reads the whole of it
            sums[family(launch)] += (
                layout[name].nbytes // layout[name].shape[0] if looked_up else weight_nbytes(layout, name)
            )
    sums["attention"] += seq_len * kv_row_nbytes(layout, step.config)
    return dict(sums)


def table(step: Step, seq_len: int, ceiling: float | None) -> list[dict[str, Any]]:
    """A row for each kernel, in the order of the step."""
    times, saved, nbytes = profiled_us(step, seq_len), saved_us(step, seq_len), least_nbytes(step, seq_len)
    families = [family(launch) for launch in step.program.decode]
    sums: dict[str, float] = defaultdict(float)
    for name, time_us in zip(families, times or [], strict=times is not None):
        sums[name] += time_us
    rows = []
    for name in dict.fromkeys(families):
        launches = families.count(name)
        floor = None if ceiling is None else nbytes[name] / ceiling / 1e3
        us = sums.get(name)  # None without a profile
        rows.append(
            {
                "kernel": name,
                "launches": launches,
                "us": us,
                "share": None if us is None else us / sum(sums.values()),
                "saved_us": saved.get(name),
                "floor_us": floor,
                "us_each": None if us is None else us / launches,
                "floor_us_each": None if floor is None else floor / launches,
            }
        )
    return rows


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=f"{', '.join(SHAPES)}, or a model")
    parser.add_argument("--max-seq-len", type=int, default=None)
    parser.add_argument("--length", type=int, default=1024, help="live length")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--ceiling", type=float, default=None, help="GB/s, instead of measuring it")
    parser.add_argument("--json", type=Path, default=None, help="where to write, instead of bench/results")
    args = parser.parse_args()
    ceiling = args.ceiling or trusted_ceiling_gb_s(args.device)
    with build(args.model, args.max_seq_len, args.dtype, args.device) as built:
        step = built.step
        random_cache(step.arena, step.config)
        verdict = step.check(args.length)
        rows = table(step, args.length, ceiling) if str(verdict) == "ok" else []
        timing = step.time(args.length)
        loop, submit_us = step.host_loop(), step.submit_us()
    print_table(rows, COLUMNS)
    step_us = percentile(timing.batched, 50) * 1e3
    print(
        f"verdict {verdict}; unprofiled step {step_us:.1f} us, by kernels {sum(row['us'] or 0 for row in rows):.1f} us"
    )
    print(
        f"CPU a token: {submit_us:.1f} us to submit a replay, {loop['cpu_ms'] * 1e3:.0f} us in the whole host loop, "
        f"which spins while it waits; wall {loop['wall_ms'] * 1e3:.0f} us"
    )
    facts = {"model": args.model, "seq_len": args.length, "step_us": step_us, "submit_us": submit_us, **loop}
    facts["verdict"] = str(verdict)
    rows = [{"bench": "profile", "system": "monograph", **facts, **row} for row in rows] or [facts]
    print(f"-> {write_results('profile', machine_facts(args.device), ceiling, rows, args.json)}")


if __name__ == "__main__":
    main()
