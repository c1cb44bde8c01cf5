"""What this run of the kernel tests can and cannot judge (case B10), and the forms that every supported Triton runs."""

# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from monograph.kernels.triton_import import tl, triton
from tests.kernels.rows import DEVICE, DTYPES, ON_GPU

KERNELS = Path(__file__).parents[2] / "kernels"
DECODE = ["attention", "device", "draw", "embed", "gate_up", "head", "linear_add", "qkv", "sample", "threshold"]


@triton.jit
def _count_kernel(x_ptr, count_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    count = tl.load(count_ptr)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    i = 0
    while i < count:
        total += tl.load(x_ptr + i * BLOCK + offs).to(tl.float32)
        i += 1
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_b10_loop_over_a_device_scalar(dtype: torch.dtype, count: int) -> None:
    """A `while` over a loaded bound runs on every Triton and NumPy; loading, widening and rounding are exact."""
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    out = torch.full((16,), float("nan"), dtype=dtype, device=DEVICE)
    _count_kernel[(1,)](x, torch.tensor([count], dtype=torch.int32, device=DEVICE), out, BLOCK=16)
    expected = torch.zeros(16, device=DEVICE)
    for row in x[:count]:
        expected += row.float()
    assert torch.equal(out, expected.to(dtype))


def test_b10_bf16_is_judged_on_a_gpu_alone() -> None:
    """The interpreter holds bf16 as bit patterns, so a green bf16 test in it would mean nothing: none is there."""
    assert (torch.bfloat16 in DTYPES) == ON_GPU
    assert {torch.float32, torch.float16} <= set(DTYPES)


@pytest.mark.parametrize("name", DECODE)
def test_b10_no_kernel_iterates_over_a_range_of_device_values(name: str) -> None:
    """Triton 3.6 with NumPy 2.4 cannot interpret it: only tl.static_range, whose bounds are constants, or `while`."""
    for function in ast.walk(ast.parse((KERNELS / f"{name}.py").read_text())):
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
            loops = [node for node in ast.walk(function) if isinstance(node, ast.For)]
            # A pipelined loop needs a range; beside it stands a `while` for one stage, which is what a CPU runs.
            loops = [loop for loop in loops if "num_stages=NUM_STAGES" not in ast.unparse(loop.iter)]
            assert all("static_range" in ast.unparse(loop.iter) for loop in loops), function.name
