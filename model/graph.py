"""The passes on a GPU: each captured once as a CUDA graph, replayed at every length.

Nothing that a graph freezes depends on the live length, so two graphs are all there ever are: one decode step, one
prefill chunk. The host submits replays ahead of the tokens it reads; tokens come back through pinned memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from monograph.arena import Arena
from monograph.kernels.pdl_probe import pdl_probe, pdl_probe_torch
from monograph.model.prepare import Prepared, passes, preparing
from monograph.model.program import Launch, Program, run
from monograph.model.replay import Replays
from monograph.model.runner import raise_if_not_finite
from monograph.model.state import StepState

logger = logging.getLogger("monograph")

# Replays in flight before the first of their tokens is read: 20 ms of a small model, so that a busy Python thread,
# which may hold the interpreter for 5 ms, does not starve the GPU. Where that turns out too few (several such threads,
# a smaller model) an answer goes on with more, up to the second figure. What is in flight when an answer ends costs a
# seventh of a step each.
RUN_AHEAD = 32
MAX_RUN_AHEAD = 128
# Seconds without a token after which the host asks the driver whether the GPU has failed, and between two times.
_QUERY_AFTER_S = 0.1


class GraphRunner:
    """Replays the captured passes of one engine on a stream of its own.

    Args:
        program: The launches.
        state: The step state, halted: warming up runs every launch once, and while halted none writes anything.
        arena: What the launches read and write.
        fill: Writes the weights, which no launch needs before it is replayed: called while kernels are compiled.
        debug: Check guards and addresses before every replay, and wait for it: slow, and finds what strays.

    Attributes:
        pdl: Whether launches overlap (programmatic dependent launch).
        decode_graph: The decode step.
        prefill_graph: The prefill chunk.
        prepared: The kernels, and what it took to get each ready.
        capture_ms: What capturing both took, warm-up and compilation not included.
    """

    run_ahead = RUN_AHEAD
    max_run_ahead = MAX_RUN_AHEAD

    def __init__(
        self, program: Program, state: StepState, arena: Arena, fill: Callable[[], None], debug: bool = False
    ) -> None:
        self._state, self._arena, self._debug = state, arena, debug
        self._device = arena.device
        torch.cuda.synchronize(self._device)  # the state was written on the caller's stream
        self.pdl = supports_pdl(self._device)
        self.prepared: list[Prepared]
        with preparing(program, self._device, self.pdl) as self.prepared:
            fill()
        with torch.cuda.device(self._device):
            self.stream = _new_stream(self._device)
            torch.cuda.synchronize(self._device)  # weights were written on the caller's stream
            self.capture_all(program)

    def capture_all(self, program: Program) -> None:
        """Capture both passes, in the place of what was captured before.

        Args:
            program: The launches, over step state that is halted: each runs once beforehand.
        """
        with torch.cuda.device(self._device):
            with torch.cuda.stream(self.stream):
                for launches in passes(program):
                    run(launches, self.pdl)
            self.stream.synchronize()
            started = time.perf_counter()
            self.decode_graph = self.capture(program.decode)
            self.prefill_graph = self.capture(program.prefill)
            self._prefills = Replays(self.prefill_graph, self.stream)
            self._decodes = Replays(self.decode_graph, self.stream)
            self.capture_ms = (time.perf_counter() - started) * 1e3

    def capture(self, launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
        """Capture launches whose kernels have run before, on the stream of the replays."""
        graph = torch.cuda.CUDAGraph()
        # Thread-local: another thread of the process may use CUDA meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            run(launches, self.pdl)
        return graph

    def prefill(self) -> None:
        """Submit one prefill chunk."""
        self._replay(self._prefills, 1)

    def decode(self, count: int = 1) -> None:
        """Submit decode steps, in one turn at the interpreter's lock."""
        self._replay(self._decodes, count)

    def _replay(self, replays: Replays, count: int) -> None:
        if not self._debug:
            replays(count)
            return
        for _ in range(count):
            self.stream.synchronize()
            self._arena.check_addresses()
            self._arena.check_guards()
            replays(1)

    def wait(self, position: int) -> None:
        """Return once the token at ``position`` is in the outbox.

        Raises:
            NumericsError: It never will be: a logit was not finite.
            RuntimeError: The GPU has failed.
        """
        query_at = time.monotonic() + _QUERY_AFTER_S
        while True:
            newest, halted = self._state.status()
            if newest >= position:
                return
            raise_if_not_finite(newest, position, halted)
            if time.monotonic() >= query_at:
                query_at += _QUERY_AFTER_S
                if self.stream.query() and self._state.status()[0] < position:
                    newest, halted = self._state.status()
                    raise_if_not_finite(newest, position, halted)
                    raise AssertionError(f"nothing in flight, token {position} not made: {self._state.status()}")
            time.sleep(0)  # lets other threads run

    def drain(self) -> None:
        """Wait until everything submitted has ended. After a cancel what is left of it does nothing."""
        self.stream.synchronize()

    def context(self) -> AbstractContextManager[object]:
        """Issue work on the stream of the replays."""
        return torch.cuda.stream(self.stream)


def supports_pdl(device: torch.device) -> bool:
    """Whether launches that overlap (programmatic dependent launch) capture and replay right on a device.

    Found by trying: hardware from sm_90 on has it, and on some parts and drivers it fails in a graph.
    """
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    links, replays = 8, 4
    with torch.cuda.device(device), torch.inference_mode():
        start = torch.arange(256 * 32, dtype=torch.int32, device=device)
        buffers, wanted = (start.clone(), start.clone()), (start.clone(), start.clone())
        for i in range(links * replays):
            pdl_probe_torch(wanted[i % 2], wanted[1 - i % 2])
        try:
            for pdl in (False, True):  # compiles both forms: nothing may be compiled during a capture
                pdl_probe(*buffers, pdl=pdl)
            buffers[0].copy_(start)
            stream, graph = _new_stream(device), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for i in range(links):
                    pdl_probe(buffers[i % 2], buffers[1 - i % 2], pdl=i > 0)
            for _ in range(replays):
                graph.replay()
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            logger.warning("programmatic dependent launch does not capture here: %s", error)
            return False
        return torch.equal(buffers[0], wanted[0])


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
