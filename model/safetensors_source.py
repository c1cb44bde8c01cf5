"""Reading safetensors files one tensor at a time, into memory that belongs to that tensor alone.

A file is 8 bytes of header length (little-endian), a JSON header with dtype, shape and byte range of every tensor, then
the bytes. Files are read, not mapped: a mapping keeps every page it has touched in the process's resident memory, and
kills the process if a file shrinks under it. The header is checked as strictly as the reference implementation does:
ranges lie inside the file, follow each other without gap or overlap, and agree with shape and dtype.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeGuard

import torch

from monograph.errors import CheckpointError
from monograph.model.json_file import describe
from monograph.model.manifest import WeightManifest

MAX_HEADER_NBYTES = 100_000_000

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "C64": torch.complex64,
}
_INCOMPLETE = "the download looks incomplete; fetch the model again"


@dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # in the file, bytes
    nbytes: int
    stamp: tuple[int, ...]  # of the file, when its header was read


class SafetensorsSource:
    """The tensors of one model in safetensors files. Implements `checkpoint.Source`."""

    def __init__(self, manifest: WeightManifest) -> None:
        """Read the headers of all files.

        Raises:
            CheckpointError: A file is absent, cut short or damaged, or lacks tensors that the index places in it. Every
                such tensor is named.
        """
        self._entries: dict[str, _Entry] = {}
        misplaced: list[str] = []
        for path in manifest.files:
            found = read_header(path)
            if manifest.weight_map is None:
                self._entries.update(found)
                continue
            listed = [name for name, shard in manifest.weight_map.items() if shard == path]
            misplaced += [f"{name} (not in {path.name})" for name in listed if name not in found]
            # A tensor that a shard holds beside its listed ones is still part of the checkpoint.
            self._entries.update({name: found[name] for name in listed if name in found})
            self._entries.update({name: found[name] for name in found if name not in manifest.weight_map})
        if misplaced:
            raise CheckpointError(
                f"{manifest.files[0].parent}: tensors absent from the file that the index names: "
                f"{', '.join(misplaced)}; {_INCOMPLETE}"
            )

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).dtype

    def read(self, name: str) -> torch.Tensor:
        entry = self._entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        _fill(entry, name, 0, tensor)
        return tensor

    def read_rows(self, name: str, first: int, out: torch.Tensor) -> None:
        entry = self._entry(name)
        assert out.dtype == entry.dtype and out.shape[1:] == entry.shape[1:], (name, out.dtype, out.shape)
        assert 0 <= first <= entry.shape[0] - len(out), (name, first, out.shape, entry.shape)
        _fill(entry, name, first * entry.nbytes // max(1, entry.shape[0]), out)

    def row_unit(self, name: str) -> int:
        """1: rows lie in the file as they are wanted."""
        return 1

    @property
    def is_quantised(self) -> bool:
        """Safetensors weights are plain floats."""
        return False

    def close(self) -> None:
        """Nothing to release: a file is open only while a tensor is read from it."""

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{name}: no such tensor in the checkpoint") from None


def _fill(entry: _Entry, name: str, start: int, out: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor with a tensor's bytes from byte ``start`` on, from a file opened for that alone."""
    window = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    try:
        with entry.path.open("rb", buffering=0) as file:
            if _stamp(file) != entry.stamp:
                raise CheckpointError(f"{entry.path}: file has changed since the model was opened; load it again")
            file.seek(entry.offset + start)
            while len(window):  # one call reads at most 2 GiB
                count = file.readinto(window)
                if not count:
                    raise CheckpointError(f"{entry.path}: {name}: file ends inside the tensor; {_INCOMPLETE}")
                window = window[count:]
    except OSError as fault:
        if isinstance(fault, CheckpointError):
            raise
        raise CheckpointError(f"{entry.path}: {name}: cannot be read: {fault.strerror or fault}") from fault


def read_header(path: Path) -> dict[str, _Entry]:
    """Read and check the header of one file. Raises CheckpointError naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            stamp = _stamp(file)
            file_nbytes = stamp[0]
            start = file.read(8)
            header_nbytes = int.from_bytes(start, "little")
            if len(start) < 8 or header_nbytes > file_nbytes - 8:
                raise CheckpointError(f"{path}: file of {file_nbytes:,} bytes ends inside its header; {_INCOMPLETE}")
            if header_nbytes > MAX_HEADER_NBYTES:
                raise CheckpointError(
                    f"{path}: header of {header_nbytes:,} bytes; expected {MAX_HEADER_NBYTES:,} at most"
                )
            raw = file.read(header_nbytes)
    except OSError as fault:
        if isinstance(fault, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read: {fault.strerror or fault}") from fault
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as fault:
        raise CheckpointError(f"{path}: header is not a safetensors header: {fault}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is not a safetensors header: {describe(header)}")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, stamp, name, fact, 8 + header_nbytes) for name, fact in header.items()}
    _check_ranges(path, entries, 8 + header_nbytes, file_nbytes)
    return entries


def _entry(path: Path, stamp: tuple[int, ...], name: str, fact: object, data_start: int) -> _Entry:
    if not isinstance(fact, dict):
        raise CheckpointError(f"{path}: {name}: expected dtype, shape and data_offsets, got {describe(fact)}")
    dtype = _DTYPES.get(fact["dtype"]) if isinstance(fact.get("dtype"), str) else None
    if dtype is None:
        raise CheckpointError(
            f"{path}: {name}: expected a dtype of {', '.join(_DTYPES)}, got {describe(fact.get('dtype'))}"
        )
    shape, offsets = fact.get("shape"), fact.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: {name}: damaged shape {describe(shape)} or data_offsets {describe(offsets)}")
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise CheckpointError(
            f"{path}: {name}: shape {shape} needs {nbytes:,} bytes, data_offsets give {end - begin:,}"
        )
    return _Entry(path, dtype, tuple(shape), data_start + begin, nbytes, stamp)


def _check_ranges(path: Path, entries: dict[str, _Entry], data_start: int, file_nbytes: int) -> None:
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise CheckpointError(f"{path}: {name}: starts at byte {entry.offset:,}, expected {end:,}: damaged header")
        end += entry.nbytes
    if end > file_nbytes:
        raise CheckpointError(f"{path}: file has {file_nbytes:,} bytes, its header names {end:,}; {_INCOMPLETE}")
    if end < file_nbytes:
        raise CheckpointError(f"{path}: file has {file_nbytes:,} bytes, its header names only {end:,}: damaged file")


def _stamp(file: IO[bytes]) -> tuple[int, ...]:
    facts = os.fstat(file.fileno())
    return facts.st_size, facts.st_mtime_ns, facts.st_ino


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**62 for each in values
    )


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
