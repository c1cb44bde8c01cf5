"""Where every tensor will lie, decided from sizes alone before a byte is allocated.

The order is weights, state, scratch without a span, then one shared region for each pass that gave its scratch spans.
Every offset is a multiple of 256 bytes, and from each slot's last byte on lies a guard before the next slot begins.

Inside a shared region slots are placed largest first, each at the lowest offset where it meets no slot that is live at
the same time (greedy by size, as in Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
2020). Between two that are live together a gap of guard size is kept; bytes of it that a third slot uses at another
time cannot be watched, the rest are guards like all others.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from monograph.arena.error import unknown_slot
from monograph.arena.memory_map import memory_map
from monograph.arena.slot import DTYPES, LIFETIMES, Slot, SlotRequest, Span, checked_int
from monograph.arena.units import format_nbytes
from monograph.errors import ConfigError

ALIGNMENT = 256
"""Bytes: every slot starts at a multiple of it, wide enough for any vector load and for TMA descriptors."""

_FORMAT = "monograph-layout"
_VERSION = 1


def plan(requests: Iterable[SlotRequest], guard_nbytes: int = ALIGNMENT) -> Layout:
    """Plans one allocation that holds every request.

    Args:
        requests: Tensors to place. Each lifetime keeps this order, so state slots lie next to each other as listed.
        guard_nbytes: Least bytes of guard before, between and after slots; alignment only adds to it.

    Returns:
        The layout. The same requests always give the same one, and planning ``layout.slots.values()`` again changes
        nothing.

    Raises:
        ConfigError: There is no request, two have one name, or ``guard_nbytes`` is not a positive int.
    """
    guard_nbytes = checked_int(guard_nbytes, "plan: guard_nbytes", minimum=1)
    alone: list[SlotRequest] = []
    by_pass: dict[str, list[SlotRequest]] = {}
    for request in sorted(requests, key=lambda request: LIFETIMES.index(request.lifetime)):
        (alone if request.span is None else by_pass.setdefault(request.span.pass_name, [])).append(request)

    slots: list[Slot] = []
    cursor = _align(guard_nbytes)
    for request in alone:
        slots.append(_place(request, cursor))
        cursor = _align(slots[-1].end + guard_nbytes)
    for group in by_pass.values():
        offsets = _pack(group, guard_nbytes)
        slots += [_place(request, cursor + offset) for request, offset in zip(group, offsets, strict=True)]
        cursor = _align(max(slot.end for slot in slots[-len(group) :]) + guard_nbytes)
    return Layout(tuple(slots), guard_nbytes, cursor)


@dataclass(frozen=True, repr=False)
class Layout:
    """The memory map: every slot with its place, and the size of the one allocation under them.

    ``str(layout)`` is the map as a table. A layout can be compared, hashed and pickled; it holds no memory.

    Attributes:
        entries: Slots in order: weights, state, scratch.
        guard_nbytes: Least bytes of guard around every slot.
        nbytes: Bytes to allocate, guards included.

    Raises:
        ConfigError: Slots that are misaligned, outside the allocation, nearer to each other than a guard, or on the
            same bytes without the right to share them. Every layout in existence has passed this.
    """

    entries: tuple[Slot, ...]
    guard_nbytes: int
    nbytes: int

    def __post_init__(self) -> None:
        checked_int(self.guard_nbytes, "layout: guard_nbytes", minimum=1)
        checked_int(self.nbytes, "layout: nbytes", minimum=1)
        fault = _find_fault(self.entries, self.guard_nbytes, self.nbytes)
        if fault:
            raise ConfigError(f"layout: {fault}")

    @cached_property
    def slots(self) -> Mapping[str, Slot]:
        """Every slot by name, in order. Read-only."""
        return MappingProxyType({slot.name: slot for slot in self.entries})

    @cached_property
    def guards(self) -> tuple[tuple[int, int], ...]:
        """The bytes that belong to no slot, as ``(start, end)`` offsets in ascending order, end excluded."""
        guards = []
        covered = 0
        for slot in sorted(self.entries, key=lambda slot: slot.offset):
            if slot.offset > covered:
                guards.append((covered, slot.offset))
            covered = max(covered, slot.end)
        return (*guards, (covered, self.nbytes))

    def nbytes_by_lifetime(self) -> dict[str, int]:
        """Bytes covered by slots of each lifetime, shared bytes once, and ``"guard"`` for all others.

        Returns:
            ``{"weight": ..., "state": ..., "scratch": ..., "guard": ...}``; the values add up to ``nbytes``.
        """
        sizes: dict[str, int] = dict.fromkeys(LIFETIMES, 0)
        covered = 0
        for slot in sorted(self.entries, key=lambda slot: slot.offset):
            sizes[slot.lifetime] += max(0, slot.end - max(slot.offset, covered))
            covered = max(covered, slot.end)
        return {**sizes, "guard": self.nbytes - sum(sizes.values())}

    def to_json(self) -> str:
        """Writes the layout as JSON, one slot a line, always the same text for the same layout.

        The form, version 1::

            {"format": "monograph-layout", "version": 1, "alignment": 256, "guard_nbytes": 256, "nbytes": 1024,
             "nbytes_by_lifetime": {"weight": 0, "state": 4, "scratch": 0, "guard": 1020},
             "slots": [{"name": "position", "lifetime": "state", "dtype": "int32", "shape": [1], "offset": 256,
                        "nbytes": 4, "span": null}]}

        All sizes and offsets are bytes. A span is ``{"pass_name": "prefill", "first": 0, "last": 3}``.
        """
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "alignment": ALIGNMENT,
            "guard_nbytes": self.guard_nbytes,
            "nbytes": self.nbytes,
            "nbytes_by_lifetime": self.nbytes_by_lifetime(),
        }
        lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in head.items())
        slots = ",\n".join(f"    {json.dumps(_slot_to_dict(slot))}" for slot in self.entries)
        return f'{{\n{lines},\n  "slots": [\n{slots}\n  ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Reads what ``to_json`` wrote, as it stands: nothing is planned again.

        Args:
            text: The JSON.

        Returns:
            A layout equal to the one written.

        Raises:
            ConfigError: It is not such JSON, is of another version, contradicts itself, or describes no valid layout.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT or data["version"] != _VERSION:
                raise ConfigError(
                    f"layout JSON: expected format {_FORMAT!r} version {_VERSION}, got {data['format']!r} version "
                    f"{data['version']!r}; write it again with this monograph"
                )
            layout = cls(tuple(map(_slot_from_dict, data["slots"])), data["guard_nbytes"], data["nbytes"])
            written = data["nbytes_by_lifetime"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"layout JSON: not in the form that to_json writes: {error!r}") from error
        if written != layout.nbytes_by_lifetime():
            raise ConfigError(
                f"layout JSON: nbytes_by_lifetime is {written}, its slots add up to {layout.nbytes_by_lifetime()}"
            )
        return layout

    def __getitem__(self, name: str) -> Slot:
        """The slot of that name; raises UnknownSlotError with the nearest names."""
        try:
            return self.slots[name]
        except KeyError:
            raise unknown_slot(name, self.slots) from None

    def __contains__(self, name: object) -> bool:
        return name in self.slots

    def __iter__(self) -> Iterator[str]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        return memory_map(self.entries, self.nbytes, self.nbytes_by_lifetime())

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {format_nbytes(part)}" for name, part in self.nbytes_by_lifetime().items())
        return f"Layout({len(self):,} slots, {format_nbytes(self.nbytes)}: {parts})"

    def __reduce__(self) -> tuple[type[Layout], tuple[tuple[Slot, ...], int, int]]:
        return Layout, (self.entries, self.guard_nbytes, self.nbytes)  # the cached mapping proxy does not pickle


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _place(request: SlotRequest, offset: int) -> Slot:
    return Slot(
        name=request.name,
        shape=request.shape,
        dtype=request.dtype,
        lifetime=request.lifetime,
        span=request.span,
        offset=offset,
    )


def _pack(group: list[SlotRequest], guard_nbytes: int) -> list[int]:
    """Offsets from the start of a shared region for requests with spans in one pass, in their order."""
    offsets = [0] * len(group)
    placed: list[tuple[int, int]] = []  # (offset, index into group), ascending
    for index in sorted(range(len(group)), key=lambda index: -group[index].nbytes):
        request = group[index]
        candidate = 0
        for offset, other in placed:
            if request.may_share(group[other]):
                continue
            if candidate + request.nbytes + guard_nbytes <= offset:
                break
            candidate = max(candidate, _align(offset + group[other].nbytes + guard_nbytes))
        offsets[index] = candidate
        bisect.insort(placed, (candidate, index))
    return offsets


def _find_fault(entries: tuple[Slot, ...], guard_nbytes: int, nbytes: int) -> str | None:
    """The first thing wrong with a set of placed slots, in words, or None."""
    if not entries:
        return "expected at least one slot, got none"
    seen: set[str] = set()
    for slot in entries:
        if slot.name in seen:
            return f"two slots have the name {slot.name!r}; names must be unique"
        seen.add(slot.name)
        if slot.offset % ALIGNMENT:
            return f"slot {slot.name!r} is at offset {slot.offset:,}, not a multiple of {ALIGNMENT}"
        if slot.offset < guard_nbytes or slot.end + guard_nbytes > nbytes:
            return (
                f"slot {slot.name!r} at bytes {slot.offset:,} to {slot.end:,} leaves no guard of {guard_nbytes} bytes "
                f"to an end of the {nbytes:,} bytes"
            )
    by_offset = sorted(entries, key=lambda slot: slot.offset)
    for index, slot in enumerate(by_offset):
        for other in by_offset[index + 1 :]:
            if other.offset >= slot.end + guard_nbytes:
                break
            if not slot.may_share(other):
                return (
                    f"slot {other.name!r} at offset {other.offset:,} is nearer than {guard_nbytes} bytes to the end of "
                    f"{slot.name!r} at {slot.end:,}, and the two may not share bytes"
                )
    return None


def _slot_to_dict(slot: Slot) -> dict[str, object]:
    span = slot.span
    return {
        "name": slot.name,
        "lifetime": slot.lifetime,
        "dtype": slot.dtype_name,
        "shape": list(slot.shape),
        "offset": slot.offset,
        "nbytes": slot.nbytes,
        "span": None if span is None else {"pass_name": span.pass_name, "first": span.first, "last": span.last},
    }


def _slot_from_dict(data: dict[str, object]) -> Slot:
    slot = Slot(
        name=data["name"],  # type: ignore[arg-type]  # every field is checked by Slot itself
        shape=data["shape"],  # type: ignore[arg-type]
        dtype=DTYPES.get(data["dtype"], data["dtype"]),  # type: ignore[call-overload]
        lifetime=data["lifetime"],  # type: ignore[arg-type]
        span=None if data["span"] is None else Span(**data["span"]),  # type: ignore[arg-type]
        offset=data["offset"],  # type: ignore[arg-type]
    )
    if slot.nbytes != data["nbytes"]:
        raise ConfigError(f"layout JSON: slot {slot.name!r} says {data['nbytes']} bytes, its shape has {slot.nbytes:,}")
    return slot
