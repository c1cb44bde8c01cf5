"""What every benchmark shares: facts of the machine, percentiles, clocks, and the one JSON form of a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from monograph.model.clock import Clock as Clock
from monograph.model.clock import percentile as percentile
from monograph.model.processor import processor_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def machine_facts(device: torch.device) -> dict[str, str]:
    """What a figure depends on beside the code: the head of every result file."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "driver": _driver(device),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The commit that is measured, with a + if files have changed since; MONOGRAPH_COMMIT where there is no git."""
    given = os.environ.get("MONOGRAPH_COMMIT")
    if given:
        return given
    head = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no") else "")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile of milliseconds, under the names that result rows use."""
    return {
        "ms": round(percentile(values, 50), 5),
        "p20_ms": round(percentile(values, 20), 5),
        "p80_ms": round(percentile(values, 80), 5),
    }


def write_results(
    bench: str,
    facts: Mapping[str, str],
    ceiling_gb_s: float | None,
    rows: Sequence[Mapping[str, Any]],
    path: Path | None = None,
) -> Path:
    """Write a run as JSON, a row a line.

    Args:
        bench: Name of the benchmark.
        facts: From ``machine_facts``.
        ceiling_gb_s: The read ceiling measured in this run.
        rows: The figures.
        path: Where to; by default bench/results/<bench>-<device>.json, and an older file of that name is kept beside
            it under its date.

    Returns:
        The file written.
    """
    if path is None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{bench}-{device_slug(facts['device'])}.json"
        _keep(path)
    head = [f'"{name}": {json.dumps(value)}' for name, value in {**facts, "ceiling_gb_s": ceiling_gb_s}.items()]
    body = ",\n  ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n " + ",\n ".join(head) + ',\n "rows": [\n  ' + body + "\n ]\n}\n")
    return path


def device_slug(name: str) -> str:
    """A device's name for a file name: "NVIDIA H200" gives "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print rows under headings.

    Args:
        rows: The figures; None shows as a dash.
        columns: Heading of each key to show, with a format: "ms": "ms:.4f".
    """
    headings = [heading.partition(":")[0] for heading in columns.values()]
    cells = [headings]
    for row in rows:
        cells.append([])
        for key, heading in columns.items():
            value = row.get(key)
            cells[-1].append("-" if value is None else format(value, heading.partition(":")[2]))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _keep(path: Path) -> None:
    """Move an older result of the same name aside, its date in its name."""
    if not path.exists():
        return
    date = re.sub(r"[^0-9T]", "", str(json.loads(path.read_text())["date"]).partition("+")[0])
    kept = path.with_name(f"{path.stem}-{date}.json")
    number = 2
    while kept.exists():
        kept = path.with_name(f"{path.stem}-{date}-{number}.json")
        number += 1
    path.rename(kept)


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0] if text else "unknown"


def _triton_version() -> str:
    try:
        import triton
    except ModuleNotFoundError:
        return "none"
    return str(triton.__version__)


def _processor() -> str:
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
