"""Keys and values to fill a cache with: the same for every system that is measured in one run, whatever its cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.shapes import caches
from monograph.arena import Arena
from monograph.model.config import ModelConfig


def kv_rows(
    num_layers: int, num_kv_heads: int, count: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield keys and values of every layer, each [num_kv_heads, count, head_dim], standard normal.

    The same arguments give the same bits in every process on the same kind of device. One layer is alive at a time.

    Args:
        num_layers: Layers.
        num_kv_heads: KV heads of each.
        count: Rows of each head; also the seed, so that lengths do not share rows.
        head_dim: Of a row.
        dtype: Of the cache.
        device: Where the rows are drawn.
    """
    generator = torch.Generator(device).manual_seed(count)
    for _ in range(num_layers):
        pair = torch.empty(2, num_kv_heads, count, head_dim, dtype=dtype, device=device)
        pair.normal_(generator=generator)
        yield pair[0], pair[1]


def fill_cache(arena: Arena, config: ModelConfig, count: int) -> None:
    """Have the first ``count`` rows of an arena's cache be those of ``kv_rows``; the others stay as they are."""
    dtype = arena.view("layers.0.k_cache").dtype
    fresh = kv_rows(config.num_layers, config.num_kv_heads, count, config.head_dim, dtype, arena.device)
    with torch.inference_mode():
        for pair, rows in zip(caches(arena, config), fresh, strict=True):
            for cache, new in zip(pair, rows, strict=True):
                cache[:, :count].copy_(new)
