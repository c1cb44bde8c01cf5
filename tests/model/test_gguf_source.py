"""Tensors of GGUF files: values of every type, names, row order, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from monograph.errors import CheckpointError, ConfigError
from monograph.model import gguf_source
from monograph.model.checkpoint import Source, check_complete
from monograph.model.gguf_dequantise import is_supported
from monograph.model.gguf_file import GGUFFile
from monograph.model.gguf_source import GGUFSource, hf_name
from tests import smollm2
from tests.model.tiny_gguf import Shape, finish, interleaved, metadata_writer, random_weights, stored, write_model

TINY = Shape()
SHAPES = {
    "gqa": TINY,
    "mha": Shape(num_kv_heads=4),
    "mqa": Shape(num_kv_heads=1),
    "wide heads": Shape(head_dim=32),
    "odd sizes": Shape(vocab_size=37, hidden_size=56, intermediate_size=40, num_q_heads=3, num_kv_heads=1, head_dim=10),
    "biases": Shape(attention_bias=True, mlp_bias=True),
    "tied": Shape(tied=True),
}
QUANTISED = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S",
    "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS",
]  # fmt: skip


def library_values(path: Path, name: str) -> np.ndarray:
    """Read a tensor with the gguf library alone, in the file's row order."""
    (tensor,) = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    with np.errstate(all="ignore"):  # blocks of random bits may hold scales that are not finite
        values: np.ndarray = dequantize(np.ascontiguousarray(tensor.data), tensor.tensor_type)
    return np.array(values).reshape(tuple(reversed(tensor.shape.tolist())))


def assert_holds(source: Source, weights: dict[str, torch.Tensor]) -> None:
    assert source.names() == set(weights)
    for name, weight in weights.items():
        read = source.read(name)
        assert source.shape(name) == tuple(weight.shape) == tuple(read.shape), name
        assert read.dtype == source.dtype(name), name
        assert read.is_contiguous()
        assert torch.equal(read, weight.to(read.dtype)), name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_b08_rows_of_q_and_k_come_back_in_order(tmp_path: Path, shape: Shape) -> None:
    weights = random_weights(shape)
    with GGUFSource(write_model(tmp_path / "m.gguf", weights, shape)) as source:
        assert_holds(source, weights)
        check_complete(source, source.config)
        assert source.config.dtype == torch.float32


def test_b08_order_left_as_stored_or_taken_by_q_heads_would_be_seen(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    k_name = "model.layers.1.self_attn.k_proj.weight"
    file = write_model(tmp_path / "m.gguf", weights, TINY)
    as_stored = torch.from_numpy(library_values(file, "blk.1.attn_k.weight"))
    assert not torch.equal(as_stored, weights[k_name])
    assert not torch.equal(interleaved(weights[k_name], TINY.num_q_heads), as_stored)
    assert torch.equal(interleaved(weights[k_name], TINY.num_kv_heads), as_stored)


def test_b08_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle reads the same file and must come to the same weights and the same sizes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    from transformers import LlamaForCausalLM

    file = write_model(tmp_path / "m.gguf", random_weights(TINY), TINY, Kind.Q8_0)
    oracle: Any = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with GGUFSource(file) as source:
        assert_holds(source, oracle.state_dict())
        config = source.config
    assert config.dtype is None
    assert config.vocab_size == oracle.config.vocab_size
    assert config.num_kv_heads == oracle.config.num_key_value_heads
    assert config.head_dim == oracle.config.head_dim
    assert config.max_position_embeddings == oracle.config.max_position_embeddings
    assert config.rope.theta == oracle.config.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == pytest.approx(oracle.config.rms_norm_eps, rel=1e-7)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16], ids=["F16", "BF16"])
def test_plain_floats_keep_their_dtype(tmp_path: Path, kind: Kind) -> None:
    weights = random_weights(TINY)
    dtype = torch.float16 if kind == Kind.F16 else torch.bfloat16
    with GGUFSource(write_model(tmp_path / "m.gguf", weights, TINY, kind)) as source:
        assert source.config.dtype == dtype
        assert source.dtype("model.layers.0.mlp.up_proj.weight") == dtype
        assert source.dtype("model.norm.weight") == torch.float32
        assert_holds(source, weights)


