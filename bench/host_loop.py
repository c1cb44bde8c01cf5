"""The host's part of decoding: wall time a token of a stream over the GPU time of the same replays.

The GPU's time is that of as many replays in a row, from the same live length on, between two events; an answer through
the streaming loop, its text made by a tokenizer of the model's size, is timed at its reader: "ms" is the wall time a
token from the first to the last, "ratio" that over the GPU's in the same run. "busy" threads count in Python all the
while (`x += 1`): each keeps the interpreter for sys.getswitchinterval() at a time. "gap" is the longest wait between
two pieces at the reader, who gets what came meanwhile in one piece. Kinds of runs take turns; figures are medians. The
last token is read when the interpreter is to be had: milliseconds late beside busy threads, spread over all tokens.

A row is right ("ok") if the tokens are those of every other run, and, with no busy thread or one, if the ratio is at
most 1.01. On a CPU replays are launches one by one, and the ratio has no limit.

Run: python bench/host_loop.py --model llama-3.2-1b
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import Clock, machine_facts, percentile, print_table, spread, write_results
from bench.decode import build
from bench.startup import write_tokenizer
from bench.step import GREEDY, Step
from monograph.model.stream import Stream
from monograph.model.text_stream import TextStream
from monograph.model.tokenizer import Tokenizer

COLUMNS = {
    "model": "model:",
    "busy_threads": "busy:",
    "ms": "ms:.4f",
    "p20_ms": "p20:.4f",
    "p80_ms": "p80:.4f",
    "gpu_ms": "GPU ms:.4f",
    "ratio": "ratio:.4f",
    "gap_ms": "gap ms:.2f",
    "largest_piece": "piece:",
    "first_token_ms": "first ms:.2f",
    "cpu_ms": "CPU ms:.3f",
    "verdict": "verdict:",
}
MOST = 1.01  # times the GPU's time
JUDGED_THREADS = 1  # with more, the wait for the interpreter at the very end alone can be more than a hundredth


@dataclass(frozen=True)
class Run:
    """One answer as its reader saw it.

    Attributes:
        tokens: All of them.
        wall_ms: A token, from the first to the last.
        gap_ms: The longest time between two pieces.
        largest_piece: Tokens of the largest piece.
        first_token_ms: From the call to the first token.
        cpu_ms: CPU time a token of the thread that reads.
    """

    tokens: list[int]
    wall_ms: float
    gap_ms: float
    largest_piece: int
    first_token_ms: float
    cpu_ms: float


@contextmanager
def busy_threads(count: int) -> Iterator[None]:
    """Threads that do nothing but count, in Python."""
    stop = threading.Event()
    begun = threading.Barrier(count + 1)

    def count_on() -> None:
        begun.wait()
        is_set, x = stop.is_set, 0
        while not is_set():
            for _ in range(1000):
                x += 1

    threads = [threading.Thread(target=count_on, name=f"busy-{i}") for i in range(count)]
    for thread in threads:
        thread.start()
    begun.wait()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def prompt_ids(step: Step, count: int) -> list[int]:
    """A prompt."""
    return [(17 + 31 * i) % step.config.vocab_size for i in range(count)]


def gpu_ms(step: Step, prompt_tokens: int, count: int) -> float:
    """Milliseconds a replay of ``count`` in a row, the first of which reads the token after the prompt."""
    clock = Clock(step.device)
    step.begin(prompt_tokens + 1)
    with step.context(), clock.span():
        step.runner.decode(count)
    (span,) = clock.times_ms()
    if int(step.arena.view("position")) != prompt_tokens + count:
        raise RuntimeError(f"position {int(step.arena.view('position'))}, expected {prompt_tokens + count}")
    return span / count


def read(step: Step, tokenizer: Tokenizer, prompt_tokens: int, new_tokens: int) -> Run:
    """Read an answer through the streaming loop."""
    step.settle()
    answer = step.decoder.answer(
        prompt_ids(step, prompt_tokens),
        reuse=False,
        position_limit=prompt_tokens + new_tokens,
        stop_ids=(),
        sampling=GREEDY,
    )
    stream = Stream(answer, TextStream(tokenizer), lambda: None, lambda: None, lambda *_: None)
    tokens: list[int] = []
    times: list[float] = []
    largest, cpu = 0, time.thread_time()
    for piece in stream:
        times.append(time.perf_counter())
        tokens += piece.token_ids
        largest = max(largest, len(piece.token_ids))
    cpu = time.thread_time() - cpu
    stats = answer.stats()
    return Run(
        tokens=tokens,
        wall_ms=stats.decode_ms / max(len(tokens) - 1, 1),
        gap_ms=max((after - before for before, after in pairwise(times)), default=0.0) * 1e3,
        largest_piece=largest,
        first_token_ms=stats.first_token_ms,
        cpu_ms=cpu * 1e3 / max(len(tokens), 1),
    )


def measure(
    step: Step, tokenizer: Tokenizer, busy: Sequence[int], prompt_tokens: int, new_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure every number of busy threads, in turn with the GPU alone.

    Args:
        step: The decode step.
        tokenizer: Makes text of the tokens.
        busy: Numbers of busy threads.
        prompt_tokens: Tokens of the prompt.
        new_tokens: Tokens of an answer.
        rounds: Answers of each kind.
    """
    read(step, tokenizer, prompt_tokens, new_tokens)  # warms up
    replays: list[float] = []
    runs: dict[int, list[Run]] = {count: [] for count in busy}
    for _ in range(rounds):
        for count in busy:
            replays.append(gpu_ms(step, prompt_tokens, new_tokens - 1))
            with busy_threads(count):
                runs[count].append(read(step, tokenizer, prompt_tokens, new_tokens))
    standard = runs[busy[0]][0].tokens
    replay_ms = percentile(replays, 50)
    return [_row(step, count, runs[count], standard, replay_ms, prompt_tokens, new_tokens) for count in busy]


