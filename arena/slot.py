"""What one tensor in the arena is: its request before planning, its slot after.

A request says name, shape, dtype and how long the bytes must live. Planning adds one thing, the offset, and the slot
then stands for that address until the arena is closed.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from monograph.errors import ConfigError

Lifetime = Literal["weight", "state", "scratch"]
"""``weight`` is constant after loading, ``state`` lives across steps, ``scratch`` lives inside one pass."""

LIFETIMES: tuple[Lifetime, ...] = get_args(Lifetime)

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    )
}
"""Every dtype a slot may have, by the name it carries in JSON."""

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def checked_int(value: object, argument: str, minimum: int) -> int:
    """Returns ``value`` as a plain Python int, which no size overflows.

    Args:
        value: Any integer, NumPy's included; a bool is none.
        argument: How the error names it.
        minimum: The least it may be.

    Returns:
        The int.

    Raises:
        ConfigError: It is no integer, or less than ``minimum``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < minimum:
        raise ConfigError(f"{argument} must be an int of at least {minimum}, got {value!r}")
    return number


@dataclass(frozen=True)
class Span:
    """The launches of one pass between which a scratch tensor holds something, both ends included.

    Attributes:
        pass_name: The pass that ``first`` and ``last`` count in, such as ``"prefill"``.
        first: Index of the launch that writes the tensor.
        last: Index of the last launch that reads it.

    Raises:
        ConfigError: An index is not an int, or not ``0 <= first <= last``, or the pass has no name.
    """

    pass_name: str
    first: int
    last: int

    def __post_init__(self) -> None:
        if not isinstance(self.pass_name, str) or not self.pass_name:
            raise ConfigError(f"Span: pass_name must be a name such as 'prefill', got {self.pass_name!r}")
        for argument in ("first", "last"):
            object.__setattr__(self, argument, checked_int(getattr(self, argument), f"Span: {argument}", minimum=0))
        if self.first > self.last:
            raise ConfigError(f"Span: first must not come after last, got first {self.first} and last {self.last}")

    def overlaps(self, other: Span) -> bool:
        """Whether some launch lies in both spans. Spans of different passes have no common order: they overlap."""
        return self.pass_name != other.pass_name or (self.first <= other.last and other.first <= self.last)


@dataclass(frozen=True)
class SlotRequest:
    """A tensor that the arena must hold.

    Attributes:
        name: Dotted name, unique in a layout, such as ``"layers.0.qkv"``.
        shape: Positive dimensions, at least one; a scalar on the device is ``(1,)``.
        dtype: One of ``DTYPES``.
        lifetime: See ``Lifetime``.
        span: For scratch only: allows the slot to share bytes with others of the same pass whose spans do not overlap
            it. Without a span a slot never shares.

    Raises:
        ConfigError: An argument that is none of these. Names the slot and the argument.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    lifetime: Lifetime
    span: Span | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"SlotRequest: name must be letters, digits, '_' and '-' with single dots between, got {self.name!r}"
            )
        object.__setattr__(self, "shape", _checked_shape(self.name, self.shape))
        if self.dtype not in DTYPES.values():
            raise ConfigError(f"slot {self.name!r}: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.lifetime not in LIFETIMES:
            raise ConfigError(
                f"slot {self.name!r}: lifetime must be one of {', '.join(LIFETIMES)}, got {self.lifetime!r}"
            )
        if self.span is not None and not isinstance(self.span, Span):
            raise ConfigError(f"slot {self.name!r}: span must be a Span or None, got {self.span!r}")
        if self.span is not None and self.lifetime != "scratch":
            raise ConfigError(
                f"slot {self.name!r}: span is for scratch only, got lifetime {self.lifetime!r}; {self.lifetime} slots "
                "keep their bytes to themselves"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without alignment or guard."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype as JSON and tables write it: ``"bfloat16"``."""
        return str(self.dtype).removeprefix("torch.")

    def may_share(self, other: SlotRequest) -> bool:
        """Whether the two may lie on the same bytes: scratch of one pass, never holding something at the same time."""
        return self.span is not None and other.span is not None and not self.span.overlaps(other.span)


@dataclass(frozen=True, kw_only=True)
class Slot(SlotRequest):
    """A request with its place: ``nbytes`` bytes from ``offset`` on belong to the tensor, in every pass and step.

    Attributes:
        offset: Bytes from the start of the arena, a multiple of 256.
    """

    offset: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "offset", checked_int(self.offset, f"slot {self.name!r}: offset", minimum=0))

    @property
    def end(self) -> int:
        """The first byte past the tensor."""
        return self.offset + self.nbytes


def _checked_shape(name: str, shape: object) -> tuple[int, ...]:
    try:
        dims: tuple[object, ...] = tuple(shape)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"slot {name!r}: shape must be a tuple of ints, got {shape!r}") from None
    if not dims:
        raise ConfigError(f"slot {name!r}: shape must have a dimension, got (); a scalar on the device is (1,)")
    return tuple(checked_int(dim, f"slot {name!r}: shape {dims}: dimension {i}", 1) for i, dim in enumerate(dims))
