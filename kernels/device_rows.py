"""What the prefill kernels share: live rows, tiles, and the product of a tile.

The matrix products serve chunks from one row to the full capacity with one launch. A grid made for the capacity holds
two tilings, a wide one and one for few rows; the device picks by the live row count, and programs without a tile leave
at once. Either way a row's product is summed by one program from the first column to the last, so that its bits depend
neither on the tiling nor on how the prompt was cut into chunks.
"""

from __future__ import annotations

from typing import Any

import torch

from monograph.kernels.tile import TRIGGER_FIRST, Tile, launch_options, override
from monograph.kernels.triton_import import tl, triton

WAVE = 132  # programs of one an SM that an H200 runs at once


def live_rows(capacity: int, position: torch.Tensor, prefill_end: torch.Tensor, halted: torch.Tensor) -> int:
    """Counts the rows of a chunk that hold prompt tokens; row r is at absolute position `position + r`.

    Args:
        capacity: rows of the chunk.
        position: int32 [1], absolute position of row 0.
        prefill_end: int32 [1], length of the prompt.
        halted: int32 [1]; not 0 means no row lives.

    Returns:
        A count from 0 to `capacity`.
    """
    if int(halted):
        return 0
    return max(0, min(capacity, int(prefill_end) - int(position)))


def product_tile(op: str, weight: torch.Tensor, chunk: int, tile: Tile | None) -> Tile:
    """The tile of a matrix product: BLOCK_M x BLOCK_N outputs, steps of BLOCK_K, NUM_STAGES steps in flight.

    Up to FEW_ROWS live rows the time goes into reading weights, and smaller tiles, FEW_M x FEW_N with FEW_STAGES,
    spread that over more programs: 128 rows where they still run at once. fp32 does without tensor cores, which would
    round to tf32, and sizes that 16 does not divide do without wide loads: both need small tiles to fit in registers.
    One stage means no software pipeline.

    Args:
        op: kernel, for the error message.
        weight: D [out_features, in_features].
        chunk: rows at most.
        tile: the caller's choices over the defaults.

    Raises:
        ValueError: a key that the kernels have not.
    """
    out_features, in_features = weight.shape
    if out_features % 16 or in_features % 16:
        wide = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "NUM_STAGES": 2, "num_warps": 4}
        few = {"FEW_ROWS": 32, "FEW_M": 32, "FEW_N": 32, "FEW_STAGES": 2}
    elif weight.dtype == torch.float32:
        wide = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "NUM_STAGES": 2, "num_warps": 4}
        few = {"FEW_ROWS": 32, "FEW_M": 32, "FEW_N": 32, "FEW_STAGES": 2}
    else:
        wide = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "NUM_STAGES": 4, "num_warps": 8}
        columns = triton.cdiv(out_features, 128)
        if 2 * columns * triton.cdiv(chunk, 128) <= WAVE:
            wide["BLOCK_N"] = 64  # twice the programs still run at once: 12 us for 17, 44 for 53 (1B: o, down)
        few = {"FEW_ROWS": 128 if 4 * columns <= WAVE else 64, "FEW_M": 64, "FEW_STAGES": 6}
        few["FEW_N"] = 32 if 8 * columns <= WAVE else 64
    return override(op, wide | few | {"trigger": TRIGGER_FIRST}, tile)


def product_grid(chunk: int, weight_rows: int, tile: Tile) -> tuple[int]:
    """The number of programs that is enough for every live row count of a chunk."""
    few = triton.cdiv(min(chunk, tile["FEW_ROWS"]), tile["FEW_M"]) * triton.cdiv(weight_rows, tile["FEW_N"])
    return (max(few, triton.cdiv(chunk, tile["BLOCK_M"]) * triton.cdiv(weight_rows, tile["BLOCK_N"])),)


