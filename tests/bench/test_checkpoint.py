"""Other systems load the very weights of an arena."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.checkpoint import write_checkpoint
from bench.gguf_checkpoint import write_gguf
from bench.shapes import SHAPES, random_decoder
from monograph.errors import ConfigError
from monograph.model.checkpoint import Source
from monograph.model.config import ModelConfig, RopeConfig
from monograph.model.decoder import Decoder
from monograph.model.gguf_source import GGUFSource
from monograph.model.manifest import read_manifest
from monograph.model.rope import inv_freq
from monograph.model.safetensors_source import SafetensorsSource
from monograph.model.tokenizer import Tokenizer
from monograph.model.weights import load_weights
from tests.bench.tiny import CONFIG

CPU = torch.device("cpu")
LLAMA3 = replace(SHAPES["llama-3.1-8b"].rope, original_max_position_embeddings=64)
YARN = RopeConfig(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=16.0,
    beta_slow=1.0,
    attention_factor=1.25,
    truncate=False,
)
CONFIGS = {
    "llama3": replace(CONFIG, rope=LLAMA3, dtype=torch.bfloat16, bos_token_id=1, eos_token_ids=(2, 3)),
    "linear and tied": replace(CONFIG, rope=RopeConfig("linear", 5e5, 4.0), tie_word_embeddings=True),
    "biases": replace(CONFIG, attention_bias=True, mlp_bias=True),
}
FAMILIES = {
    "yarn, of Mistral": replace(CONFIG, model_type="mistral", rope=YARN),
    "qwen2": replace(CONFIG, model_type="qwen2", attention_bias=True),
    "phi3": replace(CONFIG, model_type="phi3"),
}


def decoder_of(config: ModelConfig) -> Decoder:
    assert config.dtype is not None
    return random_decoder(config, config.dtype, 64, CPU)


def loaded_equals(source: Source, config: ModelConfig, decoder: Decoder) -> bool:
    """Whether loading a checkpoint gives the weights of the decoder, bit for bit."""
    names = [
        slot.name for slot in decoder.arena.layout.entries if slot.lifetime == "weight" and slot.name != "rope_table"
    ]
    before = decoder.arena.fingerprint(names)
    for name in names:
        decoder.arena.view(name).fill_(float("nan"))
    load_weights(source, config, decoder.arena)
    return decoder.arena.fingerprint(names) == before


@pytest.mark.parametrize("name", [*CONFIGS, *FAMILIES])
def test_a_folder_says_all(name: str, tmp_path: Path) -> None:
    config = {**CONFIGS, **FAMILIES}[name]
    decoder = decoder_of(config)
    write_checkpoint(tmp_path, config, decoder.arena, shard_nbytes=30_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert ModelConfig.from_folder(tmp_path) == config
    source = SafetensorsSource(read_manifest(tmp_path))
    assert loaded_equals(source, config, decoder)
    source.close()
    assert Tokenizer.from_folder(tmp_path).decode([3, config.vocab_size - 1]) == f"w3 w{config.vocab_size - 1}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gguf_file_says_all(name: str, tmp_path: Path) -> None:
    config, decoder = CONFIGS[name], decoder_of(CONFIGS[name])
    path = tmp_path / "model.gguf"
    write_gguf(path, config, decoder.arena)
    source = GGUFSource(path)
    torch.testing.assert_close(inv_freq(source.config), inv_freq(config), rtol=1e-6, atol=0)
    for field in ("num_layers", "num_q_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "vocab_size"):
        assert getattr(source.config, field) == pytest.approx(getattr(config, field)), field
    assert loaded_equals(source, config, decoder)
    source.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_are_not_written_as_gguf(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type: expected llama with rope_type"):
        write_gguf(tmp_path / "model.gguf", FAMILIES[name], decoder_of(FAMILIES[name]).arena)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (replace(CONFIG, model_type="mistral", sliding_window=100), "sliding_window: expected null, got 100"),
        (replace(CONFIG, model_type="smollm3", layers_without_rope=(1,)), "layers_without_rope: expected none, got"),
    ],
)
def test_layers_that_differ_are_not_written(config: ModelConfig, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        write_checkpoint(tmp_path, config, decoder_of(CONFIG).arena)


def test_frequencies_of_their_own_are_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, rope=RopeConfig(frequencies=(1.0, 2.0, 3.0, 4.0)))
    with pytest.raises(ConfigError, match="explicit frequencies"):
        write_checkpoint(tmp_path, config, decoder_of(CONFIG).arena)
