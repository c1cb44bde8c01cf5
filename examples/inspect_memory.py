"""Look at a model's memory before anything is allocated: the whole map, and what a longer context costs.

python examples/inspect_memory.py MODEL
"""

from __future__ import annotations

import sys

import monograph as mg


def main(model: str) -> None:
    plan = mg.plan_model(model, device="cpu", max_seq_len=1024)
    print(plan.layout)

    print("\nmax_seq_len  arena, MiB")
    for max_seq_len in (1024, 2048, plan.longest):
        nbytes = mg.plan_model(model, device="cpu", max_seq_len=max_seq_len).need_nbytes
        print(f"{max_seq_len:11,}  {nbytes / 2**20:10,.1f}")

    try:
        mg.plan_model(model, device="cpu", max_seq_len=plan.config.max_position_embeddings * 1000)
    except mg.MonographError as error:
        print(f"\n{error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