@pytest.mark.parametrize("name", QUANTISED)
def test_values_of_quantised_types(tmp_path: Path, name: str) -> None:
    """Values are the library's, over several slabs with an uneven last one, permuted and not."""
    kind = Kind[name]
    shape = Shape(hidden_size=256, intermediate_size=1100, num_layers=1, num_q_heads=16, num_kv_heads=8, head_dim=64)
    rows = {"attn_q": 1024, "attn_k": 512, "ffn_up": 1100}
    rng = np.random.default_rng(list(name.encode()))
    writer = metadata_writer(tmp_path / "m.gguf", shape)
    for part, num_rows in rows.items():
        writer.add_tensor(f"blk.0.{part}.weight", random_blocks(rng, num_rows, 256, kind), raw_dtype=kind)
    finish(writer)
    with GGUFSource(tmp_path / "m.gguf") as source:
        for part, num_heads in (("attn_q", 16), ("attn_k", 8), ("ffn_up", 0)):
            read = source.read(hf_name(f"blk.0.{part}.weight"))
            in_file_order = interleaved(read, num_heads) if num_heads else read
            expected = library_values(tmp_path / "m.gguf", f"blk.0.{part}.weight")
            assert read.dtype == torch.float32
            assert np.isfinite(expected).mean() > 0.9
            np.testing.assert_array_equal(in_file_order.numpy(), expected)


@pytest.mark.parametrize(
    ("kinds", "quantised"),
    [((Kind.F32, Kind.F16), False), ((Kind.BF16, Kind.BF16), False), ((Kind.F16, Kind.Q8_0), True)],
    ids=["mixed floats", "one float", "one quantised"],
)
def test_quantised_means_blocks_not_a_mix_of_floats(tmp_path: Path, kinds: tuple[Kind, Kind], quantised: bool) -> None:
    writer = metadata_writer(tmp_path / "m.gguf", TINY)
    for name, kind in zip(("token_embd.weight", "output.weight"), kinds, strict=True):
        writer.add_tensor(name, quantize(np.ones((96, 64), dtype=np.float32), kind), raw_dtype=kind)
    finish(writer)
    with GGUFSource(tmp_path / "m.gguf") as source:
        assert source.is_quantised == quantised


