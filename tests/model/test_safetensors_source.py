"""Reading safetensors: the reference implementation writes and judges, damaged files are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from monograph.errors import CheckpointError
from monograph.model.manifest import WeightManifest
from monograph.model.safetensors_source import SafetensorsSource

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


def open_file(path: Path) -> SafetensorsSource:
    return SafetensorsSource(WeightManifest((path,)))


def write_raw(path: Path, header: Any, data: bytes = b"", header_nbytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_nbytes is None else header_nbytes) + text + data)
    return path


def tensor_fact(begin: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "matrix": (torch.randn(3, 5) * 4).to(dtype),
        "scalar": torch.ones(()).to(dtype),
        "empty": torch.zeros(0, 7).to(dtype),
        "long.name": torch.ones(1, 2, 3).to(dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    source = open_file(tmp_path / "x.safetensors")
    assert source.names() == set(tensors)
    for name, tensor in tensors.items():
        read = source.read(name)
        assert (source.dtype(name), source.shape(name)) == (dtype, tuple(tensor.shape))
        assert read.dtype == dtype
        assert read.is_contiguous()
        assert torch.equal(
            read.view(torch.uint8) if tensor.dim() else read, tensor.view(torch.uint8) if tensor.dim() else tensor
        )
    source.close()


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor(
        [0x7FC1, 0x7F80, -0x80, 1, -0x8000], dtype=torch.int16
    )  # NaN with payload, inf, -inf, subnormal, -0
    save_file({"x": bits.view(torch.bfloat16)}, tmp_path / "x.safetensors")
    assert torch.equal(open_file(tmp_path / "x.safetensors").read("x").view(torch.int16), bits)


def test_what_is_read_belongs_to_the_reader(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4)}, tmp_path / "x.safetensors")
    source = open_file(tmp_path / "x.safetensors")
    first = source.read("x")
    first += 1
    assert torch.equal(source.read("x"), torch.zeros(4))
    with pytest.raises(CheckpointError, match="y: no such tensor"):
        source.read("y")


def test_unlisted_tensor_of_a_shard_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file({"x": torch.zeros(1), "y": torch.zeros(1), "z": torch.zeros(1)}, paths[0])
    save_file({"y": torch.ones(1)}, paths[1])
    source = SafetensorsSource(WeightManifest(tuple(paths), {"x": paths[0], "y": paths[1]}))
    assert source.names() == {"x", "y", "z"}
    assert source.read("y").item() == 1  # from the file that the index names


DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "not JSON": (b"{", b"", "not a safetensors header"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not a safetensors header"),
    "no object": ([1], b"", "not a safetensors header"),
    "nested": (b"[" * 100_000, b"", "not a safetensors header"),
    "duplicate": (b'{"x": %s, "x": %s}' % ((json.dumps(tensor_fact(0, 4, 1)).encode(),) * 2), b"0000", "occurs twice"),
    "no fact": ({"x": 3}, b"", "expected dtype, shape and data_offsets"),
    "dtype": ({"x": tensor_fact(0, 4, 1, dtype="F128")}, b"0000", "expected a dtype of"),
    "no dtype": ({"x": {"shape": [], "data_offsets": [0, 0]}}, b"", "expected a dtype of"),
    "shape": ({"x": tensor_fact(0, 4, -1)}, b"0000", "damaged shape"),
    "shape of text": ({"x": {**tensor_fact(0, 4), "shape": ["1"]}}, b"0000", "damaged shape"),
    "offsets": ({"x": {**tensor_fact(0, 4, 1), "data_offsets": [0]}}, b"0000", "damaged shape"),
    "too few bytes for the shape": ({"x": tensor_fact(0, 4, 2)}, b"0000", "needs 8 bytes, data_offsets give 4"),
    "backwards": ({"x": tensor_fact(4, 0, 1)}, b"0000", "data_offsets give -4"),
    "overflow": ({"x": tensor_fact(0, 4, 2**40, 2**40)}, b"0000", "needs"),
    "gap": ({"x": tensor_fact(4, 8, 1)}, b"00000000", "starts at byte"),
    "overlap": ({"x": tensor_fact(0, 8, 2), "y": tensor_fact(4, 12, 2)}, b"0" * 12, "starts at byte"),
    "cut short": ({"x": tensor_fact(0, 8, 2)}, b"0000", "the download looks incomplete"),
    "left over": ({"x": tensor_fact(0, 4, 1)}, b"00000000", "names only"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_files(fault: str, tmp_path: Path) -> None:
    header, data, expected = DAMAGED[fault]
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        open_file(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)
    if fault != "duplicate":  # all others the reference refuses too
        with pytest.raises(SafetensorError):
            load_file(path)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 2**63), struct.pack("<Q", 9) + b"{}"])
def test_files_that_end_inside_the_header(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="ends inside its header; the download looks incomplete"):
        open_file(tmp_path / "x.safetensors")


def test_huge_header_is_not_read(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", b"", header_nbytes=2**32)
    with path.open("r+b") as file:
        file.truncate(2**33)  # a hole: no disk space
    with pytest.raises(CheckpointError, match="header of 4,294,967,296 bytes"):
        open_file(path)


def test_absent_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        open_file(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        open_file(tmp_path)


def test_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(1000)}, path)
    source = open_file(path)
    with path.open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(CheckpointError, match="file has changed since the model was opened"):
        source.read("x")
    path.unlink()
    with pytest.raises(CheckpointError, match="x: cannot be read: No such file"):
        source.read("x")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 250), byte=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused_as_the_reference_does(position: int, byte: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = byte
    path.write_bytes(content)
    expected, actual = reference_reading(path), reading(path)
    if actual is None:
        names_clash = content.count(b'"a"') != 1
        assert expected is None or names_clash
    elif expected is not None:
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in actual)


def reference_reading(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        return load_file(path)
    except (SafetensorError, RuntimeError):
        return None


def reading(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        source = open_file(path)
        return {name: source.read(name) for name in source.names()}
    except CheckpointError:
        return None
