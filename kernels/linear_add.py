"""A product added to the residual stream: x[n] += W[n, :] . a + bias[n]. Used for `o_proj` and `down_proj`.

Weights are widened to fp32 and products accumulate in fp32; every output has one owner, so nothing is atomic.
"""

from __future__ import annotations

import torch


def linear_add_torch(
    a: torch.Tensor,  # fp32, in_features elements of any shape
    weight: torch.Tensor,  # D [out_features, in_features]
    bias: torch.Tensor | None,  # D [out_features]
    halted: torch.Tensor,  # int32 [1]
    x: torch.Tensor,  # fp32 [out_features]
) -> None:
    """Adds the product (and the bias) to `x` in place."""
    if int(halted):
        return
    x += torch.mv(weight.float(), a.view(-1))  # .float() of an fp32 weight is the weight itself
    if bias is not None:
        x += bias.float()
