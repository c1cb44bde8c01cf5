"""Plain matrix product of some rows of a prefill chunk: out[i] = a[first_row + i] weight^T, in fp32.

Serves teacher-forced logits, which come in pieces of `out`'s row count.
"""

from __future__ import annotations

import torch

from monograph.kernels.device_rows import live_rows


def linear_rows_torch(
    a: torch.Tensor,  # D [chunk, in_features]
    weight: torch.Tensor,  # D [out_features, in_features]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    first_row: torch.Tensor,  # int32 [1]
    out: torch.Tensor,  # fp32 [piece, out_features]
) -> None:
    """Writes the products of the live rows `first_row` to `first_row + piece - 1` into `out`."""
    first = int(first_row)
    rows = min(out.shape[0], live_rows(a.shape[0], position, prefill_end, halted) - first)
    if rows > 0:
        torch.mm(a[first : first + rows].float(), weight.float().T, out=out[:rows])
