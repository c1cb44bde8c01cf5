"""What loading a model took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoadStats:
    """Seconds of a load by phase, in the order in which they come.

    Attributes:
        import_s: Importing PyTorch, with what goes on beside that: libraries, the GPU, a tokenizer that lies in a
            folder here. Nearly nothing if the process has imported PyTorch before.
        open_s: Finding the device and the files, reading configuration and headers.
        tokenizer_s: Building the tokenizer, unless that was done beside the import.
        plan_s: Planning memory, and waiting for the device to start.
        arena_s: Allocating.
        weights_s: Filling the arena from the checkpoint.
        kernels_s: Getting kernels ready, beyond the time of the weights, during which that goes on.
        capture_s: Capturing the graphs.
        total_s: All of it.
        weights_nbytes: Bytes of the weights in the arena.
        kernels: Kernel variants that the model needs; 0 on a CPU.
        compiled: Those of them that had to be compiled; 0 after ``monograph warm``.
        tune_s: Tuning, if it was asked for.
        tiles: Where the tile of each tuned decode kernel came from, by use ("qkv", "down", "head"): "default" (the
            kernel's own rule), "shipped" (measured for this GPU and shape), "kept" (by an earlier tuning on this
            machine) or "tuned" (by this engine). Empty on a CPU, which has no tiles.
        tiles_from: The file of kept tiles, or what a shipped entry was measured by; "" for defaults.
    """

    import_s: float
    open_s: float
    tokenizer_s: float
    plan_s: float
    arena_s: float
    weights_s: float
    kernels_s: float
    capture_s: float
    total_s: float
    weights_nbytes: int
    kernels: int
    compiled: int
    tune_s: float = 0.0
    tiles: Mapping[str, str] = field(default_factory=dict)
    tiles_from: str = ""
