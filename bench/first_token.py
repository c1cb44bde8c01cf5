"""One process from its start to its first token: what a user waits for, phase by phase, as a line of JSON.

Nothing is imported before the clock runs but the clock. Started by bench/startup.py, which knows when the process was.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()


def main() -> None:
    """Load a model, answer with one token, report."""
    import argparse
    import dataclasses
    import json
    import os

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--spawned", type=float, default=BEGAN, help="when the process was started, time.monotonic()")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-seq-len", type=int, default=None)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    args = parser.parse_args()
    times = {"interpreter_s": BEGAN - args.spawned}
    started = time.monotonic()

    import monograph as mg

    load = mg.load  # imports PyTorch when it is called, as for everybody
    package_s = time.monotonic() - started
    engine = load(args.model, device=args.device, dtype=args.dtype, max_seq_len=args.max_seq_len)
    prompt = [7919 * i % engine.config.vocab_size for i in range(1, args.prompt_tokens + 1)]
    answer = engine.generate(prompt, 1, sampling=mg.Sampling(temperature=0.0))
    total_s = time.monotonic() - args.spawned
    stats = dataclasses.asdict(engine.load_stats)
    prepared = getattr(engine._decoder.runner, "prepared", [])
    print(
        json.dumps(
            {
                **times,
                **stats,
                "import_s": package_s + stats["import_s"],
                "first_token_ms": answer.stats.first_token_ms,
                "process_s": total_s,
                "token": answer.token_ids[0],
                "compiled_names": [kernel.name for kernel in prepared if kernel.compiled],
                "device": engine.device.type,
                "dtype": str(engine.capacity.dtype).removeprefix("torch."),
                "max_seq_len": engine.capacity.max_seq_len,
                "early": os.environ.get("MONOGRAPH_EARLY") != "0",
            }
        ),
        flush=True,
    )
    engine.close()


if __name__ == "__main__":
    main()
