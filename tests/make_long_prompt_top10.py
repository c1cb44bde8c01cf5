"""Makes tests/data/long_prompt_top10.json with transformers: the next-token logits after thousands of tokens.

Run: python tests/make_long_prompt_top10.py (a minute or two, 3 GB of memory).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import smollm2

DATA = Path(__file__).parent / "data"


def main() -> None:
    path = smollm2.path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = tokenizer((DATA / "alice.txt").read_text()).input_ids
    rows = []
    for num_tokens in (2000, 7000):
        with torch.inference_mode():
            logits = model(torch.tensor([ids[:num_tokens]]), logits_to_keep=1).logits[0, -1]
        top = logits.topk(11)
        rows.append(
            {
                "num_tokens": num_tokens,
                "top10_ids": top.indices[:10].tolist(),
                "top10_logits": [round(value, 5) for value in top.values[:10].tolist()],
                "smallest_gap": round(float((top.values[:-1] - top.values[1:]).min()), 5),
            }
        )
    (DATA / "long_prompt_top10.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
