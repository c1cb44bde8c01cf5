"""The configuration in GGUF metadata: what is read, what is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from monograph.errors import ConfigError
from monograph.model.config import ModelConfig, RopeConfig
from monograph.model.gguf_config import config_from_gguf
from monograph.model.gguf_file import GGUFFile
from monograph.model.rope import inv_freq
from tests import smollm2
from tests.model.tiny_gguf import Shape, finish, metadata_writer, random_weights, write_model

TINY = Shape()
SETTINGS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 96,
}


def write(path: Path, changes: dict[str, Any] | None = None, **tensors: np.ndarray) -> Path:
    """Write a file of settings; a change to None leaves the key out."""
    settings = {**SETTINGS, **(changes or {})}
    writer = gguf.GGUFWriter(path, settings.pop("general.architecture") or "none")
    for key, value in settings.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name.replace("__", "."), array)
    finish(writer)
    return path


def test_the_whole_configuration(tmp_path: Path) -> None:
    assert config_from_gguf(write(tmp_path / "m.gguf")) == ModelConfig(
        model_type="llama",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope=RopeConfig("default", 10000.0),
        tie_word_embeddings=True,
    )


def test_smollm2() -> None:
    assert config_from_gguf(smollm2.path()) == ModelConfig(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig("default", 100000.0),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_an_open_file_stays_open(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path / "m.gguf", token_embd__weight=np.zeros((96, 64), dtype=np.float32))) as file:
        config_from_gguf(file)
        file.read_into(file.tensors["token_embd.weight"], 0, np.empty(16, dtype=np.uint8))


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"llama.attention.head_count_kv": None}, "num_kv_heads", 4),
        ({"llama.attention.head_count_kv": [2, 2]}, "num_kv_heads", 2),
        ({"llama.feed_forward_length": [128, 128]}, "intermediate_size", 128),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 32}, "head_dim", 32),
        ({"llama.rope.dimension_count": 16}, "head_dim", 16),
        ({"llama.attention.layer_norm_rms_epsilon": 1e-6}, "rms_norm_eps", 1e-6),
        ({"llama.rope.freq_base": 500000.0}, "rope", RopeConfig("default", 500000.0)),
        ({"llama.rope.scaling.factor": 4.0}, "rope", RopeConfig("linear", factor=4.0)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            "rope",
            RopeConfig("linear", factor=2.5),
        ),
        ({"llama.rope.scale_linear": 8.0}, "rope", RopeConfig("linear", factor=8.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, "rope", RopeConfig()),
        ({"llama.rope.scaling.factor": 0.0}, "rope", RopeConfig()),
        ({"llama.expert_count": 0, "llama.attention.sliding_window": 0}, "head_dim", 16),
        ({"llama.attention.causal": True, "llama.rope.scaling.attn_factor": 1.0}, "head_dim", 16),
        ({"llama.attention.scale": 0.25, "llama.logit_scale": 1.0}, "head_dim", 16),
        ({"llama.tensor_data_layout": "Meta AI original pth"}, "head_dim", 16),
        ({"tokenizer.ggml.tokens": ["a", "b"], "llama.vocab_size": None}, "vocab_size", 2),
        ({"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.bos_token_id": 2}, "bos_token_id", 2),
    ],
)
def test_settings(tmp_path: Path, changes: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(config_from_gguf(write(tmp_path / "m.gguf", changes)), field) == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
        ({"general.type": "adapter"}, "type 'adapter', not a model"),
        ({"llama.block_count": None}, r"no llama\.block_count"),
        ({"llama.context_length": None}, r"no llama\.context_length"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, r"no llama\.attention\.layer_norm_rms_epsilon"),
        ({"llama.vocab_size": None}, "vocab_size"),
        ({"llama.block_count": 0}, "num_hidden_layers"),
        ({"llama.block_count": 2.0}, r"llama\.block_count is 2\.0, expected an integer"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count 0"),
        ({"llama.attention.head_count": 3}, r"not a multiple of llama\.attention\.head_count 3"),
        ({"llama.attention.head_count_kv": 3}, "num_key_value_heads"),
        ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv differs between layers \(\[2, 4\]\)"),
        ({"llama.attention.value_length": 8}, r"llama\.attention\.value_length = 8"),
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count = 8"),
        ({"llama.rope.freq_base": -1.0}, "rope_theta"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type = 'yarn'"),
        ({"llama.rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type = 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 1.5}, r"llama\.rope\.scaling\.attn_factor = 1\.5"),
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8"),
        ({"llama.attention.sliding_window": 4096}, r"llama\.attention\.sliding_window = 4096"),
        ({"llama.attention.sliding_window_pattern": [0, 1]}, r"llama\.attention\.sliding_window_pattern"),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal = False"),
        ({"llama.attention.scale": 0.1}, r"llama\.attention\.scale = 0\.1"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale = 0\.5"),
        ({"llama.use_parallel_residual": True}, r"llama\.use_parallel_residual = True"),
        ({"llama.tensor_data_layout": "other"}, r"llama\.tensor_data_layout = 'other'"),
        ({"llama.something_new": "yes"}, r"llama\.something_new = 'yes'"),
        (
            {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.bos_token_id": 1},
            r"bos_token_id is 1, expected an id below 1",
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"m\.gguf.*{says}"):
        config_from_gguf(write(tmp_path / "m.gguf", changes))


def test_more_tokens_than_rows_of_the_embedding_are_an_error(tmp_path: Path) -> None:
    rows = np.zeros((3, 64), dtype=np.float32)
    tokens = {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    assert config_from_gguf(write(tmp_path / "m.gguf", tokens, token_embd__weight=rows)).vocab_size == 3
    tokens["tokenizer.ggml.tokens"].append("d")
    with pytest.raises(ConfigError, match="4 tokens, but an embedding of 3 rows"):
        config_from_gguf(write(tmp_path / "m.gguf", tokens, token_embd__weight=rows))


@pytest.mark.parametrize("shape", [Shape(attention_bias=True), Shape(mlp_bias=True), Shape(tied=True)])
def test_biases_and_ties_follow_from_the_tensors(tmp_path: Path, shape: Shape) -> None:
    config = config_from_gguf(write_model(tmp_path / "m.gguf", random_weights(shape), shape))
    assert config.attention_bias == shape.attention_bias
    assert config.mlp_bias == shape.mlp_bias
    assert config.tie_word_embeddings == shape.tied


def test_mixed_matrices_have_no_dtype(tmp_path: Path) -> None:
    writer = metadata_writer(tmp_path / "m.gguf", TINY)
    writer.add_tensor("token_embd.weight", np.zeros((96, 64), dtype=np.float32))
    writer.add_tensor("output.weight", np.zeros((96, 64), dtype=np.float16))
    finish(writer)
    assert config_from_gguf(tmp_path / "m.gguf").dtype is None


def llama3_divisors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Return what converters store for Llama 3's stretched frequencies, from its published definition."""
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_frequency_divisors_give_the_frequencies_of_llama_3(tmp_path: Path, dtype: type[np.floating]) -> None:
    divisors = llama3_divisors(128, 500000.0, 32.0, 1.0, 4.0, 8192)
    assert len(set(divisors.tolist())) > 4
    assert divisors.min() == 1.0
    assert divisors.max() == 32.0
    changes = {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": 128, "llama.attention.value_length": 128}
    config = config_from_gguf(write(tmp_path / "m.gguf", changes, rope_freqs__weight=divisors.astype(dtype)))
    original = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 128,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
    )
    tolerance = 1e-6 if dtype is np.float32 else 1e-3
    torch.testing.assert_close(inv_freq(config), inv_freq(original), rtol=tolerance, atol=0)


