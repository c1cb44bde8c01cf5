"""Argument checks of the kernel wrappers: they run when a graph is captured, not when it is replayed."""

from __future__ import annotations

import torch

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def expect(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises unless `tensor` is a contiguous tensor of that shape and type.

    Raises:
        ValueError: names the kernel, the argument, what it should be and what it is.
    """
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise ValueError(
            f"{op}: {name} must be contiguous {_dtype(dtype)} {list(shape)}, "
            f"got {layout} {_dtype(tensor.dtype)} {list(tensor.shape)}; pass the arena view of that slot"
        )


def expect_weight(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises unless `tensor` is a contiguous matrix in a weight dtype.

    Raises:
        ValueError: names the kernel, the argument and the supported dtypes.
    """
    if tensor.dim() != 2 or not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} must be a contiguous matrix, got {list(tensor.shape)}; pass the arena view")
    expect_weight_dtype(op, name, tensor)


def expect_weight_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises unless weights or cache are in a dtype that the kernels read.

    Raises:
        ValueError: names the kernel, the argument and the supported dtypes.
    """
    if tensor.dtype not in WEIGHT_DTYPES:
        supported = ", ".join(map(_dtype, WEIGHT_DTYPES))
        raise ValueError(f"{op}: {name} must be in one of {supported}, got {_dtype(tensor.dtype)}; convert on loading")


def expect_scalars(op: str, dtype: torch.dtype, **scalars: torch.Tensor) -> None:
    """Raises unless every argument is a device scalar: one element of that type.

    Raises:
        ValueError: names the kernel and the argument.
    """
    for name, tensor in scalars.items():
        expect(op, name, tensor, (1,), dtype)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
