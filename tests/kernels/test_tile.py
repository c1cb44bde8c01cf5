"""Default tiles: within registers, wide, and enough programs for the GPU."""

from __future__ import annotations

import pytest
import torch

from monograph.kernels.tile import MAX_ROWS, MAX_WARPS, column_block, launch_options, matvec_tile, override

# out_features, in_features: SmolLM2's, Llama 1B's, 8B's and 70B's products
PRODUCTS = [(960, 576), (576, 1536), (2048, 8192), (16384, 2048), (128256, 4096), (57344, 8192), (8192, 28672)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [*PRODUCTS, (1, 1), (3, 5)], ids=str)
@pytest.mark.parametrize("paired", [False, True])
def test_tile_fits_registers(dtype: torch.dtype, size: tuple[int, int], paired: bool) -> None:
    out_features, in_features = size
    tile = matvec_tile(out_features, in_features, dtype, num_warps=4, bytes_per_thread=256, paired=paired)
    rows = tile["BLOCK_N"] * (2 if paired else 1)
    assert rows & (rows - 1) == 0
    assert 1 <= rows <= MAX_ROWS
    assert 1 <= tile["num_warps"] <= MAX_WARPS
    # A row that no tile can hold in 256 bytes a thread is taken alone, with all warps.
    nbytes = rows * in_features * dtype.itemsize
    assert nbytes <= tile["num_warps"] * 32 * 256 or (tile["BLOCK_N"] == 1 and tile["num_warps"] == MAX_WARPS)
    block = column_block(in_features, dtype, tile["num_warps"])
    assert block & (block - 1) == 0
    assert block * dtype.itemsize >= 16


def test_small_matrices_get_small_tiles() -> None:
    assert matvec_tile(960, 576, torch.bfloat16, num_warps=8, bytes_per_thread=256)["BLOCK_N"] == 2
    assert matvec_tile(100, 576, torch.bfloat16, num_warps=8, bytes_per_thread=256)["BLOCK_N"] == 1


def test_override() -> None:
    default = {"BLOCK_N": 8, "num_warps": 4}
    assert override("op", default, None) == default
    assert override("op", default, {"num_warps": 2}) == {"BLOCK_N": 8, "num_warps": 2}
    with pytest.raises(ValueError, match="op: tile has no BLOCK_Q, depth; it has BLOCK_N, num_warps"):
        override("op", default, {"BLOCK_Q": 2, "depth": 1})


def test_launch_options() -> None:
    assert launch_options(False) == {"enable_fp_fusion": True}
    assert launch_options(True, fp_fusion=False) == {"enable_fp_fusion": False, "launch_pdl": True}