def test_frequency_divisors_that_make_no_sense_are_errors(tmp_path: Path) -> None:
    for divisors, says in ((np.ones(7), "8 values"), (np.zeros(8), "above 0"), (np.full(8, np.nan), "finite")):
        with pytest.raises(ConfigError, match=rf"m\.gguf.*{says}"):
            config_from_gguf(write(tmp_path / "m.gguf", rope_freqs__weight=divisors.astype(np.float32)))
    blocks = np.zeros((1, 34), dtype=np.uint8)
    writer = metadata_writer(tmp_path / "q.gguf", TINY)
    writer.add_tensor("rope_freqs.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is of type Q8_0"):
        config_from_gguf(tmp_path / "q.gguf")


@pytest.mark.parametrize(
    ("metadata", "types", "expected"),
    [
        ({"eos_token_id": 1}, None, (1,)),
        ({"eos_token_id": 1, "eot_token_id": 2, "eom_token_id": 3}, None, (1, 2, 3)),
        ({"eos_token_id": 1, "eot_token_id": 1}, None, (1,)),
        ({"eos_token_id": 1}, [1, 3, 3, 3, 1], (1, 2)),
        ({"eos_token_id": 1}, [1, 3, 1, 3, 1], (1,)),
        ({}, None, ()),
        ({"model": "llama"}, None, (2,)),
        ({"model": "llama", "eos_token_id": 4}, None, (4,)),
    ],
)
def test_every_end_of_an_answer(
    tmp_path: Path, metadata: dict[str, Any], types: list[int] | None, expected: tuple[int, ...]
) -> None:
    """From the keys; from control tokens that say end of turn by their text; SentencePiece's own id by default."""
    changes: dict[str, Any] = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    changes["tokenizer.ggml.tokens"] = ["a", "<|end_of_text|>", "<|eot_id|>", "x", "y"]
    changes["tokenizer.ggml.token_type"] = types
    assert config_from_gguf(write(tmp_path / "m.gguf", changes)).eos_token_ids == expected
