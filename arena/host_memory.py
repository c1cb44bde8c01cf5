"""Small host memory that the GPU writes and the host reads without a copy or a wait: token outbox, cancel flag."""

from __future__ import annotations

import ctypes
from typing import Literal

import torch

from monograph.arena.capacity import capacity_error
from monograph.arena.device import on_device, resolve_device
from monograph.arena.layout import ALIGNMENT, Layout
from monograph.arena.memory import SlotMemory
from monograph.errors import ConfigError

_FORMATS: dict[torch.dtype, Literal["q", "i", "h", "b", "B"]] = {
    torch.int64: "q",
    torch.int32: "i",
    torch.int16: "h",
    torch.int8: "b",
    torch.uint8: "B",
}


class HostMemory(SlotMemory):
    """Slots in pinned host memory, which launches on a CUDA device address directly; ordinary memory without one.

    All slots start as zeros. Keep it small: pinned pages are taken from the whole machine.

    Attributes:
        pinned: Whether the memory is pinned, which is so exactly on CUDA.
    """

    def __init__(self, layout: Layout, device: str | torch.device = "cpu") -> None:
        """Allocates the layout on the host.

        Args:
            layout: A plan of its own, separate from the arena's.
            device: Where the launches run that use it, as for ``Arena``.

        Raises:
            CapacityError: The host cannot supply, or cannot pin, as much.
            ConfigError: No such device.
        """
        where = resolve_device(device)
        self.pinned = where.type == "cuda"
        with torch.inference_mode(False), on_device(where):
            try:
                # PyTorch's CPU allocator aligns to 64 bytes only: take the aligned part of a little more.
                raw = torch.zeros(layout.nbytes + ALIGNMENT - 1, dtype=torch.uint8, pin_memory=self.pinned)
            except (RuntimeError, MemoryError) as error:
                kind = "pinned host memory" if self.pinned else "host memory"
                reason = str(error).partition("\n")[0]
                raise capacity_error(layout.nbytes, None, f"the system answers: {reason}", device=kind) from error
            start = -raw.data_ptr() % ALIGNMENT
            super().__init__(layout, where, raw[start : start + layout.nbytes])

    def numbers(self, name: str) -> memoryview[int]:
        """The slot as Python ints, the way to poll it: reading an item makes no tensor (tens of nanoseconds).

        Args:
            name: A slot of an integer dtype.

        Returns:
            A flat, writable view of the slot's elements; it keeps the memory alive.

        Raises:
            ConfigError: The slot holds no integers; use ``view``.
            UnknownSlotError: No such slot.
            EngineError: The memory was closed.
        """
        tensor = self.view(name)
        if tensor.dtype not in _FORMATS:
            raise ConfigError(
                f"numbers: slot {name!r} holds {tensor.dtype}, expected an integer dtype; use view({name!r})"
            )
        raw = (ctypes.c_char * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())
        raw.owner = tensor  # type: ignore[attr-defined]  # the address is good for as long as the tensor lives
        return memoryview(raw).cast("B").cast(_FORMATS[tensor.dtype])
