"""Configurations and checkpoints of the families: published files, defaults of absent fields, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import monograph as mg
from monograph.errors import CheckpointError, ConfigError
from monograph.model.checkpoint import check_complete
from monograph.model.config import ModelConfig, RopeConfig
from monograph.model.family import FAMILIES
from monograph.model.manifest import read_manifest
from monograph.model.rope import inv_freq, rope_table
from monograph.model.safetensors_source import SafetensorsSource
from monograph.model.weights import load_weights
from tests.checkpoints import ABSENT, WeightSlots, fused_parameters
from tests.model.family_configs import MISTRAL, PHI3, QWEN2, REFUSED, SERVED, SMOLLM3
from tests.model.family_models import MODELS, make_model, save_model
from tests.model.llama_configs import LLAMA_CONFIGS

LLAMA = LLAMA_CONFIGS["Llama 2 7B"]
# transformers computes frequencies in fp32: a power, a division and a blend, each rounded.
FREQUENCY_TOLERANCE = 8 * 2.0**-23


def read(values: dict[str, Any], **overrides: Any) -> ModelConfig:
    merged = {**values, **overrides}
    return ModelConfig.from_dict({name: value for name, value in merged.items() if value is not ABSENT})


def refusal(values: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(values, **overrides)
    return str(caught.value).removeprefix("config.json: ")


@pytest.mark.parametrize("name", SERVED)
def test_published_models_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    import transformers

    family, facts, longest = SERVED[name]
    ours, theirs = ModelConfig.from_dict(facts), getattr(transformers, f"{family}Config").from_dict(facts)
    assert ours.longest_seq_len == longest
    assert (ours.num_kv_heads, ours.rms_norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert (ours.max_position_embeddings, ours.dtype) == (theirs.max_position_embeddings, theirs.dtype)
    rope = theirs.rope_parameters
    assert (ours.rope.theta, ours.rope.rope_type) == (rope["rope_theta"], rope["rope_type"])
    if ours.rope.rope_type == "yarn":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if getattr(theirs, "head_dim", None) is None:
            theirs.head_dim = ours.head_dim
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
        torch.testing.assert_close(inv_freq(ours), frequencies.double(), rtol=FREQUENCY_TOLERANCE, atol=0)
        assert ours.rope.attention_factor == pytest.approx(attention_factor, rel=1e-15)
    theirs.save_pretrained(tmp_path)  # in the newer spelling
    assert ModelConfig.from_folder(tmp_path) == ours


@pytest.mark.parametrize("name", REFUSED)
def test_published_models_that_are_refused(name: str) -> None:
    facts, expected = REFUSED[name]
    assert refusal(facts).startswith(expected)


@pytest.mark.parametrize(
    ("family", "facts"), [("Mistral", MISTRAL), ("Qwen2", QWEN2), ("Phi3", PHI3), ("SmolLM3", SMOLLM3)]
)
def test_absent_fields_are_what_they_are_for_transformers(family: str, facts: dict[str, Any]) -> None:
    import transformers

    names = "rms_norm_eps max_position_embeddings hidden_act tie_word_embeddings num_key_value_heads sliding_window"
    names += " rope_theta"
    bare = {name: value for name, value in facts.items() if name not in names.split()}
    bare |= {"num_attention_heads": 32, "hidden_size": 4096}  # which the default of Qwen2's KV heads divides
    ours, theirs = ModelConfig.from_dict(bare), getattr(transformers, f"{family}Config").from_dict(bare)
    assert (ours.rms_norm_eps, ours.max_position_embeddings) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert (ours.num_kv_heads, ours.sliding_window) == (theirs.num_key_value_heads, theirs.sliding_window)
    assert (ours.tie_word_embeddings, ours.rope.theta) == (
        theirs.tie_word_embeddings,
        theirs.rope_parameters["rope_theta"],
    )
    assert read(bare, num_key_value_heads=None).num_kv_heads == 32


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        ({}, (3, 7, 11, 15, 19, 23, 27, 31, 35)),
        ({"no_rope_layers": ABSENT}, (3, 7, 11, 15, 19, 23, 27, 31, 35)),
        ({"no_rope_layers": None, "no_rope_layer_interval": 20}, (19,)),
        ({"no_rope_layers": None, "no_rope_layer_interval": 100}, ()),
        ({"no_rope_layers": [0, *[1] * 35], "no_rope_layer_interval": 4}, (0,)),
    ],
)
def test_layers_without_rope(overrides: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert read(SMOLLM3, **overrides).layers_without_rope == layers
    assert read(LLAMA).layers_without_rope == ()


@pytest.mark.parametrize(
    ("facts", "overrides", "window"),
    [
        (MISTRAL, {"sliding_window": None}, None),
        (MISTRAL, {"sliding_window": ABSENT}, 4096),
        (MISTRAL, {"sliding_window": 2}, 2),
        (MISTRAL, {"sliding_window": 512, "use_sliding_window": False}, 512),  # a switch that Mistral does not have
        (MISTRAL, {"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"] * 16}, 512),
        (PHI3, {"sliding_window": ABSENT}, None),
        (QWEN2, {"use_sliding_window": ABSENT, "sliding_window": 512}, None),
        (SMOLLM3, {"sliding_window": 512, "layer_types": None}, None),
        (SMOLLM3, {"use_sliding_window": True, "sliding_window": 512}, None),  # layer_types says otherwise
        (SMOLLM3, {"use_sliding_window": True, "sliding_window": 512, "layer_types": None}, 512),
        (
            SMOLLM3,
            {"use_sliding_window": True, "sliding_window": 512, "layer_types": None, "no_rope_layers": [1] * 36},
            None,
        ),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 27}, 512),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 28}, None),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": ABSENT}, None),
        (QWEN2, {"use_sliding_window": True, "sliding_window": ABSENT, "max_window_layers": 0}, 4096),
        (QWEN2, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 512, "layer_types": ["full_attention"] * 28}, None),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 512, "layer_types": ["sliding_attention"] * 28}, 512),
    ],
)
def test_which_window_a_file_means(facts: dict[str, Any], overrides: dict[str, Any], window: int | None) -> None:
    config = read(facts, **overrides)
    assert config.sliding_window == window
    assert config.longest_seq_len == min(window or 10**9, config.max_position_embeddings)


SLIDING = ["sliding_attention"] * 28


@pytest.mark.parametrize(
    ("facts", "overrides", "expected"),
    [
        (MISTRAL, {"attention_bias": True}, "attention_bias: expected null or false for Mistral, got true"),
        (QWEN2, {"attention_bias": False}, "attention_bias: expected null or true for Qwen2, got false"),
        (PHI3, {"mlp_bias": True}, "mlp_bias: expected null or false for Phi-3, got true"),
        (QWEN2, {"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window: expected null for Llama, got 4096"),
        (LLAMA, {"use_sliding_window": True}, "use_sliding_window: expected null or false, got true"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 36 numbers 0 or 1, got"),
        (SMOLLM3, {"no_rope_layers": [2] * 36}, "no_rope_layers: expected 36 numbers 0 or 1, got"),
        (SMOLLM3, {"no_rope_layers": 4}, "no_rope_layers: expected 36 numbers 0 or 1, got 4"),
        (SMOLLM3, {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval: expected an integer"),
        (LLAMA, {"no_rope_layers": [1, 0]}, "no_rope_layers: expected only known keys"),
        (LLAMA, {"no_rope_layer_interval": 4}, "no_rope_layer_interval: expected only known keys"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp: expected null or 1, got 2"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window: expected an integer in 2.."),
        (MISTRAL, {"sliding_window": 1}, "sliding_window: expected an integer in 2.."),
        (MISTRAL, {"sliding_window": True}, "sliding_window: expected an integer in 2.."),
        (PHI3, {"sliding_window": 2047.0}, "sliding_window: expected an integer in 2.."),
        (MISTRAL, {"layer_types": ["sliding_attention"] * 32}, "layer_types: expected only 'full_attention' without"),
        (QWEN2, {"layer_types": SLIDING}, "layer_types: expected only 'full_attention', since use_sliding_window"),
        (
            QWEN2,
            {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": None},
            "layer_types: expected only 'full_attention', since use_sliding_window or sliding_window is off",
        ),
        (QWEN2, {"layer_types": ["full_attention"] * 27}, "layer_types: expected 28 entries (num_hidden_layers)"),
        (QWEN2, {"layer_types": ["chunked_attention"] * 28}, "layer_types: expected only 'full_attention' or"),
        (QWEN2, {"use_sliding_window": "no"}, "use_sliding_window: expected true or false, got 'no'"),
        (QWEN2, {"max_window_layers": -1, "use_sliding_window": True}, "max_window_layers: expected an integer"),
        (QWEN2, {"use_mrope": True}, "use_mrope: expected null or false, got true"),
        (QWEN2, {"architectures": ["LlamaForCausalLM"]}, "architectures: expected [Qwen2ForCausalLM], got"),
        (QWEN2, {"hidden_act": "gelu"}, "hidden_act: expected silu"),
        (PHI3, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type: expected one of default"),
        (
            PHI3,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
            "rope_parameters.partial_rotary_factor: expected no such field",
        ),
    ],
)
def test_refusals(facts: dict[str, Any], overrides: dict[str, Any], expected: str) -> None:
    assert refusal(facts, **overrides).startswith(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"factor": ABSENT}, "rope_scaling.factor: expected a number for rope_type yarn, got no such field"),
        ({"factor": 0.5}, "rope factor: expected a number of at least 1"),
        ({"factor": "4"}, "rope_scaling.factor: expected a finite number"),
        ({"attention_factor": 0}, "rope_scaling.attention_factor: expected a finite number above 0, got 0"),
        ({"attention_factor": -1.0}, "rope_scaling.attention_factor: expected a finite number above 0"),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast: expected a number of at least beta_slow 2, got 1"),
        ({"beta_slow": True}, "rope_scaling.beta_slow: expected a finite number"),
        ({"mscale": -1.0}, "rope_scaling.mscale: expected a finite number"),
        ({"mscale_all_dim": "x"}, "rope_scaling.mscale_all_dim: expected a finite number"),
        ({"truncate": 1}, "rope_scaling.truncate: expected true or false, got 1"),
        ({"original_max_position_embeddings": 0}, "rope_scaling.original_max_position_embeddings: expected an integer"),
        ({"partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor: expected no such field"),
        ({"low_freq_factor": 1.0}, "rope_scaling.low_freq_factor: expected no such field beside rope_type yarn"),
        ({"llama_4_scaling_beta": 0.1}, "rope_scaling.llama_4_scaling_beta: expected no such field"),
        ({"type": "dynamic"}, "rope_scaling.rope_type: expected one of default, linear, llama3, yarn for Mistral"),
    ],
)
def test_refusals_of_yarn(fields: dict[str, Any], expected: str) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, **fields}
    scaling = {name: value for name, value in scaling.items() if value is not ABSENT}
    assert refusal(MISTRAL, rope_scaling=scaling).startswith(expected)


def test_yarn_beside_explicit_frequencies_is_refused() -> None:
    with pytest.raises(ConfigError, match="beside explicit frequencies, got yarn"):
        RopeConfig("yarn", frequencies=(1.0,))


def test_yarn_multiplies_the_table() -> None:
    """At position 0 cosines are the attention factor itself, and sines are zero, over the whole table."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "attention_factor": 1.25}
    table = rope_table(read(MISTRAL, rope_scaling=scaling), 200)
    assert torch.equal(table[0], torch.tensor([1.25, 0.0]).repeat_interleave(64))
    norms = table[:, :64].square() + table[:, 64:].square()
    torch.testing.assert_close(norms, torch.full_like(norms, 1.25**2), rtol=1e-6, atol=0)


