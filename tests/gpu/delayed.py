"""Kernels that let the next launch start at once and then dawdle: copies of the real ones for the race test.

A kernel file is loaded a second time under another name, and in that copy the helper `enter`, which every kernel calls
before its first store, is another function. Nothing in the real kernels knows of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import monograph.kernels.tile
from monograph.kernels.triton_import import tl, triton
from monograph.model.program import Launch

KERNELS = Path(monograph.kernels.tile.__file__ or "").parent
DELAY_NS = 20_000  # of an even program; an odd one takes twice as long, so that programs end out of order
_DELAY_NS = tl.constexpr(DELAY_NS)


@triton.jit  # type: ignore[untyped-decorator]
def enter_and_dawdle(PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Lets the next launch start, waits for all before, and spins: loads and stores come late, after an early start."""
    tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
    if PDL > 0:
        tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]
    start = tl.extra.cuda.globaltimer()  # pyright: ignore[reportAttributeAccessIssue]
    now = start
    while now - start < _DELAY_NS * (1 + (tl.program_id(0) + tl.program_id(1)) % 2):
        now = tl.extra.cuda.globaltimer()  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit  # type: ignore[untyped-decorator]
def enter_without_waiting(PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The fault that the race test is for."""
    tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]


def copy_of(stem: str, enter: Any) -> ModuleType:
    """Load kernels/<stem>.py once more, with another `enter` in it."""
    name = f"monograph_copy_{stem}_{enter.__name__}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, KERNELS / f"{stem}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        assert hasattr(module, "enter"), f"{stem} has no `enter` to replace"
        module.enter = enter  # type: ignore[attr-defined]
    return sys.modules[name]


def with_copies(launches: tuple[Launch, ...], names: set[str], enter: Any) -> tuple[Launch, ...]:
    """The launches with every one whose name ends so (as in "layers.0.qkv") replaced by its copy."""

    def changed(launch: Launch) -> Launch:
        if launch.name.rpartition(".")[2] not in names:
            return launch
        stem = launch.kernel.__name__
        return replace(launch, kernel=getattr(copy_of(stem, enter), stem))

    return tuple(map(changed, launches))


@contextmanager
def copies_forgotten() -> Iterator[None]:
    """Take all copies out of sys.modules at the end."""
    yield
    for name in [name for name in sys.modules if name.startswith("monograph_copy_")]:
        del sys.modules[name]
