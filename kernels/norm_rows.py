"""RMSNorm of a prefill chunk: out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * norm_weight.

All in fp32, rounded once to the model's dtype on store: `out` feeds the tensor cores (Zhang and Sennrich 2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from monograph.kernels.device_rows import live_rows


def norm_rows_torch(
    x: torch.Tensor,  # fp32 [chunk, hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    out: torch.Tensor,  # D [chunk, hidden_size]
    *,
    eps: float,
) -> None:
    """Writes the normalised live rows of `x` into `out`."""
    rows = live_rows(x.shape[0], position, prefill_end, halted)
    if rows:
        out[:rows] = F.rms_norm(x[:rows], (x.shape[1],), norm_weight.float(), eps)
