"""The memory map of a plan as a picture: an SVG drawing in which every length is a number of bytes.

Two drawings share a page. Above, the arena from its first byte to its last, every slot where it lies. Below, a bar for
each family of slots, all of one scale, so that what is scattered over the layers can be compared.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from monograph.arena import Slot, format_nbytes
from monograph.arena.memory_map import families
from monograph.model.plan import Plan

WIDTH, MARGIN = 1000.0, 30.0
SPAN = WIDTH - 2 * MARGIN  # of the arena's bar
_BAR_TOP, _BAR_HEIGHT = 92.0, 56.0
_LEGEND_TOP = 200.0
_ROWS_TOP = 268.0
_ROW = 20.0
_LABEL, _BARS, _NUMBERS = MARGIN, 270.0, 740.0  # where the columns of the lower drawing begin
_LONGEST = _NUMBERS - _BARS - 20
LEAST_PX = 0.5  # families with a shorter bar share a row
_LETTER = 6.9  # a generous width of a letter at 12 px
COLOURS = {"weights": "#3b6ea8", "KV cache": "#e07b1a", "state": "#3f8f4f", "scratch": "#9a5fa0", "guards": "#8a8a8a"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CACHE = re.compile(r"\.[kv]_cache$")
_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.)")
_STYLE = (
    "text{font:12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#222}.head{font-size:18px;font-weight:600}"
    ".dim{fill:#666}.in{fill:#fff;font-weight:600}.num{font-variant-numeric:tabular-nums}"
)


@dataclass(frozen=True)
class _Row:
    """A bar: its label, kind and bytes; of how many slots; and the bytes of each, where they are alike."""

    label: str
    kind: str
    nbytes: int
    count: int
    each_nbytes: int | None = None


def kind_of(slot: Slot) -> str:
    """What a slot is drawn as: its lifetime, the KV cache apart."""
    if slot.lifetime == "state" and _CACHE.search(slot.name):
        return "KV cache"
    return {"weight": "weights"}.get(slot.lifetime, slot.lifetime)


def nbytes_by_kind(plan: Plan) -> dict[str, int]:
    """Bytes of each kind, every byte once, in the order of the legend; they add up to the arena."""
    parts = plan.layout.nbytes_by_lifetime()
    cache = sum(slot.nbytes for slot in plan.layout.entries if kind_of(slot) == "KV cache")
    return {
        "weights": parts["weight"],
        "KV cache": cache,
        "state": parts["state"] - cache,
        "scratch": parts["scratch"],
        "guards": parts["guard"],
    }


def plan_picture(plan: Plan, title: str) -> str:
    """Draw a plan.

    Args:
        plan: The plan.
        title: The model's name.

    Returns:
        An SVG document.
    """
    rows = _rows(plan)
    height = _ROWS_TOP + _ROW * len(rows) + MARGIN
    svg = ET.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        width=f"{WIDTH:g}",
        height=f"{height:g}",
        role="img",
    )
    _add(svg, "title", f"Memory map of {title}")
    _add(svg, "desc", _summary(plan))
    _add(svg, "style", _STYLE)
    _rect(svg, 0, 0, WIDTH, height, "#ffffff")
    _text(svg, MARGIN, 38, title, "head")
    _text(svg, MARGIN, 60, _summary(plan))
    _draw_arena(svg, plan)
    _draw_legend(svg, plan)
    _draw_families(svg, plan, rows)
    ET.indent(svg)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(svg, encoding="unicode") + "\n"


def _summary(plan: Plan) -> str:
    return str(plan).partition("\n")[0]


def _draw_arena(svg: ET.Element, plan: Plan) -> None:
    nbytes = plan.layout.nbytes
    scale = SPAN / nbytes
    _text(svg, MARGIN, _BAR_TOP - 8, f"The arena, byte 0 to {nbytes:,}: every slot where it lies", "dim")
    group = _add(svg, "g", id="arena")
    _rect(group, MARGIN, _BAR_TOP, SPAN, _BAR_HEIGHT, COLOURS["guards"])
    for slot in plan.layout.entries:
        shade = "1" if _layer(slot) % 2 == 0 else "0.82"
        box = _rect(
            group,
            MARGIN + slot.offset * scale,
            _BAR_TOP,
            slot.nbytes * scale,
            _BAR_HEIGHT,
            COLOURS[kind_of(slot)],
            opacity=shade,
        )
        _add(box, "title", f"{slot.name}: {format_nbytes(slot.nbytes)} at {slot.offset:,}")
    for kind, first, last in _runs(plan):
        left, right = MARGIN + first * scale, MARGIN + last * scale
        if right - left > _LETTER * len(kind) + 8:
            _text(svg, (left + right) / 2, _BAR_TOP + _BAR_HEIGHT / 2 + 4, kind, "in", anchor="middle")
    for part in range(5):
        x, anchor = MARGIN + SPAN * part / 4, ("start", "middle", "middle", "middle", "end")[part]
        _rect(svg, x - 0.5, _BAR_TOP + _BAR_HEIGHT, 1, 5, "#666666")
        _text(svg, x, _BAR_TOP + _BAR_HEIGHT + 19, format_nbytes(nbytes * part // 4), "dim", anchor=anchor)


def _draw_legend(svg: ET.Element, plan: Plan) -> None:
    step = SPAN / len(COLOURS)
    for i, (kind, nbytes) in enumerate(nbytes_by_kind(plan).items()):
        x = MARGIN + i * step
        _rect(svg, x, _LEGEND_TOP, 14, 14, COLOURS[kind])
        _text(svg, x + 20, _LEGEND_TOP + 11, kind)
        _text(svg, x + 20, _LEGEND_TOP + 27, f"{format_nbytes(nbytes)}, {_share(nbytes, plan)}", "num")


def _draw_families(svg: ET.Element, plan: Plan, rows: list[_Row]) -> None:
    scale = _LONGEST / max(row.nbytes for row in rows)
    _text(
        svg,
        MARGIN,
        _ROWS_TOP - 10,
        "What it is made of, all bars of one scale; scratch slots that share bytes are each drawn in full",
        "dim",
    )
    group = _add(svg, "g", id="families")
    for i, row in enumerate(rows):
        top = _ROWS_TOP + _ROW * i
        _text(svg, _LABEL, top + 14, _shortened(row.label, int((_BARS - _LABEL) / _LETTER)))
        _rect(group, _BARS, top + 3, row.nbytes * scale, _ROW - 6, COLOURS[row.kind])
        each = "" if row.each_nbytes is None else f"{row.count} × {format_nbytes(row.each_nbytes)} = "
        _text(svg, _NUMBERS, top + 14, f"{each}{format_nbytes(row.nbytes)}, {_share(row.nbytes, plan)}", "num")


def _rows(plan: Plan) -> list[_Row]:
    """The families of slots, of each kind first those whose bar can be seen, and the others in one row."""
    found = [
        _Row(label, kind_of(slots[0]), sum(s.nbytes for s in slots), len(slots), slots[0].nbytes)
        for label, slots in families(plan.layout.entries)
    ]
    least = max(row.nbytes for row in found) / _LONGEST * LEAST_PX
    rows: list[_Row] = []
    for kind in COLOURS:
        rows += [row for row in found if row.kind == kind and row.nbytes >= least]
        small = [row for row in found if row.kind == kind and row.nbytes < least]
        if small:
            count = sum(row.count for row in small)
            label = f"{kind}: {count} small {'slot' if count == 1 else 'slots'}"
            rows.append(_Row(label, kind, sum(row.nbytes for row in small), count))
    return [row if row.count > 1 else replace(row, each_nbytes=None) for row in rows]


def _runs(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Stretches of slots of one kind, by address: kind, first byte, and the byte after the last."""
    ordered = sorted(plan.layout.entries, key=lambda slot: slot.offset)
    for kind, run in groupby(ordered, kind_of):
        slots = list(run)
        yield kind, slots[0].offset, max(slot.offset + slot.nbytes for slot in slots)


def _layer(slot: Slot) -> int:
    found = _LAYER.search(slot.name)
    return int(found[1]) if found is not None else 0


def _share(nbytes: int, plan: Plan) -> str:
    return f"{100 * nbytes / plan.layout.nbytes:.1f} %"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _rect(
    parent: ET.Element, x: float, y: float, width: float, height: float, fill: str, opacity: str = "1"
) -> ET.Element:
    sizes = {"x": x, "y": y, "width": width, "height": height}
    box = ET.SubElement(parent, "rect", {name: f"{size:.6g}" for name, size in sizes.items()}, fill=fill)
    if opacity != "1":
        box.set("fill-opacity", opacity)
    return box


def _text(parent: ET.Element, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
    element = _add(parent, "text", text, x=f"{x:.6g}", y=f"{y:.6g}")
    if style:
        element.set("class", style)
    if anchor != "start":
        element.set("text-anchor", anchor)


def _add(parent: ET.Element, tag: str, text: str | None = None, **attributes: str) -> ET.Element:
    element = ET.SubElement(parent, tag, attributes)
    if text is not None:
        element.text = _NOT_XML.sub("\ufffd", text)
    return element
