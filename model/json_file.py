"""JSON files written by others: read with a limit on their size, and with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monograph.errors import MonographError

MAX_JSON_NBYTES = 64 * 1024 * 1024


def read_json_object(path: Path, error: type[MonographError]) -> Mapping[str, Any]:
    """Read a file that must hold one JSON object.

    Args:
        path: The file.
        error: What to raise when it cannot be read: the caller knows what the file means.

    Raises:
        error: The file is absent, not a plain file, too large, not UTF-8, not JSON or not an object.
    """
    try:
        if not path.is_file():
            raise error(f"{path}: expected a JSON file, got {'a folder' if path.is_dir() else 'nothing there'}")
        nbytes = path.stat().st_size
        if nbytes > MAX_JSON_NBYTES:
            raise error(f"{path}: expected a JSON file of at most {MAX_JSON_NBYTES:,} bytes, got {nbytes:,}")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise error(
            f"{path}: expected UTF-8 text, got byte 0x{fault.object[fault.start]:02x} at {fault.start}"
        ) from None
    except OSError as fault:
        if isinstance(fault, error):
            raise
        raise error(f"{path}: cannot be read: {fault.strerror or fault}") from fault
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise error(f"{path}: expected a JSON object, got JSON nested too deeply to read") from None
    except ValueError as fault:  # JSONDecodeError, and integers of thousands of digits
        raise error(f"{path}: expected a JSON object, got text that is not JSON: {fault}") from None
    if not isinstance(parsed, dict):
        raise error(f"{path}: expected a JSON object, got {describe(parsed)}")
    return parsed


def describe(value: object) -> str:
    """Name a JSON value and its type, short enough for an error message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kind = {int: "integer", float: "number", str: "text", list: "list", dict: "object"}.get(type(value))
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return shown if kind is None else f"{shown} ({kind})"
