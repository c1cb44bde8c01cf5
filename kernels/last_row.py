"""The end of a prefill chunk: hands the prompt's last row to the head, if this chunk holds it.

gate tells the head and the token choice whether they have anything to do.
"""

from __future__ import annotations

import torch

from monograph.kernels.device_rows import live_rows


def last_row_torch(
    x_rows: torch.Tensor,  # fp32 [chunk, hidden_size]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    x: torch.Tensor,  # fp32 [hidden_size]
    gate: torch.Tensor,  # int32 [1]
) -> None:
    """Copies the last live row into `x` and sets `gate` to 1 when the prompt ends in this chunk, else `gate` to 0.

    While halted nothing is written: the head and the token choice read `halted` themselves.
    """
    if int(halted):
        return
    rows = live_rows(x_rows.shape[0], position, prefill_end, halted)
    ends_here = int(rows > 0 and int(position) + x_rows.shape[0] >= int(prefill_end))
    if ends_here:
        x.copy_(x_rows[rows - 1])
    gate.fill_(ends_here)
