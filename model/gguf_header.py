"""The header of a GGUF file, parsed without trusting a single number in it.

Magic, version, two counts, the metadata (typed key-value pairs), one record per tensor; then, aligned, the tensor data.
Every count and length is checked against the bytes that the file has left before anything is allocated for it, so that
a truncated, damaged or hostile file ends in `CheckpointError`.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from monograph.errors import CheckpointError

# A metadata value: numbers in an array are one numpy array, strings in an array one list.
MetadataValue = bool | int | float | str | list[str] | np.ndarray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
# Far above any real model, low enough that a file of zeros as large as a disk cannot keep the parser busy for long.
_MAX_METADATA = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_ARRAY = 1 << 22
_MAX_TEXT_NBYTES = 1 << 26
_READ_NBYTES = 1 << 20

_SCALARS: dict[GGUFValueType, np.dtype[np.generic]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies, and in which format."""

    name: str
    shape: tuple[int, ...]  # rows first: the reverse of the order in the file
    type: GGMLQuantizationType
    part: int  # index of the file that holds it
    offset: int  # bytes from the start of that file
    nbytes: int


def read_header(path: Path, stream: BinaryIO, part: int) -> tuple[dict[str, MetadataValue], list[GGUFTensor]]:
    """Return the metadata and the tensor records of one file.

    Args:
        path: The file's name, for messages.
        stream: The file, open for reading bytes from its start.
        part: What the records say in `GGUFTensor.part`.

    Raises:
        CheckpointError: Not a GGUF file, a version or byte order that is not supported, damaged or truncated.
    """
    return _Header(path, stream).parse(part)


