"""The decode kernels compile for every GPU generation in their default tiles: no spills, wide loads, the PDL rules.

Compiled ahead of time in a process of its own, where kernels are compiled and not interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LAUNCHES = ("embed", "qkv", "attention", "o", "gate_up", "down", "head", "sample")
# Bytes of shared memory that one program may use.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
MATVECS = {"qkv", "o", "gate_up", "down", "head"}
# Every launch on the newest tuned generation, and each on one of the others; the rest is for `make aot`.
QUICK = [
    "90:bfloat16:llama-3.2-1b",
    "80:bfloat16:smollm2-135m:qkv,head",
    "89:bfloat16:llama-3.1-8b:o,gate_up",
    "100:bfloat16:llama-3.2-1b:attention",
    "120:bfloat16:llama-3.1-8b:down,embed",
    "90:float32:llama-3.2-1b:attention",
    "90:float32:mqa:attention",
    "90:float16:odd:qkv",
]
FULL = [
    f"{capability}:{dtype}:{shape}"
    for capability in SHARED_LIMIT
    for dtype in ("bfloat16", *(("float16", "float32") if capability == 90 else ()))
    for shape in ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "mqa", "odd")
]


def compile_all(jobs: list[str]) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.kernels.compile_decode", *jobs]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(report: dict[str, Any]) -> None:
    capability, dtype, shape = report["job"].split(":")[:3]
    launch = report["launch"]
    # No spills, but for what leads out of the nested loops of a draw, saved once.
    assert report["stack"] <= (64 if launch == "sample" else 0), report
    assert report["shared"] <= SHARED_LIMIT[int(capability)], report
    assert not report["tf32"], report
    assert report["mma"] == (launch == "attention" and dtype != "float32"), report
    if launch in MATVECS:
        assert report["weight_loads"] > 0, report
        if shape != "odd":
            assert report["wide_weight_loads"] == report["weight_loads"], report
    if launch == "attention":
        assert report["wide_loads"] >= 2, report
    if int(capability) >= 90:  # a wait on the way through, or on both of them, and on the way out of a halted launch
        assert report["waits"] == (3 if launch == "sample" else 2), report
        assert not report["stores_early"], report
        assert launch == "sample" or report["loads_early"] > 0, report  # weights or cache before the wait
        if launch in ("head", "sample") and shape == "llama-3.2-1b" and dtype == "bfloat16" and capability == "90":
            # Four programs of the head and one of the choice fit in the registers of a multiprocessor.
            assert report["registers"] <= (104 if launch == "head" else 96), report
    else:
        assert report["waits"] == 0, report


def test_aot_quick() -> None:
    reports = compile_all(QUICK)
    assert {report["launch"] for report in reports} == set(LAUNCHES)
    assert {report["job"] for report in reports} == set(QUICK)
    for report in reports:
        check(report)


@pytest.mark.slow
@pytest.mark.parametrize("job", FULL)
def test_aot_full(job: str) -> None:
    reports = compile_all([job])
    assert [report["launch"] for report in reports] == list(LAUNCHES)
    for report in reports:
        check(report)
