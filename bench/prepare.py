"""First process of a comparison: writes the weights that all systems load and the logits that all are judged by.

A named shape gets random weights and is written as a checkpoint folder; a model that is given stays where it is. The
reference is what the PyTorch references of every launch make of those weights in fp32: after the prompt of the
start-up, and for one step at every length over the cache that all systems are given.

Run by bench/compare.py.
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

from bench.checkpoint import write_checkpoint
from bench.decode import build
from bench.judge import ALLOWED_OTHERS, Bounds
from bench.kv_rows import fill_cache
from bench.shapes import SHAPES
from bench.step import GREEDY, NEVER, Step
from bench.systems.system import BATCH, SYSTEMS, Task
from monograph.model.open import open_model

PROMPT_TOKENS = 16


def prepare(task: Task, folder: Path) -> dict[str, Any]:
    """Write what the other processes need.

    Args:
        task: Its ``model`` may be a named shape, its ``dtype`` "auto", its ``prompt`` empty.
        folder: Where to write.

    Returns:
        "task", with all of these settled, and the sizes that the floor is made of: "weights_nbytes", "kv_row_nbytes".
    """
    config = SHAPES[task.model] if task.model in SHAPES else open_model(task.model).config
    limit = min(task.max_seq_len or config.max_position_embeddings, config.max_position_embeddings)
    wanted = [length for length in task.lengths if 1 <= length <= limit]
    capacity = min(max([*wanted, PROMPT_TOKENS]) + BATCH, limit)
    with build(task.model, capacity, task.dtype, torch.device(task.device)) as built:
        step = built.step
        if task.model in SHAPES:
            write_checkpoint(folder / "model", step.config, step.arena)
            if SYSTEMS["llama.cpp"].is_installed:
                from bench.gguf_checkpoint import write_gguf

                task.gguf = str(folder / "model.gguf")
                write_gguf(Path(task.gguf), step.config, step.arena)
            task.model = str(folder / "model")
        elif task.model.endswith(".gguf"):
            task.gguf = task.model
        task.dtype = str(step.dtype).removeprefix("torch.")
        task.prompt = [(17 + 31 * i) % step.config.vocab_size for i in range(PROMPT_TOKENS)]
        task.reference = str(folder / "reference.pt")
        kept = {
            "prompt": prompt_logits(step, task.prompt).cpu(),
            "lengths": {length: _judgement(step, length) for length in wanted},
        }
        torch.save(kept, task.reference)
        nbytes = step.nbytes(0), step.nbytes(1)
    return {"task": task.to_json(), "weights_nbytes": nbytes[0], "kv_row_nbytes": nbytes[1] - nbytes[0]}


def prompt_logits(step: Step, ids: list[int]) -> torch.Tensor:
    """What the references make of a whole prompt in fp32: the logits after its last token, [vocab_size]."""
    step.settle()
    with step.context(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        step.state.begin(ids, 0, NEVER, (), GREEDY)
        for position in range(len(ids)):
            step.state.set_position(position)
            for launch in step.program.decode_logits:
                launch.reference(*launch.args, **launch.constants)
        return step.arena.view("logits").clone()


def _judgement(step: Step, length: int) -> dict[str, Any]:
    step.settle()
    fill_cache(step.arena, step.config, length - 1)
    want = step.reference_logits(length)
    bounds = Bounds.of(want, step.plain_logits(length), ALLOWED_OTHERS)
    return {"want": want.cpu(), **vars(bounds)}


def main() -> None:
    """Prepare, and say in one line of JSON what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--started", type=float, default=0.0)
    args = parser.parse_args()
    found = prepare(Task.from_json(json.loads(args.task.read_text())), args.task.parent)
    args.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
