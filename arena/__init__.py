"""Where every tensor lives: one allocation, planned from sizes alone, with permanent addresses.

``plan`` turns requests into a ``Layout``; an ``Arena`` is that layout in memory; ``HostMemory`` is the small part that
host and GPU share.
"""

from __future__ import annotations

from monograph.arena.arena import Arena
from monograph.arena.capacity import capacity_error, check_capacity, device_free_nbytes
from monograph.arena.error import GuardError, RebindError, UnknownSlotError
from monograph.arena.host_memory import HostMemory
from monograph.arena.layout import Layout, plan
from monograph.arena.slot import Lifetime, Slot, SlotRequest, Span
from monograph.arena.units import format_nbytes

__all__ = [
    "Arena",
    "GuardError",
    "HostMemory",
    "Layout",
    "Lifetime",
    "RebindError",
    "Slot",
    "SlotRequest",
    "Span",
    "UnknownSlotError",
    "capacity_error",
    "check_capacity",
    "device_free_nbytes",
    "format_nbytes",
    "plan",
]
