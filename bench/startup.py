"""Start-up: from the start of a process to its first token, by phase, with kernels to compile and without.

Every figure is of a process of its own. "cold" starts with an empty folder for Triton's cache, "warm" with one that
`monograph warm` has filled; on a CPU there are no kernels and one kind of start. "warm" is measured in turn with and
without what is begun before PyTorch is imported (the variable MONOGRAPH_EARLY). The model's files are in the page
cache, and this process leaves the GPU alone, so that it keeps nothing awake for those that are measured. "ms" is the
time from the call that starts the process until the token is on the host. A start is right ("ok") if its token is that
of every other start, and if after `monograph warm` nothing was compiled and no file was added to the cache.

The model is a named shape, written with random weights to a temporary folder, or anything that monograph.load takes.

Run: python bench/startup.py --model llama-3.2-1b --rounds 5
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.checkpoint import write_checkpoint
from bench.common import ROOT, machine_facts, print_table, spread, write_results
from bench.shapes import SHAPES, random_fill
from monograph.arena import Arena
from monograph.model.layout import Capacity, plan_layout

PHASES = (
    "interpreter_s",
    "import_s",
    "open_s",
    "tokenizer_s",
    "plan_s",
    "arena_s",
    "weights_s",
    "kernels_s",
    "capture_s",
)
COLUMNS = {
    "model": "model:",
    "cache": "cache:",
    "early": "early:",
    "ms": "ms:,.0f",
    "p20_ms": "p20:,.0f",
    "p80_ms": "p80:,.0f",
    **{phase: f"{phase.removesuffix('_s')}:.2f" for phase in PHASES},
    "first_token_ms": "token ms:.1f",
    "weights_gb_s": "GB/s:.1f",
    "compiled": "compiled:",
    "verdict": "verdict:",
}
LIMIT_S = 400


def write_model(name: str, folder: Path, device: torch.device) -> None:
    """Write a named shape with random weights as a checkpoint folder, its tokenizer as large as a real one."""
    config = SHAPES[name]
    assert config.dtype is not None
    capacity = Capacity.for_model(config, 64, config.dtype)
    with Arena(plan_layout(config, capacity), device) as arena:
        random_fill(arena, config)
        write_checkpoint(folder, config, arena)
    write_tokenizer(folder, config.vocab_size)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer with a merge for every token: reading a large one takes a third of a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ((left, right) for left in alphabet for right in alphabet)
    triples = ((left + middle, right) for left in alphabet for middle in alphabet for right in alphabet)
    merges = list(itertools.islice(itertools.chain(pairs, triples), max(0, vocab_size - len(alphabet))))
    vocab = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)][:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def start(model: str, options: Sequence[str], cache: Path | None, early: bool = True) -> dict[str, Any]:
    """Start a process, let it answer with one token, and return what it reports.

    Args:
        model: What it loads.
        options: More arguments of bench/first_token.py.
        cache: Folder for Triton's cache; None for the usual one.
        early: Whether libraries and GPU are begun with before PyTorch is imported.
    """
    before = _files(cache)
    script = ROOT / "bench" / "first_token.py"
    command = [sys.executable, str(script), model, *options, "--spawned", repr(time.monotonic())]
    found: dict[str, Any] = json.loads(_run(command, cache, early).splitlines()[-1])
    return {**found, "new_files": len(_files(cache) - before)}


def warm(model: str, options: Sequence[str], cache: Path | None) -> float:
    """Run ``monograph warm`` and return the seconds that the process took."""
    started = time.monotonic()
    print(_run([sys.executable, "-m", "monograph", "warm", model, *options], cache).splitlines()[-1], flush=True)
    return time.monotonic() - started


def row(model: str, cache: str | None, starts: list[dict[str, Any]], token: int, seq_len: int) -> dict[str, Any]:
    """The figures of one kind of start: medians over processes."""

    def median(name: str) -> float:
        return statistics.median(float(start[name]) for start in starts)

    return {
        "bench": "start",
        "model": model,
        "system": "monograph",
        "dtype": starts[0]["dtype"],
        "seq_len": seq_len,
        "max_seq_len": starts[0]["max_seq_len"],
        **spread([start["process_s"] * 1e3 for start in starts]),
        "floor_ms": None,
        "graphs": 0 if starts[0]["device"] == "cpu" else 2,
        "verdict": verdict(cache, starts, token),
        "cache": cache,
        "early": starts[0]["early"],
        "starts": len(starts),
        **{phase: round(median(phase), 4) for phase in PHASES},
        "load_s": round(median("total_s"), 4),
        "first_token_ms": round(median("first_token_ms"), 3),
        "weights_nbytes": starts[0]["weights_nbytes"],
        "weights_gb_s": round(starts[0]["weights_nbytes"] / median("weights_s") / 1e9, 3),
        "kernels": starts[0]["kernels"],
        "compiled": max(len(start["compiled_names"]) for start in starts),
    }


def verdict(cache: str | None, starts: list[dict[str, Any]], token: int) -> str:
    """Whether starts were right: "ok", or why not."""
    others = {start["token"] for start in starts} - {token}
    if others:
        return f"token {min(others)}, elsewhere {token}"
    late = [name for start in starts for name in start["compiled_names"]]
    if cache == "warm" and late:
        return f"compiled after warming: {', '.join(sorted(set(late)))}"
    if cache == "warm" and any(start["new_files"] for start in starts):
        return f"{max(start['new_files'] for start in starts)} new files in the cache after warming"
    if cache == "cold" and not late:
        return "nothing was compiled: the cache was not cold"
    return "ok"


def measure(name: str, model: str, options: Sequence[str], seq_len: int, rounds: int) -> list[dict[str, Any]]:
    """Measure every kind of start of a model.

    Args:
        name: Of the model, in the rows.
        model: What is loaded.
        options: For loading it, as ``--max-seq-len 4096``.
        seq_len: Tokens of the prompt.
        rounds: Processes of each kind; one of them where kernels are compiled.
    """
    asked = [*options, "--prompt-tokens", str(seq_len)]
    with tempfile.TemporaryDirectory(prefix="monograph-cold-") as cold, tempfile.TemporaryDirectory() as warmed:
        first = start(model, asked, Path(cold))
        if first["device"] == "cpu":
            return [row(name, None, [start(model, asked, None) for _ in range(rounds)], first["token"], seq_len)]
        warm_s = warm(model, options, Path(warmed))
        pairs = [[start(model, asked, Path(warmed), early) for early in (True, False)] for _ in range(rounds)]
    kinds = ("cold", [first]), ("warm", [pair[0] for pair in pairs]), ("warm", [pair[1] for pair in pairs])
    rows = [row(name, kind, of, first["token"], seq_len) for kind, of in kinds]
    rows[1]["warm_s"] = round(warm_s, 3)
    return rows


def _run(command: Sequence[str], cache: Path | None, early: bool = True) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "MONOGRAPH_EARLY": str(int(early))}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def _files(folder: Path | None) -> set[Path]:
    return set() if folder is None else {path for path in folder.rglob("*") if path.is_file()}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b", help=f"{', '.join(SHAPES)}, or a model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-seq-len", type=int, default=None, help="the model's own by default")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="where to write, instead of bench/results")
    parser.add_argument("--write", type=Path, default=None, help="write the named shape to this folder and end")
    args = parser.parse_args()
    device = args.device
    if args.write is not None:
        write_model(args.model, args.write, torch.device(_device(device)))
        return
    options = ["--device", device]
    if args.max_seq_len is not None:
        options += ["--max-seq-len", str(args.max_seq_len)]
    with ExitStack() as stack:
        model = args.model
        if model in SHAPES:
            model = stack.enter_context(tempfile.TemporaryDirectory(prefix="monograph-model-"))
            command = [sys.executable, str(Path(__file__).resolve()), "--model", args.model, "--device", device]
            _run([*command, "--write", model], None)  # a process of its own: this one leaves the GPU alone
        rows = measure(args.model, model, options, args.prompt_tokens, args.rounds)
    print_table(rows, COLUMNS)
    path = write_results("startup", machine_facts(torch.device(_device(device))), None, rows, args.json)
    print(f"-> {path}")
    if any(row["verdict"] != "ok" for row in rows):
        sys.exit(1)


def _device(device: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


if __name__ == "__main__":
    main()
