"""Tensors of more than 2**31 elements, of which a test touches a few rows."""

from __future__ import annotations

import math
import mmap

import torch

from tests.kernels.rows import ON_GPU

MAP_NORESERVE = 0x4000  # Linux; Python's mmap has it from 3.13


def huge(*shape: int) -> torch.Tensor:
    """fp16, not filled. On the CPU pages come into being as they are touched, so it costs no memory."""
    if ON_GPU:
        return torch.empty(*shape, dtype=torch.float16, device="cuda")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, math.prod(shape) * 2, flags=flags)
    return torch.frombuffer(pages, dtype=torch.float16).view(*shape)
