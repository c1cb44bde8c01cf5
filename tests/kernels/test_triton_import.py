"""The kernel files on a system for which Triton is not published."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None  # importing it now raises ModuleNotFoundError
import torch
from monograph.kernels import attention, draw, embed, gate_up, head, linear_add, qkv, sample, threshold
from monograph.kernels.triton_import import triton

a, weight, halted = torch.ones(3), torch.eye(3), torch.zeros(1, dtype=torch.int32)
x = torch.zeros(3)
linear_add.linear_add_torch(a, weight, None, halted, x)
assert x.tolist() == [1, 1, 1]
assert (triton.cdiv(7, 2), triton.next_power_of_2(5), triton.next_power_of_2(1)) == (4, 8, 1)
try:
    linear_add.linear_add(a, weight, None, halted, x)
except ModuleNotFoundError as error:
    print(error)
"""


def test_references_work_without_triton() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    expected = "_linear_add_kernel: Triton is not installed; on the CPU use the reference (device='cpu')"
    assert done.stdout.strip() == expected
