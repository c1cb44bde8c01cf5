"""Benchmarks of a model: what is measured, what is made of it, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import monograph as mg
from monograph.cli import main
from monograph.model import bench_model as module
from monograph.model.bench_model import Benchmark, bench_engine, measured_ceiling_gb_s
from tests.checkpoints import tiny_config
from tests.engines import tiny_engine, write_model

H200 = Benchmark(
    device="NVIDIA H200",
    on_gpu=True,
    dtype="bfloat16",
    max_seq_len=8192,
    prompt_tokens=512,
    new_tokens=128,
    repeats=9,
    load_s=3.0,
    first_token_ms=3.5,
    ms=0.75,
    p20_ms=0.74,
    p80_ms=0.76,
    step_nbytes=2_700_000_000,
    ceiling_gb_s=4500.0,
)


def test_figures_follow_from_what_was_measured() -> None:
    assert H200.tokens_per_s == pytest.approx(1333.33, rel=1e-4)
    assert H200.gb_s == pytest.approx(3600)
    assert H200.percent_of_ceiling == pytest.approx(80)
    assert H200.floor_ms == pytest.approx(0.6)
    said = json.loads(H200.to_json())
    assert (said["judgement"], said["verdict"]) == ("ok", "ok: 80 % of what this GPU can read")
    assert said["percent_of_ceiling"] == pytest.approx(80)
    lines = str(H200).splitlines()
    assert lines[0] == "device       NVIDIA H200, bfloat16, max_seq_len 8,192, loaded in 3.0 s"
    assert lines[3] == "reads        2.700 GB a token, 3,600.0 GB/s, 80.0 % of the 4,500 GB/s that this GPU can read"


@pytest.mark.parametrize(
    ("found", "judgement", "words"),
    [
        (replace(H200, ms=1.0, p20_ms=1.0, p80_ms=1.0), "slow", "60 % of what this GPU can read; 'monograph tune'"),
        (replace(H200, p80_ms=0.86), "unsteady", "from 0.740 to 0.860 ms"),
        (replace(H200, ms=0.3, p20_ms=0.3, p80_ms=0.3, step_nbytes=270_000_000), "unjudged", "so small a model"),
        (replace(H200, ceiling_gb_s=None), "unjudged", "could not be measured"),
        (replace(H200, ceiling_gb_s=None, on_gpu=False), "unjudged", "on a CPU"),
    ],
)
def test_verdicts(found: Benchmark, judgement: str, words: str) -> None:
    assert found.judgement == judgement
    assert words in found.verdict
    assert found.verdict.startswith(judgement)
    assert str(found).splitlines()[-1].endswith(found.verdict)


def test_a_model_is_measured(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, load={"max_seq_len": 64}) as engine:
        lengths: list[tuple[int, int]] = []
        measure = engine.measure

        def spy(ids: list[int], new_tokens: int) -> mg.Stats:
            stats = measure(ids, new_tokens)
            lengths.append((stats.prompt_tokens, stats.completion_tokens))
            assert stats.reused_tokens == 0
            return stats

        engine.measure = spy  # type: ignore[method-assign,assignment]
        found = bench_engine(engine, 20, 10, 0.0, None)
        assert lengths == [(20, 10), (20, 10)]  # the first is not counted
        assert (found.prompt_tokens, found.new_tokens, found.repeats) == (20, 10, 1)
        assert found.ms > 0
        assert found.first_token_ms > 0
        assert not found.on_gpu
        rows = sum(engine.layout[f"layers.{i}.{k}_cache"].nbytes // 64 for i in range(2) for k in "kv")
        more = bench_engine(engine, 21, 10, 0.0, None)
        assert more.step_nbytes - found.step_nbytes == rows  # one more live row

        lengths.clear()
        bench_engine(engine, None, None, 1e-9, None)
        assert lengths[0] == (16, 8)  # a look at how fast it is
        assert lengths[1:] == [(16, 8)] * 2  # the least, where there is no time
        assert module._lengths(engine, None, None, 1e6) == (32, 32)  # all that fits, where there is time


def test_answers_do_not_end_at_a_stop_token(tmp_path: Path) -> None:
    """Every token of the vocabulary ends an answer of this model, and none a measurement."""
    config = tiny_config()
    every = list(range(config["vocab_size"]))[:64]
    with tiny_engine(tmp_path, {**config, "eos_token_id": every}, load={"max_seq_len": 64}) as engine:
        assert engine.measure([5, 6, 7], 30).completion_tokens == 30


def test_lengths_that_do_not_fit(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, load={"max_seq_len": 64}) as engine:
        for prompt, new in ((60, 5), (None, 64), (65, None), (10, 1)):
            with pytest.raises(mg.ConfigError, match="within max_seq_len 64"):
                bench_engine(engine, prompt, new, 0.0, None)
        for new in (1, 62):
            with pytest.raises(mg.ConfigError, match="expected 2 to 61"):
                engine.measure([1, 2, 3], new)
        assert bench_engine(engine, 60, 4, 0.0, None).new_tokens == 4
    with pytest.raises(mg.EngineError):
        engine.measure([1, 2, 3], 4)


def test_an_answer_after_a_measurement_is_as_before(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, load={"max_seq_len": 64}) as engine:
        greedy = mg.Sampling(temperature=0.0)
        before = engine.generate([3, 4, 5], 8, sampling=greedy).token_ids
        engine.measure([3, 4, 5, 6, 7], 8)
        assert engine.generate([3, 4, 5], 8, sampling=greedy, reuse=True).token_ids == before


def test_ceiling_needs_memory_and_may_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def ceiling(device: torch.device, nbytes: int) -> dict[str, float]:
        asked.append(nbytes)
        if nbytes == 3 << 30:
            raise RuntimeError("out of memory")
        return {"ceiling_gb_s": 4500.0}

    monkeypatch.setattr(module, "read_ceiling_gb_s", ceiling)
    gpu = torch.device("cuda", 0)
    for free, expected in ((100 << 30, 4500.0), (4 << 30, 4500.0), (6 << 30, None), (1 << 30, None)):
        monkeypatch.setattr(module, "device_free_nbytes", lambda device, free=free: free)
        assert measured_ceiling_gb_s(gpu) == expected
    assert asked == [8 << 30, 2 << 30, 3 << 30]
    assert "out of memory" in caplog.text


def test_progress_ends_before_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(module, "bench_engine", lambda *_: events.append("measured"))
    model = str(write_model(tmp_path))
    module.bench_model(
        model,
        device="cpu",
        max_seq_len=64,
        progress=lambda done, total: events.append("read"),
        loaded=lambda: events.append("loaded"),
    )
    assert events[-2:] == ["loaded", "measured"]
    assert set(events[:-2]) == {"read"}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path))
    arguments = ["bench", model, "--device", "cpu", "--max-seq-len", "64", "--seconds", "1"]
    assert main([*arguments, "--prompt-tokens", "8", "--new-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "device",
        "work",
        "decode",
        "reads",
        "first token",
        "verdict",
    ]
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tokens_per_s"] > 0
    assert said["percent_of_ceiling"] is None
    assert main([*arguments, "--new-tokens", "64"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "--max-seq-len 96" in err


@pytest.mark.gpu
def test_on_this_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path))
    assert main(["bench", model, "--max-seq-len", "64", "--seconds", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["on_gpu"]
    assert said["device"] == torch.cuda.get_device_name(0)
    assert 100 < said["ceiling_gb_s"] < 20000
    assert 0 < said["percent_of_ceiling"] < 100
