"""Which weight files make up a model: read from the manifest that a folder holds, never guessed from file names.

`model.safetensors` is a whole model. Without it, `model.safetensors.index.json` names the file of every tensor. Other
weight files in the folder (consolidated copies, shards of another naming, pickles) are never opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from monograph.errors import CheckpointError
from monograph.model.json_file import describe, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*\.safetensors")
_INCOMPLETE = "the download looks incomplete; fetch the model again"


@dataclass(frozen=True)
class WeightManifest:
    """The safetensors files of a model.

    Attributes:
        files: Every file, in the order in which the manifest names them first.
        weight_map: File of each tensor by name, from the index; None for a model in a single file.
    """

    files: tuple[Path, ...]
    weight_map: Mapping[str, Path] | None = None


def read_manifest(folder: Path) -> WeightManifest:
    """Find the weight files of a local folder.

    A single `model.safetensors` wins over an index beside it, as it does for transformers.

    Raises:
        CheckpointError: There are no safetensors weights, the index is damaged or points outside the folder, or files
            that it names are absent: all of them are named.
    """
    if (folder / SINGLE_FILE).is_file():
        return WeightManifest((folder / SINGLE_FILE,))
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, got neither{other_weights(_file_names(folder))}"
        )
    names = read_index(folder / INDEX_FILE)
    files = tuple(folder / name for name in dict.fromkeys(names.values()))
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise CheckpointError(
            f"{folder}: expected the {len(files)} files that {INDEX_FILE} names, "
            f"missing: {', '.join(absent)}; {_INCOMPLETE}"
        )
    return WeightManifest(files, {tensor: folder / name for tensor, name in names.items()})


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor from an index file.

    Raises:
        CheckpointError: The index is not a JSON object with a `weight_map` of tensor names to plain safetensors file
            names. Names that lead to another folder are refused.
    """
    weight_map = read_json_object(path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map: expected an object of file names, got {describe(weight_map)}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise CheckpointError(
                f"{path}: weight_map: {tensor}: expected the name of a .safetensors file in the same folder, "
                f"got {describe(name)}"
            )
    return weight_map


def other_weights(names: list[str]) -> str:
    """Say which files of other formats are there instead of safetensors, as the end of an error message."""
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    pickles = sorted(name for name in names if name.endswith((".bin", ".pth", ".pt", ".ckpt")))
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if gguf:
        return f"; it has GGUF files, name the one to load: {', '.join(gguf)}"
    if others:
        return f"; other safetensors files ({', '.join(others)}) are not a whole model under the names that count"
    if pickles:
        return (
            f"; it has {', '.join(pickles)}, and pickle files are never opened, for they can run code: convert the "
            "model to safetensors (save_pretrained of a current transformers does)"
        )
    return ""


def _file_names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.is_file()]
    except OSError as fault:
        raise CheckpointError(f"{folder}: cannot be listed: {fault.strerror or fault}") from fault
