"""Tuned tiles on disk: one JSON file for each key, written whole or not at all, and never believed without a look.

They are in ``~/.cache/monograph/tiles``, or under the folder that MONOGRAPH_CACHE_DIR names; XDG_CACHE_HOME is heeded.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from monograph.errors import ConfigError
from monograph.model.cache_folder import tiles_folder
from monograph.model.json_file import read_json_object
from monograph.model.tile_key import TileKey
from monograph.model.tile_space import Tiles, faults
from monograph.model.whole_file import whole_file

logger = logging.getLogger("monograph")

FORMAT = 1


def tiles_path(key: TileKey) -> Path:
    """The file for a key.

    Raises:
        ConfigError: There is no home folder to keep it in, as for a user that the system does not know.
    """
    try:
        folder = tiles_folder()
        known = folder.parts[:1] != ("~",)
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(
            "tuned tiles have no place: the home folder is not known; set MONOGRAPH_CACHE_DIR to a folder"
        )
    slug = re.sub(r"[^a-z0-9]+", "-", f"{key.gpu} {key.shape} {key.dtype}".lower()).strip("-")
    return folder / f"{slug[:96]}-{key.digest}.json"


def check_place(key: TileKey) -> None:
    """Find out whether tiles for a key could be kept, before time is spent on them.

    Raises:
        ConfigError: They could not.
    """
    folder = tiles_path(key).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _cannot_keep(folder, error) from error


def keep_tiles(key: TileKey, tiles: Tiles, measured: Mapping[str, Any]) -> Path:
    """Keep tiles for later loads, in the place of any that were kept for the same key.

    Args:
        key: What they were measured for.
        tiles: By use.
        measured: What the measurement said: for people, not read again.

    Returns:
        The file.

    Raises:
        ConfigError: It cannot be written.
    """
    path = tiles_path(key)
    record = {
        "format": FORMAT,
        "key": asdict(key),
        "tiles": {use: dict(tile) for use, tile in tiles.items()},
        "measured": dict(measured),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write((json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        raise _cannot_keep(path.parent, error) from error
    return path


def kept_tiles(key: TileKey, multiprocessors: int) -> dict[str, dict[str, int]] | None:
    """Tiles that were kept for a key.

    Args:
        key: What they must have been measured for.
        multiprocessors: Of the GPU.

    Returns:
        By use; None where there are none, or only what cannot be used, which is warned of and left where it is.
    """
    try:
        path = tiles_path(key)
    except ConfigError:
        return None  # no place to keep anything in: a load that did not ask for tuning need not know
    try:
        if not path.exists():
            return None
    except OSError as error:
        _ignored(path, error.strerror or str(error))
        return None
    try:
        record = read_json_object(path, ConfigError)
    except ConfigError as error:
        _ignored(path, str(error).removeprefix(f"{path}: "))
        return None
    if record.get("format") != FORMAT:
        _ignored(path, f"its format is {record.get('format')!r}, expected {FORMAT}")
        return None
    if record.get("key") != asdict(key):
        _ignored(path, "it was measured for another GPU, model or version")
        return None
    found = next(faults(record.get("tiles"), multiprocessors), None)
    if found is not None:
        _ignored(path, found)
        return None
    return {use: dict(tile) for use, tile in record["tiles"].items()}


def _cannot_keep(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"tuned tiles cannot be kept in {folder}: {error.strerror or error}; "
        "set MONOGRAPH_CACHE_DIR to a folder that can be written"
    )


def _ignored(path: Path, reason: str) -> None:
    logger.warning("tuned tiles in %s are ignored: %s; 'monograph tune' writes the file anew", path, reason)
