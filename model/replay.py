"""Submits replays of a captured graph in a row, and keeps the interpreter's lock while it does.

``torch.cuda.CUDAGraph.replay`` lets go of the lock for the microseconds that a launch takes. A thread that is busy in
Python takes it then and gives it back after sys.getswitchinterval(), 5 ms: with one such thread in the process every
replay of 0.7 ms would be paid with 5 ms. The driver is called here through ``ctypes.PyDLL``, which keeps the lock, so
that any number of replays costs one turn at it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


class Replays:
    """Replays one graph on one stream. Made on the thread that captured it, while the stream's device is current.

    Args:
        graph: Captured and instantiated; kept alive.
        stream: Where replays are submitted.
        driver: The CUDA driver's library, called with the lock held; by default the one of this system.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, driver: Any = None) -> None:
        self._graph, self._stream = graph, stream
        self._submit: Callable[[int], None] = self._by_torch
        # Absent from PyTorch before 2.9. Without it replays are right, and slow beside a busy thread.
        raw = getattr(graph, "raw_cuda_graph_exec", None)
        if raw is not None:
            self._driver = _driver() if driver is None else driver
            self._exec, self._stream_handle = ctypes.c_void_p(int(raw())), ctypes.c_void_p(stream.cuda_stream)
            self._context = ctypes.c_void_p()
            self._check("cuCtxGetCurrent", ctypes.byref(self._context))
            if self._context.value:
                self._submit = self._by_driver

    @property
    def keeps_lock(self) -> bool:
        """Whether the interpreter's lock is held from the first replay of a row to the last."""
        return self._submit == self._by_driver

    def __call__(self, count: int = 1) -> None:
        """Submit replays, one after the other, from any thread.

        Raises:
            RuntimeError: The GPU has failed.
        """
        self._submit(count)

    def _by_torch(self, count: int) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(count):
                self._graph.replay()

    def _by_driver(self, count: int) -> None:
        launch, handle, stream = self._driver.cuGraphLaunch, self._exec, self._stream_handle
        # The calling thread may have no context, or that of another device.
        self._check("cuCtxPushCurrent_v2", self._context)
        try:
            for _ in range(count):
                error = launch(handle, stream)
                if error:
                    raise RuntimeError(f"CUDA error {error} from cuGraphLaunch")
        finally:
            self._check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _check(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise RuntimeError(f"CUDA error {error} from {name}")


def _driver() -> Any:
    return ctypes.PyDLL("libcuda.so.1")
