"""A finished comparison as Markdown: what a page can show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def markdown(run: Mapping[str, Any]) -> str:
    """All models of a comparison: milliseconds a token, the same over the floor, start-up, and what failed.

    Args:
        run: Content of a result file of bench/compare.py.
    """
    models = list(dict.fromkeys(row["model"] for row in run["rows"]))
    parts = [_model(run, model, [row for row in run["rows"] if row["model"] == model]) for model in models]
    return "\n".join(parts)


def _model(run: Mapping[str, Any], model: str, rows: Sequence[Row]) -> str:
    decode = [row for row in rows if row["bench"] == "decode" and row["seq_len"] is not None]
    starts = [row for row in rows if row["bench"] == "start"]
    lengths = sorted({row["seq_len"] for row in decode})
    by_system: dict[str, dict[int, Row]] = {}
    for row in decode:
        by_system.setdefault(row["system"], {})[row["seq_len"]] = row
    names = {row["system"]: _name(row) for row in rows}
    ceiling = f", read ceiling {run['ceiling_gb_s']:,.0f} GB/s" if run["ceiling_gb_s"] else ""
    lines = [
        f"{model}, {rows[0]['dtype']}, {run['device']}{ceiling}; torch {run['torch']}, commit {run['commit']}, "
        f"{run['date'][:10]}",
        "",
    ]
    if lengths:
        body = [
            [names[system], *(_cell(at.get(length), "ms") for length in lengths)] for system, at in by_system.items()
        ]
        floors = {row["seq_len"]: row for row in reversed(decode) if row["floor_ms"] is not None}
        if floors:
            body.append(["memory floor", *(_cell(floors.get(length), "floor_ms") for length in lengths)])
        lines += _table(["ms a token at live length", *(f"{length:,}" for length in lengths)], body)
        if floors:
            body = [
                [names[system], *(_cell(at.get(length), "ratio") for length in lengths)]
                for system, at in by_system.items()
            ]
            lines += _table(["over the memory floor", *(f"{length:,}" for length in lengths)], body)
    if starts:
        lines += _table(
            ["process start to token, s", "first, cold", "first, warm", "fourth, cold", "fourth, warm"],
            [_start(names[system], starts, system) for system in dict.fromkeys(row["system"] for row in starts)],
        )
    return "\n".join([*lines, *_remarks(rows, decode, names)]) + "\n"


def _name(row: Row) -> str:
    version = row.get("version")
    return f"{row['system']} {version}" if version and row["system"] != "monograph" else str(row["system"])


def _cell(row: Row | None, key: str) -> str:
    value = None if row is None else row.get(key)
    if value is None:
        return "–"
    return f"{value:.2f}" if key == "ratio" else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _start(name: str, starts: Iterable[Row], system: str) -> list[str]:
    rows = {row["cache"]: row for row in starts if row["system"] == system}
    cells = [name]
    for key in ("ms", "settled_ms"):
        for cache in ("cold", "warm"):
            value = rows.get(cache, {}).get(key)
            cells.append("–" if value is None else f"{value / 1e3:.1f}")
    return cells


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]


def _remarks(rows: Sequence[Row], decode: Sequence[Row], names: Mapping[str, str]) -> list[str]:
    absent = [row["system"] for row in rows if row["verdict"] == "not installed"]
    timed = [row for row in decode if row["ms"] is not None]
    agree = sum(bool(row.get("argmax_agrees")) for row in timed)
    lines = []
    if timed:
        lines.append(f"Every step that is timed was judged right first; {agree} of {len(timed)} choose the very token")
        lines[-1] += " that the fp32 reference chooses."
    if elsewhere := {names[row["system"]]: row["judged_at"] for row in timed if row.get("judged_at")}:
        said = ", ".join(f"{name} after {tokens} tokens of its own" for name, tokens in elsewhere.items())
        lines.append(f"Judged not at each length but once: {said}.")
    for row in rows:
        if row["verdict"] not in ("ok", "not installed"):
            at = f"length {row['seq_len']:,}" if row["bench"] == "decode" and row["seq_len"] else row["bench"]
            at += f", {row['cache']}" if "cache" in row else ""
            lines.append(f"{_name(row)}, {at}: {row['verdict']}.")
    if absent:
        lines.append(f"Not installed: {', '.join(absent)}.")
    return [line for text in lines for line in (text, "")][:-1]
