"""Block sizes, warps and trigger modes: one default for each kernel and shape class, and how a caller overrides them.

A matrix-vector kernel keeps whole rows of its tile in registers, asked for before the kernel waits for its input, so
a tile is as large as registers allow: rows = bytes_per_thread * threads / row bytes. A chunk of BLOCK_K columns is
spread over all threads of a program, 16 bytes for each, so that every weight load is 128 bits wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# When a kernel lets its successor start (programmatic dependent launch). The successor's programs become resident only
# once every program of this kernel has started, so the right mode is a property of the whole step.
TRIGGER_FIRST = 1  # at the very start
TRIGGER_AFTER_WAIT = 2  # once the input is there
TRIGGER_AT_EXIT = 3  # implicit

TARGET_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors: below this, smaller tiles fill the GPU better
MAX_WARPS = 16
MAX_ROWS = 16
LONG_ROW, LONGEST_WALKED_ROW = 12288, 32768  # bytes

# What programs share that draw a token together.
BINS, BUFFERS = 512, 3  # of the histogram of a round of the search for a threshold
LIST = 256  # tokens that a small top-k may leave

Tile = dict[str, int]


def vector_width(dtype: torch.dtype) -> int:
    """Elements of a 128-bit load."""
    return 16 // dtype.itemsize


def matvec_tile(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    *,
    num_warps: int,
    bytes_per_thread: int,
    paired: bool = False,
    trigger: int = TRIGGER_FIRST,
) -> Tile:
    """The default tile of a matrix-vector kernel.

    Args:
        out_features: rows of the matrix.
        in_features: columns of the matrix.
        dtype: dtype of the matrix.
        num_warps: warps of a program; fewer where a row is short, more where it would not fit in `bytes_per_thread`.
        bytes_per_thread: weights that a thread holds in registers.
        paired: whether the kernel takes rows in pairs (rotated halves, gate and up), and BLOCK_N counts pairs.
        trigger: a trigger mode.

    Returns:
        BLOCK_N rows or pairs (a power of two), num_warps and trigger.
    """
    unit = 2 if paired else 1
    unit_nbytes = unit * in_features * dtype.itemsize
    while num_warps < MAX_WARPS and 32 * num_warps * bytes_per_thread < unit_nbytes:
        num_warps *= 2
    while num_warps > 1 and 32 * num_warps * vector_width(dtype) > ceil_power_of_two(in_features):
        num_warps //= 2
    units = min(
        32 * num_warps * bytes_per_thread // unit_nbytes, out_features // (unit * TARGET_PROGRAMS), MAX_ROWS // unit
    )
    return {"BLOCK_N": floor_power_of_two(max(units, 1)), "num_warps": num_warps, "trigger": trigger}


def linear_tile(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The default tile of a product that needs no norm: `matvec_tile` and how many programs walk over the tiles.

    Long rows (the down projection of a large model) are best read by a few large programs that ask for the next tile
    while they multiply (8.4 us against 9.8 for Llama 1B's on an H200); short ones by a program for each tile (0).
    """
    row_nbytes = in_features * dtype.itemsize
    if not LONG_ROW <= row_nbytes <= LONGEST_WALKED_ROW:
        return matvec_tile(out_features, in_features, dtype, num_warps=4, bytes_per_thread=256) | {"programs": 0}
    programs = multiprocessors(device) * (2 if row_nbytes <= 16384 else 1)
    return {"BLOCK_N": 2, "num_warps": MAX_WARPS, "trigger": TRIGGER_FIRST, "programs": programs}


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; an H200's where there is none, for planning and compiling ahead."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def column_block(in_features: int, dtype: torch.dtype, num_warps: int) -> int:
    """Columns that one 128-bit load of every thread covers, or the whole row where it is shorter."""
    return min(32 * num_warps * vector_width(dtype), max(ceil_power_of_two(in_features), vector_width(dtype)))


def draw_block(vocab_size: int, most_programs: int, device: torch.device) -> int:
    """Ids of each program that draws: a power of two, so many that all programs are resident at once.

    They wait for each other, and an eighth of a multiprocessor is enough for one; at most two on each are asked for. On
    a CPU, where programs run one after another, it is one program.
    """
    programs = 1 if device.type == "cpu" else min(2 * multiprocessors(device), most_programs)
    return max(ceil_power_of_two(-(-vocab_size // programs)), min(1024, ceil_power_of_two(vocab_size)))


def override(op: str, default: Tile, tile: Tile | None) -> Tile:
    """The default with the caller's choices over it.

    Raises:
        ValueError: a key that the kernel has not.
    """
    if isinstance(tile, _Question):
        raise _Answer(default)
    unknown = set(tile or {}) - set(default)
    if unknown:
        raise ValueError(f"{op}: tile has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(default))}")
    return default | (tile or {})


class _Question(Tile):
    """Given to a wrapper as its tile, asks for the default and for nothing else."""


class _Answer(Exception):  # noqa: N818  # no error: the way out of a wrapper before it launches
    def __init__(self, tile: Tile) -> None:
        super().__init__(tile)
        self.tile = tile


def default_tile(wrapper: Callable[..., None], *args: Any, **constants: Any) -> Tile:
    """The tile that a wrapper would choose for these arguments, which it checks; nothing is launched.

    Args:
        wrapper: of a kernel, taking `tile`.
        args: its arguments.
        constants: its keyword arguments without `tile`.
    """
    try:
        wrapper(*args, **constants, tile=_Question())
    except _Answer as answer:
        return answer.tile
    raise AssertionError(f"{wrapper.__name__} launched without choosing a tile by override()")


def launch_options(pdl: bool, fp_fusion: bool = True) -> dict[str, bool]:
    """Options of a launch beside its warps.

    Fused multiply-add is asked for by name, because Triton 3.10 turns it off by default. The PDL attribute is absent
    rather than false, because older GPUs and the interpreter do not know it.
    """
    return {"enable_fp_fusion": fp_fusion} | ({"launch_pdl": True} if pdl else {})


def floor_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def ceil_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def one_instruction_fits(head_dim: int, group: int, dtype: torch.dtype) -> bool:
    """Whether attention_mma.py serves a head size, a number of query heads to a KV head, and a dtype.

    The query heads of a KV head are the eight columns of one tensor core instruction.
    """
    return head_dim in (64, 128) and group <= 8 and dtype in (torch.bfloat16, torch.float16)
