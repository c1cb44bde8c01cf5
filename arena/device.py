"""Devices an arena can live on, and the two things that differ on CUDA: which device is current, and waiting."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from monograph.errors import ConfigError


def resolve_device(device: str | torch.device) -> torch.device:
    """Checks a device and fixes its index, so that a later change of the current device moves nothing.

    Args:
        device: ``"cpu"``, ``"cuda"`` (the current one) or ``"cuda:N"``.

    Returns:
        The CPU, or a CUDA device with its index.

    Raises:
        ConfigError: Another kind of device, or a CUDA device that PyTorch does not see.
    """
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {device!r}") from error
    if asked.type == "cpu":
        return torch.device("cpu")
    if asked.type != "cuda":
        raise ConfigError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {str(asked)!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = asked.index if asked.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        seen = f"{count} CUDA device{'' if count == 1 else 's'}"
        raise ConfigError(f"device: asked for 'cuda:{index}', PyTorch sees {seen}; use 'cpu' or a lower index")
    return torch.device("cuda", index)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device current inside a ``with`` and restores the one before; nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def settle(device: torch.device) -> None:
    """Waits for all work of all streams of a CUDA device; nothing on the CPU. Not allowed during capture."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
