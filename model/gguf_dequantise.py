"""Numbers out of GGUF's blocks: floats as they are stored, quantised blocks as float32 through the gguf library."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def is_float(kind: GGMLQuantizationType) -> bool:
    """Whether tensors of this type hold plain floats that torch reads without conversion."""
    return kind in _FLOATS


def dtype_of(kind: GGMLQuantizationType) -> torch.dtype:
    """Return the dtype that `dequantise` gives for a type."""
    return _FLOATS.get(kind, torch.float32)


@cache
def is_supported(kind: GGMLQuantizationType) -> bool:
    """Whether `dequantise` knows a type: asked of the installed gguf library, with one block of zeros."""
    if is_float(kind):
        return True
    block = np.zeros(GGML_QUANT_SIZES[kind][1], dtype=np.uint8)
    try:
        dequantise(block, kind)
    except NotImplementedError:
        return False
    return True


def dequantise(blocks: np.ndarray, kind: GGMLQuantizationType) -> torch.Tensor:
    """Return the numbers in a run of whole blocks.

    Args:
        blocks: uint8 `[nbytes]`. For plain floats the result shares its memory.
        kind: The type of the blocks.

    Returns:
        A 1-D tensor of `dtype_of(kind)`.

    Raises:
        NotImplementedError: The gguf library does not dequantise this type.
    """
    if is_float(kind):
        return torch.from_numpy(blocks).view(_FLOATS[kind])
    # As one row: the library cuts several rows into groups of 16, which halves its speed on the rows of a small model.
    with np.errstate(all="ignore"):  # a scale that is not finite shows as a logit that is not finite
        values = dequantize(blocks[np.newaxis, :], kind)
    return torch.from_numpy(values[0])
