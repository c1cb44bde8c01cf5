"""Whether an arena fits, asked before it is allocated, and the error that says what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from monograph.arena.device import on_device
from monograph.arena.units import format_nbytes
from monograph.errors import CapacityError

_WAY_OUT = "choose a shorter max_seq_len, a smaller dtype or a device with more memory"
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_capacity(need_nbytes: int, free_nbytes: int | None, hint: str = "", *, device: object = None) -> None:
    """Raises unless the need is met.

    Args:
        need_nbytes: Bytes to be allocated.
        free_nbytes: Bytes that can be had; None where the system does not say, and then nothing is refused.
        hint: The way out, such as the longest length that fits; a general one if empty.
        device: Named in the error if given.

    Raises:
        CapacityError: The need is greater; its text has need, free, what is short, and the hint.
    """
    if free_nbytes is not None and need_nbytes > free_nbytes:
        raise capacity_error(need_nbytes, free_nbytes, hint, device=device)


def capacity_error(
    need_nbytes: int, free_nbytes: int | None, hint: str = "", *, device: object = None
) -> CapacityError:
    """Builds the error, for ``check_capacity`` and for an allocation that failed although the check had passed.

    Args:
        need_nbytes: As in ``check_capacity``, like the others.
        free_nbytes: None leaves it out of the text.
        hint: The way out.
        device: Named if given.

    Returns:
        The error, to be raised by the caller.
    """
    text = f"arena needs {_both(need_nbytes)}"
    where = "" if device is None else f" on {device}"
    if free_nbytes is None:
        text += where
    elif need_nbytes > free_nbytes:
        short = format_nbytes(need_nbytes - free_nbytes)
        text += f", {_both(free_nbytes)} is free{where}, {short} short"
    else:
        text += f", {_both(free_nbytes)} looked free{where}, yet the allocation failed"
    return CapacityError(f"{text}; {hint or _WAY_OUT}")


def device_free_nbytes(device: torch.device) -> int | None:
    """Bytes that an allocation on the device could get now.

    On CUDA that is what the driver has free plus what PyTorch's cache would give back whole. On the CPU it is what the
    kernel can supply without swapping, and no more than the memory limit of a surrounding container leaves.

    Args:
        device: The CPU or a CUDA device with its index.

    Returns:
        Bytes, or None where the system does not say.
    """
    if device.type == "cuda":
        with on_device(device):
            free, _ = torch.cuda.mem_get_info(device)
            stats = torch.cuda.memory_stats(device)
        kinds = ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
        reserved, allocated, split = (int(stats.get(f"{kind}.all.current", 0)) for kind in kinds)
        return int(free) + max(0, reserved - allocated - split)
    known = [nbytes for nbytes in (_host_free_nbytes(), _container_free_nbytes()) if nbytes is not None]
    return min(known) if known else None


def _both(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes:,} bytes)"


def _host_free_nbytes(meminfo: Path = _MEMINFO) -> int | None:
    """MemAvailable on Linux; elsewhere free pages, or failing that all of memory, as an upper bound."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        try:
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            continue
    return None


def _container_free_nbytes(cgroup: Path = _CGROUP) -> int | None:
    """What a cgroup v2 limit leaves, counting page cache as free since the kernel drops it first; None without one."""
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" is no number: no limit
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return None
