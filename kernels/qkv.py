"""RMSNorm, query, key and value products, RoPE and KV append of one decode step in one launch.

y = W (x * norm_weight) / rms(x) + bias, rows of W ordered q heads, k heads, v heads. q and k are rotated by halves,
(y_i, y_{i + d/2}) -> (y_i cos - y_{i + d/2} sin, y_{i + d/2} cos + y_i sin), with the phases of the live position (Su
et al. 2021; halves as in Llama checkpoints of Hugging Face). Weights are widened, products accumulated and rotated in
fp32; k and v are rounded once, on their way into cache row `position`. A tile holds the two rows of each rotated
pair, so the rotation happens in registers.
"""

from __future__ import annotations

import torch


def qkv_torch(
    x: torch.Tensor,  # fp32 [hidden_size]
    norm_weight: torch.Tensor,  # D [hidden_size]
    weight: torch.Tensor,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    bias: torch.Tensor | None,  # D [(num_q_heads + 2 * num_kv_heads) * head_dim]
    rope_table: torch.Tensor,  # fp32 [max_seq_len, head_dim]: cos, then sin
    position: torch.Tensor,  # int32 [1]
    halted: torch.Tensor,  # int32 [1]
    q: torch.Tensor,  # fp32 [num_q_heads, head_dim]
    k_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    v_cache: torch.Tensor,  # D [num_kv_heads, max_seq_len, head_dim]
    *,
    eps: float,
) -> None:
    """Writes the rotated query into `q`, key and value into row `position` of the cache."""
    if int(halted):
        return
    row = int(position)
    num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[0]
    normed = x * torch.rsqrt(x.square().mean() + eps) * norm_weight.float()
    y = torch.mv(weight.float(), normed)  # .float() of an fp32 weight is the weight itself
    if bias is not None:
        y += bias.float()
    y = y.view(-1, head_dim)  # [num_q_heads + 2 * num_kv_heads, head_dim]
    rotated, values = y.split([num_q_heads + num_kv_heads, num_kv_heads])
    cos, sin = rope_table[row].chunk(2)  # [head_dim / 2]
    first, second = rotated.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    q.copy_(rotated[:num_q_heads])
    k_cache[:, row] = rotated[num_q_heads:]
    v_cache[:, row] = values
