"""The read ceiling of a GPU: the most bytes a second that a kernel which only reads has been seen to read.

Frozen method, so that ratios to it can be compared over time: int32 words are summed over 8 GiB by each of a fixed set
of Triton configurations (128-bit loads; tile, warps, grid, eviction policy differ), each is timed by CUDA events, the
median of its repeats counts, and the best configuration is the ceiling. A configuration whose sum is wrong does not
count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from monograph.kernels.triton_import import tl, triton
from monograph.model.clock import Clock, percentile

NBYTES = 8 << 30
REPEATS = 9


@dataclass(frozen=True)
class Configuration:
    """One way to read: `unroll` loads of `block` words in flight, by programs of `num_warps`.

    Attributes:
        block: int32 words of one load of a whole program.
        unroll: Loads in flight.
        num_warps: Warps of a program.
        programs_per_sm: Of a persistent grid; 0 gives every tile a program of its own.
        evict_first: Whether what is read is the first to leave L2.
    """

    block: int
    unroll: int
    num_warps: int
    programs_per_sm: int
    evict_first: bool


CONFIGURATIONS = (
    Configuration(1024, 8, 4, 0, False),
    Configuration(2048, 4, 4, 0, False),
    Configuration(2048, 4, 4, 4, False),
    Configuration(4096, 2, 4, 0, False),
    Configuration(4096, 2, 4, 4, False),
    Configuration(4096, 4, 4, 2, False),
    Configuration(4096, 2, 8, 0, False),
    Configuration(4096, 2, 8, 2, False),
    Configuration(4096, 4, 8, 2, False),
    Configuration(8192, 2, 16, 1, False),
    Configuration(4096, 2, 4, 0, True),
    Configuration(4096, 2, 4, 4, True),
    Configuration(4096, 2, 8, 0, True),
    Configuration(4096, 2, 8, 2, True),
)


@triton.jit(do_not_specialize=["tiles"])  # type: ignore[untyped-decorator]
def _read_kernel(  # type: ignore[no-untyped-def]
    words_ptr,  # int32 [tiles * num_programs * UNROLL * BLOCK]
    sums_ptr,  # int32 [num_programs]
    tiles,  # of each program
    BLOCK: tl.constexpr,  # noqa: N803
    UNROLL: tl.constexpr,  # noqa: N803
    EVICT_FIRST: tl.constexpr,  # noqa: N803
):
    total = tl.zeros([BLOCK], dtype=tl.int32)
    words_ptr += tl.program_id(0).to(tl.int64) * (UNROLL * BLOCK) + tl.arange(0, BLOCK)
    stride = tl.num_programs(0).to(tl.int64) * (UNROLL * BLOCK)
    tile = 0
    while tile < tiles:
        for i in tl.static_range(UNROLL):  # pyright: ignore[reportGeneralTypeIssues]
            if EVICT_FIRST:
                total += tl.load(words_ptr + i * BLOCK, eviction_policy="evict_first")
            else:
                total += tl.load(words_ptr + i * BLOCK)
        words_ptr += stride
        tile += 1
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, axis=0))


def read(words: torch.Tensor, sums: torch.Tensor, how: Configuration, num_sms: int) -> tuple[int, int]:
    """Launch one configuration over as much of ``words`` as divides evenly.

    Args:
        words: int32, flat.
        sums: int32, an element a program at least.
        how: The configuration.
        num_sms: Multiprocessors of the device.

    Returns:
        Words read, a prefix of ``words``, and programs, each with its sum in ``sums``.
    """
    tile = how.block * how.unroll
    programs = how.programs_per_sm * num_sms or len(words) // tile
    tiles = len(words) // tile // programs
    _read_kernel[(programs,)](
        words,
        sums,
        tiles,
        BLOCK=how.block,
        UNROLL=how.unroll,
        EVICT_FIRST=how.evict_first,
        num_warps=how.num_warps,  # pyright: ignore[reportCallIssue]
        enable_fp_fusion=True,  # pyright: ignore[reportCallIssue]
    )
    return programs * tiles * tile, programs


def is_right(words: torch.Tensor, sums: torch.Tensor, count: int, programs: int) -> bool:
    """Whether the sums of all programs add up to that of the words read, modulo 2^32."""
    difference = int(sums[:programs].sum(dtype=torch.int64) - words[:count].sum(dtype=torch.int64))
    return difference % 2**32 == 0


def read_ceiling_gb_s(device: torch.device, nbytes: int = NBYTES) -> dict[str, Any]:
    """Measure the ceiling.

    Args:
        device: A CUDA device.
        nbytes: Bytes of the buffer, freed afterwards; far more than L2 holds.

    Returns:
        "ceiling_gb_s", and under "configurations" each with its "gb_s" (None if its sum was wrong).

    Raises:
        RuntimeError: No configuration gave the right sum.
    """
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    rows: list[dict[str, Any]] = []
    with torch.cuda.device(device):
        words = torch.empty(nbytes // 4, dtype=torch.int32, device=device).random_()
        sums = torch.empty(len(words) // 8192 + 1, dtype=torch.int32, device=device)
        clock = Clock(device)
        for how in CONFIGURATIONS:
            sums.fill_(-1)
            count, programs = read(words, sums, how, num_sms)
            right = is_right(words, sums, count, programs)
            for _ in range(REPEATS):
                with clock.span():
                    read(words, sums, how, num_sms)
            gb_s = 4 * count / percentile(clock.times_ms(), 50) / 1e6
            rows.append({**asdict(how), "gb_s": round(gb_s, 1) if right else None})
        del words, sums
        torch.cuda.empty_cache()
    best = max((row["gb_s"] for row in rows if row["gb_s"] is not None), default=None)
    if best is None:
        raise RuntimeError(f"read ceiling: no configuration gave the right sum on {device}")
    return {"ceiling_gb_s": best, "nbytes": nbytes, "configurations": rows}
