"""Attention of one query token over the live rows of the cache, split over programs on the device.

out[h] = sum_t softmax_t(scale * q[h] . k[t]) v[t] for t = 0 .. position, query head h reading KV head h // group.
"""

from __future__ import annotations

import torch


def attention_torch(
    q: torch.Tensor,  # fp32 [num_q_heads, head_dim]
    k_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    position: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    partial_out: torch.Tensor,  # fp32 [num_splits, num_q_heads, head_dim]
    partial_lse: torch.Tensor,  # fp32 [num_splits, num_q_heads]
    arrivals: torch.Tensor,  # int32 [num_kv_heads]
    out: torch.Tensor,  # fp32 [num_q_heads, head_dim]
    *,
    scale: float,
) -> None:
    """Writes the attention of rows 0 .. position into `out`; the partials and arrivals are the kernel's alone."""
    if int(halted):
        return
    num_kv_heads, max_seq_len, head_dim = k_cache.shape
    seq_len = min(int(position) + 1, max_seq_len)
    # A KV head is a batch entry and its query heads are the rows of a matrix: nothing is repeated or copied.
    grouped = q.view(num_kv_heads, 1, -1, head_dim)
    keys = k_cache[:, None, :seq_len].float()  # [num_kv_heads, 1, seq_len, head_dim]
    values = v_cache[:, None, :seq_len].float()
    out.copy_(torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=scale).view_as(out))
