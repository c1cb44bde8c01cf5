"""RMSNorm, gate and up products, and the gated unit, in one launch.

h = silu(g) * u, where [g; u] = W (x * norm_weight) / rms(x) + bias and silu(g) = g / (1 + exp(-g)) (Shazeer 2020).
Rows of W: gate, then up. Weights are widened and products accumulated in fp32. A tile holds a gate row beside its up
row, so the unit is applied in registers.
"""

from __future__ import annotations

import torch


def gate_up_torch(
    x: torch.Tensor,  # fp32 [hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    weight: torch.Tensor,  # D [2 * intermediate_size, hidden_size]
    bias: torch.Tensor | None,  # D [2 * intermediate_size]
    halted: torch.Tensor,  # int32 [1]
    h: torch.Tensor,  # fp32 [intermediate_size]
    *,
    eps: float,
) -> None:
    """Writes the gated activations into `h`."""
    if int(halted):
        return
    normed = x * torch.rsqrt(x.square().mean() + eps) * norm_weight.float()
    y = torch.mv(weight.float(), normed)  # .float() of an fp32 weight is the weight itself
    if bias is not None:
        y += bias.float()
    gate, up = y.chunk(2)
    torch.mul(torch.nn.functional.silu(gate), up, out=h)
