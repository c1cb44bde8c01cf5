"""Decoding speed: milliseconds a token at any live length, against the floor that memory bandwidth sets.

At each length a step is first judged and only then timed; where the verdict is not "ok" there are no times. It is
judged against the PyTorch references in fp32, with at most twice the error of plain PyTorch in the same precision, and
the captured graph against single launches, in bits. "ms" is the median over batches of 16 replays in a row, the
position put back between batches outside of what is timed: the live length grows by 15 in a batch, and the floor is
that of its mean. "alone" is a replay by itself, its launch included. The floor is the bytes that a step must read
(weights once, live keys and values once) over the read ceiling measured in the same run.

Models are named shapes with random weights, or anything that monograph.load takes.

Run: python bench/decode.py --model llama-3.2-1b --max-seq-len 131072 --lengths 64,1024,4096,16384,65536,131072
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import monograph as mg
from bench.ceiling import trusted_ceiling_gb_s
from bench.common import machine_facts, percentile, print_table, spread, write_results
from bench.shapes import SHAPES, random_cache, random_fill
from bench.step import Step, graph_facts
from monograph.arena import Arena
from monograph.model.config import DTYPES
from monograph.model.decoder import Decoder
from monograph.model.layout import Capacity, plan_layout

COLUMNS = {
    "model": "model:",
    "seq_len": "length:,",
    "ms": "ms:.4f",
    "p20_ms": "p20:.4f",
    "p80_ms": "p80:.4f",
    "floor_ms": "floor:.4f",
    "ratio": "ratio:.3f",
    "alone_ms": "alone:.4f",
    "error": "error:.1e",
    "plain_error": "plain:.1e",
    "verdict": "verdict:",
}
# Shown once a model; "_ms" and the like are units.
EXTRAS = (
    "graphs",
    "nodes",
    "programmatic_edges",
    "capture_ms",
    "scratch_nbytes",
    "decode_scratch_nbytes",
    "graphs_nbytes",
    "build_s",
    "submit_us",
    "halted_ms",
    "first_token_ms",
    "wall_ms",
    "cpu_ms",
)
ROUNDS = 20  # of each capacity, in turn, when two are compared


@dataclass
class Built:
    """A model in memory.

    Attributes:
        step: Its decode step.
        facts: What building it cost: figures for every row.
    """

    step: Step
    facts: dict[str, Any]


@contextlib.contextmanager
def build(model: str, max_seq_len: int | None, dtype: str, device: torch.device) -> Iterator[Built]:
    """Build a named shape with random weights, or load a model; free it afterwards."""
    started = time.perf_counter()
    after_fill: list[int] = []
    closing: Callable[[], None]
    if model in SHAPES:
        config = SHAPES[model]
        chosen = DTYPES.get(dtype) or config.dtype or torch.bfloat16
        capacity = Capacity.for_model(config, max_seq_len or config.max_position_embeddings, chosen)

        def fill(arena: Arena) -> None:
            random_fill(arena, config)
            after_fill.append(_free_nbytes(device))

        decoder = Decoder(config, capacity, plan_layout(config, capacity), device, fill)
        closing = decoder.close
    else:
        engine = mg.load(model, device=device, dtype=dtype, max_seq_len=max_seq_len)
        decoder, closing = engine._decoder, engine.close
    try:
        _settle(device)
        facts: dict[str, Any] = {"build_s": round(time.perf_counter() - started, 2)}
        if after_fill and device.type == "cuda":
            facts["graphs_nbytes"] = after_fill[0] - _free_nbytes(device)  # graphs, and the kernels' code
        facts["capture_ms"] = getattr(decoder.runner, "capture_ms", None)
        layout = decoder.arena.layout
        facts["scratch_nbytes"] = layout.nbytes_by_lifetime()["scratch"]
        facts["decode_scratch_nbytes"] = sum(
            slot.nbytes for slot in layout.entries if slot.lifetime == "scratch" and slot.span is None
        )
        built = Built(Step(decoder), facts)
        yield built
        vars(built.step).clear()  # whoever keeps it keeps no memory
    finally:
        closing()


def measure(built: Built, model: str, lengths: list[int], replays: int, ceiling: float | None) -> list[dict[str, Any]]:
    """Judge and time a model at every length; a length that fails is a row that says why."""
    step = built.step
    random_cache(step.arena, step.config)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        row = _row(step, model, length)
        try:
            _measure_length(step, row, length, replays, ceiling)
        except Exception as fault:  # the other lengths are still worth having
            row["verdict"] = f"{type(fault).__name__}: {fault}".partition("\n")[0]
            if "CUDA error" in str(fault):  # nothing works in this process from here on
                return [*rows, row]
        rows.append(row)
    extras = {**built.facts, "pdl": step.pdl}
    try:
        extras |= graph_facts(step)
        extras["submit_us"] = round(step.submit_us(), 2)
        extras["halted_ms"] = round(step.halted_ms(), 5)
        extras |= {name: round(value, 4) for name, value in step.host_loop().items()}
    except Exception as fault:  # as above
        extras["fault"] = f"{type(fault).__name__}: {fault}".partition("\n")[0]
        print(f"  {extras['fault']}", flush=True)
    return [{**row, **extras} for row in rows]


def compare_capacities(
    long: Built, short: Built, model: str, replays: int, ceiling: float | None
) -> list[dict[str, Any]]:
    """Time two capacities of one model at the same live length, in turn, so that both see the same machine."""
    length = 64
    sides = []
    for built in (long, short):
        random_cache(built.step.arena, built.step.config, rows=4 * length)
        row = _row(built.step, model, length)
        verdict = built.step.check(length)
        errors = {"error": verdict.error, "plain_error": verdict.plain_error}
        sides.append((built.step, {**row, **errors, "verdict": str(verdict)}))
    if all(row["verdict"] == "ok" for _, row in sides):
        times: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(ROUNDS):
            for i, (step, _) in enumerate(sides):
                times[i] += step.time(length, replays=max(replays // ROUNDS, 16), alone=1).batched
        for i, (step, row) in enumerate(sides):
            row |= spread(times[i]) | _floor(step, length + 7.5, percentile(times[i], 50), ceiling)
    return [row for _, row in sides]


def _measure_length(step: Step, row: dict[str, Any], length: int, replays: int, ceiling: float | None) -> None:
    if not 1 <= length <= step.max_seq_len:
        row["verdict"] = f"length outside 1..{step.max_seq_len:,}"
        return
    verdict = step.check(length)
    row |= {"error": verdict.error, "plain_error": verdict.plain_error}
    row |= {"argmax_agrees": verdict.argmax_agrees, "verdict": str(verdict)}
    if row["verdict"] != "ok":
        return
    timing = step.time(length, replays)
    row |= spread(timing.batched) | {"alone_ms": round(percentile(timing.alone, 50), 5)}
    row |= _floor(step, timing.mean_seq_len, row["ms"], ceiling)


def _row(step: Step, model: str, length: int) -> dict[str, Any]:
    return {
        "bench": "decode",
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
    }


def _floor(step: Step, mean_seq_len: float, ms: float, ceiling: float | None) -> dict[str, Any]:
    nbytes = step.nbytes(mean_seq_len)
    floor = None if ceiling is None else nbytes / ceiling / 1e6
    return {
        "nbytes": round(nbytes),
        "floor_ms": None if floor is None else round(floor, 5),
        "ratio": None if floor is None else round(ms / floor, 4),
    }


def _free_nbytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _show(rows: list[dict[str, Any]]) -> None:
    print_table(rows, COLUMNS)
    if not rows:
        return
    last = rows[-1]
    units = {"nbytes": 1 / 2**20, "ms": 1, "us": 1, "s": 1}
    for name in EXTRAS:
        if last.get(name) is not None:
            value = last[name] * units.get(name.rpartition("_")[2], 1)
            print(f"  {name.replace('_nbytes', ' MiB'):<24}{value:,.3f}".rstrip("0").rstrip("."), flush=True)


def main() -> None:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=f"{', '.join(SHAPES)}, or a model; several with commas")
    parser.add_argument("--max-seq-len", type=int, default=None)
    parser.add_argument("--lengths", default="64,1024,4096,16384,65536,131072", help="live lengths, with commas")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--compare-max-seq-len", type=int, default=None, help="also time this capacity, at length 64")
    parser.add_argument("--ceiling", type=float, default=None, help="GB/s, instead of measuring it")
    parser.add_argument("--json", type=Path, default=None, help="where to write, instead of bench/results")
    args = parser.parse_args()
    started = time.perf_counter()
    lengths = [int(length) for length in args.lengths.split(",") if length]
    facts = machine_facts(args.device)
    rows: list[dict[str, Any]] = []
    ceiling = args.ceiling
    if ceiling is None and args.device.type == "cuda":
        ceiling = trusted_ceiling_gb_s(args.device)
        print(f"{facts['device']}, read ceiling {ceiling:,.0f} GB/s", flush=True)
    for model in args.model.split(","):
        with build(model, args.max_seq_len, args.dtype, args.device) as built:
            found = measure(built, model, lengths, args.replays, ceiling)
            _show(found)
            rows += found
            if args.compare_max_seq_len is not None:
                with build(model, args.compare_max_seq_len, args.dtype, args.device) as other:
                    found = compare_capacities(built, other, model, args.replays, ceiling)
                    _show(found)
                    rows += [{**row, "note": "capacities in turn"} for row in found]
                    if all(row["ms"] for row in found):
                        capacities = " / ".join(f"{row['max_seq_len']:,}" for row in found)
                        print(f"  max_seq_len {capacities}: ratio {found[0]['ms'] / found[1]['ms']:.4f}", flush=True)
    path = write_results("decode", facts, ceiling, rows, args.json)
    print(f"{time.perf_counter() - started:.0f} s -> {path}")
    if any(row["verdict"] != "ok" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
