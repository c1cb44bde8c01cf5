"""Start-up on a GPU: what `monograph warm` leaves, and loading that compiles and reads at the same time."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import monograph as mg
from bench.startup import start, warm
from monograph.model.warm import warm_model
from tests.checkpoints import tiny_config, tiny_tensors
from tests.engines import write_model
from tests.gpu import tiny

pytestmark = pytest.mark.gpu

CONFIG = tiny_config(
    vocab_size=515,
    hidden_size=96,
    intermediate_size=200,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    attention_bias=True,
    max_position_embeddings=4096,
    torch_dtype="bfloat16",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), CONFIG, dtype=torch.bfloat16)


def start_of(folder: Path, cache: Path, *options: str) -> dict[str, Any]:
    """A fresh process that loads the model and answers with a token."""
    return start(str(folder), ["--device", "cuda", *options], cache)


def test_a_warmed_start_compiles_nothing(folder: Path, tmp_path: Path) -> None:
    """In another process, with the default length, one that 16 divides, and one that it does not."""
    warm(str(folder), ["--device", "cuda"], tmp_path)
    warm(str(folder), ["--device", "cuda", "--max-seq-len", "1001"], tmp_path)
    for options in ((), ("--max-seq-len", "512"), ("--max-seq-len", "777")):
        found = start_of(folder, tmp_path, *options)
        assert found["compiled_names"] == [], options
        assert found["new_files"] == 0, options
        assert (found["compiled"], found["kernels"] > 10) == (0, True), options


def test_a_cold_start_compiles_all_and_the_next_nothing(folder: Path, tmp_path: Path) -> None:
    """Without warming: everything is compiled before weights are needed, nothing twice, and the token is the same."""
    cold = start_of(folder, tmp_path)
    assert len(cold["compiled_names"]) > 10
    assert cold["new_files"] > 10
    again = start_of(folder, tmp_path)
    assert (again["compiled_names"], again["new_files"]) == ([], 0)
    assert again["token"] == cold["token"]
    assert again["kernels_s"] < cold["kernels_s"]


def test_warming_needs_no_weights_and_gives_its_memory_back(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "model"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    before = in_use()
    said: list[tuple[int, int]] = []
    warmed = warm_model(str(bare), device="cuda", report=lambda _, number, count: said.append((number, count)))
    assert warmed is not None
    assert warmed.dtype == torch.bfloat16
    assert said == [(number, len(warmed.kernels)) for number in range(1, len(warmed.kernels) + 1)]
    assert {"qkv", "qkv_rows", "attention", "head", "sample"} <= {kernel.name for kernel in warmed.kernels}
    assert in_use() == before


def test_a_load_says_what_it_took(folder: Path) -> None:
    bytes_read: list[int] = []
    with mg.load(str(folder), device="cuda", progress=lambda done, _: bytes_read.append(done)) as engine:
        stats = engine.load_stats
    phases = (stats.open_s, stats.tokenizer_s, stats.plan_s, stats.arena_s, stats.weights_s, stats.capture_s)
    assert min(phases) > 0
    assert sum(phases) + stats.kernels_s <= stats.total_s
    assert stats.kernels > 10
    assert bytes_read == sorted(bytes_read)


def test_a_load_that_fails_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """No thread, no memory, and nothing in flight: the next load is as any other."""
    tensors = tiny_tensors(CONFIG, dtype=torch.bfloat16)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e30
    damaged = write_model(tmp_path / "model", CONFIG, tensors=tensors)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = in_use()
    with pytest.raises(mg.CheckpointError, match=r"layers\.1\.mlp\.down_proj.*does not fit float16"):
        mg.load(str(damaged), device="cuda", dtype="float16")
    assert in_use() == before
    with pytest.raises(KeyboardInterrupt):
        mg.load(str(folder), device="cuda", progress=interrupt)
    assert in_use() == before
    with mg.load(str(folder), device="cuda") as engine:
        assert len(engine.generate([5, 6, 7], 4).token_ids) > 0


def in_use() -> tuple[int, int]:
    """Bytes of device memory, and threads, once nothing refers to what has gone."""
    tiny.settle()
    gc.collect()
    return torch.cuda.memory_allocated(tiny.DEVICE), threading.active_count()
