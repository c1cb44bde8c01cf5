"""config.json: both spellings, published models, and everything that must be refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monograph.errors import ConfigError
from monograph.model.config import ModelConfig, RopeConfig
from monograph.model.config_keys import HARMLESS, NEUTRAL, READ
from monograph.model.rope import inv_freq
from tests.checkpoints import ABSENT, tiny_config
from tests.model.llama_configs import LLAMA_CONFIGS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(**overrides))


def refusal(**overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**overrides)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    return message


def test_every_field() -> None:
    assert read() == ModelConfig(
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
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        dtype=torch.float32,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().vocab_size = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", LLAMA_CONFIGS)
def test_published_models(name: str) -> None:
    config = ModelConfig.from_dict(LLAMA_CONFIGS[name])
    assert config.num_q_heads * config.head_dim == config.hidden_size
    assert config.eos_token_ids
    stretched = {"Llama 3.1": "llama3", "Llama 3.2": "llama3", "DeepSeek R1": "llama3"}
    stretched |= {"DeepSeek Coder": "linear", "LLaMA-2": "linear"}
    kinds = [kind for start, kind in stretched.items() if name.startswith(start)]
    assert config.rope.rope_type == (kinds[0] if kinds else "default")
    if config.rope.rope_type == "llama3":
        assert config.rope.theta == 500000.0
        assert config.rope.original_max_position_embeddings == 8192
        assert config.dtype == torch.bfloat16


def test_spelling_of_transformers_5_is_the_same_model() -> None:
    older, newer = (
        ModelConfig.from_dict(LLAMA_CONFIGS[name])
        for name in ("Llama 3.2 1B Instruct", "Llama 3.2 1B, saved by transformers 5")
    )
    assert older == newer


# B01: the base is found wherever it is written.
B01 = [
    ({"rope_theta": 500000}, 500000),
    ({"rope_theta": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 500000),
    ({"rope_theta": 20000, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 500000),
    ({"rope_theta": 500000, "rope_scaling": None}, 500000),
    ({"rope_theta": 500000, "rope_parameters": {"rope_type": "default"}}, 500000),
    ({"rope_theta": 20000, "rope_scaling": {"rope_theta": 500000, "type": "default"}}, 500000),
    ({"rope_theta": 500000, "rope_parameters": {}}, 500000),
    ({"rope_theta": ABSENT}, 10000),
    ({"rope_theta": None}, 10000),
]


@pytest.mark.parametrize(("overrides", "theta"), B01)
def test_b01_rope_base_from_either_place(overrides: dict[str, Any], theta: float) -> None:
    config = read(**overrides)
    assert config.rope == RopeConfig("default", float(theta))
    if theta == 500000:
        expected = [1, 0.193923, 0.037606, 0.007293, 0.001414, 0.000274, 5.3e-5, 1e-5]
        torch.testing.assert_close(inv_freq(config), torch.tensor(expected, dtype=torch.float64), rtol=0.04, atol=5e-7)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling(key: str) -> None:
    assert read(**{key: LLAMA3}).rope == RopeConfig("llama3", 10000.0, 8.0, 1.0, 4.0, 64)
    assert read(**{key: {"type": "linear", "factor": 2}}).rope == RopeConfig("linear", 10000.0, 2.0)
    assert read(**{key: {"type": "linear", "rope_type": "linear", "factor": 2}}).rope.factor == 2
    assert read(**{key: {"rope_type": "default", "factor": 1.0, "beta_fast": None}}).rope == RopeConfig()
    without_original = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    assert read(**{key: without_original}).rope.original_max_position_embeddings == 256
    assert read(**{key: LLAMA3}, original_max_position_embeddings=32).rope.original_max_position_embeddings == 32


def test_rope_said_twice() -> None:
    newer = {**LLAMA3, "rope_theta": 500000.0}
    assert read(rope_scaling=LLAMA3, rope_parameters=newer).rope.theta == 500000.0
    message = refusal(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=newer)
    assert "rope_scaling: expected the same settings as rope_parameters" in message


@pytest.mark.parametrize(
    ("scaling", "field", "got"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, "rope_scaling.rope_type", "dynamic"),
        ({"rope_type": "longrope", "short_factor": [1]}, "rope_scaling.rope_type", "longrope"),
        ({"rope_type": 3}, "rope_scaling.rope_type", "3"),
        ({"factor": 4.0}, "rope_scaling.rope_type", "no such field"),
        ({"rope_type": "linear", "type": "llama3", "factor": 2.0}, "rope_scaling.rope_type", "linear"),
        ({"rope_type": "linear"}, "rope_scaling.factor", "no such field"),
        ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor", "0"),
        ({"rope_type": "linear", "factor": 0.5}, "rope factor", "0.5"),
        ({"rope_type": "linear", "factor": math.nan}, "rope_scaling.factor", "nan"),
        ({"rope_type": "linear", "factor": "2"}, "rope_scaling.factor", "'2'"),
        ({"rope_type": "default", "factor": 2.0}, "rope_scaling.factor", "2.0"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.5}, "rope_scaling.attention_factor", "1.5"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor", "0.5"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor", "1"),
        ({**LLAMA3, "low_freq_factor": None}, "rope_scaling.low_freq_factor", "no such field"),
        ({**LLAMA3, "original_max_position_embeddings": -1}, "rope_scaling.original_max_position_embeddings", "-1"),
        ({"full_attention": {"rope_theta": 1.0}}, "rope_scaling.full_attention", "an object"),
        ([1], "rope_scaling", "[1]"),
    ],
)
def test_rope_refusals(scaling: Any, field: str, got: str) -> None:
    message = refusal(rope_scaling=scaling)
    assert f"{field}: expected" in message
    assert got in message.partition(f"{field}: ")[2].partition("got ")[2]


@pytest.mark.parametrize(
    ("theta", "got"), [(0, "0"), (1, "1"), (-1.0, "-1.0"), ("x", "'x'"), (True, "true"), (math.inf, "inf")]
)
def test_rope_theta_refusals(theta: Any, got: str) -> None:
    assert f"rope_theta: expected a finite number above 1, got {got}" in refusal(rope_theta=theta)


@pytest.mark.parametrize(
    ("overrides", "head_dim"),
    [
        ({"head_dim": 32}, 32),
        ({"hidden_size": 56, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}, 32),
        ({"head_dim": None}, 16),
        ({"head_dim": ABSENT}, 16),
    ],
)
def test_b02_head_dim(overrides: dict[str, Any], head_dim: int) -> None:
    config = read(**overrides)
    assert config.head_dim == head_dim
    assert config.scale == head_dim**-0.5


def test_head_dim_refusals() -> None:
    assert "head_dim: expected an even number" in refusal(head_dim=15)
    assert "head_dim: expected an even number" in refusal(hidden_size=60, head_dim=None)
    message = refusal(hidden_size=56, num_attention_heads=3, num_key_value_heads=1, head_dim=None)
    assert "head_dim: expected an integer, since hidden_size 56 is not a multiple of num_attention_heads 3" in message
    assert "head_dim: expected an integer in 1..4096" in refusal(head_dim=8192)


def test_b03_bias_flags() -> None:
    config = read(attention_bias=True, mlp_bias=True)
    assert (config.attention_bias, config.mlp_bias) == (True, True)
    config = read(attention_bias=ABSENT, mlp_bias=None)
    assert (config.attention_bias, config.mlp_bias) == (False, False)
    assert "attention_bias: expected true or false, got 1" in refusal(attention_bias=1)
    assert "model_type: expected one of llama, mistral, phi3, qwen2, smollm3, got 'gemma'" in refusal(
        model_type="gemma"
    )


def test_defaults_of_absent_fields() -> None:
    names = "num_key_value_heads rms_norm_eps max_position_embeddings hidden_act tie_word_embeddings"
    config = read(**dict.fromkeys([*names.split(), "bos_token_id", "eos_token_id", "torch_dtype"], ABSENT))
    assert (config.num_kv_heads, config.rms_norm_eps, config.max_position_embeddings) == (4, 1e-6, 2048)
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_ids) == (False, None, ())
    assert config.dtype is None


@pytest.mark.parametrize(
    ("eos", "ids"), [(2, (2,)), ([5, 2, 5], (5, 2)), ([], ()), (None, ()), (0, (0,)), ([95], (95,))]
)
def test_eos_token_ids(eos: Any, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=eos).eos_token_ids == ids


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"torch_dtype": ABSENT, "dtype": "float32"}, torch.float32),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16", "dtype": None}, torch.float16),
        ({"torch_dtype": "auto"}, None),
    ],
)
def test_b09_dtype_in_either_spelling(overrides: dict[str, Any], dtype: torch.dtype | None) -> None:
    assert read(**overrides).dtype == dtype


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("field", [*SIZES, "num_key_value_heads"])
@pytest.mark.parametrize("value", [0, -4, 4.0, "4", True, [4], 10**12, pytest.param(10**5000, id="huge"), math.nan])
def test_bad_sizes(field: str, value: Any) -> None:
    assert f"{field}: expected an integer in 1.." in refusal(**{field: value})


@pytest.mark.parametrize("field", SIZES)
def test_missing_sizes(field: str) -> None:
    assert f"{field}: expected an integer in 1.." in refusal(**{field: ABSENT})
    assert "got null" in refusal(**{field: None})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_key_value_heads", 3, "a divisor of num_attention_heads 4, got 3"),
        ("max_position_embeddings", 1e30, "an integer in 1.."),
        ("rms_norm_eps", math.nan, "a finite number above 0, got nan"),
        ("rms_norm_eps", 0.0, "a finite number above 0, got 0.0"),
        ("rms_norm_eps", 10**400, "a finite number above 0, got an integer of"),
        ("tie_word_embeddings", "yes", "true or false, got 'yes'"),
        ("eos_token_id", [2, 96], "an integer in 0..95, got 96"),
        ("eos_token_id", "</s>", "an integer in 0..95, got '</s>'"),
        ("bos_token_id", -1, "an integer in 0..95, got -1"),
        ("torch_dtype", "int8", "one of bfloat16, float16, float32, got 'int8'"),
        ("torch_dtype", {"": "float16"}, "text, got"),
        ("hidden_act", "gelu", "silu, got 'gelu'"),
        ("model_type", "gemma", "one of llama, mistral, phi3, qwen2, smollm3, got 'gemma'"),
        ("model_type", ABSENT, "one of llama, mistral, phi3, qwen2, smollm3, got no such field"),
        ("model_type", 3, "text, got 3"),
        ("architectures", ["LlamaForSequenceClassification"], "[LlamaForCausalLM], got"),
        ("architectures", "LlamaForCausalLM", "[LlamaForCausalLM], got"),
    ],
)
def test_bad_values(field: str, value: Any, expected: str) -> None:
    assert f"{field}: expected {expected}" in refusal(**{field: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pretraining_tp", 2),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("sliding_window", 4096),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("text_config", {"model_type": "llama"}),
        ("vision_config", {"image_size": 336}),
        ("logits_scaling", 8.0),
        ("embedding_multiplier", 12.0),
        ("final_logit_softcapping", 30.0),
        ("use_rms_norm", False),
        # listed nowhere, but their names speak of the computation
        ("num_experts_per_tok", 2),
        ("use_qk_norm", True),
        ("attn_output_gate", True),
        ("alibi_bias_max", 8),
        ("residualScale", 0.5),
        ("no_rope_layers", [1, 0]),
        ("vocab_parallel_embedding", 1),
        ("lora_rank", 16),
    ],
)
def test_keys_that_change_the_computation_are_refused(key: str, value: Any) -> None:
    message = refusal(**{key: value})
    assert f"{key}: expected" in message
    assert "support" in message


def test_refusal_of_a_quantised_model_names_its_method_and_a_way_out() -> None:
    message = refusal(quantization_config={"quant_method": "awq", "bits": 4})
    assert "awq" in message
    assert "use the unquantised checkpoint" in message


@pytest.mark.parametrize(
    "harmless",
    [
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "use_sliding_window": False},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        {"pretraining_tp": 1, "partial_rotary_factor": 1.0, "rope_interleaved": False},
        {"quantization_config": None, "text_config": None},
        {"use_qk_norm": False, "num_experts": 0, "attn_scale": None, "head_scales": []},
        {"my_dataset": "web", "trained_by": {"name": "someone"}, "license": "mit", "neuron": 7},
        {"embd_pdrop": 0.1, "attention_dropout": 0.5, "resid_pdrop": 0.1, "layerdrop": 0.2},
        {"_attn_implementation": "sdpa", "_name_or_path": "x", "id2label": {"0": "A"}, "temperature": 0.5},
    ],
)
def test_harmless_keys_are_accepted(harmless: dict[str, Any]) -> None:
    assert read(**harmless) == read()


def test_key_tables_do_not_overlap() -> None:
    tables = [set(READ), set(HARMLESS), set(NEUTRAL)]
    assert sum(map(len, tables)) == len(set.union(*tables))


# Files


def test_from_folder_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert ModelConfig.from_folder(tmp_path) == read()
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(vocab_size=-1)))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_folder(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}/config.json: vocab_size: expected")


def test_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()), encoding="utf-8-sig")
    assert ModelConfig.from_folder(tmp_path) == read()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not JSON"),
        (b"[1, 2]", "expected a JSON object, got [1, 2] (list)"),
        (b'"llama"', "expected a JSON object, got 'llama' (text)"),
        (b"null", "expected a JSON object, got null"),
        (b'{"a": ', "not JSON"),
        (b'{"model_type": "ll\xff"}', "expected UTF-8 text, got byte 0xff at 18"),
        (b"\x80\x02}q\x00.", "expected UTF-8 text"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"vocab_size": NaN}', "model_type: expected one of llama, mistral"),
    ],
)
def test_hostile_files(content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert expected in str(caught.value)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing there"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="a folder"):
        ModelConfig.from_folder(tmp_path)


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**33)  # a hole: no disk space
    with pytest.raises(ConfigError, match="at most 67,108,864 bytes, got 8,589,934,592"):
        ModelConfig.from_folder(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*READ, *NEUTRAL, *LLAMA3, "sliding_window", "layer_types"]), JSON_VALUES))
def test_any_values_give_a_config_or_a_config_error(overrides: dict[str, Any]) -> None:
    nested = {name: value for name, value in overrides.items() if name in LLAMA3}
    config = read_or_none({"rope_parameters": nested} | overrides)
    if config is not None:
        assert config.head_dim % 2 == 0
        assert torch.isfinite(inv_freq(config)).all()


def read_or_none(overrides: dict[str, Any]) -> ModelConfig | None:
    try:
        return read(**overrides)
    except ConfigError:
        return None
