"""Pictures show what a result file says, and nothing that it does not vouch for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import bench.plots
from bench.plots import COLOURS
from bench.systems.system import SYSTEMS

LENGTHS = (64, 1024, 16384)


def row(bench: str, system: str, seq_len: int, ms: float, **more: Any) -> dict[str, Any]:
    floor = 0.5 + seq_len / 1e5
    head = {"bench": bench, "model": "some/llama-1b", "system": system, "dtype": "bfloat16", "seq_len": seq_len}
    return {**head, "ms": ms, "floor_ms": floor, "ratio": ms / floor, "verdict": "ok", **more}


ROWS = [
    *(row("decode", "monograph", length, 0.7 + length / 1e5) for length in LENGTHS),
    *(row("decode", "transformers eager", length, 13.0) for length in LENGTHS[:2]),
    row("decode", "llama.cpp", 64, 3.0, verdict="error 2.0e-01 above 1.0e-01"),
    {**row("decode", "vllm", 64, 0.0, verdict="not installed"), "ms": None},
    *(row("start", "monograph", 16, 4e3, settled_ms=4.1e3, cache=cache) for cache in ("cold", "warm")),
    *(
        row("scaling", "monograph", length, 1.0 + i, mean_seq_len=length + 7.5, in_line=i != 1, splits_change=i == 2)
        for i, length in enumerate(LENGTHS)
    ),
]
NAMES = ["compare-llama-1b-floor", "compare-llama-1b-ms", "compare-llama-1b-start", "scaling-llama-1b"]


def draw(
    folder: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> dict[str, bytes]:
    """The files drawn from rows, by name."""
    folder.mkdir()
    file = folder / "run.json"
    file.write_text(json.dumps({"device": "NVIDIA H200", "rows": rows}))
    monkeypatch.setattr("sys.argv", ["plots.py", str(file), "--out", str(folder / "images"), *arguments])
    bench.plots.main()
    return {path.name: path.read_bytes() for path in sorted((folder / "images").iterdir())}


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = draw(tmp_path / "one", ROWS, monkeypatch)
    assert list(files) == [f"{name}.svg" for name in NAMES]
    assert all(1000 < len(content) < 100_000 for content in files.values())
    assert draw(tmp_path / "two", ROWS, monkeypatch) == files  # the same bytes
    over_length = files["compare-llama-1b-ms.svg"].decode()
    for text in (
        "monograph",
        "transformers eager",
        "memory floor",
        "16k",
        "llama-1b, bfloat16, one stream, NVIDIA H200",
    ):
        assert text in over_length, text
    assert "llama.cpp" not in over_length  # its verdict is not ok
    assert "vllm" not in over_length
    assert COLOURS["monograph"] in over_length
    assert "warm: 4.0 s" in files["compare-llama-1b-start.svg"].decode()
    scaling = files["scaling-llama-1b.svg"].decode()
    assert "above its neighbours" in scaling
    assert "split of attention changes" in scaling


def test_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = draw(tmp_path / "one", ROWS[:3], monkeypatch, "--format", "svg,png")
    assert list(files) == [f"{name}.{suffix}" for name in NAMES[:2] for suffix in ("png", "svg")]
    assert files["compare-llama-1b-ms.png"].startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="nothing to draw"):
        draw(tmp_path / "one", ROWS[5:7], monkeypatch)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[bench\]'"):
        draw(tmp_path / "one", ROWS, monkeypatch)


def test_every_system_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(SYSTEMS)
    assert len(set(COLOURS.values())) == len(COLOURS)
