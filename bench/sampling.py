"""What choosing a token costs: the captured decode step under every sampling setting, against greedy in the same run.

Each setting is first judged: over some steps the token must be the one that the PyTorch reference chooses from the same
scores. Then all settings are timed in turn, a batch of replays each, round after round; "over greedy" is the median of
the differences from greedy in the same round. Flat and peaked scores are the same random model's, its final norm scaled
so that the logits have the standard deviation named: 1, where top-p 0.9 keeps a good part of the vocabulary, and 6,
where it keeps a few tokens.

Two rows have graphs of their own: "no choice" is the step without its last launch, "argmax" that step and torch.argmax
over the scores.

Run: python bench/sampling.py --model llama-3.2-1b --max-seq-len 4096
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import Clock, machine_facts, percentile, print_table, spread, write_results
from bench.decode import build
from bench.shapes import SHAPES, random_cache
from bench.step import BATCH, NEVER, Step
from monograph.kernels.draw import draw_torch
from monograph.model.config import DTYPES
from monograph.model.program import FILTERS, run
from monograph.model.sampling import Sampling

COLUMNS = {
    "scores": "scores:",
    "setting": "setting:",
    "kept": "kept:,",
    "ms": "ms:.4f",
    "p20_ms": "p20:.4f",
    "p80_ms": "p80:.4f",
    "over_greedy_us": "over greedy us:.2f",
    "verdict": "verdict:",
}
GREEDY = "greedy"
SETTINGS: dict[str, dict[str, float]] = {
    GREEDY: {},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-k 1000": {"temperature": 0.8, "top_k": 1000},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "top-k 50, top-p, min-p, penalties": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
    },
    "top-k 1000, top-p, min-p, penalties": {
        "temperature": 0.8,
        "top_k": 1000,
        "top_p": 0.9,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
    },
}
SCALES = {"flat": 1.0, "peaked": 6.0}  # standard deviation of the logits
CHECKED = 6  # steps


def begin(step: Step, seq_len: int, setting: str) -> None:
    """Make ``seq_len`` the live length of the next step, under a setting."""
    step.settle()
    sampling = Sampling(seed=7, **SETTINGS[setting]).resolve({})  # type: ignore[arg-type]
    with step.context():
        step.state.begin([step.token(i) for i in range(seq_len)], seq_len - 1, NEVER, (), sampling)


def scale_logits(step: Step, std: float, seq_len: int) -> None:
    """Scale the final norm until the logits of a step have the standard deviation given."""
    begin(step, seq_len, GREEDY)
    with step.context():
        step.runner.decode()
        step.settle()
        step.arena.view("final_norm").mul_(std / float(step.arena.view("logits").std()))
    step.settle()


def judge(step: Step, seq_len: int, setting: str) -> dict[str, Any]:
    """Run some steps; "verdict", and how many tokens the filters "kept" in the last."""
    begin(step, seq_len, setting)
    kept = 1
    for position in range(seq_len, seq_len + CHECKED):
        with step.context():
            step.runner.decode()
            step.settle()
            scores = step.arena.view("scores")
            if "temperature" in SETTINGS[setting]:
                temperature, top_k, top_p, min_p, seed = (step.arena.view(name) for name in FILTERS)
                expected, masses = draw_torch(scores, temperature, top_k, top_p, min_p, seed, position)
                kept = int((masses > 0).sum())
            else:
                expected = int((scores == scores.max()).nonzero()[0, 0])
            found = [int(step.arena.view(name)[0]) for name in ("position", "halted")]
            token = int(step.arena.view("tokens")[position])
        if [token, *found] != [expected, position, 0]:
            fault = f"at {position}: token, position, halted {[token, *found]}, expected {[expected, position, 0]}"
            return {"verdict": fault, "kept": kept}
        if step.state.token(position) != token:
            return {"verdict": f"at {position}: the outbox says {step.state.token(position)}", "kept": kept}
    return {"verdict": "ok", "kept": kept}


def own_graphs(step: Step, seq_len: int) -> dict[str, Callable[[], None]]:
    """Replays of the step without its choice, and with torch.argmax for it; none without a GPU."""
    if step.device.type != "cuda":
        return {}
    launches, replays = step.program.decode_logits, {}
    token = torch.zeros(1, dtype=torch.int64, device=step.device)
    scores = step.arena.view("scores").view(1, -1)

    def no_choice() -> None:
        run(launches, step.pdl)

    def argmax() -> None:
        run(launches, step.pdl)
        torch.argmax(scores, dim=1, out=token)

    for name, body in {"no choice": no_choice, "argmax": argmax}.items():
        begin(step, seq_len, GREEDY)
        with step.context():
            body()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=step.runner.stream, capture_error_mode="thread_local"):  # type: ignore[attr-defined]
            body()
        replays[name] = graph.replay
    return replays


def time_in_turn(
    step: Step, names: list[str], others: dict[str, Any], seq_len: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds a replay of every setting in every round, and of the graphs beside them."""
    times: dict[str, list[float]] = {name: [] for name in (*names, *others)}
    clock = Clock(step.device)
    for round_number in range(rounds + 1):
        for name in times:
            begin(step, seq_len, GREEDY if name in others else name)
            replay = others.get(name, step.runner.decode)
            with step.context():
                replay()  # the first one after a pause is slower
                step.state.set_position(seq_len - 1)
                with clock.span():
                    for _ in range(BATCH):
                        replay()
            if round_number > 0:  # one round warms up
                times[name].append(clock.times_ms()[0] / BATCH)
            else:
                clock.times_ms()
    return times


