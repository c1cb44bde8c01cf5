"""How long work on a device takes, and percentiles of many such times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of a sample, interpolated linearly between its neighbours."""
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


class Clock:
    """Measures spans of work on a device: by CUDA events on the current stream, on a CPU by the wall clock.

    Nothing waits between spans, so that the device never runs dry in the middle of one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measure what is submitted inside."""
        start = self._mark()
        yield
        self._spans.append((start, self._mark()))

    def times_ms(self) -> list[float]:
        """Wait for the device, return the length of every span in order, and start over."""
        spans, self._spans = self._spans, []
        if self._device.type != "cuda":
            return [(end - start) * 1e3 for start, end in spans]
        torch.cuda.synchronize(self._device)
        return [float(start.elapsed_time(end)) for start, end in spans]

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
