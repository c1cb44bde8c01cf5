"""GGUF files: metadata, the place of every tensor, and tensor data on demand.

Only the header is read when a file is opened (a few MiB, in one pass). A model split over several files
(``-00001-of-00003.gguf``) is opened through its first part and looks like one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from monograph.errors import CheckpointError, ConfigError
from monograph.model.gguf_header import GGUFTensor, MetadataValue, read_header

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GGUFFile:
    """An open GGUF model: metadata, tensor records, and tensor data on demand.

    Args:
        path: The file, or the first part of a split model.

    Raises:
        CheckpointError: Not a GGUF file, a version or byte order that is not supported, damaged, truncated, or parts
            are missing. Names the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, MetadataValue] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._parts: list[tuple[Path, BinaryIO]] = []
        try:
            self.metadata = self._open_part(self.path)
            self._open_other_parts()
        except BaseException:
            self.close()
            raise

    def _open_part(self, path: Path) -> dict[str, MetadataValue]:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise CheckpointError(f"{path}: not a regular file")
        try:
            stream = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from error
        self._parts.append((path, stream))
        metadata, tensors = read_header(path, stream, part=len(self._parts) - 1)
        for tensor in tensors:
            if tensor.name in self.tensors:
                raise CheckpointError(f"{path}: tensor {tensor.name} occurs twice")
            self.tensors[tensor.name] = tensor
        return metadata

    def _open_other_parts(self) -> None:
        count = self.integer("split.count", 1)
        if count <= 1:
            return
        number = self.integer("split.no", 0)
        match = _PART_NAME.fullmatch(self.path.name)
        if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
            raise CheckpointError(
                f"{self.path}: part {number + 1} of a model in {count} files; such files must keep their names "
                f"(…-{number + 1:05d}-of-{count:05d}.gguf)"
            )
        paths = [self.path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
        if number != 0:
            raise CheckpointError(f"{self.path}: part {number + 1} of {count}; open the first part, {paths[0].name}")
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(f"{self.path}: parts are missing beside it: {', '.join(missing)}")
        for i, path in enumerate(paths[1:], start=1):
            metadata = self._open_part(path)
            if metadata.get("split.no") != i or metadata.get("split.count") != count:
                raise CheckpointError(f"{path}: does not call itself part {i + 1} of {count}")
        expected = self.integer("split.tensors.count", len(self.tensors))
        if len(self.tensors) != expected:
            raise CheckpointError(f"{self.path}: {len(self.tensors)} tensors in {count} parts, expected {expected}")

    def read_into(self, tensor: GGUFTensor, start: int, out: np.ndarray) -> None:
        """Fill `out` (uint8, contiguous) with the tensor's bytes from byte `start` on. Safe to call from threads.

        Raises:
            CheckpointError: The file was closed, or has become shorter, or cannot be read.
        """
        assert 0 <= start <= tensor.nbytes - out.nbytes, (tensor, start, out.nbytes)
        if not self._parts:
            raise CheckpointError(f"{self.path}: closed")
        path, stream = self._parts[tensor.part]
        view = out.data.cast("B")
        offset = tensor.offset + start
        while len(view):
            try:
                count = os.preadv(stream.fileno(), [view], offset)
            except OSError as error:
                raise CheckpointError(f"{path}: tensor {tensor.name} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{path}: tensor {tensor.name} ends after the end of the file")
            view = view[count:]
            offset += count

    def text(self, key: str, default: str | None = None) -> str:
        """Return the string under a key, or the default; without a default the key must be there."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return the boolean under a key, or the default; without a default the key must be there."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the integer under a key, or the default; without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number under a key, or the default; without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return float(value)

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """Return the array of strings under a key, or the default; without a default the key must be there."""
        value = self._value(key, default)
        if not isinstance(value, list):
            raise self._wrong(key, "an array of strings", value)
        return value

    def numbers(self, key: str, default: np.ndarray | None = None) -> np.ndarray:
        """Return the array of numbers under a key, or the default; without a default the key must be there."""
        value = self._value(key, default)
        if not isinstance(value, np.ndarray):
            raise self._wrong(key, "an array of numbers", value)
        return value

    def _value(self, key: str, default: MetadataValue | None) -> MetadataValue:
        value = self.metadata.get(key, default)
        if value is None:
            raise ConfigError(f"{self.path}: metadata has no {key}")
        return value

    def _wrong(self, key: str, expected: str, value: MetadataValue) -> ConfigError:
        found = f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)
        return ConfigError(f"{self.path}: metadata {key} is {found:.80}, expected {expected}")

    def close(self) -> None:
        """Close the files. Calling it twice does no harm; metadata and tensor records stay readable."""
        for _, stream in self._parts:
            stream.close()
        self._parts = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
