"""Token embedding of a prefill chunk: x[r] = embedding[tokens[position + r]].

The embedding is read in the model's dtype and widened to fp32, the dtype of the residual stream: nothing is rounded.
"""

from __future__ import annotations

import torch

from monograph.kernels.device_rows import live_rows


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
