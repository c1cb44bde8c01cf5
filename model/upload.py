"""Weights to a GPU as fast as the bus goes: pieces of tensors through a few pinned buffers, several at a time.

A copy out of ordinary memory goes through a buffer of the driver's, page by page, on one core: about 1.3 GB/s. Here
several threads read pieces of the files into pinned buffers, out of which the GPU fetches them by itself while the
threads read on; a buffer is used again once its copy has left it. A piece that the slot wants in another dtype is
fetched as it is stored and converted on the GPU. Beside the arena there are never more than the buffers on the host,
and on the device one piece for each thread with what its conversion takes.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from monograph.model.checkpoint import Source

Progress = Callable[[int, int], None]

# Pinning takes about half a millisecond a MiB, so the buffers are few and small; a thread fills one in less time than
# the GPU needs to empty several, hence only some more of them than threads.
BUFFER_NBYTES = 4 << 20
MAX_THREADS = 8
SPARE_BUFFERS = 4


class Transfer(NamedTuple):
    """One tensor of the checkpoint and the rows of a slot that it belongs in.

    Attributes:
        tensor: Its name.
        destination: Of the tensor's shape, contiguous.
        compares: Leave the destination as it is and see whether the tensor holds the same.
    """

    tensor: str
    destination: torch.Tensor
    compares: bool = False


class _Piece(NamedTuple):
    transfer: int
    first: int
    destination: torch.Tensor


class _Buffer:
    """Pinned memory, made when it is first used."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.emptied: torch.cuda.Event | None = None

    def rows(self, shape: torch.Size, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        """Memory for some rows, once what was there has left."""
        if self.emptied is not None:
            self.emptied.synchronize()
        nbytes = math.prod(shape) * dtype.itemsize
        if len(self._bytes) < nbytes:
            self._bytes = torch.empty(max(nbytes, BUFFER_NBYTES), dtype=torch.uint8, pin_memory=pinned)
        return self._bytes[:nbytes].view(dtype).view(shape)


def upload(source: Source, transfers: Sequence[Transfer], progress: Progress | None = None) -> list[str]:
    """Bring tensors from a checkpoint to their places on a device, and wait until they are there.

    Args:
        source: The checkpoint.
        transfers: All to the same device, none twice.
        progress: Called on the calling thread with the bytes that are under way or there, and those in all.

    Returns:
        Tensors that are not what they should be: a finite number of theirs does not fit the dtype of the destination,
        or, where they were to be compared, they differ from it.

    Raises:
        CheckpointError: A file cannot be read. Nothing is in flight then, as after any other interruption.
    """
    return _Upload(source, transfers).run(progress)


class _Upload:
    def __init__(self, source: Source, transfers: Sequence[Transfer]) -> None:
        self._source, self._transfers = source, transfers
        self._device = transfers[0].destination.device
        self._on_gpu = self._device.type == "cuda"
        self._num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for _ in range(self._num_threads + SPARE_BUFFERS):
            self._free.put(_Buffer())
        self._stop = threading.Event()  # set by the first fault
        self._sending = threading.Lock()  # one at a time, so that one piece alone is converted
        with torch.inference_mode(False):  # what was made in it the threads, which are not in it, could not write
            self._wrong = torch.zeros(len(transfers), dtype=torch.bool, device=self._device)
        self._stream = torch.cuda.Stream(self._device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def run(self, progress: Progress | None) -> list[str]:
        if self._stream is not None:  # the arena was made, and its flags are, on the caller's stream
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pieces = list(self._pieces())
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="upload")
        try:
            self._watch(pieces, [pool.submit(self._carry, piece) for piece in pieces], progress)
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)
            if self._stream is not None:
                self._stream.synchronize()
        return [self._transfers[i].tensor for i, wrong in enumerate(self._wrong.tolist()) if wrong]

    def _watch(self, pieces: list[_Piece], futures: list[Future[None]], progress: Progress | None) -> None:
        done, total = 0, sum(piece.destination.nbytes for piece in pieces)
        for piece, future in zip(pieces, futures, strict=True):
            future.result()
            done += piece.destination.nbytes
            if progress is not None:
                progress(done, total)

    def _pieces(self) -> Iterator[_Piece]:
        """Cut tensors into runs of rows that fit a buffer; vectors stay whole."""
        for number, (name, destination, _) in enumerate(self._transfers):
            rows = len(destination)
            if destination.dim() > 1:
                unit = self._source.row_unit(name)
                unit_nbytes = unit * math.prod(destination.shape[1:]) * self._source.dtype(name).itemsize
                rows = unit * max(1, BUFFER_NBYTES // unit_nbytes)
            for first in range(0, len(destination), rows):
                yield _Piece(number, first, destination[first : first + rows])

    def _carry(self, piece: _Piece) -> None:
        if self._stop.is_set():
            return
        name = self._transfers[piece.transfer].tensor
        buffer = self._free.get()
        try:
            rows = buffer.rows(piece.destination.shape, self._source.dtype(name), self._on_gpu)
            self._source.read_rows(name, piece.first, rows)
            with self._sending, self._context(), torch.no_grad():
                self._send(piece, rows)
                if self._stream is not None:
                    buffer.emptied = buffer.emptied or torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    buffer.emptied.record(self._stream)
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._free.put(buffer)

    def _context(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _send(self, piece: _Piece, rows: torch.Tensor) -> None:
        destination, wrong = piece.destination, self._wrong[piece.transfer]
        if self._transfers[piece.transfer].compares:
            there = rows.to(self._device, non_blocking=True).to(destination.dtype)
            wrong.logical_or_((there != destination).any())
        elif rows.dtype == destination.dtype:
            destination.copy_(rows, non_blocking=True)
        else:
            there = rows.to(self._device, non_blocking=True)
            destination.copy_(there)
            if narrows(there.dtype, destination.dtype):
                wrong.logical_or_((destination.isinf() & there.isfinite()).any())


def narrows(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a finite number of one dtype can be beyond the range of another."""
    return torch.finfo(wanted).max < torch.finfo(stored).max
