"""A conversation with a break in it, for tests in which one process saves and another goes on.

Run as a program: ``python -m tests.session_process (save | go_on) MODEL DEVICE DTYPE FOLDER``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import monograph as mg

ROOT = Path(__file__).parents[1]
SEEDS = (0, 42, 2**63 + 1)
CUT, WHOLE = 9, 30  # tokens of the second answer before the break, and in all


def sampling(engine: mg.Engine, seed: int) -> mg.Sampling:
    """Everything that draws and counts; special tokens, the end of text among them, are banned."""
    special = [i for i, token in engine.tokenizer.backend.get_added_tokens_decoder().items() if token.special]
    return mg.Sampling(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=dict.fromkeys(special, -math.inf),
        seed=seed,
    )


def until_the_break(engine: mg.Engine, seed: int, second: int, *, closed: bool = False) -> mg.Chat:
    """Two turns from a cold cache, the second answer cut after ``second`` tokens: by its limit, or by its reader."""
    engine.generate([5], 1)
    chat = engine.chat(system="Be brief.")
    list(chat.send("Tell me about the sea.", max_new_tokens=24, sampling=sampling(engine, seed)))
    limit = WHOLE if closed else second
    pieces = chat.send("And about the shore?", max_new_tokens=limit, sampling=sampling(engine, seed))
    for made, _ in enumerate(pieces, start=1):
        if closed and made == second:
            pieces.close()
    return chat


def after_the_break(engine: mg.Engine, chat: mg.Chat, seed: int) -> dict[str, Any]:
    """A third turn; what the second answer and this one are, to the token, and digests of logits and KV rows."""
    assert chat.completion is not None
    second = chat.completion.token_ids
    list(chat.send("Go on.", max_new_tokens=16, sampling=sampling(engine, seed)))
    stats = chat.completion.stats
    live = stats.prompt_tokens + stats.completion_tokens - 1
    found = hashlib.blake2b(_raw(engine.arena.view("logits")))
    for i in range(engine.config.num_layers):
        for name in ("k_cache", "v_cache"):
            found.update(_raw(engine.arena.view(f"layers.{i}.{name}")[:, :live]))
    counts = [_raw(engine.arena.view(name)).hex()[:64] for name in ("context_counts", "output_counts")]
    return {
        "second": second,
        "third": chat.completion.token_ids,
        "reused": stats.reused_tokens,
        "prefilled": stats.prefilled_tokens,
        "messages": chat.messages,
        "counts": counts,
        "bits": found.hexdigest(),
    }


def never_stopped(engine: mg.Engine, seed: int) -> dict[str, Any]:
    """The same conversation without a break."""
    return after_the_break(engine, until_the_break(engine, seed, WHOLE), seed)


def save(engine: mg.Engine, folder: Path) -> None:
    """Talk up to the break, for each seed."""
    for seed in SEEDS:
        until_the_break(engine, seed, CUT).save(folder / f"{seed}.session")


def go_on(engine: mg.Engine, folder: Path) -> dict[str, Any]:
    """Go on from each file."""
    found = {}
    for seed in SEEDS:
        chat = engine.load_chat(folder / f"{seed}.session")
        list(chat.resume(max_new_tokens=WHOLE - CUT))
        assert chat.completion is not None
        assert chat.completion.stats.prefilled_tokens == 1  # the token that was not read yet
        found[str(seed)] = after_the_break(engine, chat, seed)
    return found


def in_a_process(action: str, model: Path, device: str, dtype: str, folder: Path) -> Any:
    """Run ``save`` or ``go_on`` in a process of its own and return what it reports."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.session_process", action, str(model), device, dtype, str(folder)]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def main(action: str, model: str, device: str, dtype: str, folder: str) -> None:
    """What ``in_a_process`` starts."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    found = None
    with mg.load(model, device=device, dtype=dtype, max_seq_len=256) as engine:
        if action == "save":
            save(engine, Path(folder))
        else:
            found = go_on(engine, Path(folder))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
