"""Query, key and value of a prefill chunk: product, bias, RoPE, KV append in one launch.

y = a weight^T + bias, its rows ordered q heads, k heads, v heads. q and k are rotated by halves,
(y_i, y_{i + d/2}) -> (y_i cos - y_{i + d/2} sin, y_{i + d/2} cos + y_i sin), with the phases of row r's absolute position
`position + r` (Su et al. 2021, halves as in Llama checkpoints of Hugging Face). Accumulated and rotated in fp32,
rounded once on store.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from monograph.kernels.device_rows import live_rows


def qkv_rows_torch(
    a: torch.Tensor,  # D [chunk, hidden_size]
    weight: torch.Tensor,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    bias: torch.Tensor | None,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim]
    rope_table: torch.Tensor,  # fp32 [max_seq_len, head_dim]: cos, then sin
    position: torch.Tensor,  # int32 [1]
    prefill_end: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    q: torch.Tensor,  # D [chunk, num_q_heads, head_dim]
    k_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
) -> None:
    """Writes the rotated queries into `q`, keys and values into rows `position + r` of the cache."""
    start = int(position)
    num_kv_heads, max_seq_len, head_dim = k_cache.shape
    rows = live_rows(min(a.shape[0], max_seq_len - start), position, prefill_end, halted)
    if not rows:
        return
    num_q_heads = q.shape[1]
    y = F.linear(a[:rows].float(), weight.float(), None if bias is None else bias.float())
    y = y.view(rows, num_q_heads + 2 * num_kv_heads, head_dim)
    rotated, values = y.split([num_q_heads + num_kv_heads, num_kv_heads], dim=1)
    cos, sin = rope_table[start : start + rows, None].chunk(2, dim=-1)  # [rows, 1, head_dim / 2]
    first, second = rotated.chunk(2, dim=-1)  # [rows, num_q_heads + num_kv_heads, head_dim / 2]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    q[:rows] = rotated[:, :num_q_heads]
    k_cache[:, start : start + rows] = rotated[:, num_q_heads:].transpose(0, 1)
    v_cache[:, start : start + rows] = values.transpose(0, 1)
