"""Each family against transformers in float32: logits of 100 positions, both passes, and faults that must show."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import monograph as mg
from monograph.model.config import ModelConfig
from monograph.model.family import FAMILIES
from monograph.model.plan import plan_model
from tests.checkpoints import tiny_ids
from tests.model.family_models import COMMON, MODELS, SIZES, make_model, older_spelling, oracle_logits, save_model

# What the families promise. Two orders of fp32 summation stay below a fifth of it.
RELATIVE_ERROR = 1e-4
POSITIONS = 100
WEIGHTS = "model.safetensors"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def worst_error(folder: Path, ids: list[int], want: torch.Tensor) -> float:
    """The larger error of both passes."""
    with mg.load(str(folder), device="cpu", max_seq_len=len(ids)) as engine:
        return max(relative_error(engine.logits(ids, through=through), want) for through in ("prefill", "decode"))


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    facts = json.loads((folder / "config.json").read_text())
    change(facts)
    (folder / "config.json").write_text(json.dumps(facts))


def test_every_family_has_three_models() -> None:
    made = [make_model(family, facts).config.model_type for family, facts in MODELS.values()]
    assert {kind: made.count(kind) for kind in made} == dict.fromkeys(FAMILIES, 3)


@pytest.mark.parametrize("spelling", ["newer", "older"])
@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_transformers(case: str, spelling: str, tmp_path: Path) -> None:
    family, facts = MODELS[case]
    model = make_model(family, facts)
    save_model(model, tmp_path, spelling)
    ids = tiny_ids(facts, POSITIONS)
    assert worst_error(tmp_path, ids, oracle_logits(model, ids)) < RELATIVE_ERROR / 5


@pytest.mark.parametrize("case", MODELS)
def test_a_wrong_base_does_not_pass(case: str, tmp_path: Path) -> None:
    family, facts = MODELS[case]
    model = make_model(family, facts)
    save_model(model, tmp_path)
    change_config(tmp_path, lambda f: f["rope_parameters"].update(rope_theta=1.1 * f["rope_parameters"]["rope_theta"]))
    ids = tiny_ids(facts, POSITIONS)
    assert worst_error(tmp_path, ids, oracle_logits(model, ids)) > 10 * RELATIVE_ERROR


@pytest.mark.parametrize("case", MODELS)
def test_a_wrong_epsilon_does_not_pass(case: str, tmp_path: Path) -> None:
    """Small weights: the mean squares must be near epsilon for it to matter."""
    family, facts = MODELS[case]
    model = make_model(family, facts, std=0.02, bias_std=0.02)
    save_model(model, tmp_path)
    ids, want = tiny_ids(facts, POSITIONS), oracle_logits(model, tiny_ids(facts, POSITIONS))
    assert worst_error(tmp_path, ids, want) < RELATIVE_ERROR / 5
    change_config(tmp_path, lambda f: f.update(rms_norm_eps=10 * f["rms_norm_eps"]))
    assert worst_error(tmp_path, ids, want) > 10 * RELATIVE_ERROR


@pytest.mark.parametrize("case", [case for case in MODELS if case.startswith("Qwen2") or case == "Llama 1"])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_lost_bias_does_not_pass(case: str, part: str, tmp_path: Path) -> None:
    """A bias of k moves the scores of a query alike but for RoPE, so the change that it makes is the smallest."""
    family, facts = MODELS[case]
    model = make_model(family, facts)
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors[f"model.layers.1.self_attn.{part}_proj.bias"].zero_()
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    ids = tiny_ids(facts, POSITIONS)
    assert worst_error(tmp_path, ids, oracle_logits(model, ids)) > 10 * RELATIVE_ERROR


@pytest.mark.parametrize("tensor", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_fused_rows_in_another_order_do_not_pass(tensor: str, tmp_path: Path) -> None:
    family, facts = MODELS["Phi3 3"]
    model = make_model(family, facts)
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = f"model.layers.0.{tensor}.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    ids = tiny_ids(facts, POSITIONS)
    assert worst_error(tmp_path, ids, oracle_logits(model, ids)) > 10 * RELATIVE_ERROR


def _turn_all_or_none(turned: int, facts: dict[str, Any]) -> None:
    facts["no_rope_layers"] = [turned] * facts["num_hidden_layers"]


@pytest.mark.parametrize("case", [case for case in MODELS if case.startswith("SmolLM3")])
def test_rope_in_other_layers_does_not_pass(case: str, tmp_path: Path) -> None:
    family, facts = MODELS[case]
    model = make_model(family, facts)
    save_model(model, tmp_path)
    ids = tiny_ids(facts, POSITIONS)
    for turned in (1, 0):
        change_config(tmp_path, partial(_turn_all_or_none, turned))
        assert worst_error(tmp_path, ids, oracle_logits(model, ids)) > 10 * RELATIVE_ERROR


# YaRN, all fields

YARN: dict[str, dict[str, Any]] = {
    "factor alone": {},
    "attention factor": {"attention_factor": 0.7},
    "mscale": {"mscale": 0.707, "mscale_all_dim": 1.4},
    "mscale alone": {"mscale": 0.707},
    "mscale off": {"mscale": 1.0, "mscale_all_dim": 0},
    "betas": {"beta_fast": 8, "beta_slow": 0.5},
    "not truncated": {"truncate": False},
    "truncate null": {"truncate": None},
    "factor null": {"factor": None},
    "passage of no width": {"beta_fast": 1e-6, "beta_slow": 1e-6},
    "original length as now": {"original_max_position_embeddings": 256},
}


@pytest.mark.parametrize("case", YARN)
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_yarn(family: str, case: str, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 48}
    facts = {**COMMON, **SIZES[2], "head_dim": 32, "rope_parameters": {**rope, **YARN[case]}}
    model = make_model(family, facts)
    save_model(model, tmp_path)
    ids = tiny_ids(facts, POSITIONS)
    assert worst_error(tmp_path, ids, oracle_logits(model, ids)) < RELATIVE_ERROR / 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("attention_factor", 1.0), ("factor", 4.0), ("original_max_position_embeddings", 24), ("beta_fast", 2.0)],
)
def test_a_wrong_field_of_yarn_does_not_pass(field: str, value: float, tmp_path: Path) -> None:
    family, facts = MODELS["Mistral 3"]
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 48}
    model = make_model(family, {**facts, "head_dim": 32, "rope_parameters": rope})
    save_model(model, tmp_path)
    change_config(tmp_path, lambda f: f["rope_parameters"].update({field: value}))
    ids = tiny_ids(facts, POSITIONS)
    assert worst_error(tmp_path, ids, oracle_logits(model, ids)) > 10 * RELATIVE_ERROR


# Windows

WINDOWED = {
    "Mistral": {},
    "Phi3": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "SmolLM3": {"use_sliding_window": True, "no_rope_layer_interval": 2},
}


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_bounds_the_length(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Up to the window logits are right, to the last position; one more would be wrong, and is refused."""
    facts = {**COMMON, **SIZES[0], **WINDOWED[family], "sliding_window": 40}
    model = make_model(family, facts)
    save_model(model, tmp_path)
    ids = tiny_ids(facts, 41)
    with caplog.at_level(logging.WARNING, "monograph"), mg.load(str(tmp_path), device="cpu") as engine:
        assert engine.capacity.max_seq_len == 40
        want = oracle_logits(model, ids[:40])
        assert relative_error(engine.logits(ids[:40]), want) < RELATIVE_ERROR / 5
        assert relative_error(engine.logits(ids[:40], through="decode"), want) < RELATIVE_ERROR / 5
        with pytest.raises(mg.PromptError, match="the model's limit is 40"):
            engine.generate(ids)
    (message,) = [message for message in caplog.messages if "sliding_window" in message]
    assert message.startswith("max_seq_len is 40, the model's sliding_window")
    model.config.sliding_window = None
    change_config(tmp_path, lambda f: f.update(sliding_window=41))
    without = model.from_pretrained(tmp_path).eval()
    with_window = make_model(family, facts)
    difference = (oracle_logits(without, ids) - oracle_logits(with_window, ids)).abs().amax(dim=1)
    assert difference[:40].max() < 1e-4
    assert difference[40] > 1e-2


