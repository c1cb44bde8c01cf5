"""Planning: byte arithmetic, the longest length that fits, devices and dtypes, and that nothing is loaded for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import monograph as mg
from monograph.arena import Layout, device_free_nbytes
from monograph.model import plan as plan_module
from monograph.model.config import ModelConfig
from monograph.model.layout import Capacity, plan_layout
from monograph.model.plan import choose_device, choose_dtype, longest_that_fits, make_plan, plan_model
from tests import smollm2
from tests.checkpoints import ABSENT, tiny_config, write_checkpoint
from tests.engines import write_model

CPU = torch.device("cpu")
GIB = 2**30
LLAMA_8B = tiny_config(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    torch_dtype="bfloat16",
)
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def layout_of(values: dict[str, object], max_seq_len: int, dtype: torch.dtype = torch.bfloat16) -> Layout:
    config = ModelConfig.from_dict(values)
    return plan_layout(config, Capacity.for_model(config, max_seq_len, dtype))


@pytest.mark.parametrize(("values", "gib"), [(LLAMA_8B, 16), (LLAMA_70B, 40)])
def test_b19_kv_cache_bytes(values: dict[str, object], gib: int) -> None:
    layout = layout_of(values, 131072)
    assert sum(slot.nbytes for slot in layout.slots.values() if slot.name.endswith("_cache")) == gib * GIB


def test_weights_are_those_of_the_model() -> None:
    layout = layout_of(LLAMA_8B, 4096)
    weights = sum(s.nbytes for s in layout.slots.values() if s.lifetime == "weight" and s.name != "rope_table")
    assert weights == 2 * 8_030_261_248  # the published parameter count of Llama 3.1 8B
    assert "lm_head" not in layout_of({**LLAMA_8B, "tie_word_embeddings": True}, 4096)


def test_decode_scratch_is_small_and_apart() -> None:
    layout = layout_of(LLAMA_8B, 131072)
    decode = [slot for slot in layout.slots.values() if slot.lifetime == "scratch" and slot.span is None]
    assert sum(slot.nbytes for slot in decode) < 64 * 2**20
    assert all(slot.span is not None for slot in layout.slots.values() if slot.name.endswith("_rows"))


def test_nothing_but_caches_tokens_and_table_grows_with_the_length() -> None:
    short, long = layout_of(LLAMA_8B, 4096), layout_of(LLAMA_8B, 131072)
    grown = {name for name in long if long[name].shape != short[name].shape}
    assert {name.split(".")[-1] for name in grown} == {"k_cache", "v_cache", "tokens", "rope_table"}


def test_b19_just_below_and_just_above(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dict(LLAMA_8B)
    need = layout_of(LLAMA_8B, 32768).nbytes
    monkeypatch.setattr(plan_module, "device_free_nbytes", lambda device: need)
    plan = make_plan(config, CPU, torch.bfloat16, 32768)
    assert (plan.need_nbytes, plan.longest) == (need, 32768)
    with pytest.raises(mg.CapacityError) as caught:
        make_plan(config, CPU, torch.bfloat16, 32769)
    assert f"{layout_of(LLAMA_8B, 32769).nbytes:,} bytes" in str(caught.value)
    assert f"{need:,} bytes" in str(caught.value)
    assert "longest max_seq_len that fits is 32,768" in str(caught.value)
    assert isinstance(caught.value, MemoryError)


def test_b19_default_length_leaves_room_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = ModelConfig.from_dict(LLAMA_8B)
    monkeypatch.setattr(plan_module, "device_free_nbytes", lambda device: 24 * GIB)
    plan = make_plan(config, CPU, torch.bfloat16, None)
    assert plan.need_nbytes <= 0.9 * 24 * GIB < layout_of(LLAMA_8B, plan.max_seq_len + 64).nbytes
    assert f"max_seq_len is {plan.max_seq_len:,}, the longest that leaves room" in caplog.text
    assert plan.max_seq_len % 16 == 0  # the kernels of every start are the same, whatever is free
    caplog.clear()
    monkeypatch.setattr(plan_module, "device_free_nbytes", lambda device: 80 * GIB)
    assert make_plan(config, CPU, torch.bfloat16, None).max_seq_len == 131072
    assert not caplog.text
    monkeypatch.setattr(plan_module, "device_free_nbytes", lambda device: GIB)
    with pytest.raises(mg.CapacityError, match="not even the weights fit"):
        make_plan(config, CPU, torch.bfloat16, None)
    monkeypatch.setattr(plan_module, "device_free_nbytes", lambda device: None)
    assert make_plan(config, CPU, torch.bfloat16, None).longest == 131072


@pytest.mark.parametrize("length", [0, 1, -5, 257, 10**30, True, 2.5, "64"])
def test_b19_lengths_that_cannot_be(length: object, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(mg.ConfigError, match="max_seq_len: expected an integer from 2 to 256"):
        plan_model(str(tmp_path), max_seq_len=length)  # type: ignore[arg-type]


def test_longest_that_fits_is_exact() -> None:
    config = ModelConfig.from_dict(tiny_config(max_position_embeddings=4096))

    def need(length: int) -> int:
        return plan_layout(config, Capacity.for_model(config, length, torch.float32)).nbytes

    for length in (2, 3, 1000, 4095, 4096):
        assert longest_that_fits(config, torch.float32, need(length)) >= length
        assert need(min(4096, longest_that_fits(config, torch.float32, need(length)))) <= need(length)
    assert longest_that_fits(config, torch.float32, need(2) - 1) == 0
    assert longest_that_fits(config, torch.float32, None) == 4096


def test_a_model_that_does_not_fit_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setattr(plan_module, "device_free_nbytes", lambda device: 1000)
    with pytest.raises(mg.CapacityError):
        mg.load(str(tmp_path), device="cpu")


def test_a_shortened_length_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    write_model(tmp_path)
    need = plan_model(str(tmp_path), device="cpu", max_seq_len=100).need_nbytes
    monkeypatch.setattr(plan_module, "device_free_nbytes", lambda device: need)
    with mg.load(str(tmp_path), device="cpu") as engine:
        assert engine.capacity.max_seq_len < 256
    assert caplog.text.count("the longest that leaves room") == 1


def test_plan_as_text_and_json() -> None:
    plan = plan_model(str(smollm2.path()), device="cpu", max_seq_len=4096)
    facts = json.loads(plan.to_json())
    assert facts["need_nbytes"] == plan.need_nbytes == facts["layout"]["nbytes"]
    assert facts["max_seq_len"] == 4096
    assert facts["dtype"] == "float32"
    assert {slot["name"] for slot in facts["layout"]["slots"]} == set(plan.layout)
    assert "max_seq_len 4,096 in float32 on cpu" in str(plan)
    assert "k_cache" in str(plan)


def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    """A folder with config.json alone, as someone has who wants to know before a download."""
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    plan = plan_model(str(tmp_path), device="cpu")
    assert plan.max_seq_len == 256
    assert plan.capacity.dtype == torch.float32


def test_devices() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device(torch.device("cpu", 0)) == CPU
    for name in ("tpu", "", "cuda:x", "mps", "meta", 3.5):
        with pytest.raises(mg.ConfigError, match="device: expected"):
            choose_device(name)  # type: ignore[arg-type]
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(mg.ConfigError, match=f"'{missing}' is not on this machine"):
        choose_device(missing)


def test_dtypes(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(tiny_config(torch_dtype=ABSENT))
    for name, dtype in (("bf16", torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32)):
        assert choose_dtype(name, config, CPU) == dtype
    for wrong in ("int8", torch.int8, "", "double"):
        with pytest.raises(mg.ConfigError, match="dtype: expected"):
            choose_dtype(wrong, config, CPU)
    assert choose_dtype("auto", ModelConfig.from_dict(tiny_config(torch_dtype="float16")), CPU) == torch.float16
    quantised = plan_model(str(smollm2.path()), device="cpu")
    assert quantised.capacity.dtype == torch.float32
    assert choose_dtype("auto", quantised.config, torch.device("cuda", 0)) == torch.bfloat16


def test_free_memory_is_known_here() -> None:
    free = device_free_nbytes(CPU)
    assert free is None or free > 2**20