def random_blocks(rng: np.random.Generator, num_rows: int, num_columns: int, kind: Kind) -> np.ndarray:
    """Return rows of blocks: quantised numbers where the library quantises the type, random bits where it does not."""
    try:
        numbers: np.ndarray = rng.normal(0, 0.15, (num_rows, num_columns)).astype(np.float32)
        return np.asarray(quantize(numbers, kind))
    except NotImplementedError:
        block_size, block_nbytes = GGML_QUANT_SIZES[kind]
        return rng.integers(0, 256, (num_rows, num_columns // block_size * block_nbytes), dtype=np.uint8)


def test_every_type_of_the_library_is_read_and_no_other() -> None:
    dequantised = {kind.name for kind in Kind if library_dequantises(kind)}
    assert dequantised == {kind.name for kind in Kind if is_supported(kind)}
    assert dequantised == {"F32", "F16", "BF16", *QUANTISED}


def library_dequantises(kind: Kind) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def test_a_type_that_is_not_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    writer = metadata_writer(tmp_path / "m.gguf", TINY)
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((128, 64), dtype=np.int32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"m\.gguf.*blk\.0\.ffn_up\.weight.*I32"):
        GGUFSource(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_1], ids=["F32", "F16", "Q4_1"])
def test_rows_are_those_of_the_whole_and_nothing_else_is_written(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_source, "_SLAB_ELEMENTS", 40 * 64)  # tiny tensors span slabs, with a remainder
    weights = random_weights(TINY)
    with GGUFSource(write_model(tmp_path / "m.gguf", weights, TINY, kind)) as source:
        for name in source.names():
            whole, unit = source.read(name), source.row_unit(name)
            assert unit == (TINY.head_dim if "q_proj" in name or "k_proj" in name else 1)
            count = unit if whole.dim() > 1 else len(whole)  # vectors are small, and quantised ones have no rows
            for first in range(0, len(whole), count):
                expected = whole[first : first + count]
                slot = torch.full((expected.numel() + 64,), torch.nan, dtype=whole.dtype)
                source.read_rows(name, first, slot[32:-32].view(expected.shape))
                assert torch.equal(slot[32:-32].view(expected.shape), expected), name
                assert slot[:32].isnan().all()
                assert slot[-32:].isnan().all()


def test_threads_give_the_same_bits(tmp_path: Path) -> None:
    shape = Shape(vocab_size=5000, hidden_size=128, num_q_heads=8, num_kv_heads=4, num_layers=1)
    file = write_model(tmp_path / "m.gguf", random_weights(shape), shape, Kind.Q5_0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with GGUFSource(file) as source:
            alone = {name: source.read(name) for name in source.names()}
        torch.set_num_threads(3)
        with GGUFSource(file) as source:
            assert all(torch.equal(source.read(name), alone[name]) for name in source.names())
    finally:
        torch.set_num_threads(before)


def test_frequency_divisors_belong_to_the_configuration(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    file = write_model(tmp_path / "m.gguf", random_weights(TINY), TINY, extra={"rope_freqs.weight": divisors})
    with GGUFSource(file) as source:
        assert source.config.rope.frequencies == tuple(divisors.tolist())
        assert source.names() == set(random_weights(TINY))


def test_tensors_that_llama_does_not_have_keep_their_names(tmp_path: Path) -> None:
    scale = {"blk.0.attn_q.scale": np.ones(1, dtype=np.float32)}
    file = write_model(tmp_path / "m.gguf", random_weights(TINY), TINY, extra=scale)
    with GGUFSource(file) as source, pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.scale"):
        check_complete(source, source.config)


def test_rows_that_do_not_divide_into_heads_are_an_error(tmp_path: Path) -> None:
    writer = metadata_writer(tmp_path / "m.gguf", TINY)
    writer.add_tensor("blk.0.attn_k.weight", np.zeros((30, 64), dtype=np.float32))
    finish(writer)
    with GGUFSource(tmp_path / "m.gguf") as source, pytest.raises(CheckpointError, match=r"attn_k\.weight.*30 rows"):
        source.read("model.layers.0.self_attn.k_proj.weight")


def test_unknown_names_and_reading_after_close(tmp_path: Path) -> None:
    source = GGUFSource(write_model(tmp_path / "m.gguf", random_weights(TINY), TINY))
    with pytest.raises(CheckpointError, match=r"no tensor token_embd\.weight"):
        source.read("token_embd.weight")
    source.close()
    source.close()
    assert source.shape("model.norm.weight") == (64,)
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight"):
        with pytest.raises(CheckpointError, match="closed"):
            source.read(name)


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", random_weights(TINY), TINY, Kind.Q8_0)
    with GGUFSource(file) as source:
        os.truncate(file, 4096)
        last = max(source._tensors, key=lambda name: source._tensors[name].offset)
        with pytest.raises(CheckpointError, match=r"m\.gguf.*tensor.*ends after the end"):
            source.read(last)


def test_a_refused_model_leaves_no_file_open(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    finish(writer)
    opened = GGUFFile(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="qwen2"):
        GGUFSource(opened)
    assert not opened._parts


def test_smollm2_values_are_those_of_the_library() -> None:
    file = smollm2.path()
    with GGUFSource(file) as source:
        check_complete(source, source.config)
        assert source.config.dtype is None
        assert source.config.tie_word_embeddings
        with GGUFFile(file) as raw:
            for gguf_name, heads in (
                ("blk.7.attn_q.weight", 9),
                ("blk.29.attn_k.weight", 3),
                ("blk.3.ffn_down.weight", 0),
            ):
                record = raw.tensors[gguf_name]
                blocks = np.empty(record.nbytes, dtype=np.uint8)
                raw.read_into(record, 0, blocks)
                expected = dequantize(blocks.reshape(record.shape[0], -1), record.type)
                read = source.read(hf_name(gguf_name))
                in_file_order = interleaved(read, heads) if heads else read
                np.testing.assert_array_equal(in_file_order.numpy(), expected)


def test_stored_order_is_what_the_converter_writes() -> None:
    """The helper of these tests against the reshape by which the converter is described."""
    weight = torch.arange(64 * 3, dtype=torch.float32).view(64, 3)
    expected = weight.view(4, 2, 8, 3).transpose(1, 2).reshape(64, 3)
    np.testing.assert_array_equal(stored("x.q_proj.weight", weight, TINY), expected.numpy())
