"""Getting a GPU and the kernels of a program ready: started early, compiled or found on disk, and loaded, in parallel.

Triton compiles a kernel where it is first launched, which takes about a second for each, and keeps the outcome in a
folder from which the next process takes it. Every distinct launch of a program is made once here, on several threads,
while the step state is halted and no launch writes anything.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from monograph.kernels.triton_import import triton
from monograph.model.program import Launch, Program

# Triton has one listener to its compiler in a process.
_LISTENING = threading.Lock()


@dataclass(frozen=True)
class Prepared:
    """One kernel that is ready to be launched.

    Attributes:
        name: Of the kernel, and of the first launch that uses it where that says more: ``linear_add (down)``.
        seconds: What getting it ready took.
        compiled: Whether it had to be compiled; otherwise Triton's cache had it.
    """

    name: str
    seconds: float
    compiled: bool


Report = Callable[[Prepared, int, int], None]


@contextmanager
def starting(device: torch.device) -> Iterator[None]:
    """Start a GPU for this process on another thread during a ``with`` statement: its context, and what Triton does
    before its first kernel, which is to load its driver and to hash itself (0.3 s). Nothing on a CPU.
    """
    if device.type != "cuda":
        yield
        return
    thread = threading.Thread(target=_start, args=(device,), name="start")
    thread.start()
    try:
        yield
    finally:  # a process that ended with CUDA half started would end badly
        thread.join()


def _start(device: torch.device) -> None:
    with suppress(Exception):  # whoever needs the device meets the same fault, on a thread that can tell
        torch.empty(1, device=device)
        with torch.cuda.device(device):
            triton.runtime.driver.active.get_current_target()
            triton.runtime.cache.triton_key()


def passes(program: Program) -> tuple[Sequence[Launch], ...]:
    """The sequences of launches that an engine runs; all others are beginnings of these."""
    return program.prefill, program.decode, program.prefill_logits


def distinct_launches(program: Program, pdl: bool) -> list[tuple[Launch, bool]]:
    """Choose launches that between them use every kernel variant: one of each set of equal shapes and constants.

    Args:
        program: The launches.
        pdl: Whether all launches of a pass but its first may overlap the one before.

    Returns:
        Launches and how to run each.
    """
    chosen: dict[Any, tuple[Launch, bool]] = {}
    for launches in passes(program):
        for i, launch in enumerate(launches):
            # What Triton chooses a variant by, and the wrappers a tile. Slots are aligned alike.
            shapes = tuple(None if arg is None else (arg.shape, arg.dtype) for arg in launch.args)
            overlaps = pdl and i > 0
            variant = (launch.kernel, shapes, repr(launch.constants), repr(launch.tile), overlaps)
            chosen.setdefault(variant, (launch, overlaps))
    return list(chosen.values())


def prepare(
    program: Program,
    device: torch.device,
    pdl: bool,
    report: Report | None = None,
    stop: threading.Event | None = None,
) -> list[Prepared]:
    """Make every kernel of a program ready on a CUDA device.

    Args:
        program: Its launches, over step state that is halted and has reached the device.
        device: Where they run.
        pdl: Whether launches overlap.
        report: Called after each kernel, on the calling thread, with it, its number from 1 and how many there are.
        stop: Once it is set, kernels that have not been begun are left out.

    Returns:
        The kernels in the order in which they became ready.
    """
    stop = stop or threading.Event()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    launches = distinct_launches(program, pdl)
    done: list[Prepared] = []

    def note(prepared: Prepared | None) -> None:
        if prepared is not None:
            done.append(prepared)
            if report is not None:
                report(prepared, len(done), len(launches))

    with _LISTENING, _compilations() as compiled:

        def make(launch: Launch, overlaps: bool) -> Prepared | None:
            if stop.is_set():
                return None
            started = time.perf_counter()
            compiled.discard(threading.get_ident())
            with torch.cuda.device(device), torch.cuda.stream(stream):
                launch.run(overlaps)
            return Prepared(_name(launch), time.perf_counter() - started, threading.get_ident() in compiled)

        # The first alone: what it starts, Triton's driver among it, must not be started twice.
        note(make(*launches[0]))
        pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="prepare")
        try:
            for future in as_completed([pool.submit(make, *launch) for launch in launches[1:]]):
                note(future.result())
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            stream.synchronize()
    return done


@contextmanager
def preparing(program: Program, device: torch.device, pdl: bool) -> Iterator[list[Prepared]]:
    """Prepare a program's kernels on other threads during a ``with`` statement, and be done at its end.

    Yields:
        A list that holds the kernels once the statement has ended. If it ends by an error, what has not been begun is
        left out.
    """
    found: list[Prepared] = []
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="prepare") as side:
        future = side.submit(prepare, program, device, pdl, None, stop)
        try:
            yield found
            found += future.result()
        finally:
            stop.set()


def num_threads() -> int:
    """How many kernels are compiled at once: most of a compilation is outside the interpreter's lock."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder() -> Path:
    """Where Triton keeps compiled kernels; the variable TRITON_CACHE_DIR names another place."""
    return Path(triton.knobs.cache.dir)


def _name(launch: Launch) -> str:
    kernel, use = launch.kernel.__name__, launch.use
    return kernel if kernel.startswith(use) else f"{kernel} ({use})"


@contextmanager
def _compilations() -> Iterator[set[int]]:
    """Collects the threads on which Triton has compiled a kernel that its cache did not have."""
    threads: set[int] = set()
    before = triton.knobs.compilation.listener

    def listen(*, cache_hit: bool, **facts: Any) -> None:
        if not cache_hit:
            threads.add(threading.get_ident())
        if before is not None:
            before(cache_hit=cache_hit, **facts)

    triton.knobs.compilation.listener = listen
    try:
        yield threads
    finally:
        triton.knobs.compilation.listener = before
