"""Where the step changes how it works: the live lengths at which attention goes over to another number of splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from monograph.kernels import attention, attention_mma
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
    launch = next(launch for launch in decoder.program.decode if launch.name.endswith(".attention"))
    sizes = _launch_options(launch)
    least, most = sizes["MIN_BLOCKS"], sizes["NUM_SPLITS"]
    if "BLOCK_T" in sizes:  # attention.py: blocks of all rows
        return lambda length: min(max(((length - 1) // sizes["BLOCK_T"] + 1) // least, 1), most)
    rows = 16 * sizes["NUM_WARPS"]  # attention_mma.py: blocks of rows older than the live one
    return lambda length: min(max((length - 1 + rows - 1) // rows // least, 1), most)


def _launch_options(launch: Launch) -> dict[str, Any]:
    """The keyword arguments with which attention would launch whichever kernel it chooses."""
    options: dict[str, Any] = {}

    class Recorder:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *_, **given: options.update(given)

    with _replaced(((attention, "_attention_kernel"), (attention_mma, "_attention_mma_kernel")), Recorder()):
        launch.kernel(*launch.args, **launch.constants)
    return options


@contextmanager
def _replaced(names: tuple[tuple[ModuleType, str], ...], value: Any) -> Iterator[None]:
    """Names of modules that are something else for a while."""
    kept = [getattr(module, name) for module, name in names]
    try:
        for module, name in names:
            setattr(module, name, value)
        yield
    finally:
        for (module, name), before in zip(names, kept, strict=True):
            setattr(module, name, before)