def measure(step: Step, model: str, seq_len: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each kind of scores and each setting; those that are wrong have no times."""
    random_cache(step.arena, step.config, rows=seq_len + BATCH + 2)
    rows: list[dict[str, Any]] = []
    for scores, std in SCALES.items():
        scale_logits(step, std, seq_len)
        verdicts = {name: judge(step, seq_len, name) for name in SETTINGS}
        right = [name for name, verdict in verdicts.items() if verdict["verdict"] == "ok"]
        others = own_graphs(step, seq_len) if GREEDY in right else {}
        times = time_in_turn(step, right, others, seq_len, rounds)
        for name in (*SETTINGS, *others):
            row: dict[str, Any] = {
                "bench": "sampling",
                "model": model,
                "system": "torch" if name == "argmax" else "monograph",
                "dtype": str(step.dtype).removeprefix("torch."),
                "seq_len": seq_len,
                "max_seq_len": step.max_seq_len,
                "vocab_size": step.config.vocab_size,
                "scores": scores,
                "setting": name,
                "kept": None,
                "ms": None,
                "p20_ms": None,
                "p80_ms": None,
                "floor_ms": None,
                "over_greedy_us": None,
                "graphs": 1 if step.device.type == "cuda" else 0,
                "verdict": "ok",
                **verdicts.get(name, {}),
            }
            if name in times:
                row |= spread(times[name])
            if name in times and GREEDY in times:
                over = [(a - b) * 1e3 for a, b in zip(times[name], times[GREEDY], strict=True)]
                row["over_greedy_us"] = round(percentile(over, 50), 3)
            rows.append(row)
    return rows


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=f"{', '.join(SHAPES)}, or a model")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--length", type=int, default=64, help="live length")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, default=None, help="where to write, instead of bench/results")
    args = parser.parse_args()
    started = time.perf_counter()
    with build(args.model, args.max_seq_len, args.dtype, args.device) as built:
        rows = measure(built.step, args.model, args.length, args.rounds)
    print_table(rows, COLUMNS)
    path = write_results("sampling", machine_facts(args.device), None, rows, args.json)
    print(f"{time.perf_counter() - started:.0f} s -> {path}")
    if any(row["verdict"] != "ok" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
