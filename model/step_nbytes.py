"""The bytes that a decode step cannot do without reading: what its time is measured against."""

from __future__ import annotations

from monograph.arena import Layout
from monograph.model.config import ModelConfig


def step_nbytes(layout: Layout, config: ModelConfig, seq_len: float) -> float:
    """The fewest bytes that a decode step reads: weights once, one row of embedding and RoPE table, the live KV rows.

    Args:
        layout: Of the model.
        config: The model.
        seq_len: Live rows, that of the step's own token among them; the mean of several steps need not be whole.
    """
    weights = sum(weight_nbytes(layout, slot.name) for slot in layout.entries if slot.lifetime == "weight")
    return weights + seq_len * kv_row_nbytes(layout, config)


def weight_nbytes(layout: Layout, name: str) -> int:
    """Bytes of a weight slot that a step must read: a row of a table that is looked up, the whole of a matrix."""
    slot = layout[name]
    looked_up = name == "rope_table" or (name == "embed" and "lm_head" in layout)
    return slot.nbytes // slot.shape[0] if looked_up else slot.nbytes


def kv_row_nbytes(layout: Layout, config: ModelConfig) -> int:
    """Bytes of keys and values of one token, over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * layout["layers.0.k_cache"].dtype.itemsize
