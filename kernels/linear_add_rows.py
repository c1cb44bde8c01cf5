"""Matrix product of a prefill chunk added to the residual stream: x[r] += a[r] weight^T + bias.

Used for the attention's output and the MLP's down projection. Accumulated in fp32 and added in fp32: nothing is rounded
to the model's dtype.
"""

from __future__ import annotations

import torch

from monograph.kernels.device_rows import live_rows


def linear_add_rows_torch(
    a: torch.Tensor,  # D [chunk, in_features]
    weight: torch.Tensor,  # D [out_features, in_features]
    bias: torch.Tensor | None,  # D [out_features]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    x: torch.Tensor,  # fp32 [chunk, out_features]
) -> None:
    """Adds the product of the live rows to `x`."""
    rows = live_rows(x.shape[0], position, prefill_end, halted)
    if not rows:
        return
    x[:rows].addmm_(a[:rows].float(), weight.float().T)
    if bias is not None:
        x[:rows] += bias
