"""Gate and up projection of a prefill chunk with SwiGLU: h[r] = silu(g) * u.

(g, u) = a[r] weight^T + bias, the rows of `weight` being those of the gate, then those of up; silu(g) = g / (1 + exp(-g)).
Accumulated and combined in fp32, rounded once on store (Shazeer 2020).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from monograph.kernels.device_rows import live_rows


def gate_up_rows_torch(
    a: torch.Tensor,  # D [chunk, hidden_size]
    weight: torch.Tensor,  # D [2 * intermediate_size, hidden_size]
    bias: torch.Tensor | None,  # D [2 * intermediate_size]
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    h: torch.Tensor,  # D [chunk, intermediate_size]
) -> None:
    """Writes the gated products of the live rows into `h`."""
    rows = live_rows(a.shape[0], position, prefill_end, halted)
    if not rows:
        return
    gate, up = F.linear(a[:rows].float(), weight.float(), None if bias is None else bias.float()).chunk(2, dim=1)
    torch.mul(F.silu(gate), up, out=h[:rows])
