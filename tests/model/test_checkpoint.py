"""Which weight files a folder means, and whether they hold what the configuration asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from monograph.errors import CheckpointError, ConfigError
from monograph.model.checkpoint import EMBED, LM_HEAD, check_complete, layer_name, resolve_dtype, wanted_tensors
from monograph.model.config import ModelConfig
from monograph.model.manifest import INDEX_FILE, read_manifest
from monograph.model.safetensors_source import SafetensorsSource
from tests.checkpoints import ABSENT, tiny_config, tiny_tensors, write_checkpoint

SHARDS = [f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2)]


def open_checkpoint(folder: Path) -> tuple[SafetensorsSource, ModelConfig]:
    """Everything that happens before anything is allocated."""
    source, config = SafetensorsSource(read_manifest(folder)), ModelConfig.from_folder(folder)
    check_complete(source, config)
    return source, config


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


def edit_index(folder: Path, **weight_map: str | None) -> None:
    """Change entries of the index; None removes one. Dots in names are written as `__`."""
    path = folder / INDEX_FILE
    index = json.loads(path.read_text())
    for name, file in weight_map.items():
        index["weight_map"][name.replace("__", ".")] = file
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_complete_checkpoints(shards: int, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, shards=shards)
    source, config = open_checkpoint(tmp_path)
    assert source.names() == set(written) == set(wanted_tensors(config))
    for name, tensor in written.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert source.dtype(name) == torch.float32
        assert torch.equal(source.read(name), tensor)
    source.close()
    source.close()


def test_wanted_tensors_of_a_biased_tied_model() -> None:
    config = ModelConfig.from_dict(
        tiny_config(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=32)
    )
    wanted = wanted_tensors(config)
    assert LM_HEAD not in wanted
    assert len(wanted) == 2 + 2 * (2 + 7 + 7)
    assert wanted[layer_name(1, "self_attn.q_proj")] == (128, 64)
    assert wanted[layer_name(1, "self_attn.k_proj", "bias")] == (64,)
    assert wanted[layer_name(1, "self_attn.o_proj")] == (64, 128)
    assert wanted[layer_name(0, "self_attn.o_proj", "bias")] == (64,)
    assert wanted[layer_name(0, "mlp.down_proj", "bias")] == (64,)


# B03: a flag and the tensors that it is about must agree.


def test_b03_flag_without_tensors(tmp_path: Path) -> None:
    biases = [layer_name(0, f"self_attn.{part}_proj", "bias") for part in "qkvo"]
    write_checkpoint(tmp_path, tiny_config(attention_bias=True), omit=biases)
    message = refusal(tmp_path)
    assert all(name in message for name in biases)
    assert layer_name(1, "self_attn.q_proj", "bias") not in message
    assert "attention_bias asks for biases of q, k, v and o" in message


def test_b03_tensors_without_flag(tmp_path: Path) -> None:
    name = layer_name(1, "self_attn.q_proj", "bias")
    write_checkpoint(tmp_path, extra={name: torch.ones(64)})
    assert f"has no place for: {name} (attention_bias or mlp_bias is false" in refusal(tmp_path)


# B05: what is incomplete is not loaded.


def test_b05_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / SHARDS[1]).unlink()
    message = refusal(tmp_path)
    assert f"missing: {SHARDS[1]}; the download looks incomplete" in message
    assert SHARDS[0] not in message


def test_b05_no_shard_at_all(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    for shard in SHARDS:
        (tmp_path / shard).unlink()
    assert f"missing: {', '.join(SHARDS)}; the download looks incomplete" in refusal(tmp_path)


def test_b05_tensor_absent_from_its_shard(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, shards=2)
    names = [layer_name(1, "mlp.up_proj"), "model.norm.weight"]
    index = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    assert {index[name] for name in names} == {SHARDS[1]}
    rest = {name: tensors[name] for name, shard in index.items() if shard == SHARDS[1] and name not in names}
    save_file(rest, tmp_path / SHARDS[1])
    message = refusal(tmp_path)
    for name in names:
        assert f"{name} (not in {SHARDS[1]})" in message
    assert "incomplete" in message


def test_b05_index_names_the_wrong_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    edit_index(tmp_path, lm_head__weight=SHARDS[0])
    assert f"lm_head.weight (not in {SHARDS[0]})" in refusal(tmp_path)


def test_b05_index_and_shard_agree_but_the_model_wants_more(tmp_path: Path) -> None:
    name = layer_name(0, "mlp.down_proj")
    write_checkpoint(tmp_path, shards=2, omit=[name])
    assert f"missing tensors: {name} (an incomplete download or conversion?)" in refusal(tmp_path)


def test_b05_shard_cut_short(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    path = tmp_path / SHARDS[1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    message = refusal(tmp_path)
    assert str(path) in message
    assert "the download looks incomplete" in message


def test_b05_no_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert f"expected model.safetensors or {INDEX_FILE}, got neither" in refusal(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    assert "consolidated.safetensors) are not a whole model" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("{}", "weight_map: expected an object of file names, got null"),
        ('{"weight_map": {}}', "weight_map: expected an object of file names"),
        ('{"weight_map": []}', "weight_map: expected an object of file names"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "a: expected the name of a .safetensors file in the same folder"),
        ('{"weight_map": {"a": "x.bin"}}', "a: expected the name of a .safetensors file in the same folder"),
        ('{"weight_map": {"a": "/x.safetensors"}}', "a: expected the name of a .safetensors file in the same folder"),
        ('{"weight_map": {"a": null}}', "a: expected the name of a .safetensors file in the same folder"),
        ("[", "not JSON"),
    ],
)
def test_hostile_index(index: str, expected: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / INDEX_FILE).write_text(index)
    assert expected in refusal(tmp_path)


# B06: a missing head is tied or an error, never noise.


@pytest.mark.parametrize("tie", [False, ABSENT, None])
def test_b06_no_head_and_not_tied(tie: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(tie_word_embeddings=tie), omit=[LM_HEAD])
    assert f"missing tensors: {LM_HEAD} (tie_word_embeddings is false" in refusal(tmp_path)


def test_b06_no_head_and_tied(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(tie_word_embeddings=True))
    source, _ = open_checkpoint(tmp_path)
    assert LM_HEAD not in source.names()


def test_b06_only_the_head_and_tied(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path, tiny_config(tie_word_embeddings=True), omit=[EMBED], extra={LM_HEAD: torch.zeros(96, 64)}
    )
    open_checkpoint(tmp_path)


def test_b06_neither_and_tied(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(tie_word_embeddings=True), omit=[EMBED])
    assert f"missing tensors: {EMBED}" in refusal(tmp_path)


def test_b06_tied_head_of_another_shape(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(tie_word_embeddings=True), extra={LM_HEAD: torch.zeros(95, 64)})
    assert f"{LM_HEAD} (expected [96, 64], got [95, 64])" in refusal(tmp_path)


# B07: only the files of the manifest are opened.


def test_b07_other_copies_are_not_opened(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, shards=2)
    save_file(
        {name: torch.zeros_like(tensor) for name, tensor in written.items()}, tmp_path / "consolidated.safetensors"
    )
    save_file({"layers.0.attention.wq.weight": torch.zeros(3)}, tmp_path / "model-00003-of-00002.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "x.pth").write_bytes(b"junk")
    manifest = read_manifest(tmp_path)
    assert [path.name for path in manifest.files] == SHARDS
    source, _ = open_checkpoint(tmp_path)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in written.items())


def test_b07_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=1, shards=2)
    written = write_checkpoint(tmp_path, seed=2)
    (tmp_path / SHARDS[1]).unlink()  # not even looked for
    source, _ = open_checkpoint(tmp_path)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in written.items())


# Shapes, extras, dtypes


def test_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    names = [layer_name(0, "self_attn.k_proj"), layer_name(1, "post_attention_layernorm")]
    write_checkpoint(tmp_path, extra={names[0]: torch.zeros(64, 64), names[1]: torch.zeros(1, 64)})
    message = refusal(tmp_path)
    assert f"{names[0]} (expected [32, 64], got [64, 64])" in message
    assert f"{names[1]} (expected [64], got [1, 64])" in message


def test_vocabulary_of_another_size(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    write_checkpoint(tmp_path, tiny_config(vocab_size=128), tensors=tensors)
    message = refusal(tmp_path)
    assert f"{EMBED} (expected [128, 64], got [96, 64])" in message
    assert f"{LM_HEAD} (expected [128, 64], got [96, 64])" in message


def test_more_layers_than_the_configuration_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(num_hidden_layers=1), tensors=tiny_tensors(tiny_config()))
    message = refusal(tmp_path)
    assert "has no place for: model.layers.1.input_layernorm.weight, " in message
    assert message.count("model.layers.1.") == 9


def test_long_lists_are_cut(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, extra={f"layers.{i}.x": torch.zeros(1) for i in range(100)})
    assert "and 36 more" in refusal(tmp_path)


def test_harmless_extras_are_accepted(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    extra["model.rotary_emb.inv_freq"] = torch.ones(8)
    write_checkpoint(tmp_path, extra=extra)
    open_checkpoint(tmp_path)


def test_quantised_checkpoint_is_recognised(tmp_path: Path) -> None:
    name = layer_name(0, "mlp.up_proj")
    quantised = {name: torch.zeros(128, 64, dtype=torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}
    write_checkpoint(tmp_path, extra=quantised)
    message = refusal(tmp_path)
    assert f"{name}_scale (this looks like a quantised checkpoint" in message
    assert f"{name} (float8_e4m3fn)" in message


def test_body_without_head_is_recognised(tmp_path: Path) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in tiny_tensors(tiny_config()).items()}
    write_checkpoint(tmp_path, tensors=tensors)
    assert "the names lack 'model.'" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("named", "stored", "requested", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, torch.float32, "auto", torch.bfloat16),
        ({"torch_dtype": ABSENT, "dtype": "float16"}, torch.float32, "auto", torch.float16),
        ({"torch_dtype": ABSENT}, torch.float16, "auto", torch.float16),
        ({"torch_dtype": ABSENT}, torch.bfloat16, "auto", torch.bfloat16),
        ({"torch_dtype": ABSENT}, torch.float64, "auto", torch.float32),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16, "float16", torch.float16),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16, "fp32", torch.float32),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_b09_dtype_follows_the_config_then_the_file(
    named: dict[str, Any], stored: torch.dtype, requested: str | torch.dtype, expected: torch.dtype, tmp_path: Path
) -> None:
    # Norms in another dtype do not decide.
    norms = {name: torch.ones(64) for name in (layer_name(0, "input_layernorm"), "model.norm.weight")}
    write_checkpoint(tmp_path, tiny_config(**named), dtype=stored, extra=norms if stored != torch.float64 else None)
    source, config = open_checkpoint(tmp_path)
    assert resolve_dtype(requested, config, source) == expected


@pytest.mark.parametrize("requested", ["int8", "", "float64", torch.float64, torch.int32])
def test_dtype_refusals(requested: str | torch.dtype, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    source, config = open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="dtype: expected auto, bfloat16, float16, float32, got"):
        resolve_dtype(requested, config, source)
