"""monograph beside what else is installed: the same weights and lengths, one run.

A named shape gets random weights, written as a checkpoint that every system loads in its own way; a model path is
loaded as it is. Each system has processes of its own, one after another, each under a time limit; what fails is a row
that says why, and what is not installed is a row that says so.

Decoding is greedy. At every length the systems start from the same random keys and values, are judged by the same fp32
logits (bench/judge.py), and only then timed: "ms" is the median over batches of 16 tokens in a row. The floor is the
bytes that a step must read over the read ceiling measured in the same run. Start-up is from the start of the process to
the first token of an answer to 16 tokens, the checkpoint in the page cache: "cold" with empty kernel and compiler
caches, "warm" once more with what the first start left there.

Run: python bench/compare.py --model llama-3.2-1b --json compare.json --markdown compare.md
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ceiling import trusted_ceiling_gb_s
from bench.child import Outcome, run_child
from bench.common import machine_facts, print_table, spread, write_results
from bench.compare_table import markdown
from bench.shapes import SHAPES
from bench.systems.system import OURS, SYSTEMS, Task
from monograph.model.config import DTYPES

HERE = Path(__file__).resolve().parent
COLUMNS = {
    "system": "system:",
    "seq_len": "length:,",
    "ms": "ms:.4f",
    "p20_ms": "p20:.4f",
    "p80_ms": "p80:.4f",
    "floor_ms": "floor:.4f",
    "ratio": "ratio:.3f",
    "error": "error:.1e",
    "verdict": "verdict:",
}
START_COLUMNS = {
    "system": "system:",
    "cache": "caches:",
    "ms": "first token ms:,.0f",
    "settled_ms": "fourth token ms:,.0f",
    "verdict": "verdict:",
}


@dataclass(frozen=True)
class Run:
    """What all models of a run share.

    Attributes:
        systems: Names of the systems, in order.
        starts: Processes of each system; the last goes on to the lengths.
        limit_s: Seconds of each process.
        ceiling: GB/s.
    """

    systems: list[str]
    starts: int
    limit_s: float
    ceiling: float | None


def compare(model: str, task: Task, run: Run, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Measure all systems on one model.

    Args:
        model: What the rows call it.
        task: What to measure; ``task.model`` is settled here.
        run: The rest.
        folder: For files that the processes share; those of a named shape are large.

    Yields:
        The rows of each system, those that say why there is no figure among them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_task(folder, task)
    print(f"{model}: weights and reference", flush=True)
    # No limit of its own: nothing can be compared without it.
    prepared = run_child(HERE / "prepare.py", ["--task", str(folder / "task.json")], folder / "prepare", 3600)
    if prepared.fault is not None:
        verdict = f"no weights and reference: {prepared.fault}"
        print(f"  {verdict}", flush=True)
        heads = [{"model": model, "system": name, "dtype": task.dtype} for name in run.systems]
        yield [_row(head, "decode") | {"verdict": verdict} for head in heads]
        return
    sizes = prepared.rows[0]
    settled = Task.from_json(sizes["task"])
    _write_task(folder, settled)
    for name in run.systems:
        head: dict[str, Any] = {"model": model, "system": name, "dtype": settled.dtype}
        if not SYSTEMS[name].is_installed:
            yield [_row(head, "decode") | {"verdict": "not installed"}]
            continue
        head["version"] = SYSTEMS[name].version
        found = _measure_system(name, head, settled, sizes, run, folder)
        _show(found)
        yield found


def _measure_system(
    name: str, head: dict[str, Any], task: Task, sizes: dict[str, Any], run: Run, folder: Path
) -> list[dict[str, Any]]:
    slug = name.replace(" ", "-")
    environment = {
        "TRITON_CACHE_DIR": str(folder / f"cache-{slug}" / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache-{slug}" / "inductor"),
    }
    if Path(task.model).exists():
        environment["HF_HUB_OFFLINE"] = "1"  # nothing is looked up while the clock runs
    outcomes: list[Outcome] = []
    for i in range(run.starts):
        print(f"  {name}: start {i + 1} of {run.starts}", flush=True)
        more = ["--start-only"] if i < run.starts - 1 else []
        arguments = [name, "--task", str(folder / "task.json"), *more]
        outcomes.append(
            run_child(HERE / "compare_worker.py", arguments, folder / f"{slug}-{i}", run.limit_s, environment)
        )
    last = outcomes[-1]
    measured = {row["seq_len"]: row for row in last.rows if row["kind"] == "decode"}
    rows = []
    for length in [*task.lengths, *(task.long_lengths if name == OURS else ())]:
        found = measured.get(length, {"verdict": last.fault or "the process ended before it"})
        rows.append(_row(head, "decode") | _finished({**found, "seq_len": length}, sizes, run.ceiling))
    return rows + _start_rows(head, outcomes, len(task.prompt))


def _start_rows(head: dict[str, Any], outcomes: list[Outcome], prompt_tokens: int) -> list[dict[str, Any]]:
    """A row for the first start, and one for all that found its caches."""
    rows = []
    for cache, group in (("cold", outcomes[:1]), ("warm", outcomes[1:])):
        if not group:
            continue
        row = _row(head, "start") | {"seq_len": prompt_tokens, "cache": cache}
        starts = [row for outcome in group for row in outcome.rows if row["kind"] == "start"]
        if starts:
            row |= spread([start["first_ms"] for start in starts])
            row["settled_ms"] = spread([start["settled_ms"] for start in starts])["ms"]
        faults = [start["verdict"] for start in starts if start["verdict"] != "ok"]
        # A process that failed after its first token has started all the same.
        faults += [outcome.fault or "no token came" for outcome in group if not outcome.rows]
        rows.append(row | {"verdict": "; ".join(faults) or "ok"})
    return rows


def _row(head: dict[str, Any], bench: str) -> dict[str, Any]:
    return {
        "bench": bench,
        "model": head["model"],
        "system": head["system"],
        "dtype": head["dtype"],
        "seq_len": None,
        "max_seq_len": None,
        "ms": None,
        "p20_ms": None,
        "p80_ms": None,
        "floor_ms": None,
        "graphs": None,
        "verdict": "not run",
        "version": head.get("version"),
    }


def _finished(found: dict[str, Any], sizes: dict[str, Any], ceiling: float | None) -> dict[str, Any]:
    """A row of a worker with its floor, which is that of the mean live length of a batch."""
    row = {name: value for name, value in found.items() if name not in ("kind", "mean_seq_len")}
    if found.get("ms") is not None:
        nbytes = sizes["weights_nbytes"] + found["mean_seq_len"] * sizes["kv_row_nbytes"]
        row["nbytes"] = round(nbytes)
        if ceiling is not None:
            floor = nbytes / ceiling / 1e6
            row |= {"floor_ms": round(floor, 5), "ratio": round(found["ms"] / floor, 4)}
    return row


def _write_task(folder: Path, task: Task) -> None:
    (folder / "task.json").write_text(json.dumps(task.to_json()))


def _show(rows: list[dict[str, Any]]) -> None:
    print_table([row for row in rows if row["bench"] == "decode"], COLUMNS)
    print_table([row for row in rows if row["bench"] == "start"], START_COLUMNS)


def _lengths(text: str) -> list[int]:
    return [int(length) for length in text.split(",") if length]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=f"{', '.join(SHAPES)}, or a model; several with commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, with commas; by default all")
    parser.add_argument("--lengths", type=_lengths, default="64,1024,4096,16384", help="live lengths of all systems")
    parser.add_argument("--long-lengths", type=_lengths, default="65536,131072", help="more, of monograph alone")
    parser.add_argument("--max-seq-len", type=int, default=None, help="of monograph's arena; by default the model's")
    parser.add_argument(
        "--static-max",
        type=_lengths,
        default="",
        help="capacities of the static cache, with commas: each length takes the smallest that holds it; "
        "by default the next power of two, 1,024 at least",
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--replays", type=int, default=200, help="tokens that are timed at each length, at least")
    parser.add_argument("--starts", type=int, default=2, help="processes of each system; the first starts cold")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds of each process")
    parser.add_argument("--compile-backend", default="inductor", help="of torch.compile, for the static cache")
    parser.add_argument("--ceiling", type=float, default=None, help="GB/s, instead of measuring it")
    parser.add_argument("--folder", type=Path, default=None, help="keep checkpoint, caches and logs here")
    parser.add_argument("--json", type=Path, default=None, help="where to write, instead of bench/results")
    parser.add_argument("--markdown", type=Path, default=None, help="write the table here, instead of printing it")
    parser.add_argument("--show", type=Path, default=None, help="print the table of a finished run and end")
    return parser


def main() -> None:
    """Measure, print tables, write JSON and Markdown."""
    parser = make_parser()
    args = parser.parse_args()
    if args.show is not None:
        print(markdown(json.loads(args.show.read_text())), end="")
        return
    systems = [name for name in args.systems.split(",") if name]
    if unknown := [name for name in systems if name not in SYSTEMS]:
        parser.error(f"--systems: {', '.join(unknown)} not known; known are {', '.join(SYSTEMS)}")
    if args.starts < 1:
        parser.error(f"--starts: expected 1 or more, got {args.starts}")
    started, facts, ceiling = time.perf_counter(), machine_facts(args.device), args.ceiling
    if ceiling is None and args.device.type == "cuda":
        ceiling = trusted_ceiling_gb_s(args.device)
        print(f"{facts['device']}, read ceiling {ceiling:,.0f} GB/s", flush=True)
    run = Run(systems, args.starts, args.limit_s, ceiling)
    rows: list[dict[str, Any]] = []
    for model in args.model.split(","):
        task = Task(
            model=model,
            device=str(args.device),
            dtype=args.dtype,
            lengths=args.lengths,
            long_lengths=args.long_lengths,
            replays=args.replays,
            max_seq_len=args.max_seq_len,
            static_max=sorted(args.static_max),
            compile_backend=args.compile_backend,
        )
        with tempfile.TemporaryDirectory(prefix="monograph-compare-") as scratch:
            label = Path(model).name if Path(model).exists() else model
            for found in compare(label, task, run, (args.folder or Path(scratch)) / Path(model).name):
                rows += found
                if args.json is not None:  # what there is so far, should the run be cut short
                    write_results("compare", facts, ceiling, rows, args.json)
    path = write_results("compare", facts, ceiling, rows, args.json)
    text = markdown(json.loads(path.read_text()))
    if args.markdown is None:
        print(text, end="")
    else:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(text)
    print(f"{time.perf_counter() - started:.0f} s -> {path}")
    if any(row["system"] == OURS and row["verdict"] != "ok" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