def _row(
    step: Step,
    busy: int,
    runs: list[Run],
    standard: list[int],
    replay_ms: float,
    prompt_tokens: int,
    new_tokens: int,
) -> dict[str, Any]:
    wall = spread([run.wall_ms for run in runs])
    ratio = wall["ms"] / replay_ms
    on_gpu = step.device.type == "cuda"
    return {
        "bench": "host_loop",
        "system": "monograph",
        "dtype": str(step.dtype).removeprefix("torch."),
        "seq_len": prompt_tokens,
        "max_seq_len": step.max_seq_len,
        **wall,
        "floor_ms": None,
        "graphs": 2 if on_gpu else 0,
        "verdict": verdict(runs, standard, new_tokens, ratio if on_gpu and busy <= JUDGED_THREADS else None),
        "busy_threads": busy,
        "new_tokens": new_tokens,
        "rounds": len(runs),
        "gpu_ms": round(replay_ms, 5),
        "ratio": round(ratio, 5),
        "gap_ms": round(max(run.gap_ms for run in runs), 3),
        "largest_piece": max(run.largest_piece for run in runs),
        "first_token_ms": round(percentile([run.first_token_ms for run in runs], 50), 3),
        "cpu_ms": round(percentile([run.cpu_ms for run in runs], 50), 4),
        "run_ahead": step.runner.run_ahead,
        "switch_interval_ms": sys.getswitchinterval() * 1e3,
    }


def verdict(runs: Sequence[Run], standard: Sequence[int], new_tokens: int, ratio: float | None) -> str:
    """Whether runs were right: "ok", or why not.

    Args:
        runs: Answers of one kind.
        standard: The tokens that they should have.
        new_tokens: How many those should be.
        ratio: Of wall time to GPU time; None where it has no limit.
    """
    for run in runs:
        if len(run.tokens) != new_tokens:
            return f"{len(run.tokens):,} tokens, expected {new_tokens:,}"
        if run.tokens != list(standard):
            at = next(i for i, (got, want) in enumerate(zip(run.tokens, standard, strict=True)) if got != want)
            return f"token {at} is {run.tokens[at]}, elsewhere {standard[at]}"
    if ratio is not None and ratio > MOST:
        return f"wall time {ratio:.4f} of the GPU's, at most {MOST:g} expected"
    return "ok"


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b", help="a named shape with random weights, or a model")
    parser.add_argument("--max-seq-len", type=int, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--busy", default="0,1,4", help="numbers of busy threads, with commas")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1000, help="of an answer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="where to write, instead of bench/results")
    args = parser.parse_args()
    busy = [int(count) for count in args.busy.split(",")]
    with (
        tempfile.TemporaryDirectory() as folder,
        build(args.model, args.max_seq_len, args.dtype, args.device) as built,
    ):
        write_tokenizer(Path(folder), built.step.config.vocab_size)
        tokenizer = Tokenizer.from_folder(folder)
        rows = measure(built.step, tokenizer, busy, args.prompt_tokens, args.tokens, args.rounds)
    rows = [{"bench": row.pop("bench"), "model": args.model, **row} for row in rows]
    print_table(rows, COLUMNS)
    path = write_results("host_loop", machine_facts(args.device), None, rows, args.json)
    print(f"-> {path}")
    if any(row["verdict"] != "ok" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
