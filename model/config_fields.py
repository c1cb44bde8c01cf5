"""Typed reading of the fields of a config.json: what was expected, what was found, under the field's own name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from monograph.errors import ConfigError
from monograph.model.json_file import describe

# Far above every published model and far below what overflows an int32 or a planner's arithmetic.
MAX_VOCAB_SIZE = 2**24
MAX_WIDTH = 2**20
MAX_LAYERS = 2**12
MAX_HEADS = 2**14
MAX_HEAD_DIM = 2**12
MAX_POSITIONS = 2**30


class Fields:
    """A JSON object whose values are asked for by name and type.

    A field that is null counts as absent, as it does for transformers. Every error names the field with `prefix`.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer in low..high, or None if the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        return check_integer(self.prefix + name, value, low, high)

    def required_integer(self, name: str, low: int, high: int) -> int:
        """Return an integer in low..high; absence is an error."""
        value = self.integer(name, low, high)
        if value is None:
            found = "null" if name in self.values else "no such field"
            raise ConfigError(f"{self.prefix}{name}: expected an integer in {low}..{high}, got {found}")
        return value

    def number(self, name: str, above: float = 0.0) -> float | None:
        """Return a finite number greater than `above`, or None if the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        return check_number(self.prefix + name, value, above)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.prefix}{name}: expected true or false, got {describe(value)}")
        return value

    def text(self, name: str) -> str | None:
        """Return a string, or None if the field is absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.prefix}{name}: expected text, got {describe(value)}")
        return value

    def object(self, name: str) -> Fields | None:
        """Return a nested object, or None if the field is absent or the object is empty."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.prefix}{name}: expected an object, got {describe(value)}")
        return Fields(value, f"{self.prefix}{name}.") if value else None

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the ids of a field that is an id, a list of ids or null: each once, in the file's order."""
        value = self.values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        return tuple(dict.fromkeys(check_integer(self.prefix + name, each, 0, vocab_size - 1) for each in ids))


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Return `value` if it is an integer in low..high, else raise ConfigError naming it."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}: expected an integer in {low}..{high}, got {describe(value)}")
    return value


def check_number(name: str, value: object, above: float = 0.0) -> float:
    """Return `value` as a float if it is finite and greater than `above`, else raise ConfigError naming it."""
    if not isinstance(value, bool) and isinstance(value, (int, float)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number > above:
            return number
    raise ConfigError(f"{name}: expected a finite number above {above:g}, got {describe(value)}")
