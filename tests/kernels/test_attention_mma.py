"""attention_mma against fp64 on a GPU, which alone can run Gluon; everywhere, which of the two kernels is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monograph.kernels import attention as module
from monograph.kernels.attention import attention, attention_torch
from monograph.kernels.attention_mma import attention_mma, attention_mma_torch
from tests.kernels.rows import same_bits
from tests.kernels.test_attention import Heads, run

TWO_BYTES = (torch.bfloat16, torch.float16)
SHAPES = [Heads(4, 1, 64), Heads(9, 3, 64), Heads(8, 1, 64), Heads(2, 2, 64), Heads(8, 2, 128), Heads(5, 1, 128)]
# Around the ends of the warps' rows (16) and of blocks (64 and 128 rows), and in the third block.
LENGTHS = (1, 2, 15, 16, 17, 18, 33, 64, 65, 66, 127, 128, 129, 130, 257, 300, 640, 1000)


@pytest.mark.parametrize(
    ("heads", "dtype", "tile", "mma"),
    [
        (Heads(32, 8, 64), torch.bfloat16, None, True),
        (Heads(9, 3, 64), torch.float16, None, True),
        (Heads(32, 4, 128), torch.bfloat16, {"MIN_BLOCKS": 1}, True),
        (Heads(32, 8, 64), torch.float32, None, False),
        (Heads(32, 8, 80), torch.bfloat16, None, False),
        (Heads(9, 1, 64), torch.bfloat16, None, False),  # more query heads than the instruction has columns
        (Heads(32, 8, 64), torch.bfloat16, {"BLOCK_T": 64}, False),  # asked for by a key that only it has
    ],
)
def test_which_kernel(
    heads: Heads, dtype: torch.dtype, tile: dict[str, int] | None, mma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[bool] = []

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: launched.append(False)

    monkeypatch.setattr(module, "_attention_kernel", Recorder())
    monkeypatch.setattr(module, "attention_mma", lambda *_, **__: launched.append(True))

    def new(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    q, cache = new(heads.num_q_heads, heads.head_dim), new(heads.num_kv_heads, 96, heads.head_dim, dtype=dtype)
    one, arrivals = new(1, dtype=torch.int32), new(heads.num_kv_heads, dtype=torch.int32)
    partials = new(4, heads.num_q_heads, heads.head_dim), new(4, heads.num_q_heads)
    attention(q, cache, cache, one, one, *partials, arrivals, q, scale=0.125, tile=tile)
    assert launched == [mma]


@pytest.mark.parametrize("dtype", TWO_BYTES)
def test_reference(dtype: torch.dtype) -> None:
    for seq_len in (1, 17, 64):
        run(attention_mma_torch, dtype, Heads(6, 2, 64), seq_len, seed=seq_len).check(0.125)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TWO_BYTES)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_every_length(dtype: torch.dtype, heads: Heads) -> None:
    for seq_len in LENGTHS:
        result = run(attention_mma, dtype, heads, seq_len, max_seq_len=1024, num_splits=5, seed=seq_len)
        result.check(heads.head_dim**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 3, 33])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
def test_tiles(num_splits: int, num_stages: int, num_warps: int) -> None:
    heads = Heads(8, 2, 64)
    tile = {"num_warps": num_warps, "NUM_STAGES": num_stages, "MIN_BLOCKS": 1, "COMBINE_STEP": 4}
    for seq_len in (1, 16 * num_warps + 1, 16 * num_warps + 2, 700):
        result = run(
            attention_mma, torch.bfloat16, heads, seq_len, max_seq_len=704, num_splits=num_splits, seed=3, tile=tile
        )
        result.check(0.125)


@pytest.mark.gpu
def test_b12_capacity_decides_nothing() -> None:
    """Nor does the other end of the cache: the last block may be cut off by it."""
    heads = Heads(4, 1, 64)
    for seq_len in (1, 200, 640):
        small, large = (
            run(attention_mma, torch.bfloat16, heads, seq_len, max_seq_len=rows, num_splits=9, seed=5)
            for rows in (640, 8192)
        )
        assert same_bits(small.out, large.out), seq_len


@pytest.mark.gpu
def test_halted_writes_nothing() -> None:
    result = run(attention_mma, torch.bfloat16, Heads(4, 1, 64), 300, max_seq_len=512, halted=1)
    assert result.out.isnan().all()


@pytest.mark.gpu
def test_scores_far_apart() -> None:
    """Most rows weigh nothing, and whole warps see none that counts."""
    for function in (attention_mma, attention_torch):
        run(function, torch.float16, Heads(4, 1, 64), 500, max_seq_len=512, scale=2.0).check(2.0)
