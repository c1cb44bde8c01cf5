"""What a measured choice of tiles holds for: the GPU, the compiler, the kernels as they are written, sizes and dtype.

The longest sequence is not among it, on purpose: tiles decide the last bits of logits, and those do not depend on how
much room was reserved. Nor is the number of layers, which are all alike.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from monograph.kernels import tile as tile_module
from monograph.kernels.triton_import import triton
from monograph.model.config import ModelConfig


@dataclass(frozen=True)
class TileKey:
    """What tiles were chosen for.

    Attributes:
        gpu: Its name, as CUDA has it.
        capability: Its compute capability, "9.0".
        triton: Version of the compiler.
        kernels: Digest of the source of all kernels.
        dtype: Of weights and KV cache.
        shape: Every size of the model that a decode kernel sees.
    """

    gpu: str
    capability: str
    triton: str
    kernels: str
    dtype: str
    shape: str

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> TileKey:
        """The key of a model on a CUDA device."""
        major, minor = torch.cuda.get_device_capability(device)
        return cls(
            gpu=torch.cuda.get_device_name(device),
            capability=f"{major}.{minor}",
            triton=str(triton.__version__),
            kernels=kernels_digest(),
            dtype=str(dtype).removeprefix("torch."),
            shape=shape_class(config),
        )

    @property
    def gpu_class(self) -> str:
        """The generation of the GPU, "sm_90"."""
        return f"sm_{self.capability.replace('.', '')}"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        text = "\n".join(f"{name}={value}" for name, value in asdict(self).items())
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def shape_class(config: ModelConfig) -> str:
    """The sizes of a model that decide about tiles, in a line: models that share them share tiles."""
    attention = "attention" if config.output_bias else "qkv"
    biases = f"+{attention}_bias" * config.attention_bias + "+mlp_bias" * config.mlp_bias
    return (
        f"hidden{config.hidden_size}-mlp{config.intermediate_size}-heads{config.num_q_heads}/{config.num_kv_heads}"
        f"x{config.head_dim}-vocab{config.vocab_size}{biases}"
    )


def kernels_digest() -> str:
    """16 hexadecimal digits of the source of every kernel: what was measured of other kernels does not hold."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(tile_module.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
