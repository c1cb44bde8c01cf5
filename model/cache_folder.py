"""Where compiled kernels and tuned tiles are kept on disk; asked without importing PyTorch or Triton."""

from __future__ import annotations

import os
from pathlib import Path


def monograph_folder() -> Path:
    """What monograph keeps: MONOGRAPH_CACHE_DIR, or ``monograph`` in the user's cache folder (XDG_CACHE_HOME)."""
    own = os.environ.get("MONOGRAPH_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared) if shared and Path(shared).is_absolute() else _home() / ".cache"
    return base / "monograph"


def tiles_folder() -> Path:
    """Where tuned tiles are kept."""
    return monograph_folder() / "tiles"


def triton_folder() -> Path:
    """Where Triton keeps compiled kernels, by its own rules: TRITON_CACHE_DIR, or below TRITON_HOME or the home."""
    own = os.environ.get("TRITON_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("TRITON_HOME") or _home()) / ".triton" / "cache"


def _home() -> Path:
    """The user's folder; "~" itself where the system does not know it, as Triton has it."""
    return Path(os.path.expanduser("~"))  # noqa: PTH111  # Path.home() raises there
