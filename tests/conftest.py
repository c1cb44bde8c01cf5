"""Decides what runs where, before any test module is imported, and says so in pytest's header and summary.

With a CUDA device the kernels are compiled and run on it. Without one they run in Triton's interpreter on the CPU, and
tests marked ``gpu`` are deselected. ``TRITON_INTERPRET=1`` asks for the second on a machine with a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated: set before any kernel is imported

# The models of the tests are small: on a busy machine two threads, waiting for each other, took four times as long.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))

_DESELECTED = pytest.StashKey[int]()


def pytest_report_header() -> list[str]:
    if ON_GPU:
        where = f"kernels compiled for {torch.cuda.get_device_name()}; gpu tests included"
    else:
        where = "no CUDA device in use: kernels in Triton's interpreter, programs on the CPU; gpu tests deselected"
    return [f"monograph: {where}", f"torch {torch.__version__}, threads: {torch.get_num_threads()}"]


@pytest.hookimpl(trylast=True)  # after -m and -k, so that the count is of tests that would have run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needing_gpu = [] if ON_GPU else [item for item in items if item.get_closest_marker("gpu")]
    config.stash[_DESELECTED] = len(needing_gpu)
    if needing_gpu:
        config.hook.pytest_deselected(items=needing_gpu)
        items[:] = [item for item in items if item not in needing_gpu]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(_DESELECTED, 0)
    if count:
        terminalreporter.write_line(f"monograph: {count} gpu tests need a CUDA device and did not run; see 'make gpu'")
