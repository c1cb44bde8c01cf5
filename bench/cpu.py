"""Without a GPU: the PyTorch references against transformers' generate, in one run, the two in turn.

Both run the same GGUF file in float32 with the same number of threads and must give the same tokens. Reported are the
load time, the time to the first token of a 40-token prompt, and decoding speed.

Run: python bench/cpu.py [--model FILE.gguf] [--rounds 5] [--new-tokens 32] [--json PATH] [--show PATH]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from find_smollm2 import smollm2_path

import monograph as mg

PROMPT = "Give me three reasons to learn how to sail."  # 40 tokens with SmolLM2's template and system prompt


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds that a call takes, and what it returns."""
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


def load_transformers(path: Path) -> Any:
    """Load the GGUF file as transformers does: dequantised, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def run_transformers(model: Any, ids: list[int], new_tokens: int) -> tuple[list[int], float, float]:
    """Answer with transformers: token ids, time of a one-token answer, time of the rest for each token (ms)."""
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        first_ms, _ = timed(lambda: model.generate(**inputs, max_new_tokens=1, **fixed))
        whole_ms, out = timed(lambda: model.generate(**inputs, max_new_tokens=new_tokens, **fixed))
    return out[0, len(ids) :].tolist(), first_ms, (whole_ms - first_ms) / (new_tokens - 1)


def run_monograph(engine: mg.Engine, ids: list[int], new_tokens: int) -> tuple[list[int], float, float]:
    """The same with monograph; no reuse, so that every round reads the prompt anew."""
    first_ms, _ = timed(lambda: engine.generate(ids, 1))
    whole_ms, answer = timed(lambda: engine.generate(ids, new_tokens))
    return answer.token_ids, first_ms, (whole_ms - first_ms) / (len(answer.token_ids) - 1)


def cpu_name() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def row(bench: str, system: str, model: str, seq_len: int, values: list[float], verdict: str) -> dict[str, Any]:
    """One figure in the form that all benchmarks share."""
    ordered = sorted(values)
    return {
        "bench": bench,
        "model": model,
        "system": system,
        "dtype": "float32",
        "seq_len": seq_len,
        "ms": round(statistics.median(values), 3),
        "p20_ms": round(ordered[int(0.2 * (len(ordered) - 1))], 3),
        "p80_ms": round(ordered[round(0.8 * (len(ordered) - 1))], 3),
        "verdict": verdict,
    }


def table(run: dict[str, Any]) -> str:
    """A run as text: medians and their ratio."""
    ms = {(row["bench"], row["system"]): row["ms"] for row in run["rows"]}
    first = run["rows"][0]
    lines = [
        f"{first['model']}, {first['dtype']}, prompt of {first['seq_len']} tokens; {run['device']}",
        f"torch {run['torch']}, transformers {run['transformers']}, {run['date']}; tokens: {first['verdict']}",
        f"{'median, ms':<20}{'monograph':>12}{'transformers':>14}{'ratio':>8}",
    ]
    for bench, label in (("start", "load"), ("first_token", "first token"), ("decode", "decode, per token")):
        ours, theirs = ms[bench, "monograph"], ms[bench, "transformers"]
        lines.append(f"{label:<20}{ours:>12.1f}{theirs:>14.1f}{ours / theirs:>8.2f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="a .gguf file; by default SmolLM2 from its wheel")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--show", type=Path, default=None, help="print the table of a finished run and end")
    args = parser.parse_args()
    if args.show:
        print(table(json.loads(args.show.read_text())), end="")
        return
    path = args.model or smollm2_path()
    import transformers  # imported before the clock starts, as torch is for both

    loads: dict[str, list[float]] = {"monograph": [], "transformers": []}
    for _ in range(2):
        loads["transformers"].append(timed(lambda: load_transformers(path))[0])
        loads["monograph"].append(timed(lambda: mg.load(str(path), device="cpu", dtype="float32").close())[0])
    peer = load_transformers(path)
    engine = mg.load(str(path), device="cpu", dtype="float32")
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
    systems: dict[str, Callable[[], tuple[list[int], float, float]]] = {
        "monograph": lambda: run_monograph(engine, ids, args.new_tokens),
        "transformers": lambda: run_transformers(peer, ids, args.new_tokens),
    }
    firsts: dict[str, list[float]] = {name: [] for name in systems}
    steps: dict[str, list[float]] = {name: [] for name in systems}
    answers = {name: system()[0] for name, system in systems.items()}  # warm up
    for _ in range(args.rounds):
        for name, system in systems.items():
            answers[name], first_ms, step_ms = system()
            firsts[name].append(first_ms)
            steps[name].append(step_ms)
    verdict = "ok" if answers["monograph"] == answers["transformers"][: len(answers["monograph"])] else "other tokens"
    run = {
        "device": cpu_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "date": date.today().isoformat(),
        "rows": [
            row(bench, name, path.stem, len(ids), values, verdict)
            for bench, figures in (("start", loads), ("first_token", firsts), ("decode", steps))
            for name, values in figures.items()
        ],
    }
    print(table(run), end="")
    if args.json:
        args.json.write_text(json.dumps(run, indent=1) + "\n")
    if verdict != "ok":
        sys.exit("the two systems gave different tokens")


if __name__ == "__main__":
    main()
