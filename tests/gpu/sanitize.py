"""A program to be run under compute-sanitizer: all launches of decode and prefill at lengths where loops begin to end.

B14: loops whose trip count the device decides may be pipelined by the compiler past their end. Each slot is therefore
an allocation of its own, exactly as long as the slot: a read past the end of a cache, a weight or a scratch row is a
read past the end of an allocation, which memcheck reports. The same lengths then run through graphs over an arena.

Run: PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
         python -m tests.gpu.sanitize [--dtype bfloat16,float32] [--plant]

With --plant one launch reads past its input on purpose: memcheck must report it, or its silence means nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from typing import Any, cast

import torch

from bench.shapes import random_cache, random_decoder, random_fill
from bench.step import Step
from monograph.arena import Arena, HostMemory, Layout
from monograph.model.config import DTYPES
from monograph.model.graph import supports_pdl
from monograph.model.layout import Capacity, plan_host_layout, plan_layout
from monograph.model.program import build_program, run
from monograph.model.read_ceiling import Configuration, _read_kernel
from tests.gpu import tiny

CONFIG = dataclasses.replace(tiny.CONFIG, num_layers=1)
MAX_SEQ_LEN = 528  # past the length at which a second split joins, and no multiple of a block
DECODE = (
    1,
    2,
    3,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    383,
    384,
    385,
    511,
    512,
    513,
    527,
    528,
)
PREFILL = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 511, 512)
STARTS = (0, 1, 15, 16)
SETTINGS: dict[str, float] = {
    "decode_gate": 1,
    "position_limit": tiny.NEVER,
    "stop_ids": -1,
    "top_p": 1,
    "repetition_penalty": 1,
}
DRAWN: dict[str, float] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "processors": 3,
}


class SlotsApart:
    """Stands for an arena: every slot is an allocation of its own, of exactly its bytes."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._views = {slot.name: torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in layout.entries}
        for slot in layout.entries:
            if slot.lifetime == "state":
                self._views[slot.name].zero_()

    def view(self, name: str) -> torch.Tensor:
        """The tensor of a slot."""
        return self._views[name]

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def set(self, settings: dict[str, float]) -> None:
        """Fill scalars."""
        for name, value in settings.items():
            self._views[name].fill_(value)


def launch_by_launch(dtype: torch.dtype) -> int:
    """Run decode and prefill over slots apart; returns the number of passes."""
    capacity = Capacity.for_model(CONFIG, MAX_SEQ_LEN, dtype)
    slots = SlotsApart(plan_layout(CONFIG, capacity), tiny.DEVICE)
    arena = cast(Arena, slots)
    random_fill(arena, CONFIG)
    random_cache(arena, CONFIG)
    host = HostMemory(plan_host_layout(capacity), tiny.DEVICE)
    program, pdl, passes = build_program(CONFIG, capacity, arena, host), supports_pdl(tiny.DEVICE), 0

    def check(what: str) -> None:
        tiny.settle()
        assert int(slots.view("halted")) == 0, f"{what}: halted {int(slots.view('halted'))}"
        assert bool(torch.isfinite(slots.view("logits")).all()), f"{what}: logits are not finite"

    for settings in (SETTINGS, {**SETTINGS, **DRAWN}):
        slots.set(settings)
        for length in DECODE:
            slots.set({"position": length - 1, "prefill_end": length})
            run(program.decode, pdl)
            check(f"decode at length {length}")
            passes += 1
    for start in STARTS:
        for rows in (n for n in PREFILL if start + n <= MAX_SEQ_LEN):
            slots.set({"position": start, "prefill_end": start + rows})
            run(program.prefill, pdl)
            check(f"prefill of {rows} rows from {start}")
            passes += 1
    slots.set({"position": 16, "prefill_end": MAX_SEQ_LEN})  # the last chunk ends with the cache
    run(program.prefill, pdl)
    check("prefill to the end of the cache")
    slots.set({"position": 0, "prefill_end": 512})
    run(program.prefill_layers, pdl)
    for first_row in (0, 64, 448):
        slots.set({"first_row": first_row})
        run(program.prefill_logits, pdl)
    slots.set({"halted": 1})
    for launches in (program.decode, program.prefill, program.prefill_logits):
        run(launches, pdl)
    tiny.settle()
    host.close()
    return passes + 5


def through_graphs(dtype: torch.dtype) -> int:
    """Run replays over a real arena; returns their number."""
    decoder = random_decoder(CONFIG, dtype, MAX_SEQ_LEN, tiny.DEVICE)
    random_cache(decoder.arena, CONFIG)
    step = Step(decoder)
    for length in DECODE:
        step.begin(length)
        decoder.runner.decode()
    answer = decoder.answer([5] * 514, reuse=False, position_limit=MAX_SEQ_LEN, stop_ids=(), sampling=tiny.GREEDY)
    count = len(DECODE) + 2 + len(list(answer.tokens()))
    decoder.arena.check_guards()
    decoder.close()
    return count


def plant() -> None:
    """Read 8 KiB past the end of 2 KiB."""
    how = Configuration(512, 1, 4, 0, False)
    words = torch.zeros(how.block, dtype=torch.int32, device=tiny.DEVICE)
    sums: Any = torch.zeros(1, dtype=torch.int32, device=tiny.DEVICE)
    options = {"BLOCK": how.block, "UNROLL": 1, "EVICT_FIRST": False, "num_warps": 4, "enable_fp_fusion": True}
    _read_kernel[(1,)](words, sums, 5, **options)
    tiny.settle()


def main() -> None:
    """Run everything, say how much it was."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--plant", action="store_true", help="read past an end on purpose")
    args = parser.parse_args()
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        sys.exit("set PYTORCH_NO_CUDA_MEMORY_CACHING=1: otherwise allocations lie side by side in larger ones")
    if args.plant:
        plant()
        return
    for name in args.dtype.split(","):
        started = time.perf_counter()
        with torch.cuda.stream(torch.cuda.Stream(tiny.DEVICE)):
            passes = launch_by_launch(DTYPES[name])
        replays = through_graphs(DTYPES[name])
        print(
            f"{name}: {passes} passes launch by launch, {replays} replays, {time.perf_counter() - started:.1f} s",
            flush=True,
        )
    print("done")


if __name__ == "__main__":
    main()