class _Header:
    """The header of one file, parsed front to back through a buffer that grows only by bytes the file really has."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self._buffer = bytearray()
        self._position = 0

    def parse(self, part: int) -> tuple[dict[str, MetadataValue], list[GGUFTensor]]:
        self._check_magic()
        version = self._uint32()
        if version not in _VERSIONS:
            if version & 0xFFFF == 0 and version >> 24 in _VERSIONS:
                raise self._error("big-endian GGUF is not supported; use the little-endian file")
            raise self._error(f"GGUF version {version} is not supported (2 and 3 are); convert the model again")
        num_tensors = self._uint64()
        num_metadata = self._uint64()
        # The least that a pair takes: key length, value type, one byte; a record: name length, one dimension, the rest.
        self._check_count("metadata pairs", num_metadata, _MAX_METADATA, nbytes_each=8 + 4 + 1)
        self._check_count("tensors", num_tensors, _MAX_TENSORS, nbytes_each=8 + 4 + 8 + 4 + 8)
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_metadata):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._error(f"metadata {key} occurs twice")
            metadata[key] = self._metadata_value(key)
        records = [self._tensor_record() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r:.80}, expected a power of two")
        start = -(-self._position // alignment) * alignment
        return metadata, self._place(records, start, alignment, part)

    def _check_magic(self) -> None:
        magic = bytes(self._take(min(4, self._size)))
        if magic == _MAGIC:
            return
        if magic == b"vers":
            raise self._error("a Git LFS pointer, not the model; fetch the file itself (git lfs pull)")
        raise self._error(f"not a GGUF file: starts with {magic!r}, expected {_MAGIC!r}")

    def _metadata_value(self, key: str) -> MetadataValue:
        kind = self._value_type(key)
        if kind == GGUFValueType.STRING:
            return self._text(f"metadata {key}")
        if kind != GGUFValueType.ARRAY:
            scalar: bool | int | float = self._numbers(_SCALARS[kind], 1)[0].item()
            return scalar
        element = self._value_type(key)
        count = self._uint64()
        if element == GGUFValueType.ARRAY:
            raise self._error(f"metadata {key} is an array of arrays, which is not supported")
        if element == GGUFValueType.STRING:
            self._check_count(f"strings in metadata {key}", count, _MAX_ARRAY, nbytes_each=8)
            return self._texts(f"metadata {key}", count)
        dtype = _SCALARS[element]
        self._check_count(f"numbers in metadata {key}", count, _MAX_ARRAY, nbytes_each=dtype.itemsize)
        return self._numbers(dtype, count)

    def _value_type(self, key: str) -> GGUFValueType:
        value = self._uint32()
        try:
            return GGUFValueType(value)
        except ValueError:
            raise self._error(f"metadata {key} has the unknown value type {value}") from None

    def _tensor_record(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        """Return name, shape (rows first), type, offset within the data, and byte count."""
        name = self._name("a tensor name")
        num_dimensions = self._uint32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {num_dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
        dimensions = [self._uint64() for _ in range(num_dimensions)]
        type_code = self._uint32()
        offset = self._uint64()
        try:
            kind = GGMLQuantizationType(type_code)
        except ValueError:
            raise self._error(f"tensor {name} has the unknown type {type_code}") from None
        block_size, block_nbytes = GGML_QUANT_SIZES[kind]
        if dimensions[0] % block_size:
            raise self._error(
                f"tensor {name}: rows of {dimensions[0]} do not divide into blocks of {block_size} ({kind.name})"
            )
        num_elements = 1
        for dimension in dimensions:
            num_elements *= dimension
        return name, tuple(reversed(dimensions)), kind, offset, num_elements // block_size * block_nbytes

    def _place(
        self,
        records: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]],
        start: int,
        alignment: int,
        part: int,
    ) -> list[GGUFTensor]:
        """Turn offsets into places in the file, and check that each tensor lies inside it and apart from the others."""
        tensors = []
        for name, shape, kind, offset, nbytes in records:
            if nbytes == 0:
                raise self._error(f"tensor {name} is empty: shape {shape}")
            if offset % alignment:
                raise self._error(f"tensor {name} at offset {offset} is not aligned to {alignment} bytes")
            if start + offset + nbytes > self._size:
                raise self._error(
                    f"tensor {name} ends at byte {start + offset + nbytes:,} of a file of {self._size:,}: "
                    "truncated, or an incomplete download"
                )
            tensors.append(GGUFTensor(name, shape, kind, part, start + offset, nbytes))
        by_offset = sorted(tensors, key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(by_offset):
            if before.offset + before.nbytes > after.offset:
                raise self._error(f"tensors {before.name} and {after.name} overlap")
        return tensors

    def _check_count(self, what: str, count: int, limit: int, nbytes_each: int) -> None:
        if count > limit or count * nbytes_each > self._size - self._position:
            raise self._error(f"claims {count:,} {what} in {self._size:,} bytes: damaged, or truncated")

    def _uint32(self) -> int:
        value: int = _UINT32.unpack(self._take(4))[0]
        return value

    def _uint64(self) -> int:
        value: int = _UINT64.unpack(self._take(8))[0]
        return value

    def _numbers(self, dtype: np.dtype[np.generic], count: int) -> np.ndarray:
        return np.frombuffer(bytes(self._take(count * dtype.itemsize)), dtype=dtype)

    def _text(self, what: str) -> str:
        return self._texts(what, 1)[0]

    def _name(self, what: str) -> str:
        name = self._text(what)
        if not name:
            raise self._error(f"{what} is empty: damaged")
        return name

    def _texts(self, what: str, count: int) -> list[str]:
        """Read `count` strings, each a length and that many bytes of UTF-8. A tokenizer has hundreds of thousands."""
        texts = []
        buffer, position, unpack = self._buffer, self._position, _UINT64.unpack_from
        for _ in range(count):
            if position + 8 > len(buffer):
                self._fill(position + 8)
            (nbytes,) = unpack(buffer, position)
            start = position + 8
            position = start + nbytes
            if nbytes > _MAX_TEXT_NBYTES:
                raise self._error(f"{what} claims {nbytes:,} bytes of text: damaged")
            if position > len(buffer):
                self._fill(position)
            try:
                texts.append(buffer[start:position].decode())
            except UnicodeDecodeError:
                raise self._error(f"{what} is not UTF-8: damaged") from None
        self._position = position
        return texts

    def _take(self, nbytes: int) -> memoryview | bytearray:
        start = self._position
        if start + nbytes > len(self._buffer):
            self._fill(start + nbytes)
        self._position = start + nbytes
        return self._buffer[start : start + nbytes]

    def _fill(self, end: int) -> None:
        """Extend the buffer to hold byte `end - 1`."""
        if end > self._size:
            raise self._error(f"ends at byte {self._size:,} inside its header: truncated, or an incomplete download")
        while len(self._buffer) < end:
            try:
                chunk = self._stream.read(
                    min(self._size - len(self._buffer), max(_READ_NBYTES, end - len(self._buffer)))
                )
            except OSError as error:
                raise self._error(f"cannot be read: {error.strerror}") from error
            if not chunk:
                raise self._error("became shorter while it was read")
            self._buffer += chunk

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {text}")
