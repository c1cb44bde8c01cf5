"""One decode step in plain PyTorch, every product and activation in one dtype: how well that precision can do.

An independent oracle: it shares with the program only the weights and the cached rows of the arena.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as product
from torch.nn.functional import silu

from monograph.arena import Arena
from monograph.model.config import ModelConfig


def plain_logits(arena: Arena, config: ModelConfig, token: int, position: int, dtype: torch.dtype) -> torch.Tensor:
    """Compute the logits of one token after the rows that the cache holds before it. Nothing is written to the arena.

    Norms compute their mean square, RoPE its table and softmax its sum in fp32, as model code commonly has it; all
    results are rounded to ``dtype``.

    Args:
        arena: Weights and cache, of any dtype.
        config: The model.
        token: Id of the token.
        position: Its position: rows 0 to position - 1 of the cache count.
        dtype: Of products and activations.

    Returns:
        fp32 [vocab_size].
    """

    def weight(name: str) -> torch.Tensor:
        return arena.view(name).to(dtype)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return product(x, weight(name), weight(f"{name}_bias") if f"{name}_bias" in arena else None)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean() + config.rms_norm_eps)).to(dtype) * weight(name)

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
    cos, sin = arena.view("rope_table")[position].to(dtype).chunk(2)
    x = arena.view("embed")[token].to(dtype)
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        heads = linear(norm(x, f"{layer}.attn_norm"), f"{layer}.qkv").view(-1, config.head_dim)
        q, k, v = heads.split([q_heads, kv_heads, kv_heads])  # type: ignore[no-untyped-call]
        keys, values = (
            _appended(arena.view(f"{layer}.{name}")[:, :position], new)
            for name, new in (("k_cache", rotate(k)), ("v_cache", v))
        )
        # A KV head is a batch entry and its query heads are rows: nothing is repeated.
        grouped = rotate(q).view(kv_heads, -1, config.head_dim)
        scores = grouped @ keys.transpose(1, 2) * config.scale
        mixed = scores.softmax(dim=-1, dtype=torch.float32).to(dtype) @ values
        x = x + linear(mixed.reshape(-1), f"{layer}.o")
        gate, up = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.gate_up").chunk(2)
        x = x + linear(silu(gate) * up, f"{layer}.down")
    head = "embed" if config.tie_word_embeddings else "lm_head"
    return product(norm(x, "final_norm"), weight(head)).float()


def _appended(rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[num_kv_heads, n + 1, head_dim]: ``rows`` [num_kv_heads, n, head_dim] and ``new``, in the dtype of ``new``."""
    heads, count, dim = rows.shape
    whole = new.new_empty(heads, count + 1, dim)
    whole[:, :count] = rows
    whole[:, count] = new
    return whole
