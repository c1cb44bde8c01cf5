"""A file of named tensors and a header, in the safetensors form, that is whole or not there.

Written beside its final name, flushed to disk, then renamed: who reads that name sees the old content or the new. A
digest over header and data, in the header, tells a damaged or shortened file before anything of it is used. Tensors
come in parts, so that what lies on a GPU is never whole on the host. The form holds numbers and text only: reading one
runs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from monograph.errors import CheckpointError
from monograph.model.whole_file import whole_file

FORMAT = "monograph.session.1"
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}
_NO_DIGEST = "0" * 32
_MAX_HEADER_NBYTES = 100 << 20  # what readers of safetensors accept
_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor to write.

    Attributes:
        name: Its name in the file.
        shape: Its shape.
        dtype: float32, float16, bfloat16 or int32.
        parts: Makes its content: contiguous CPU tensors that follow each other.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Path, session: dict[str, Any], entries: Iterable[Entry]) -> None:
    """Write a file, whole or not at all.

    Args:
        path: Its final name; a file of that name is replaced at the end. A link is followed.
        session: Anything that JSON can say.
        entries: The tensors.

    Raises:
        OSError: It cannot be written; nothing is left of it.
    """
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a device or a pipe, /dev/null for one: a file would take its place
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    entries = list(entries)
    header = _header(session, entries)
    try:
        with whole_file(path) as file:
            digest = hashlib.blake2b(header, digest_size=16)
            file.write(header)
            for entry in entries:
                _write_entry(file, entry, digest.update)
            file.seek(header.index(_NO_DIGEST.encode()))
            file.write(digest.hexdigest().encode())
    except OSError as error:
        if error.filename is not None:  # the name that was given, not that of the unfinished file
            error.filename, error.filename2 = str(path), None
        raise
    _sync_folder(path.parent)


class SessionFile:
    """A file that ``write`` made, checked whole.

    Args:
        path: The file.

    Attributes:
        session: What was written beside the tensors.
        shapes: Every tensor's shape.

    Raises:
        CheckpointError: Missing, unreadable, damaged, cut short, or of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                header = self._check(file, path.stat().st_size)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        self.session: Any = json.loads(header["__metadata__"]["session"])
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU.

        Raises:
            CheckpointError: There is none of that name.
        """
        from safetensors import SafetensorError, safe_open

        if name not in self.shapes:
            raise CheckpointError(f"{self.path}: holds no {name!r}; it was written by another version")
        try:
            with safe_open(self.path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error
        return tensor

    def _check(self, file: BinaryIO, nbytes: int) -> dict[str, Any]:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        raw = file.read(length) if len(start) == 8 and length <= min(_MAX_HEADER_NBYTES, nbytes - 8) else b""
        try:
            header: dict[str, Any] = json.loads(raw)
            metadata = header["__metadata__"]
            kind, digest = metadata["format"], str(metadata["digest"])
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError):
            raise CheckpointError(f"{self.path}: is not a saved conversation, or its beginning is damaged") from None
        if kind != FORMAT:
            raise CheckpointError(f"{self.path}: is of the form {kind!r}, and this version reads {FORMAT!r}")
        if nbytes != 8 + length + end:
            fault = "cut short" if nbytes < 8 + length + end else "damaged"
            raise CheckpointError(
                f"{self.path}: is {fault}: {nbytes:,} bytes, where its header says {8 + length + end:,}; save it anew"
            )
        found = hashlib.blake2b(start + raw.replace(digest.encode(), _NO_DIGEST.encode(), 1), digest_size=16)
        while piece := file.read(_PIECE_NBYTES):
            found.update(piece)
        if found.hexdigest() != digest:
            raise CheckpointError(f"{self.path}: is damaged: its content does not match its digest; save it anew")
        return header


def _header(session: dict[str, Any], entries: list[Entry]) -> bytes:
    metadata = {"format": FORMAT, "digest": _NO_DIGEST, "session": json.dumps(session)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_entry(file: BinaryIO, entry: Entry, note: Callable[[memoryview], object]) -> None:
    written = 0
    for part in entry.parts():
        assert part.dtype == entry.dtype, (entry.name, part.dtype)
        content = memoryview(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        written += len(content)
        note(content)
        file.write(content)
    assert written == entry.nbytes, (entry.name, written, entry.nbytes)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems have no such thing
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def whole(tensor: torch.Tensor, name: str) -> Entry:
    """An entry for a small CPU tensor."""

    def parts() -> Iterator[torch.Tensor]:
        yield tensor

    return Entry(name, tuple(tensor.shape), tensor.dtype, parts)
