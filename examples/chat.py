"""A conversation in code: each turn reuses what the KV cache already holds, and turns can be taken back.

python examples/chat.py MODEL
"""

from __future__ import annotations

import sys

import monograph as mg


def main(model: str) -> None:
    with mg.load(model, max_seq_len=2048) as engine:
        chat = engine.chat(system="You answer in one short sentence.")
        for question in ("What is the capital of France?", "And of Italy?"):
            print(f"> {question}")
            for text in chat.send(question, max_new_tokens=48):
                print(text, end="", flush=True)
            assert chat.completion is not None
            stats = chat.completion.stats
            print(f"\n[{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens were in the cache]")

        chat.rewind(1)  # as if the second question had not been asked
        print(f"{len(chat.messages)} messages are left, the last by the {chat.messages[-1]['role']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
