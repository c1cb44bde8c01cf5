"""What the processor of this machine is called."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """The processor's name where the system has it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
