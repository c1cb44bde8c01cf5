"""Warming reads a configuration and nothing else; what it does on a GPU is tested there (tests/gpu/test_warm.py)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import monograph as mg
from monograph.model import warm as warm_module
from monograph.model.plan import make_plan
from monograph.model.prepare import Prepared
from monograph.model.program import Program
from monograph.model.sampling import Sampling
from monograph.model.state import StepState
from monograph.model.tiles import ChosenTiles
from monograph.model.warm import Warmed, warm_model
from tests.checkpoints import tiny_config
from tests.engines import write_model

CPU = torch.device("cpu")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Program, bool]]:
    """What would be compiled on a GPU, which here is the CPU under another name; "compiling" leaves a file."""
    asked: list[tuple[Program, bool]] = []
    folder = tmp_path / "cache"

    def prepare(program: Program, device: torch.device, pdl: bool, report: Any) -> list[Prepared]:
        asked.append((program, pdl))
        new = folder / str(len(program.decode))
        (kernel,) = kernels = [Prepared("qkv", 0.5, not new.exists())]
        folder.mkdir(exist_ok=True)
        new.write_bytes(b"x" * 1000)
        if report is not None:
            report(kernel, 1, 1)
        return kernels

    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(warm_module, "choose_device", lambda device: gpu)
    monkeypatch.setattr(warm_module, "starting", lambda device: nullcontext())
    monkeypatch.setattr(warm_module, "make_plan", lambda config, device, *rest: make_plan(config, CPU, *rest))
    for name in ("Arena", "HostMemory"):
        made = getattr(warm_module, name)
        monkeypatch.setattr(warm_module, name, lambda layout, device, made=made: made(layout, CPU))
    monkeypatch.setattr(warm_module, "supports_pdl", lambda device: True)
    monkeypatch.setattr(warm_module, "cache_folder", lambda: folder)
    monkeypatch.setattr(warm_module, "prepare", prepare)
    monkeypatch.setattr(warm_module, "choose_tiles", lambda *_: ChosenTiles({"qkv": {"num_warps": 2}}, "kept"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    return asked


def test_one_layer_of_the_true_sizes(tmp_path: Path, prepared: list[tuple[Program, bool]]) -> None:
    folder = write_model(tmp_path / "model", tiny_config(num_hidden_layers=5))
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    said: list[Any] = []
    warmed = warm_model(str(folder), dtype="bfloat16", max_seq_len=96, report=lambda *report: said.append(report))
    assert warmed is not None
    ((program, pdl),) = prepared
    assert pdl
    assert [launch.name.partition(".")[2] for launch in program.decode[1:-2]] == [
        f"0.{part}" for part in ("qkv", "attention", "o", "gate_up", "down")
    ]
    shapes = {
        launch.name: [None if arg is None else tuple(arg.shape) for arg in launch.args] for launch in program.decode
    }
    assert (4 * 16 + 2 * 2 * 16, 64) in shapes["layers.0.qkv"]
    assert (2, 96, 16) in shapes["layers.0.attention"]
    assert (96, 64) in shapes["head"]
    assert [launch.use for launch in program.decode if launch.tile] == ["qkv"]  # in the tiles that a load will take
    assert program.decode[1].args[2].dtype == torch.bfloat16  # type: ignore[union-attr]
    assert (warmed.compiled, warmed.new_files, warmed.new_nbytes, warmed.max_seq_len) == (1, 1, 1000, 96)
    assert said == [(warmed.kernels[0], 1, 1)]
    again = warm_model(str(folder), dtype="bfloat16", max_seq_len=96)
    assert again is not None
    assert (again.compiled, again.new_files, again.new_nbytes) == (0, 0, 0)
    assert str(again).endswith(f"0 compiled in {again.seconds:.1f} s, all in {tmp_path / 'cache'}")


def test_launches_are_halted(
    tmp_path: Path, prepared: list[tuple[Program, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is launched; else a kernel would run over memory that holds anything."""
    made: list[StepState] = []

    class Watched(StepState):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)
            assert int(self._arena.view("halted")) == 1

    monkeypatch.setattr(warm_module, "StepState", Watched)
    warm_model(str(write_model(tmp_path / "model")))
    assert len(made) == 1


def test_dtype_and_length_are_those_of_a_load(tmp_path: Path, prepared: list[tuple[Program, bool]]) -> None:
    folder = write_model(tmp_path / "model", tiny_config(torch_dtype="float16"))
    warmed = warm_model(str(folder))
    assert warmed is not None
    with mg.load(str(folder), device="cpu") as engine:
        assert (warmed.dtype, warmed.max_seq_len) == (engine.capacity.dtype, engine.capacity.max_seq_len)
        engine.generate([3, 4], 1, sampling=Sampling(temperature=0))


def test_faults_are_those_of_a_load(tmp_path: Path, prepared: list[tuple[Program, bool]]) -> None:
    folder = str(write_model(tmp_path / "model"))
    with pytest.raises(mg.ConfigError, match="max_seq_len: expected an integer from 2 to 256"):
        warm_model(folder, max_seq_len=1000)
    with pytest.raises(mg.ConfigError, match="dtype: expected auto"):
        warm_model(folder, dtype="int3")
    with pytest.raises(mg.CheckpointError, match="no such file or folder"):
        warm_model(str(tmp_path / "nothing"))
    assert not prepared


def test_a_gguf_file_of_the_hub_is_not_fetched(
    prepared: list[tuple[Program, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def open_model(model: str, *, local_files_only: bool, **_: Any) -> None:
        asked.append(local_files_only)
        raise mg.HubError(f"{model}: not in the cache")

    monkeypatch.setattr(warm_module, "open_model", open_model)
    with pytest.raises(mg.HubError, match=r"not in the cache \(warming fetches no weights"):
        warm_model("org/name:file.gguf")
    with pytest.raises(mg.HubError, match=r"org/name: not in the cache$"):
        warm_model("org/name")
    assert asked == [True, False]  # what is no GGUF file has a configuration to fetch


def test_nothing_on_a_cpu() -> None:
    assert warm_model("no/model", device="cpu") is None


def test_lengths_that_16_does_not_divide_are_said() -> None:
    warmed = Warmed("a GPU", torch.float32, 1000, [], 0.0, Path("/c"), 0, 0)
    assert "at every max_seq_len that 16 does not divide" in str(warmed)
