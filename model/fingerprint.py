"""What makes two engines the same model, to the bit, and what else their last bits depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from monograph.arena import Arena
from monograph.kernels.triton_import import triton
from monograph.model.config import ModelConfig
from monograph.model.layout import Capacity
from monograph.model.tile_space import Tile, Tiles
from monograph.model.tokenizer import Tokenizer

# Facts of a checkpoint rather than of its arithmetic, spelled otherwise in another file format.
_NOT_ARITHMETIC = ("dtype", "bos_token_id", "eos_token_ids", "max_position_embeddings", "sliding_window")
_DIGESTS = ("weights", "vocabulary")

Fingerprint = Mapping[str, Any]


def model_fingerprint(config: ModelConfig, capacity: Capacity, arena: Arena, tokenizer: Tokenizer) -> Fingerprint:
    """Configuration, dtype, and digests of all weights and of the vocabulary. Reads every weight: seconds for 16 GB."""
    all_facts = dataclasses.asdict(config)
    facts = {name: value for name, value in all_facts.items() if name not in _NOT_ARITHMETIC and value != ()}
    rope = facts.pop("rope")
    facts.update({f"rope {name}": value for name, value in rope.items()})
    facts["dtype"] = str(capacity.dtype).removeprefix("torch.")
    facts["weights"] = _weights_digest(arena)
    words = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items())
    facts["vocabulary"] = hashlib.blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()
    plain: Fingerprint = json.loads(json.dumps(facts))  # tuples as lists, as a file gives them back
    return plain


def machine_fingerprint(capacity: Capacity, device: torch.device, tiles: Tiles) -> Fingerprint:
    """What rounding depends on beside the model: the same on both sides, and the same bits come out.

    Args:
        capacity: What the arena was planned for.
        device: Where it is.
        tiles: Of the decode kernels by use, as they are launched, not as they came to be chosen: a tuning that found
            the defaults changes no bit. Empty on a CPU.
    """
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": str(torch.__version__),
        "triton": getattr(triton, "__version__", None) if on_gpu else None,
        "chunk_rows": capacity.chunk_rows,
        "num_splits": capacity.num_splits,
        **{f"tile of {use}": _in_words(tile) for use, tile in tiles.items()},
    }


def differences(saved: Fingerprint, here: Fingerprint) -> list[str]:
    """What differs, in words."""
    names = [name for name in {**here, **saved} if saved.get(name) != here.get(name)]
    return [
        name if name in _DIGESTS else f"{name} ({saved.get(name)!r} there, {here.get(name)!r} here)" for name in names
    ]


def _in_words(tile: Tile) -> str:
    """A tile without its trigger, which decides when the next kernel may begin and no bit."""
    return ", ".join(f"{key} {value}" for key, value in sorted(tile.items()) if key != "trigger")


def _weights_digest(arena: Arena) -> str:
    """A digest over all weight slots, several read at a time. RoPE tables follow from the configuration."""
    names = [s.name for s in arena.layout.entries if s.lifetime == "weight" and not s.name.endswith("rope_table")]
    total = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as threads:
        for digest in threads.map(lambda name: arena.fingerprint([name]), names):
            total.update(digest.encode())
    return total.hexdigest()