@pytest.mark.parametrize("family", WINDOWED)
def test_a_length_beyond_the_window_is_refused_before_weights_are_read(family: str, tmp_path: Path) -> None:
    save_model(make_model(family, {**COMMON, **SIZES[0], **WINDOWED[family], "sliding_window": 40}), tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(mg.ConfigError) as caught:
        mg.load(str(tmp_path), device="cpu", max_seq_len=41)
    message = str(caught.value)
    assert "max_seq_len: expected an integer from 2 to 40 (the model's sliding_window" in message
    assert "pass max_seq_len=40 or less), got 41" in message


def test_a_window_no_shorter_than_the_model_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(make_model("Mistral", {**COMMON, **SIZES[0], "sliding_window": 256}), tmp_path)
    with caplog.at_level(logging.WARNING, "monograph"):
        assert plan_model(str(tmp_path), device="cpu").longest == 256
    assert not [message for message in caplog.messages if "sliding_window" in message]


@pytest.mark.parametrize("case", MODELS)
def test_both_spellings_are_the_same_model(case: str, tmp_path: Path) -> None:
    family, facts = MODELS[case]
    make_model(family, facts).config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved
    saved["dtype"] = "float32"
    assert ModelConfig.from_dict(older_spelling(saved)) == ModelConfig.from_dict(saved)