def attention_tile(op: str, q: torch.Tensor, group: int, tile: Tile | None) -> Tile:
    """The tile of attention: BLOCK_M rows times query heads of a group, BLOCK_N keys, NUM_STAGES key blocks in flight.

    As wide as registers allow without spilling. Where tensor cores take their operands from registers (sm_80, sm_89,
    sm_120) wide heads leave room for half the keys. fp32 does without tensor cores.

    Args:
        op: kernel, for the error message.
        q: D [chunk, num_q_heads, head_dim]; tells dtype, head size and device.
        group: query heads that share a key/value head.
        tile: the caller's choices over the defaults.

    Raises:
        ValueError: a key that the kernel has not.
    """
    head_dim = q.shape[2]
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 9
    if q.dtype == torch.float32:
        default = {"BLOCK_M": 64, "num_warps": 8} if head_dim <= 64 else {"BLOCK_M": 16, "num_warps": 4}
        default |= {"BLOCK_N": 16, "NUM_STAGES": 2}
    elif head_dim <= 64:
        default = {"BLOCK_M": 64, "BLOCK_N": 64, "NUM_STAGES": 3, "num_warps": 4}
    elif head_dim > 128:
        default = {"BLOCK_M": 64, "BLOCK_N": 32, "NUM_STAGES": 2, "num_warps": 8}
    else:
        default = {"BLOCK_M": 128, "BLOCK_N": 64 if major in (9, 10) else 32, "NUM_STAGES": 3, "num_warps": 8}
    default["BLOCK_M"] = max(default["BLOCK_M"], triton.next_power_of_2(group))
    return override(op, default | {"trigger": TRIGGER_FIRST}, tile)


def launch_keywords(tile: Tile, pdl: bool, **constants: int) -> dict[str, Any]:
    """The keyword arguments of a launch: constants of the shape, the tile, and what dependent launch needs."""
    blocks = {key: value for key, value in tile.items() if key != "trigger"}
    return constants | blocks | {"PDL": tile["trigger"] if pdl else 0} | launch_options(pdl)


@triton.jit
def live_row_count(position, prefill_end_ptr, halted_ptr, capacity):
    """`live_rows` on the device. These scalars are written by a graph's last kernel alone: no wait is needed."""
    rows = tl.minimum(tl.load(prefill_end_ptr) - position, capacity)
    return tl.where(tl.load(halted_ptr) == 0, tl.maximum(rows, 0), 0)


@triton.jit
def product_tiles(
    rows,
    weight_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    FEW_M: tl.constexpr,
    FEW_N: tl.constexpr,
):
    """Counts the tiles of a product with `rows` live rows: programs past it have nothing to do."""
    few = tl.cdiv(rows, FEW_M) * tl.cdiv(weight_rows, FEW_N)
    return tl.where(rows <= FEW_ROWS, few, tl.cdiv(rows, BLOCK_M) * tl.cdiv(weight_rows, BLOCK_N))


@triton.jit
def _product_step(acc, a_ptrs, w_ptrs, live, offs_k, k, in_features, EVEN_K: tl.constexpr):
    if EVEN_K:
        a = tl.load(a_ptrs + k, mask=live[:, None], other=0.0)
        w = tl.load(w_ptrs + k)
    else:
        inside = offs_k < in_features - k
        a = tl.load(a_ptrs + k, mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_ptrs + k, mask=inside[:, None], other=0.0)
    return tl.dot(a, w, acc, input_precision="ieee")


@triton.jit
def rows_product(
    a_ptr,  # D [*, in_features]
    w_ptr,  # D [*, in_features]
    a_rows,  # int32 [M]: rows of a
    live,  # int1 [M]: whether that row is read; a product with a row that is not is 0
    w_rows,  # int32 [N]: rows of w, all valid
    in_features,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # BLOCK_K divides in_features
    NUM_STAGES: tl.constexpr,
):
    """Returns a[a_rows] w[w_rows]^T, fp32 [M, N].

    Rows that do not live are masked: reading the last live row in their place made 16 rows 3.5 times slower than 64.
    """
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * in_features + offs_k[None, :]  # [M, BLOCK_K]
    w_ptrs = w_ptr + w_rows.to(tl.int64)[None, :] * in_features + offs_k[:, None]  # [BLOCK_K, N]
    acc = tl.zeros([a_rows.shape[0], w_rows.shape[0]], dtype=tl.float32)
    if NUM_STAGES == 1:
        k = 0
        while k < in_features:
            acc = _product_step(acc, a_ptrs, w_ptrs, live, offs_k, k, in_features, EVEN_K)
            k += BLOCK_K
    else:
        for k in tl.range(0, in_features, BLOCK_K, num_stages=NUM_STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            acc = _product_step(acc, a_ptrs, w_ptrs, live, offs_k, k, in_features, EVEN_K)
    return acc
