"""Tuning of the decode step: milliseconds a token before and after, and the seconds that it took, as JSON.

Tunes a named shape with random weights, or anything that monograph.load takes, from its defaults. The figures before
and after are those of the step harness of bench/decode.py, on the step as it was loaded and as it was left, each judged
first (``Step.check``); tuning's own figures stand beside them. Nothing is kept on disk but with --keep; --entry prints
the outcome as an entry of the table of shipped tiles.

Run: python bench/tune.py --model llama-3.2-1b --max-seq-len 32768
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import machine_facts, percentile
from bench.decode import build
from bench.shapes import SHAPES, random_cache
from bench.step import Step
from monograph.model.config import DTYPES
from monograph.model.tile_key import TileKey
from monograph.model.tiles import current_tiles, only_changed
from monograph.model.tune import DEFAULT_SECONDS, TuneProgress
from monograph.model.tune_step import keep_tuned, lengths_for, measured_facts, shipped_entry, tune_decoder


def measure(step: Step, lengths: tuple[int, ...], replays: int) -> list[dict[str, Any]]:
    """Judge the step and time it at each length."""
    random_cache(step.arena, step.config)
    rows = []
    for length in lengths:
        verdict = step.check(length)
        times = step.time(length, replays, alone=1).batched
        rows.append(
            {"seq_len": length, "ms": round(percentile(times, 50), 5), "error": verdict.error, "verdict": str(verdict)}
        )
    return rows


def main() -> None:
    """Tune, print progress on stderr and the outcome as JSON on stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=f"{', '.join(SHAPES)}, or a model")
    parser.add_argument("--max-seq-len", type=int, default=32768)
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS)
    parser.add_argument("--replays", type=int, default=400)
    parser.add_argument("--keep", action="store_true", help="keep the outcome for later loads")
    parser.add_argument("--entry", action="store_true", help="print the outcome as an entry of the table on stderr")
    args = parser.parse_args()
    if args.device.type != "cuda":
        sys.exit("nothing to tune: on a CPU PyTorch runs the program, and there are no block sizes to choose")

    def say(progress: TuneProgress) -> None:
        if progress.text:
            print(f"{progress.seconds:5.1f} s: {progress.text}", file=sys.stderr, flush=True)

    lengths = lengths_for(args.max_seq_len)
    with build(args.model, args.max_seq_len, args.dtype, args.device) as built:
        step = built.step
        before = measure(step, lengths, args.replays)
        start = current_tiles(step.decoder.program)
        found = tune_decoder(step.decoder, args.seconds, say)
        tuned = Step(step.decoder)  # which has another program now
        after = measure(tuned, lengths, args.replays)
        key = TileKey.of(tuned.config, tuned.dtype, args.device)
        print(
            json.dumps(
                {
                    **machine_facts(args.device),
                    "model": args.model,
                    "dtype": key.dtype,
                    "max_seq_len": args.max_seq_len,
                    "before": before,
                    "after": after,
                    "tune_s": round(found.seconds, 2),
                    "tuning": measured_facts(found, args.max_seq_len),
                    "start": start,
                    "changed": {use: dict(tile) for use, tile in only_changed(found.tiles, found.start).items()},
                    "unusable": found.unusable,
                    "left_out": found.left_out,
                    "kept": str(keep_tuned(tuned.decoder, found)) if args.keep else None,
                },
                indent=1,
            ),
            flush=True,
        )
        if args.entry:
            print(shipped_entry(found, key, "bench/results/FILE"), file=sys.stderr)
        vars(tuned).clear()
    if any(row["verdict"] != "ok" for row in (*before, *after)):
        sys.exit(1)


if __name__ == "__main__":
    main()