JSON_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.text())
KEYS = ["sliding_window", "use_sliding_window", "layer_types", "max_window_layers", "mlp_bias", "no_rope_layers"]
YARN_KEYS = ["factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([LLAMA, MISTRAL, QWEN2, PHI3, SMOLLM3]),
    st.dictionaries(st.sampled_from(KEYS), JSON_VALUES),
    st.dictionaries(st.sampled_from(YARN_KEYS), JSON_VALUES),
)
def test_any_values_give_a_config_or_a_config_error(
    facts: dict[str, Any], overrides: dict[str, Any], yarn: dict[str, Any]
) -> None:
    try:
        config = read(facts, **overrides, rope_scaling={"type": "yarn", "factor": 2.0, **yarn} if yarn else None)
    except ConfigError:
        return
    assert config.longest_seq_len >= 2
    assert torch.isfinite(inv_freq(config)).all()


# Checkpoints


def open_checkpoint(folder: Path) -> tuple[SafetensorsSource, ModelConfig]:
    return SafetensorsSource(read_manifest(folder)), ModelConfig.from_folder(folder)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_reaches_its_rows(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(*MODELS[case])
    save_model(model, tmp_path)
    source, config = open_checkpoint(tmp_path)
    check_complete(source, config)
    slots = WeightSlots(config, dtype)
    load_weights(source, config, slots)
    assert slots.gaps_intact()
    expected = fused_parameters(config, model.state_dict())
    tables = {"rope_table", "no_rope_table"} if config.layers_without_rope else {"rope_table"}
    assert slots.views.keys() == {*expected, *tables}
    for name, tensor in expected.items():
        assert torch.equal(slots.view(name), tensor.to(dtype)), name


@pytest.mark.parametrize(
    ("case", "change", "expected"),
    [
        ("Qwen2 1", {"model.layers.1.self_attn.k_proj.bias": None}, "(Qwen2 has biases of q, k and v)"),
        ("Qwen2 1", {"model.layers.0.self_attn.o_proj.bias": torch.zeros(66)}, "(Qwen2 has no such biases)"),
        ("Mistral 1", {"model.layers.0.self_attn.q_proj.bias": torch.zeros(66)}, "(Mistral has no such biases)"),
        ("Phi3 1", {"model.layers.2.mlp.gate_up_proj.weight": None}, "model.layers.2.mlp.gate_up_proj.weight"),
        ("Phi3 1", {"model.layers.0.self_attn.q_proj.weight": torch.zeros(66, 66)}, "has no place for: model.layers.0"),
        ("Phi3 1", {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(66, 66)}, "expected [110, 66], got [66"),
    ],
)
def test_checkpoints_that_do_not_match_are_refused(
    case: str, change: dict[str, torch.Tensor | None], expected: str, tmp_path: Path
) -> None:
    save_model(make_model(*MODELS[case]), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {**load_file(path), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(CheckpointError) as caught:
        mg.load(str(tmp_path), device="cpu")
    assert expected in str(caught.value)
    assert all(name in str(caught.value) for name in change)


# docs/models.md


def test_the_page_of_models_names_every_family_and_kind_of_rope() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    assert {cells[0].strip(" `") for cells in rows} == set(FAMILIES)
    for cells in rows:
        family = FAMILIES[cells[0].strip(" `")]
        assert {kind.strip() for kind in cells[2].split(",")} == set(family.rope_types), family.name
    for name, (family_name, _, longest) in SERVED.items():
        assert family_name in {"Llama", "Mistral", "Qwen2", "Phi3", "SmolLM3"}, name
        assert f"| {name} | {longest:,} |" in page, name
    for name, (_, reason) in REFUSED.items():
        assert f"| {name} | `{reason.partition(':')[0]}` |" in page, name
