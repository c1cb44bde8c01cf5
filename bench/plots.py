"""Pictures of finished runs: what a result file says, drawn by matplotlib.

Of bench/compare.py: milliseconds a token over the live length, the same over the memory floor, and start-up, a picture
of each for every model. Of bench/scaling.py: milliseconds a token at every length, the points that are out of line
marked. Only figures with the verdict "ok" are drawn. The same file gives the same bytes.

Run: python bench/plots.py RESULTS.json [MORE.json ...] --out docs/images [--format svg,png]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
# Distinct in hue and in lightness, so that neither print nor colour blindness merges two (Okabe and Ito 2008).
COLOURS = {
    "monograph": "#d55e00",
    "transformers eager": "#999999",
    "transformers static": "#0072b2",
    "llama.cpp": "#009e73",
    "vllm": "#cc79a7",
    "sglang": "#56b4e9",
    "gpt-fast": "#e69f00",
}
OTHER = "#333333"
GRID = "#dddddd"
STYLE = {
    "svg.hashsalt": "monograph",  # ids of elements do not change from run to run
    "svg.fonttype": "none",  # text as text: small, and searchable
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def pictures(run: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Draw what a result file holds.

    Args:
        run: Its content.

    Yields:
        A name for each picture, without suffix, and the picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; names the extra that has it.
    """
    plotted = _matplotlib()
    for model in dict.fromkeys(row["model"] for row in run["rows"]):
        rows = [
            row for row in run["rows"] if row["model"] == model and row["verdict"] == "ok" and row["ms"] is not None
        ]
        of = {bench: [row for row in rows if row["bench"] == bench] for bench in ("decode", "start", "scaling")}
        slug = re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower()).strip("-")
        with plotted.rc_context(STYLE):
            if of["decode"]:
                yield f"compare-{slug}-ms", _over_length(plotted, run, of["decode"], "ms")
            if any(row.get("ratio") for row in of["decode"]):
                yield f"compare-{slug}-floor", _over_length(plotted, run, of["decode"], "ratio")
            if of["start"]:
                yield f"compare-{slug}-start", _starts(plotted, run, of["start"])
            if of["scaling"]:
                yield f"scaling-{slug}", _scaling(plotted, run, of["scaling"])


def _matplotlib() -> Any:
    """matplotlib.pyplot, drawing to files."""
    try:
        import matplotlib
    except ModuleNotFoundError as fault:
        raise ModuleNotFoundError("plots need matplotlib; install the extra: pip install -e '.[bench]'") from fault
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _over_length(plotted: Any, run: Mapping[str, Any], rows: Sequence[Row], key: str) -> Figure:
    """One line for each system over the live length; both axes logarithmic, since lengths and systems are."""
    figure, axes = _figure(plotted, run, rows)
    for system, line in _by_system(rows).items():
        points = sorted((row["seq_len"], row[key]) for row in line if row.get(key) is not None)
        _line(axes, points, system)
    floors = {row["seq_len"]: row["floor_ms"] for row in rows if row["floor_ms"] is not None}
    if key == "ms":
        if floors:
            axes.plot(*zip(*sorted(floors.items()), strict=True), color=OTHER, linestyle=":", label="memory floor")
        axes.set_ylabel("ms a token")
    else:
        axes.axhline(1.0, color=OTHER, linestyle=":")
        axes.set_ylabel("time over the memory floor")
    _length_axis(axes, sorted({row["seq_len"] for row in rows}))
    _number_axis(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _starts(plotted: Any, run: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Two bars for each system: the first token, and after it the wait until decoding has its speed."""
    systems = list(_by_system(rows))
    figure, axes = _figure(plotted, run, rows, height=0.9 + 0.62 * len(systems))
    at = {(row["system"], row["cache"]): row for row in rows}
    for i, system in enumerate(systems):
        for offset, cache in ((0.2, "warm"), (-0.2, "cold")):
            row = at.get((system, cache))
            if row is None:
                continue
            first, settled = row["ms"] / 1e3, row["settled_ms"] / 1e3
            colour = COLOURS.get(system, OTHER)
            axes.barh(i + offset, first, color=colour, alpha=1.0 if cache == "warm" else 0.6, height=0.36, linewidth=0)
            axes.barh(i + offset, settled - first, left=first, color=colour, alpha=0.25, height=0.36, linewidth=0)
            then = f", fourth {settled:.1f} s" if settled - first > 0.5 else ""
            axes.text(settled, i + offset, f" {cache}: {first:.1f} s{then}", va="center", fontsize=9)
    axes.set_yticks(range(len(systems)), systems)
    axes.invert_yaxis()
    axes.set_xlabel("s from process start to the first token; pale: to the fourth, compiled and captured")
    axes.margins(x=0.3)
    return figure


def _scaling(plotted: Any, run: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Every measured length, those marked at which the split of attention changes."""
    figure, axes = _figure(plotted, run, rows)
    points = sorted((row["mean_seq_len"], row["ms"]) for row in rows)
    axes.plot(*zip(*points, strict=True), color=COLOURS["monograph"], marker=".", markersize=4, linewidth=1)
    high = [(row["mean_seq_len"], row["ms"]) for row in rows if not row["in_line"]]
    if high:
        axes.plot(*zip(*high, strict=True), color="black", marker="x", linestyle="", label="above its neighbours' line")
    floors = sorted((row["mean_seq_len"], row["floor_ms"]) for row in rows if row["floor_ms"] is not None)
    if floors:
        axes.plot(*zip(*floors, strict=True), color=OTHER, linestyle=":", label="memory floor")
    changes = [row["mean_seq_len"] for row in rows if row["splits_change"]]
    for i, change in enumerate(changes):
        axes.axvline(
            change, color=GRID, linewidth=0.8, zorder=0, label="split of attention changes" if i == 0 else None
        )
    axes.set_ylabel("ms a token")
    axes.set_ylim(bottom=0)
    longest = max(row["mean_seq_len"] for row in rows)
    _length_axis(axes, [4**i for i in range(20) if 4**i <= longest])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _figure(plotted: Any, run: Mapping[str, Any], rows: Sequence[Row], height: float = 3.6) -> tuple[Figure, Axes]:
    figure, axes = plotted.subplots(figsize=(8.0, height), layout="constrained")
    axes.set_title(f"{rows[0]['model']}, {rows[0]['dtype']}, one stream, {run['device']}")
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _line(axes: Axes, points: Sequence[tuple[float, float]], system: str) -> None:
    ours = system == "monograph"
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=COLOURS.get(system, OTHER),
        marker="o",
        markersize=4,
        linewidth=2.4 if ours else 1.6,
        zorder=3 if ours else 2,
        label=system,
    )


def _length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(length) for length in lengths])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("live length, tokens")


def _short(length: int) -> str:
    return f"{length >> 10}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _number_axis(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _by_system(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["system"], []).append(row)
    return found


def main() -> None:
    """Draw every file that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--format", default="svg", help="svg, png, or both with a comma")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    drawn = 0
    try:
        for path in args.results:
            for name, figure in pictures(json.loads(path.read_text())):
                for suffix in args.format.split(","):
                    file = args.out / f"{name}.{suffix}"
                    figure.savefig(file, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
                    print(f"{file}  {file.stat().st_size / 1024:.0f} KiB")
                _matplotlib().close(figure)
                drawn += 1
    except ModuleNotFoundError as fault:
        sys.exit(str(fault))
    if not drawn:
        sys.exit("nothing to draw: no row of these files is ok and has a time")


if __name__ == "__main__":
    main()
