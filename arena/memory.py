"""Slots over one allocation: what device and host memory have in common."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import NoReturn, Self

import torch

from monograph.arena.device import on_device, settle
from monograph.arena.error import GuardError, RebindError, unknown_slot
from monograph.arena.layout import ALIGNMENT, Layout
from monograph.errors import ConfigError, EngineError

_GUARD = (0xFE, 0xFF)
"""Bytes at even and odd offsets of a guard. Read as fp16, bf16, fp32 or fp64 they are NaN, so a read outside a slot
poisons what follows; they differ from 0, from -1 and from poison, so a write of any of these is seen."""


class SlotMemory:
    """Typed tensors at permanent addresses in one allocation. Base of ``Arena`` and ``HostMemory``.

    Attributes:
        layout: The plan; still there after ``close``.
        device: Where launches that use the slots run.
    """

    def __init__(self, layout: Layout, device: torch.device, storage: torch.Tensor) -> None:
        """Takes over an allocation, writes its guards and makes the views.

        Args:
            layout: The plan.
            device: Where launches that use the slots run.
            storage: uint8 ``[layout.nbytes]``, 256-byte aligned, of which nobody else keeps a reference.
        """
        assert storage.data_ptr() % ALIGNMENT == 0, f"base address {storage.data_ptr():#x} not {ALIGNMENT}-byte aligned"
        assert storage.shape == (layout.nbytes,), f"storage {tuple(storage.shape)} for a layout of {layout.nbytes}"
        self.layout = layout
        self.device = device
        self._base = storage.data_ptr()
        self._storage: torch.Tensor | None = storage
        self._views = {
            slot.name: storage[slot.offset : slot.end].view(slot.dtype).view(slot.shape) for slot in layout.entries
        }
        self._write_guards()

    @property
    def data_ptr(self) -> int:
        """Address of the first byte. Raises EngineError once closed."""
        self._open_storage()
        return self._base

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._storage is None

    def view(self, name: str) -> torch.Tensor:
        """The tensor of a slot.

        Args:
            name: The slot.

        Returns:
            A contiguous tensor with the slot's shape and dtype at its permanent address; the same object every time.

        Raises:
            UnknownSlotError: No such slot. Lists near names.
            EngineError: The memory was closed.
        """
        self._open_storage()
        try:
            return self._views[name]
        except KeyError:
            raise unknown_slot(name, self._views) from None

    def region(self, first: str, last: str) -> torch.Tensor:
        """The bytes from one slot to another, to move neighbours in one copy.

        Args:
            first: The slot that the region begins with.
            last: The slot that it ends with, not before ``first``.

        Returns:
            uint8, flat, the guards between the slots included: whoever writes it writes them as they were.

        Raises:
            ConfigError: ``last`` lies before ``first``.
            UnknownSlotError: No such slot.
            EngineError: The memory was closed.
        """
        start, end = self.layout[first].offset, self.layout[last].end
        if end <= start:
            raise ConfigError(f"region: expected last to lie after {first!r}, got {last!r}, which lies before it")
        return self._open_storage()[start:end]

    def addresses(self) -> dict[str, int]:
        """The address of every slot, by name, in layout order. Raises EngineError once closed."""
        self._open_storage()
        return {slot.name: self._base + slot.offset for slot in self.layout.entries}

    def copy_(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor into a slot, on the current stream.

        Args:
            name: The slot.
            tensor: Of exactly the slot's shape and dtype, on any device, strided in any way.

        Returns:
            The slot's tensor.

        Raises:
            ConfigError: Another shape or dtype; nothing was written.
            UnknownSlotError: No such slot.
            EngineError: The memory was closed.
        """
        view = self.view(name)
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            raise ConfigError(
                f"copy_: slot {name!r} holds {view.dtype} {list(view.shape)}, got {tensor.dtype} "
                f"{list(tensor.shape)}; convert it first, a slot never changes its form"
            )
        with torch.no_grad():
            return view.copy_(tensor)

    def bind(self, name: str, tensor: torch.Tensor) -> NoReturn:
        """Refuses: a captured launch keeps the address it was recorded with, so a slot cannot become another tensor.

        Args:
            name: The slot.
            tensor: What it was meant to become.

        Raises:
            RebindError: Always, with the way out; UnknownSlotError or EngineError come before it.
        """
        address = self.view(name).data_ptr()
        raise RebindError(
            f"slot {name!r} stays at {address:#x} until the arena is closed: captured launches use that address and "
            f"would not see another tensor; copy the values into place with copy_({name!r}, tensor)"
        )

    def check_addresses(self) -> None:
        """Checks that every slot's tensor is still the one planned.

        PyTorch lets anyone re-point a tensor from outside (``tensor.data = other``, ``tensor.set_``, ``resize_``);
        eager code would then follow it while captured launches stay behind.

        Raises:
            RebindError: A tensor moved, or has another shape, stride or dtype. Names the slot.
            EngineError: The memory was closed.
        """
        for name, address in self.addresses().items():
            view, slot = self._views[name], self.layout[name]
            if view.data_ptr() != address or view.shape != slot.shape or view.dtype != slot.dtype:
                raise RebindError(
                    f"slot {name!r} must be {slot.dtype} {list(slot.shape)} at {address:#x}, its tensor is now "
                    f"{view.dtype} {list(view.shape)} at {view.data_ptr():#x}; copy values into place instead"
                )
            if not view.is_contiguous():
                raise RebindError(f"slot {name!r}: its tensor now has strides {view.stride()}, it must be contiguous")

    def check_guards(self) -> None:
        """Checks every byte between slots, after waiting for all launches on the device.

        Raises:
            GuardError: A byte changed. Names the slots on both sides of the first damaged guard and its first damaged
                byte, as an offset in the memory and from the neighbours.
            EngineError: The memory was closed.
        """
        storage = self._open_storage()
        settle(self.device)
        spans = self.layout.guards
        found = torch.cat([storage[start:end] for start, end in spans]).cpu()
        expected = torch.cat([self._guard_pattern(start, end, torch.device("cpu")) for start, end in spans])
        damaged = (found != expected).nonzero()[:, 0].tolist()
        if not damaged:
            return
        first = offset = int(damaged[0])
        for start, end in spans:
            if offset < end - start:
                values = f"expected {int(expected[first]):#04x}, found {int(found[first]):#04x}"
                raise GuardError(self._damage(start, end, start + offset, values, len(damaged)))
            offset -= end - start

    def close(self) -> None:
        """Waits for the device and lets the memory go. Calling it again does nothing.

        The bytes are free once no tensor that ``view`` returned is referenced any more.
        """
        if self._storage is None:
            return
        try:
            settle(self.device)
        finally:
            self._storage = None
            self._views = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.view(name)

    def __setitem__(self, name: str, tensor: torch.Tensor) -> NoReturn:
        self.bind(name, tensor)

    def __contains__(self, name: object) -> bool:
        return name in self.layout

    def __enter__(self) -> Self:
        self._open_storage()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "closed" if self._storage is None else f"{self._base:#x}"
        return f"{type(self).__name__}({self.layout!r}, device='{self.device}', {where})"

    def _open_storage(self) -> torch.Tensor:
        if self._storage is None:
            raise EngineError(f"{type(self).__name__} was closed and its memory given back; load the model again")
        return self._storage

    def _selected(self, names: Iterable[str] | None) -> list[str]:
        """Names in layout order, each once; all of them for None."""
        self._open_storage()
        if names is None:
            return list(self.layout)
        wanted = {names} if isinstance(names, str) else set(names)
        for name in sorted(wanted - set(self.layout)):
            raise unknown_slot(name, self.layout)
        return [name for name in self.layout if name in wanted]

    def _write_guards(self) -> None:
        storage = self._open_storage()
        with on_device(self.device):
            longest = max(end - start for start, end in self.layout.guards)
            pattern = self._guard_pattern(0, longest + 1, storage.device)
            for start, end in self.layout.guards:
                phase = start % 2
                storage[start:end].copy_(pattern[phase : phase + end - start])
        settle(self.device)

    @staticmethod
    def _guard_pattern(start: int, end: int, device: torch.device) -> torch.Tensor:
        pattern = torch.full((end - start,), _GUARD[start % 2], dtype=torch.uint8, device=device)
        pattern[1::2] = _GUARD[1 - start % 2]
        return pattern

    def _damage(self, start: int, end: int, first: int, values: str, count: int) -> str:
        before = " and ".join(repr(slot.name) for slot in self.layout.entries if slot.end == start)
        after = " and ".join(repr(slot.name) for slot in self.layout.entries if slot.offset == end)
        if before and after:
            place = f"between {before} and {after}"
        else:
            place = f"after {before}, the last slot," if before else f"before {after}, the first slot,"
        far = [f"{first - start:,} bytes past the end of {before}"] if before else []
        far += [f"{end - first:,} bytes before {after}"] if after else []
        return (
            f"the guard {place} was written: first at byte {first:,} ({', '.join(far)}; {values}), {count:,} damaged "
            "bytes in all guards; a launch stored outside its slot"
        )
