"""The one allocation that holds every tensor of a model, and the means to see that nobody strays in it."""

from __future__ import annotations

import hashlib
import mmap
import sys
from collections.abc import Iterable

import torch

from monograph.arena.capacity import capacity_error, check_capacity, device_free_nbytes
from monograph.arena.device import on_device, resolve_device, settle
from monograph.arena.layout import Layout
from monograph.arena.memory import SlotMemory
from monograph.arena.slot import checked_int
from monograph.errors import ConfigError

_POISON = 0xFF
"""A byte that makes NaN of every float dtype when repeated, and -1 of every signed integer."""

_PIECE_NBYTES = 16 << 20


class Arena(SlotMemory):
    """Every tensor of a model in one allocation, each at an address that never changes.

    State slots start as zeros and guards are written; weights and scratch hold anything until they are filled. On the
    CPU the memory is mapped and not touched further, so that pages nobody uses are never committed.
    """

    def __init__(self, layout: Layout, device: str | torch.device = "cpu", *, hint: str = "") -> None:
        """Allocates the layout on a device.

        Args:
            layout: The plan.
            device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; the current CUDA device is neither used nor changed.
            hint: Way out to put into the CapacityError, such as the longest length that fits.

        Raises:
            CapacityError: More than is free, found before allocating; or the allocation itself failed.
            ConfigError: No such device.
        """
        where = resolve_device(device)
        free = device_free_nbytes(where)
        check_capacity(layout.nbytes, free, hint, device=where)
        # Tensors made in inference mode could not be written to outside of it, whoever builds the engine there.
        with torch.inference_mode(False), on_device(where):
            try:
                storage = _allocate(layout.nbytes, where)
            except (OSError, OverflowError, torch.OutOfMemoryError) as error:
                raise capacity_error(layout.nbytes, free, hint, device=where) from error
            if where.type == "cuda":  # a fresh mapping is zero already, and stays unwritten
                _zero_state(storage, layout)
            super().__init__(layout, where, storage)

    def poison(self) -> None:
        """Fills all scratch with 0xFF bytes: NaN in every float dtype, so whoever reads before writing shows it.

        Waits for the device before and after. A counter that a pass expects to find at zero is state, not scratch.

        Raises:
            EngineError: The arena was closed.
        """
        storage = self._open_storage()
        settle(self.device)
        with on_device(self.device):
            for slot in self.layout.entries:
                if slot.lifetime == "scratch":
                    storage[slot.offset : slot.end].fill_(_POISON)
        settle(self.device)

    def poison_kv_tail(self, names: Iterable[str], live: int) -> None:
        """Fills the rows of KV caches that no token has reached with 0xFF bytes; rows before them stay as they are.

        Args:
            names: State slots of shape ``[num_kv_heads, max_seq_len, head_dim]``.
            live: Rows in use, 0 to max_seq_len; rows from ``live`` on are filled, for every head.

        Raises:
            ConfigError: A slot of another form or lifetime, or ``live`` out of range; nothing was written.
            UnknownSlotError: No such slot.
            EngineError: The arena was closed.
        """
        live = checked_int(live, "poison_kv_tail: live", minimum=0)
        slots = [self.layout[name] for name in self._selected(names)]
        for slot in slots:
            if slot.lifetime != "state" or len(slot.shape) != 3:
                raise ConfigError(
                    f"poison_kv_tail: slot {slot.name!r} must be state [num_kv_heads, max_seq_len, head_dim], it is "
                    f"{slot.lifetime} {list(slot.shape)}"
                )
            if live > slot.shape[1]:
                raise ConfigError(
                    f"poison_kv_tail: live must be 0 to {slot.shape[1]:,}, the rows of slot {slot.name!r}, got {live}"
                )
        settle(self.device)
        with on_device(self.device), torch.no_grad():
            for slot in slots:
                self.view(slot.name).view(torch.uint8)[:, live:].fill_(_POISON)
        settle(self.device)

    def fingerprint(self, names: Iterable[str] | None = None) -> str:
        """Digests the bytes of slots: two fingerprints are equal exactly when names, dtypes, shapes and bytes are.

        Waits for the device and reads in pieces of 16 MiB. Bytes decide, so 0.0 and -0.0 differ and NaN equals itself.

        Args:
            names: Slots to include, in any order; None for every slot.

        Returns:
            32 hexadecimal digits (BLAKE2b, 128 bits).

        Raises:
            UnknownSlotError: No such slot.
            EngineError: The arena was closed.
        """
        selected = self._selected(names)
        storage = self._open_storage()
        settle(self.device)
        digest = hashlib.blake2b(digest_size=16)
        staging = bytearray(max(1, min(_PIECE_NBYTES, max((self.layout[name].nbytes for name in selected), default=0))))
        staged = torch.frombuffer(staging, dtype=torch.uint8)
        for name in selected:
            slot = self.layout[name]
            digest.update(f"{name} {slot.dtype_name} {slot.shape};".encode())
            for start in range(slot.offset, slot.end, len(staging)):
                piece = storage[start : min(start + len(staging), slot.end)]
                staged[: piece.numel()].copy_(piece)
                digest.update(memoryview(staging)[: piece.numel()])
        return digest.hexdigest()

    def close(self) -> None:
        """Waits for the device and gives the memory back, to the driver on CUDA. Calling it again does nothing.

        Bytes that a tensor from ``view`` still refers to stay until that is gone.
        """
        if self.closed:
            return
        super().close()
        if self.device.type == "cuda":
            with on_device(self.device):
                torch.cuda.empty_cache()


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 ``[nbytes]``: from PyTorch's allocator on CUDA, a private anonymous mapping (zeros) on the CPU."""
    if device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if sys.platform == "win32":
        pages = mmap.mmap(-1, nbytes)
    else:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)  # holds the mapping until the last view is gone


def _zero_state(storage: torch.Tensor, layout: Layout) -> None:
    state = [slot for slot in layout.entries if slot.lifetime == "state"]
    if state:
        storage[state[0].offset : state[-1].end].zero_()  # they lie side by side: one fill
