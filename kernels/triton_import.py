"""Gives `triton` and `tl` where Triton exists, and inert stand-ins where it does not.

Triton is published for Linux alone. With the stand-ins every kernel file still imports on other systems, and its
reference `x_torch` works; launching the Triton kernel there says that Triton is missing.
"""

from __future__ import annotations

from typing import Any


class _MissingKernel:
    """What `@triton.jit` leaves where Triton is absent."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: object) -> Any:
        raise ModuleNotFoundError(f"{self.name}: Triton is not installed; on the CPU use the reference (device='cpu')")

    __call__ = __getitem__


class _MissingTriton:
    """Answers to every name that the kernel files read while they are imported."""

    constexpr = staticmethod(lambda value=None: value)

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        if function is None:
            return _MissingTriton.jit
        return _MissingKernel(function.__name__)

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(-x // y)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << max(n - 1, 0).bit_length()


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton: Any = _MissingTriton()  # type: ignore[no-redef]
    tl: Any = triton  # type: ignore[no-redef]

__all__ = ["tl", "triton"]
