"""Answer a question twice: greedily and whole, then sampled and piece by piece.

python examples/generate.py MODEL "Why is the sky blue?"
"""

from __future__ import annotations

import sys

import monograph as mg


def main(model: str, question: str) -> None:
    with mg.load(model, max_seq_len=1024) as engine:
        messages = [{"role": "user", "content": question}]
        ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

        completion = engine.generate(ids, max_new_tokens=32, sampling=mg.Sampling(temperature=0.0))
        print(completion.text)
        print(f"[{completion.finish_reason}, {completion.stats.tokens_per_s:.1f} tokens/s]")

        sampling = mg.Sampling(temperature=0.8, top_p=0.95, seed=7)
        for chunk in engine.stream(ids, max_new_tokens=32, sampling=sampling, stop=["\n\n"]):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
