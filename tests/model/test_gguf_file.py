"""GGUF files that are damaged, truncated, hostile or split."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from monograph.errors import CheckpointError, ConfigError, MonographError
from monograph.model.gguf_file import GGUFFile
from monograph.model.gguf_source import GGUFSource
from monograph.model.gguf_tokenizer import tokenizer_parts
from tests.model.tiny_gguf import Shape, finish, metadata_writer, random_weights, write_model, write_tokenizer

STRING, ARRAY, UINT8, UINT32, UINT64, FLOAT32, BOOL = 8, 9, 0, 4, 10, 6, 7
F32, Q8_0 = 0, 8
HUGE = (1 << 63) + 12345
# What the parser may allocate for a file of a few KiB whose counts are lies.
PEAK_NBYTES = 8 << 20


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def record(name: str, dimensions: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def model(
    *pairs: bytes,
    records: tuple[bytes, ...] = (),
    data: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> bytes:
    """Return the bytes of a file; counts are true unless given."""
    counts = (len(records) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(records)
    return header + bytes(-len(header) % 32) + data


NUMBERS = np.arange(16, dtype="<f4").tobytes()  # two rows of eight, or two tensors of 32 bytes

SOUND = {
    "empty": model(),
    "version 2": model(version=2),
    "metadata": model(
        pair("a", UINT32, struct.pack("<I", 7)),
        pair("b", STRING, text("naïve")),
        pair("c", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("")),
        pair("d", ARRAY, struct.pack("<IQ", FLOAT32, 2) + struct.pack("<ff", 0.5, 2)),
        pair("e", BOOL, b"\1"),
        records=(record("w", (8, 2)),),
        data=NUMBERS,
    ),
    "two tensors": model(records=(record("w", (8,)), record("v", (8,), offset=32)), data=NUMBERS),
}

DAMAGED = {
    "no bytes": (b"", "not a GGUF file"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "a zip": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "old magic": (model(magic=b"ggjt"), "not a GGUF file"),
    "magic only": (b"GGUF", "truncated"),
    "version 0": (model(version=0), "version 0"),
    "version 1": (model(version=1), "version 1"),
    "version 4": (model(version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "a tensor count": (model(num_tensors=HUGE), "tensors"),
    "a tensor count that overflows": (model(num_tensors=1 << 59), "tensors"),
    "a pair count": (model(num_pairs=HUGE), "metadata pairs"),
    "more pairs than there are": (model(pair("a", BOOL, b"\1"), num_pairs=2), "key is empty"),
    "a key length": (model(struct.pack("<Q", HUGE) + bytes(40), num_pairs=1), "claims"),
    "a key beyond the end": (model(struct.pack("<Q", 4000) + bytes(40), num_pairs=1), "truncated"),
    "a text length": (model(pair("a", STRING, struct.pack("<Q", HUGE) + bytes(40))), "claims"),
    "an array count": (model(pair("a", ARRAY, struct.pack("<IQ", UINT64, HUGE) + bytes(40))), "claims"),
    "an array count that overflows": (
        model(pair("a", ARRAY, struct.pack("<IQ", UINT64, 1 << 61) + bytes(40))),
        "claims",
    ),
    "an array of texts": (model(pair("a", ARRAY, struct.pack("<IQ", STRING, 1 << 40) + bytes(40))), "claims"),
    "an array longer than the file": (model(pair("a", ARRAY, struct.pack("<IQ", UINT64, 99) + bytes(40))), "claims 99"),
    "texts longer than the file": (model(pair("a", ARRAY, struct.pack("<IQ", STRING, 99) + bytes(40))), "claims 99"),
    "more tensors than fit": (model(num_tensors=99), "claims 99 tensors"),
    "arrays of arrays": (model(pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(40))), "array of arrays"),
    "a value type": (model(pair("a", 13, bytes(40))), "unknown value type 13"),
    "a key twice": (model(pair("a", BOOL, b"\1"), pair("a", BOOL, b"\1")), "a occurs twice"),
    "bytes that are no text": (model(pair(b"\xff\xfe", BOOL, b"\1")), "UTF-8"),
    "no dimensions": (model(records=(record("w", ()),), data=NUMBERS), "w has 0 dimensions"),
    "many dimensions": (model(records=(record("w", (8, 1, 1, 1, 1)),), data=NUMBERS), "w has 5 dimensions"),
    "an empty tensor": (model(records=(record("w", (8, 0)),), data=NUMBERS), "w is empty"),
    "a dimension": (model(records=(record("w", (HUGE, 2)),), data=NUMBERS), "w ends at byte"),
    "a product that overflows": (model(records=(record("w", (1 << 32, 1 << 32)),), data=NUMBERS), "w ends at byte"),
    "a tensor type": (model(records=(record("w", (8, 2), kind=99),), data=NUMBERS), "w has the unknown type 99"),
    "half a block": (model(records=(record("w", (8, 2), kind=Q8_0),), data=NUMBERS), "blocks of 32"),
    "an offset": (model(records=(record("w", (8, 2), offset=HUGE // 32 * 32),), data=NUMBERS), "w ends at byte"),
    "data one byte short": (model(records=(record("w", (8, 2)),), data=NUMBERS[:-1]), "w ends at byte"),
    "an offset between": (model(records=(record("w", (8,), offset=4),), data=NUMBERS), "not aligned"),
    "one place twice": (model(records=(record("w", (8,)), record("v", (8,))), data=NUMBERS), "overlap"),
    "a tensor twice": (
        model(records=(record("w", (8,)), record("w", (8,), offset=32)), data=NUMBERS),
        "w occurs twice",
    ),
    "alignment 0": (model(pair("general.alignment", UINT32, struct.pack("<I", 0))), "general.alignment"),
    "alignment 24": (model(pair("general.alignment", UINT32, struct.pack("<I", 24))), "general.alignment"),
    "alignment as text": (model(pair("general.alignment", STRING, text("32"))), "general.alignment"),
}


@pytest.mark.parametrize("raw", SOUND.values(), ids=SOUND)
def test_sound_files_open(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(raw)
    with GGUFFile(tmp_path / "m.gguf"):
        pass


def test_what_a_sound_file_says(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(SOUND["metadata"])
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert file.integer("a") == 7
        assert file.text("b") == "naïve"
        assert file.texts("c") == ["x", ""]
        assert file.numbers("d").tolist() == [0.5, 2.0]
        assert file.flag("e") is True
        assert file.number("a") == 7.0
        assert file.integer("absent", 3) == 3
        tensor = file.tensors["w"]
        assert tensor.shape == (2, 8)
        raw = np.empty(32, dtype=np.uint8)
        file.read_into(tensor, 32, raw)
        assert raw.view("<f4").tolist() == list(range(8, 16))


def test_metadata_of_another_type_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(SOUND["metadata"])
    with GGUFFile(tmp_path / "m.gguf") as file:
        with pytest.raises(ConfigError, match=r"m\.gguf: metadata a is 7, expected a string"):
            file.text("a")
        with pytest.raises(ConfigError, match="metadata e is True, expected an integer"):
            file.integer("e")
        with pytest.raises(ConfigError, match="metadata e is True, expected a number"):
            file.number("e")
        with pytest.raises(ConfigError, match="metadata a is 7, expected true or false"):
            file.flag("a")
        with pytest.raises(ConfigError, match="metadata d is an array of 2, expected an array of strings"):
            file.texts("d")
        with pytest.raises(ConfigError, match="metadata c is an array of 2, expected an array of numbers"):
            file.numbers("c")
        with pytest.raises(ConfigError, match="metadata has no absent"):
            file.text("absent")


@pytest.mark.parametrize(("raw", "says"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_errors_that_name_the_file(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "m.gguf").write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as error:
            GGUFFile(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < PEAK_NBYTES
    finally:
        tracemalloc.stop()
    assert str(tmp_path / "m.gguf") in str(error.value)
    assert says in str(error.value)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = SOUND["metadata"]
    for nbytes in range(len(whole)):
        (tmp_path / "m.gguf").write_bytes(whole[:nbytes])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            GGUFFile(tmp_path / "m.gguf")


@pytest.mark.filterwarnings("ignore:.*tokenizer.ggml.pre:UserWarning")
def test_flipped_bytes_end_in_our_errors_or_in_a_model(tmp_path: Path) -> None:
    """Whatever the damage to a header: no other exception, no hang, no large allocation."""
    shape = Shape(num_layers=1)
    file = write_model(tmp_path / "m.gguf", random_weights(shape), shape)
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab", "<|im_end|>"]
    vocabulary = write_tokenizer(
        tmp_path / "t.gguf", "llama", tokens, [2, 3, 3, 1, 1, 1, 1, 1, 3], scores=[0.0] * 9, bos_token_id=1
    )
    merges = write_tokenizer(
        tmp_path / "b.gguf",
        "gpt2",
        [*tokens, "ba"],
        [1] * 10,
        merges=["a b", "b a", "▁ ab"],
        pre="smollm",
        eos_token_id=2,
    )
    rng = random.Random(0)
    started = time.monotonic()
    for target, use in ((file, GGUFSource), (vocabulary, tokenizer_parts), (merges, tokenizer_parts)):
        whole = target.read_bytes()
        for _ in range(300):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(min(len(damaged), 1600))] = rng.choice((0, 1, 255, rng.randrange(256)))
            (tmp_path / "damaged.gguf").write_bytes(damaged)
            tracemalloc.start()
            try:
                opened = use(tmp_path / "damaged.gguf")
                if isinstance(opened, GGUFSource):
                    opened.close()
            except MonographError as error:
                assert "damaged.gguf" in str(error)  # noqa: PT017
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < PEAK_NBYTES
    assert time.monotonic() - started < 30


def test_what_is_no_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, says in (
        ("absent.gguf", "No such file"),
        ("pipe.gguf", "not a regular file"),
        ("", "not a regular file"),
    ):
        with pytest.raises(CheckpointError, match=says):
            GGUFFile(tmp_path / name)


def write_split(folder: Path) -> list[Path]:
    """Write a tiny model in parts of eight tensors, as the library splits them."""
    shape = Shape()
    writer = metadata_writer(folder / "m.gguf", shape, split_max_tensors=8)
    for i, weight in enumerate(random_weights(shape).values()):
        writer.add_tensor(f"tensor{i}", weight.numpy())
    finish(writer)
    return sorted(folder.glob("m-*.gguf"))


def test_a_split_model_looks_like_one_file(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    assert [path.name for path in paths] == [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    expected = list(random_weights(Shape()).values())
    with GGUFFile(paths[0]) as file:
        assert len(file.tensors) == len(expected)
        assert file.integer("llama.block_count") == 2
        for i, weight in enumerate(expected):
            tensor = file.tensors[f"tensor{i}"]
            raw = np.empty(tensor.nbytes, dtype=np.uint8)
            file.read_into(tensor, 0, raw)
            np.testing.assert_array_equal(raw.view("<f4").reshape(tensor.shape), weight.numpy())


def test_split_models_that_are_not_whole_are_errors(tmp_path: Path) -> None:
    first, second, third = write_split(tmp_path)
    with pytest.raises(CheckpointError, match=r"open the first part, m-00001-of-00003\.gguf"):
        GGUFFile(second)
    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"occurs twice|does not call itself part 3 of 3"):
        GGUFFile(first)
    third.unlink()
    with pytest.raises(CheckpointError, match=r"missing beside it: m-00003-of-00003\.gguf"):
        GGUFFile(first)
    third.write_bytes(content)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"must keep their names.*-00001-of-00003\.gguf"):
        GGUFFile(renamed)
