"""Faults in the use of slots. Each is also the built-in that a caller of a mapping or a buffer would catch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from monograph.errors import MonographError


class UnknownSlotError(MonographError, KeyError):
    """A slot name that the layout does not hold. Lists the nearest names that it does."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show the repr, quotes and all


class RebindError(MonographError, TypeError):
    """An attempt to put another tensor, address, shape or dtype where a slot is: captured launches would not see it."""


class GuardError(MonographError, RuntimeError):
    """Bytes between slots were written: some launch stored outside its slot. Names the neighbours and the place."""


def unknown_slot(name: object, names: Iterable[str]) -> UnknownSlotError:
    """Builds the error for a name that is not there, with up to three names that look like it.

    Args:
        name: What was asked for.
        names: Every name there is.

    Returns:
        The error, to be raised by the caller.
    """
    known = list(names)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    way_out = f"did you mean {', '.join(map(repr, near))}?" if near else f"the layout holds {len(known):,} other slots"
    return UnknownSlotError(f"no slot {name!r}; {way_out}")
