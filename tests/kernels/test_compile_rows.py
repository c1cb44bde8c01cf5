"""The prefill kernels compile for every supported GPU generation, without spills in their default tiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Bytes of shared memory that one program may use.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
TENSOR_CORES = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
PRODUCTS = {
    "_qkv_rows_kernel",
    "_attention_rows_kernel",
    "_linear_add_rows_kernel",
    "_gate_up_rows_kernel",
    "_linear_rows_kernel",
}
KERNELS = {"_embed_rows_kernel", "_norm_rows_kernel", "_last_row_kernel"} | PRODUCTS


SHAPES = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "odd")
DEFAULT = [(90, "bfloat16", "llama-3.2-1b"), (80, "bfloat16", "smollm2-135m"), (120, "bfloat16", "odd")]
REST = [(capability, "bfloat16", shape) for capability in SHARED_LIMIT for shape in SHAPES]
REST += [(90, dtype, shape) for dtype in ("float16", "float32") for shape in SHAPES]
REST = [case for case in REST if case not in DEFAULT]


@pytest.mark.parametrize(
    ("capability", "dtype", "shape"), DEFAULT + [pytest.param(*case, marks=pytest.mark.slow) for case in REST]
)
def test_compiles_without_spills(capability: int, dtype: str, shape: str) -> None:
    """In a process of its own, where kernels are compiled and not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.kernels.compile_rows", str(capability), dtype, shape]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert {report["kernel"] for report in reports} == KERNELS
    for report in reports:
        assert report["stack"] == 0, report
        assert report["shared"] <= SHARED_LIMIT[capability], report
        assert not report["tf32"], report
        assert report["waits_before_it_stores"] == (capability >= 90), report
        if report["kernel"] not in PRODUCTS or dtype == "float32":
            assert not report["mma"], report
        elif shape == "odd":  # tiles too small for the wide instructions
            assert report["mma"] in ([TENSOR_CORES[capability]], ["mma.sync"]), report
        else:
            assert report["mma"] == [TENSOR_CORES[capability]], report
