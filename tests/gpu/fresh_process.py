"""A program for tests: build a decoder as the first GPU work of the process, and say what that took and made.

Garbage is collected before and after every launch sequence, capture included, so that anything that capture alone keeps
alive would be lost. Prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable

import torch

import monograph.model.graph
from monograph.kernels.triton_import import triton
from monograph.model.program import Launch, run
from tests.gpu.tiny import DRAWN, bits, digest, make, random_ids, replay

PROMPT_TOKENS, STEPS = 700, 40


def main() -> None:
    """Build, answer, report."""
    compiled = {"before": 0, "capturing": 0, "after": 0}
    phase = ["before"]

    def note(**_: object) -> None:
        compiled["capturing" if torch.cuda.is_current_stream_capturing() else phase[0]] += 1

    def run_between_collections(launches: Iterable[Launch], pdl: bool = False) -> None:
        gc.collect()
        run(launches, pdl)
        gc.collect()

    triton.knobs.runtime.jit_cache_hook = note  # pyright: ignore[reportAttributeAccessIssue]
    monograph.model.graph.run = run_between_collections  # type: ignore[attr-defined]
    assert not torch.cuda.is_initialized()
    decoder = make()
    phase[0] = "after"
    replay(decoder, random_ids(PROMPT_TOKENS), STEPS, DRAWN)
    facts = {
        "compiled": compiled,
        "digest": digest(bits(decoder, PROMPT_TOKENS + STEPS)),
        "capture_ms": decoder.runner.capture_ms,  # type: ignore[attr-defined]
    }
    decoder.close()
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
