"""Where the step changes how it works: the live lengths at which attention goes over to another number of splits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from monograph.model.decoder import Decoder
from monograph.model.program import Launch


def split_changes(decoder: Decoder) -> list[int]:
    """Find every live length, the step's own token included, whose number of splits differs from that of one less.

    Args:
        decoder: Whose step it is; nothing is run.
    """
    splits = active_splits(decoder)
    lengths = range(2, decoder.capacity.max_seq_len + 1)
    return [length for length in lengths if splits(length) != splits(length - 1)]


def active_splits(decoder: Decoder) -> Callable[[int], int]:
    """Learn how attention divides a live length among its programs: the number of splits that take part.

    The sizes that decide are the kernel's own: its wrapper is asked what it would launch. The rule is repeated here; a
    test holds it to what the kernel does.

    Args:
        decoder: Whose step it is.
    """
    attention = next(launch for launch in decoder.program.decode if launch.name.endswith(".attention"))
    sizes = _launch_options(attention)
    rows, least, most = sizes["BLOCK_T"], sizes["MIN_BLOCKS"], sizes["NUM_SPLITS"]
    return lambda length: min(max(((length - 1) // rows + 1) // least, 1), most)


def _launch_options(launch: Launch) -> dict[str, Any]:
    """The keyword arguments with which a wrapper would launch its kernel."""
    module = sys.modules[launch.kernel.__module__]
    name = f"_{launch.kernel.__name__}_kernel"
    kernel, options = getattr(module, name), {}

    class Recorder:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *_, **given: options.update(given)

    setattr(module, name, Recorder())
    try:
        launch.kernel(*launch.args, **launch.constants)
    finally:
        setattr(module, name, kernel)
    return options
