"""The start-up benchmark from its command line to its file, on a CPU with a tiny model, and its verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bench.startup
from bench.shapes import SHAPES
from bench.startup import PHASES, row, verdict, write_model
from monograph.model.config import ModelConfig
from monograph.model.tokenizer import Tokenizer
from tests.bench.test_decode import FORM
from tests.bench.tiny import CONFIG


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as the benchmark writes one."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", CONFIG)
        write_model("tiny", folder, torch.device("cpu"))
    return folder


def started(**changes: Any) -> dict[str, Any]:
    """What one process reports."""
    times = dict.fromkeys(PHASES, 0.25)
    facts = {"total_s": 1.5, "process_s": 3.0, "first_token_ms": 5.0, "weights_nbytes": 10**9, "kernels": 18}
    found = {"token": 7, "compiled_names": [], "new_files": 0, "device": "cuda", "dtype": "bfloat16", "max_seq_len": 64}
    found["early"] = True
    return {**times, **facts, **found, **changes}


def test_the_model_is_whole(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    assert (config.hidden_size, config.vocab_size) == (CONFIG.hidden_size, CONFIG.vocab_size)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == CONFIG.vocab_size
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two fresh processes: one whose token is the standard, one that is measured."""
    path = tmp_path / "run.json"
    arguments = ["--model", str(folder), "--device", "cpu", "--max-seq-len", "96", "--rounds", "1", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["startup.py", *arguments])
    bench.startup.main()
    content = json.loads(path.read_text())
    (found,) = content["rows"]
    assert list(found)[: len(FORM) + 1] == [*FORM, "verdict"]
    assert (found["bench"], found["verdict"], found["cache"], found["compiled"]) == ("start", "ok", None, 0)
    assert (found["dtype"], found["max_seq_len"], found["seq_len"], found["graphs"]) == ("float32", 96, 16, 0)
    phases_s = sum(found[phase] for phase in PHASES) + found["first_token_ms"] / 1e3
    assert phases_s <= found["ms"] / 1e3 < phases_s + 0.5  # the phases are nearly all of it
    assert found["import_s"] > 0.1
    assert found["weights_gb_s"] > 0


@pytest.mark.parametrize(
    ("cache", "starts", "wanted"),
    [
        ("warm", [started(), started()], "ok"),
        ("warm", [started(), started(compiled_names=["_qkv_kernel"])], "compiled after warming: _qkv_kernel"),
        ("warm", [started(), started(new_files=2)], "2 new files in the cache after warming"),
        ("warm", [started(), started(token=8)], "token 8, elsewhere 7"),
        ("cold", [started(compiled_names=["_qkv_kernel"], new_files=9)], "ok"),
        ("cold", [started()], "nothing was compiled: the cache was not cold"),
        (None, [started(device="cpu")], "ok"),
    ],
)
def test_verdicts(cache: str | None, starts: list[dict[str, Any]], wanted: str) -> None:
    assert verdict(cache, starts, token=7) == wanted
    assert row("tiny", cache, starts, 7, 16)["verdict"] == wanted


def test_rows_are_medians() -> None:
    starts = [started(process_s=seconds, weights_s=seconds / 10) for seconds in (2.0, 4.0, 3.0)]
    found = row("tiny", "warm", starts, 7, 16)
    assert (found["ms"], found["weights_s"], found["weights_gb_s"], found["starts"]) == (3000.0, 0.3, 3.333, 3)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exit status 1.*CheckpointError.*expected a model's folder"):
        bench.startup.start(str(tmp_path), ["--device", "cpu"], None)
