"""What the prefill kernels share: tiles, grids and the product of a tile."""

# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import pytest
import torch

from monograph.kernels.device_rows import attention_tile, live_rows, product_grid, product_tile, rows_product
from monograph.kernels.triton_import import tl, triton
from tests.kernels.huge import huge
from tests.kernels.rows import DEVICE, Slots, assert_close, linear_fp64, random, scalar


@triton.jit
def _product_kernel(
    a_ptr,
    w_ptr,
    out_ptr,  # fp32 [16, 16]
    first_row,
    in_features,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    offs = tl.arange(0, 16)
    acc = rows_product(a_ptr, w_ptr, offs, offs < 5, first_row + offs, in_features, BLOCK_K, EVEN_K, 2)
    tl.store(out_ptr + offs[:, None] * 16 + offs[None, :], acc)


def test_b13_offsets_beyond_31_bits() -> None:
    """A matrix of more than 2**31 elements: its last rows are read where they lie."""
    in_features, first_row = 128, 2**24 + 3
    a, weight = random(5, in_features, dtype=torch.float16), huge(first_row + 16, in_features)
    assert weight.numel() > 2**31
    weight[first_row:] = random(16, in_features, dtype=torch.float16, seed=1)
    out = Slots().new(16, 16)
    _product_kernel[(1,)](a, weight, out, first_row, in_features, BLOCK_K=64, EVEN_K=True)
    assert_close(out[:5], *linear_fp64(a, weight[first_row:]), terms=in_features, rounded_to=torch.float32)
    assert (out[5:] == 0).all()


@pytest.mark.parametrize("in_features", [1, 15, 16, 17, 40])
def test_columns_that_blocks_do_not_fill(in_features: int) -> None:
    """Neither matrix is read beyond its columns: what follows is NaN, and 0 times NaN is NaN."""
    slots = Slots()
    a = slots.copy(random(5, in_features, dtype=torch.float16))
    weight = slots.copy(random(16, in_features, dtype=torch.float16, seed=1))
    out = slots.new(16, 16)
    _product_kernel[(1,)](a, weight, out, 0, in_features, BLOCK_K=16, EVEN_K=in_features % 16 == 0)
    assert_close(out[:5], *linear_fp64(a, weight), terms=in_features, rounded_to=torch.float32)
    slots.check_guards()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), [(77, 100), (64, 64), (2048, 2048), (28672, 4096)])
@pytest.mark.parametrize("chunk", [1, 64, 65, 512])
def test_every_row_count_has_programs_enough(
    dtype: torch.dtype, out_features: int, in_features: int, chunk: int
) -> None:
    weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")
    tile = product_tile("x", weight, chunk, None)
    (programs,) = product_grid(chunk, out_features, tile)
    for rows in range(1, chunk + 1):
        few = rows <= tile["FEW_ROWS"]
        block_m, block_n = (tile["FEW_M"], tile["FEW_N"]) if few else (tile["BLOCK_M"], tile["BLOCK_N"])
        assert -(-rows // block_m) * -(-out_features // block_n) <= programs


@pytest.mark.parametrize(
    ("position", "end", "halted", "rows"),
    [(0, 0, 0, 0), (0, 1, 0, 1), (3, 8, 0, 5), (3, 11, 0, 8), (3, 900, 0, 8), (9, 8, 0, 0), (3, 8, 2, 0)],
)
def test_live_rows(position: int, end: int, halted: int, rows: int) -> None:
    assert live_rows(8, scalar(position), scalar(end), scalar(halted)) == rows


def test_unknown_keys_are_refused() -> None:
    weight = torch.empty(16, 16, device=DEVICE)
    with pytest.raises(ValueError, match="x: tile has no BLOCK_Q"):
        product_tile("x", weight, 8, {"BLOCK_Q": 1})
    with pytest.raises(ValueError, match="x: tile has no FEW_M"):
        attention_tile("x", weight[None], 1, {"FEW_M": 1})


@pytest.mark.parametrize("group", [1, 3, 8, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_tiles_hold_a_group(group: int, dtype: torch.dtype) -> None:
    for head_dim in (16, 64, 80, 128, 256):
        q = torch.empty(4, group, head_dim, dtype=dtype, device="meta")
        assert attention_tile("x", q, group, None)["BLOCK_M"] >= group
