"""Makes tests/data/teacher_forced.json with transformers: what every row of a text's logits holds.

A row is summed up by the logarithm of the sum of its exponentials, which all values enter, and by some values as they
are: the highest, that of the token which follows, and four at ids that move on from row to row.

Run: python -m tests.make_teacher_forced (half a minute, 3 GB of memory).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from tests import smollm2

DATA = Path(__file__).parent / "data"
FILE = DATA / "teacher_forced.json"
TOKENS = 580  # more than one chunk of prefill, and a last piece that is not full
_STEP = 10_007


def summary(logits: torch.Tensor, ids: Sequence[int], first: int = 0) -> torch.Tensor:
    """Sum up rows of teacher-forced logits.

    Args:
        logits: [rows, vocab_size], those of ``ids[first:]`` onwards.
        ids: The whole text.
        first: Which row the first is.

    Returns:
        [rows, 7] float64.
    """
    rows = torch.arange(len(logits))
    follows = torch.tensor([*ids[1:], ids[0]])[first : first + len(logits)]
    moving = [((first + rows) * _STEP + k * 12_289) % logits.shape[1] for k in range(4)]
    values = logits.double()
    picked = [values[rows, column] for column in (follows, *moving)]
    return torch.stack([values.logsumexp(-1), values.max(-1).values, *picked], dim=1)


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = smollm2.path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = tokenizer((DATA / "alice.txt").read_text()).input_ids[:TOKENS]
    with torch.inference_mode():
        rows = summary(model(torch.tensor([ids])).logits[0], ids)
    text = ",\n".join(json.dumps([round(value, 4) for value in row]) for row in rows.tolist())
    FILE.write_text(f'{{"ids": {json.dumps(ids)},\n"rows": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
