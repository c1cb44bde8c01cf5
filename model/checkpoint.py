"""What a checkpoint must hold, from the wanted side.

A checkpoint is read through a `Source`, whatever its file format. All sources speak the tensor names and shapes of
Hugging Face's Llama (``model.layers.0.self_attn.q_proj.weight``, ``[out, in]``).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Source(Protocol):
    """A set of named tensors on disk, read one at a time.

    `read` returns a CPU tensor in the file's dtype (or float32 where the file holds quantised blocks). The caller drops
    each tensor before it asks for the next, and a source keeps none of those it has handed out.
    """

    def names(self) -> set[str]:
        """Return the name of every tensor in the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its data."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` would give, without reading the data."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, contiguous and on the CPU. Raises CheckpointError if its data is damaged."""
        ...

    def close(self) -> None:
        """Release the files. Calling it twice does no harm."""
        ...
