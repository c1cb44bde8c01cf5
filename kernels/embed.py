"""The first launch of a decode step: the embedding row of the token at the live position.

x = embedding[tokens[position]], widened to fp32 without rounding. An id outside the vocabulary gives a row of NaN,
which the head reports as non-finite, rather than somebody else's memory.
"""

from __future__ import annotations

import torch

from monograph.kernels.checks import expect, expect_scalars, expect_weight
from monograph.kernels.device import enter, leave
from monograph.kernels.tile import TRIGGER_FIRST, Tile, launch_options, override
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _embed_kernel(
    tokens_ptr,  # int32 [max_seq_len]
    position_ptr,  # int32 [1]
    halted_ptr,  # int32 [1]
    embedding_ptr,  # D [VOCAB_SIZE, HIDDEN_SIZE]
    x_ptr,  # fp32 [HIDDEN_SIZE]
    VOCAB_SIZE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if tl.load(halted_ptr) != 0:
        leave(PDL)
        return
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.load(tokens_ptr + tl.load(position_ptr)).to(tl.int64)
    readable = tl.where((token >= 0) & (token < VOCAB_SIZE), HIDDEN_SIZE, 0)
    row = tl.load(embedding_ptr + token * HIDDEN_SIZE + offs_n, mask=offs_n < readable, other=float("nan"))
    enter(PDL)
    tl.store(x_ptr + offs_n, row.to(tl.float32), mask=offs_n < HIDDEN_SIZE)


def embed(
    tokens: torch.Tensor,  # int32 [max_seq_len]
    position: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    embedding: torch.Tensor,  # D [vocab_size, hidden_size]
    x: torch.Tensor,  # fp32 [hidden_size]
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes the embedding of the live token into `x`.

    Args:
        pdl: launch before the predecessor has ended (not for the first kernel of a graph).
        tile: overrides of BLOCK_N, num_warps, trigger.

    Raises:
        ValueError: an argument of the wrong shape, dtype or layout.
    """
    expect_weight("embed", "embedding", embedding)
    vocab_size, hidden_size = embedding.shape
    expect("embed", "tokens", tokens, (tokens.numel(),), torch.int32)
    expect_scalars("embed", torch.int32, position=position, halted=halted)
    expect("embed", "x", x, (hidden_size,), torch.float32)
    t = override("embed", {"BLOCK_N": 512, "num_warps": 2, "trigger": TRIGGER_FIRST}, tile)
    _embed_kernel[(triton.cdiv(hidden_size, t["BLOCK_N"]),)](
        tokens,
        position,
        halted,
        embedding,
        x,
        VOCAB_SIZE=vocab_size,
        HIDDEN_SIZE=hidden_size,
        BLOCK_N=t["BLOCK_N"],
        PDL=t["trigger"] if pdl else 0,
        num_warps=t["num_warps"],
        **launch_options(pdl),
    )


def embed_torch(
    tokens: torch.Tensor,  # int32 [max_seq_len]
    position: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    embedding: torch.Tensor,  # D [vocab_size, hidden_size]
    x: torch.Tensor,  # fp32 [hidden_size]
) -> None:
    """Writes the embedding of the live token into `x`."""
    if int(halted):
        return
    token = int(tokens[int(position)])
    if 0 <= token < embedding.shape[0]:
        x.copy_(embedding[token])
    else:
        x.fill_(float("nan"))
