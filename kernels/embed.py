"""The first launch of a decode step: the embedding row of the token at the live position.

x = embedding[tokens[position]], widened to fp32 without rounding. An id outside the vocabulary gives a row of NaN,
which the head reports as non-finite, rather than somebody else's memory.
"""

from __future__ import annotations

import torch


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
