"""What the prefill kernels share: how many rows of a chunk live."""

from __future__ import annotations

import torch


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
