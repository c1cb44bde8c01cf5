"""Whole models against transformers in float32: random tiny Llamas whose weights are large enough to show any fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

import monograph as mg
from tests.checkpoints import ABSENT, tiny_config, tiny_ids
from tests.engines import tiny_engine, write_model

# Two orders of fp32 summation over a few hundred terms and two layers; any real fault is above 1e-2 here.
RELATIVE_ERROR = 2e-5

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "b01_theta_at_top": {"rope_theta": 500000.0},
    "b01_theta_nested": {
        "rope_theta": ABSENT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "b01_nested_wins": {"rope_theta": 20000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "b01_scaling_null": {"rope_theta": 500000.0, "rope_scaling": None},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "b02_head_dim": {"head_dim": 32},
    "b02_head_dim_null": {"head_dim": None},
    "b03_biases": {"attention_bias": True, "mlp_bias": True},
    "b06_tied": {"tie_word_embeddings": True},
    "gqa_of_3": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 16},
    "one_kv_head": {"num_key_value_heads": 1},
    "no_gqa": {"num_key_value_heads": 4},
    "odd_sizes": {"hidden_size": 60, "intermediate_size": 77, "vocab_size": 61, "head_dim": 6},
    "newer_spelling": {
        "rope_theta": ABSENT,
        "torch_dtype": ABSENT,
        "dtype": "float32",
        "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
    },
}


def oracle_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    config = tiny_config(**CASES[case])
    ids = tiny_ids(config)
    with tiny_engine(tmp_path, config) as engine:
        for through in ("prefill", "decode"):
            error = relative_error(engine.logits(ids, through=through), oracle_logits(tmp_path, ids))
            assert error < RELATIVE_ERROR, (through, error)


def test_b02_heads_that_do_not_divide_the_hidden_size(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=56, num_attention_heads=3, num_key_value_heads=1, head_dim=32)
    write_model(tmp_path, config)
    # LlamaConfig refuses these sizes; Mistral without a window is the same model.
    names = MistralConfig().to_dict().keys() & config.keys() - {"model_type", "architectures"}
    oracle = MistralForCausalLM(MistralConfig(**{name: config[name] for name in names}, sliding_window=None)).float()
    with mg.load(str(tmp_path), device="cpu") as engine:
        from safetensors.torch import load_file

        oracle.load_state_dict(load_file(tmp_path / "model.safetensors"))
        ids = tiny_ids(config)
        with torch.inference_mode():
            want = oracle(torch.tensor([ids])).logits[0]
        assert relative_error(engine.logits(ids), want) < RELATIVE_ERROR
        assert relative_error(engine.logits(ids, through="decode"), want) < RELATIVE_ERROR


@pytest.mark.parametrize("fault", [{"rope_theta": 20000.0}, {"rms_norm_eps": 1e-1}, {"rope_scaling": LLAMA3}])
def test_a_wrong_configuration_does_not_pass(fault: dict[str, Any], tmp_path: Path) -> None:
    """The tolerance is tight enough to see each fault."""
    ids = tiny_ids(tiny_config())
    write_model(tmp_path / "right")
    want = oracle_logits(tmp_path / "right", ids)
    with tiny_engine(tmp_path / "wrong", tiny_config(**fault)) as engine:
        assert relative_error(engine.logits(ids), want) > 100 * RELATIVE_ERROR


def test_small_activations_see_the_norm_epsilon(tmp_path: Path) -> None:
    """With weights of std 0.02 the mean squares are near epsilon, so a wrong one would show."""
    ids = tiny_ids(tiny_config())
    write_model(tmp_path / "right", std=0.02)
    want = oracle_logits(tmp_path / "right", ids)
    with tiny_engine(tmp_path / "same", std=0.02) as engine:
        assert relative_error(engine.logits(ids), want) < RELATIVE_ERROR
    with tiny_engine(tmp_path / "other", tiny_config(rms_norm_eps=1e-6), std=0.02) as engine:
        assert relative_error(engine.logits(ids), want) > 100 * RELATIVE_ERROR


@pytest.mark.parametrize(("dtype", "noise"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_narrow_dtypes_are_as_near_as_their_rounding(dtype: torch.dtype, noise: float, tmp_path: Path) -> None:
    """Weights that the dtype holds exactly; what is left is the rounding of the KV cache and of prefill's inputs."""
    ids = tiny_ids(tiny_config())
    write_model(tmp_path, dtype=dtype)
    want = oracle_logits(tmp_path, ids)
    own = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    with torch.inference_mode():
        own_error = relative_error(own(torch.tensor([ids])).logits[0].float(), want)
    assert own_error > noise / 4  # the yardstick is no accident
    with mg.load(str(tmp_path), device="cpu", dtype=dtype) as engine:
        for through in ("prefill", "decode"):
            assert relative_error(engine.logits(ids, through=through), want) < 2 * own_error


def test_chunks_of_a_long_prompt(tmp_path: Path) -> None:
    """More than one chunk of prefill, and teacher-forced logits in more than one piece."""
    config = tiny_config(max_position_embeddings=2048)
    ids = tiny_ids(config, 1100)
    with tiny_engine(tmp_path, config) as engine:
        assert engine.capacity.chunk_rows < len(ids)
        assert relative_error(engine.logits(ids), oracle_logits(tmp_path, ids)) < RELATIVE_ERROR
