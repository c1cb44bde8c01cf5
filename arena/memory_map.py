"""The memory map as text: one line for each slot, or for each family of slots that repeats over the layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from monograph.arena.slot import Slot
from monograph.arena.units import format_nbytes

_LAYER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")  # the first whole number between dots: "layers.<3>.qkv"
_HEADER = ("lifetime", "slot", "count", "dtype", "shape", "each", "total", "share", "first offset")
_LEFT = frozenset({"lifetime", "slot", "dtype", "shape"})


def memory_map(slots: Iterable[Slot], nbytes: int, nbytes_by_lifetime: Mapping[str, int]) -> str:
    """Draws the table.

    Slots whose names differ only in their layer number, and that are otherwise the same, are one line with a count;
    the offset is that of the first. The total of a line adds its slots up, shared bytes or not; the sums below the
    table count every byte once.

    Args:
        slots: In the order to show.
        nbytes: Size of the whole arena, the measure of the shares.
        nbytes_by_lifetime: Bytes of each lifetime and of the guards.

    Returns:
        Lines without a newline at the end.
    """
    slots = tuple(slots)
    lines = _aligned([_HEADER, *(_row(label, family, nbytes) for label, family in families(slots))])
    lines.insert(1, "-" * max(map(len, lines)))
    lines.append(lines[1])
    sums = [
        (name, format_nbytes(part), _share(part, nbytes), f"{part:,} B") for name, part in nbytes_by_lifetime.items()
    ]
    sums.append(("total", format_nbytes(nbytes), _share(nbytes, nbytes), f"{nbytes:,} B"))
    widths = [max(map(len, column)) for column in zip(*sums, strict=True)]
    for name, *rest in sums:
        numbers = "  ".join(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        lines.append(f"{name.ljust(widths[0])}  {numbers}")
    return "\n".join(lines)


def families(slots: tuple[Slot, ...]) -> list[tuple[str, list[Slot]]]:
    """Groups slots that differ in layer number and offset only; a family of one keeps its own name."""
    families: dict[tuple[object, ...], list[Slot]] = {}
    for slot in slots:
        label = _LAYER.sub("{i}", slot.name, count=1)
        families.setdefault((label, slot.lifetime, slot.dtype, slot.shape, slot.span), []).append(slot)
    return [(str(key[0]) if len(family) > 1 else family[0].name, family) for key, family in families.items()]


def _row(label: str, family: list[Slot], nbytes: int) -> tuple[str, ...]:
    first = family[0]
    total = sum(slot.nbytes for slot in family)
    return (
        first.lifetime,
        label if first.span is None else f"{label} ({first.span.pass_name} {first.span.first}-{first.span.last})",
        f"{len(family)}",
        first.dtype_name,
        " x ".join(map(str, first.shape)),
        format_nbytes(first.nbytes),
        format_nbytes(total),
        _share(total, nbytes),
        f"{first.offset:,}",
    )


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if heading in _LEFT else cell.rjust(width)
            for cell, width, heading in zip(row, widths, _HEADER, strict=True)
        ).rstrip()
        for row in rows
    ]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"
