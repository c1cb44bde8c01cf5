"""What a model will need, before a byte of it is loaded: dtype, device, longest length, memory map."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from dataclasses import dataclass

import torch

from monograph.arena import Layout, check_capacity, device_free_nbytes, format_nbytes
from monograph.errors import ConfigError
from monograph.model.checkpoint import Source, resolve_dtype
from monograph.model.config import ModelConfig
from monograph.model.layout import Capacity, check_max_seq_len, plan_layout
from monograph.model.open import open_model

logger = logging.getLogger("monograph")

# Left free when the length is chosen for the caller: a GPU needs room for modules and the graph, a CPU for the tensor
# that is being loaded, the tokenizer and the rest of the process.
HEADROOM = 0.1
# A length that is chosen for the caller is a multiple of this: what is free differs from one start to the next, and a
# length that 16 does not divide is compiled anew.
LENGTH_STEP = 64


@dataclass(frozen=True)
class Plan:
    """A model's memory, planned.

    Attributes:
        config: The model.
        capacity: Sizes that were planned for.
        layout: The memory map.
        device: Where it is to live.
        free_nbytes: What the device has free now; None where the system does not say.
        longest: The longest max_seq_len that fits, at most the model's own; 0 if not even the shortest does.
    """

    config: ModelConfig
    capacity: Capacity
    layout: Layout
    device: torch.device
    free_nbytes: int | None
    longest: int

    @property
    def max_seq_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.capacity.max_seq_len

    @property
    def need_nbytes(self) -> int:
        """Bytes of the arena."""
        return self.layout.nbytes

    def to_json(self) -> str:
        """The plan as JSON: sizes in bytes, and the layout under "layout"."""
        return json.dumps(
            {
                "max_seq_len": self.max_seq_len,
                "dtype": str(self.capacity.dtype).removeprefix("torch."),
                "device": str(self.device),
                "need_nbytes": self.need_nbytes,
                "free_nbytes": self.free_nbytes,
                "longest_max_seq_len": self.longest,
                "layout": json.loads(self.layout.to_json()),
            },
            indent=2,
        )

    def __str__(self) -> str:
        dtype = str(self.capacity.dtype).removeprefix("torch.")
        return (
            f"max_seq_len {self.max_seq_len:,} in {dtype} on {self.device}: needs {format_nbytes(self.need_nbytes)}, "
            f"{_free_text(self.free_nbytes)} free, longest that fits {self.longest:,}\n\n{self.layout}"
        )


def plan_model(
    model: str,
    *,
    revision: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    max_seq_len: int | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> Plan:
    """Plan a model's memory without loading its weights.

    Args:
        model: "org/name" on the Hub, a folder or a .gguf file.
        revision: Branch, tag or commit on the Hub.
        device: "auto", "cpu", "cuda" or "cuda:1".
        dtype: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
        max_seq_len: Tokens of prompt and answer together; None for the model's own, or the longest that fits.
        token: Hub access token.
        local_files_only: Never ask the network.

    Returns:
        The plan.

    Raises:
        CapacityError: It does not fit; says need, free and the longest length that does.
        MonographError: The model cannot be found, read or run.
    """
    where = choose_device(device)
    opened = open_model(model, revision=revision, token=token, local_files_only=local_files_only)
    if opened.is_local:
        with closing(opened.source()) as source:
            return make_plan(opened.config, where, choose_dtype(dtype, opened.config, where, source), max_seq_len)
    return make_plan(opened.config, where, choose_dtype(dtype, opened.config, where), max_seq_len)


def make_plan(config: ModelConfig, device: torch.device, dtype: torch.dtype, max_seq_len: int | None) -> Plan:
    """Choose the capacity for a device and plan it.

    Raises:
        CapacityError: ``max_seq_len``, or the shortest length if it is None, does not fit.
    """
    if max_seq_len is not None:
        check_max_seq_len(config, max_seq_len)
    free = device_free_nbytes(device)
    longest = longest_that_fits(config, dtype, free)
    chosen = max_seq_len
    if chosen is None:
        roomy = longest_that_fits(config, dtype, None if free is None else int(free * (1 - HEADROOM)))
        chosen = roomy or longest or config.longest_seq_len
        if LENGTH_STEP < chosen < config.longest_seq_len:
            chosen -= chosen % LENGTH_STEP
        if chosen == config.longest_seq_len < config.max_position_embeddings:
            logger.warning(
                "max_seq_len is %s, the model's sliding_window: longer sequences, up to its max_position_embeddings "
                "%s, need attention to a window, which is not supported",
                f"{chosen:,}",
                f"{config.max_position_embeddings:,}",
            )
        elif chosen < config.longest_seq_len and longest:
            logger.warning(
                "max_seq_len is %s, the longest that leaves room on %s (%s free); the model can do %s",
                f"{chosen:,}",
                device,
                _free_text(free),
                f"{config.longest_seq_len:,}",
            )
    capacity = Capacity.for_model(config, chosen, dtype)
    layout = plan_layout(config, capacity)
    if longest:
        hint = f"the longest max_seq_len that fits is {longest:,}; pass max_seq_len={longest} or less"
    else:
        hint = "not even the weights fit at any length; use a smaller model, a narrower dtype or a larger device"
    check_capacity(layout.nbytes, free, f"{hint} (asked for {chosen:,})", device=device)
    return Plan(config, capacity, layout, device, free, longest)


def longest_that_fits(config: ModelConfig, dtype: torch.dtype, free: int | None) -> int:
    """The longest max_seq_len whose arena takes at most ``free`` bytes, by bisection; 0 if none does."""

    def need(length: int) -> int:
        return plan_layout(config, Capacity.for_model(config, length, dtype)).nbytes

    low, high = 2, config.longest_seq_len
    if free is None or need(high) <= free:
        return high
    if need(low) > free:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= free else (low, middle)
    return low


def choose_device(device: str | torch.device) -> torch.device:
    """Turn a caller's device into one that is there.

    Raises:
        ConfigError: Unknown, or not on this machine.
    """
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}") from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda":
        raise ConfigError(f"device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = chosen.index if chosen.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        raise ConfigError(
            f"device: {device!r} is not on this machine, which has {count} CUDA devices; use device='cpu'"
        )
    return torch.device("cuda", index)


def choose_dtype(
    dtype: str | torch.dtype, config: ModelConfig, device: torch.device, source: Source | None = None
) -> torch.dtype:
    """Turn a caller's dtype into the one to use.

    "auto" is the one that the configuration names, else the one that most of the checkpoint is stored in. A quantised
    file has neither: float32 on a CPU, where it is fastest, and bfloat16 on a GPU.

    Raises:
        ConfigError: Not one of the three.
    """
    if dtype == "auto" and config.dtype is None and (source is None or source.is_quantised):
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return resolve_dtype(dtype, config, source)


def _free_text(free: int | None) -> str:
    return "unknown" if free is None else format_nbytes(free)
