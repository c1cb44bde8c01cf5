"""Token embedding of a prefill chunk: x[r] = embedding[tokens[position + r]].

The embedding is read in the model's dtype and widened to fp32, the dtype of the residual stream: nothing is rounded.
"""

from __future__ import annotations

import torch

from monograph.kernels.checks import expect, expect_scalars, expect_weight_dtype
from monograph.kernels.device import enter
from monograph.kernels.device_rows import launch_keywords, live_row_count, live_rows
from monograph.kernels.tile import TRIGGER_FIRST, Tile, override
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _embed_rows_kernel(
    tokens_ptr,  # int32 [max_seq_len]
    position_ptr,  # int32 [1]
    prefill_end_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    embedding_ptr,  # D [vocab_size, hidden_size]
    x_ptr,  # fp32 [chunk, hidden_size]
    chunk,
    max_seq_len,
    hidden_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    position = tl.load(position_ptr)
    rows = live_row_count(position, prefill_end_ptr, halted_ptr, tl.minimum(chunk, max_seq_len - position))
    if (row < rows) | (row + block == 0):
        enter(PDL)
    if row < rows:
        token = tl.load(tokens_ptr + position + row).to(tl.int64)
        offs = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(embedding_ptr + token * hidden_size + offs, mask=offs < hidden_size)
        tl.store(x_ptr + row.to(tl.int64) * hidden_size + offs, values.to(tl.float32), mask=offs < hidden_size)


def embed_rows(
    tokens: torch.Tensor,  # int32 [max_seq_len]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    embedding: torch.Tensor,  # D [vocab_size, hidden_size]
    x: torch.Tensor,  # fp32 [chunk, hidden_size]
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes the embeddings of the live rows into `x`; tile keys BLOCK, num_warps."""
    chunk, hidden_size = x.shape
    expect_weight_dtype("embed_rows", "embedding", embedding)
    expect_scalars("embed_rows", torch.int32, position=position, prefill_end=prefill_end, halted=halted)
    expect("embed_rows", "tokens", tokens, tokens.shape[:1], torch.int32)
    expect("embed_rows", "embedding", embedding, (embedding.shape[0], hidden_size), embedding.dtype)
    expect("embed_rows", "x", x, (chunk, hidden_size), torch.float32)
    default = {"BLOCK": min(1024, triton.next_power_of_2(hidden_size)), "num_warps": 4, "trigger": TRIGGER_FIRST}
    chosen = override("embed_rows", default, tile)
    _embed_rows_kernel[(chunk, triton.cdiv(hidden_size, chosen["BLOCK"]))](
        tokens,
        position,
        prefill_end,
        halted,
        embedding,
        x,
        chunk,
        tokens.shape[0],
        hidden_size,
        **launch_keywords(chosen, pdl),
    )


def embed_rows_torch(
    tokens: torch.Tensor,  # int32 [max_seq_len]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    embedding: torch.Tensor,  # D [vocab_size, hidden_size]
    x: torch.Tensor,  # fp32 [chunk, hidden_size]
) -> None:
    """Writes the embeddings of the live rows into `x`."""
    start = int(position)
    rows = live_rows(min(x.shape[0], tokens.shape[0] - start), position, prefill_end, halted)
    if rows:
        x[:rows] = embedding[tokens[start : start + rows]]
