"""Runs a program's passes: launch by launch on a CPU; a GPU has captured graphs instead (graph.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from monograph.errors import NumericsError
from monograph.model.program import Program, run
from monograph.model.state import Halted, StepState


class Runner(Protocol):
    """What an answer needs of the machine under it.

    Attributes:
        run_ahead: Decode steps worth submitting before their tokens are asked for.
        max_run_ahead: How many more than that may be, should the machine run out of them.
        pdl: Whether launches may overlap.
    """

    run_ahead: int
    max_run_ahead: int
    pdl: bool

    def prefill(self) -> None:
        """Submit one prefill chunk."""
        ...

    def decode(self, count: int = 1) -> None:
        """Submit decode steps."""
        ...

    def wait(self, position: int) -> None:
        """Return once the token at ``position`` is in the outbox.

        Raises:
            NumericsError: It never will be: a logit was not finite.
        """
        ...

    def drain(self) -> None:
        """Have everything submitted ended, the rest of it without effect."""
        ...

    def context(self) -> AbstractContextManager[object]:
        """Where work on the arena beside the passes must be issued, so that it keeps its order with them."""
        ...


class LaunchRunner:
    """Runs the references one after another, on the thread that asks.

    Args:
        program: The launches.
        state: The step state.
    """

    run_ahead = 0
    max_run_ahead = 0
    pdl = False

    def __init__(self, program: Program, state: StepState) -> None:
        self._program, self._state = program, state

    @torch.inference_mode()
    def prefill(self) -> None:
        """Run one prefill chunk."""
        run(self._program.prefill)

    @torch.inference_mode()
    def decode(self, count: int = 1) -> None:
        """Run decode steps."""
        for _ in range(count):
            run(self._program.decode)

    def wait(self, position: int) -> None:
        """Check that the token at ``position`` has come. Raises NumericsError if a logit was not finite."""
        newest, halted = self._state.status()
        raise_if_not_finite(newest, position, halted)
        assert newest >= position, (newest, position, halted)

    def drain(self) -> None:
        """Nothing is ever in flight."""

    def context(self) -> AbstractContextManager[object]:
        """Anywhere will do."""
        return nullcontext()


def raise_if_not_finite(newest: int, position: int, halted: Halted) -> None:
    """Raise NumericsError if the step that should have made the token at ``position`` met a non-finite logit."""
    if newest < position and halted is Halted.NOT_FINITE:
        raise NumericsError(
            f"the logits of token {position + 1} are not finite; the weights may be damaged, or the dtype too narrow "
            "for this model (bfloat16 and float32 have a wider range than float16: pass dtype=)"
        )
