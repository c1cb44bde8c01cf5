"""Ten seconds of real tuning: it keeps its budget, what it leaves is right and is found by the next load."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import monograph as mg
from monograph.model.cache_folder import tiles_folder
from monograph.model.kept_tiles import keep_tiles
from monograph.model.tile_key import TileKey
from monograph.model.tile_space import SPACE
from monograph.model.tiles import current_tiles
from monograph.model.tune import TuneProgress
from monograph.model.tune_step import StepBench, tune_decoder
from tests.checkpoints import tiny_config
from tests.engines import write_model
from tests.gpu import tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tiny_config(
        vocab_size=515,
        hidden_size=96,
        intermediate_size=200,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        torch_dtype="bfloat16",
    )
    return write_model(tmp_path / "model", config, dtype=torch.bfloat16)


@pytest.mark.usefixtures("quiet")
def test_ten_seconds_of_tuning() -> None:
    said: list[TuneProgress] = []
    with tiny.made() as decoder:
        twin = tiny.twin_on_cpu(decoder, 64)
        ids = tiny.random_ids(40)
        found = tune_decoder(decoder, 10.0, said.append)
        assert found.seconds < 11.0  # the last candidate may end after the time
        assert found.timed > 10
        assert 0 <= found.noise < 0.05
        assert min(found.before_ms + found.after_ms) > 0
        assert current_tiles(decoder.program) == {
            use: {**current_tiles(decoder.program)[use], **tile} for use, tile in found.tiles.items()
        }
        assert {one.stage for one in said} >= {"compile", "measure"}
        # Right, and the graph and the launches one by one still agree in every bit.
        tiny.clean(decoder)
        error = tiny.relative_error(decoder.logits(ids, "decode")[-1], twin.logits(ids, "decode")[-1])
        assert error < 0.05
        graphs = tiny.graphs_of(decoder.runner)
        assert len(graphs) == 2
        tiny.replay(decoder, ids, 20)
        by_graph = tiny.bits(decoder, 59)
        tiny.launch(decoder, ids, 20, decoder.runner.pdl)
        assert not tiny.differing(by_graph, tiny.bits(decoder, 59))
        twin.close()
        del graphs
    gc.collect()


def test_candidates_of_every_kind_are_right() -> None:
    """One step away from every default, whatever the clock would say: compiled, captured, replayed, checked."""
    with tiny.made() as decoder, StepBench(decoder) as bench:
        start = current_tiles(decoder.program)
        wanted = [
            (use, {**start[use], key: value})
            for use in SPACE
            for key, value in (("num_warps", 2 * start[use]["num_warps"]), ("trigger", 3), ("trigger", 2))
        ]
        outcomes = bench.compile(wanted, bench.clock() + 120, lambda done: None)
        assert outcomes.count("") > len(wanted) // 2, outcomes
        for (use, tile), outcome in zip(wanted, outcomes, strict=True):
            if not outcome:
                assert bench.agrees({**start, use: tile}), (use, tile)


def test_a_tile_that_cannot_be_is_a_reason_and_no_crash() -> None:
    with tiny.made() as decoder, StepBench(decoder) as bench:
        (outcome,) = bench.compile([("qkv", {"BLOCK_N": 3})], bench.clock() + 60, lambda done: None)
        assert outcome
        assert min(bench.sample({})) > 0


def test_tuned_once_and_kept(folder: Path) -> None:
    """By monograph.load; the answer of the next load is the same, with the same tiles."""
    with mg.load(str(folder), device="cuda", tune="off") as engine:
        assert set(engine.load_stats.tiles.values()) == {"default"}
        found = engine.tune(5.0)
        assert found is not None
        assert set(engine.load_stats.tiles.values()) == {"tuned"}
        tokens = engine.generate([5, 6, 7], 16, sampling=mg.Sampling(temperature=0.0)).token_ids
    (kept,) = tiles_folder().iterdir()
    for tune in ("auto", True):
        with mg.load(str(folder), device="cuda", tune=tune) as engine:
            assert set(engine.load_stats.tiles.values()) == {"kept"}
            assert engine.load_stats.tiles_from == str(kept)
            assert engine.load_stats.tune_s == 0.0
            again = engine.generate([5, 6, 7], 16, sampling=mg.Sampling(temperature=0.0)).token_ids
            assert again == tokens
    with mg.load(str(folder), device="cuda", tune="off") as engine:
        assert engine.load_stats.tiles_from == ""


def test_kept_tiles_do_not_depend_on_the_length(folder: Path) -> None:
    """They are the same for every max_seq_len, and so are the bits; the number of splits is no tile."""
    with mg.load(str(folder), device="cuda", max_seq_len=512) as engine:
        key = TileKey.of(engine.config, engine.capacity.dtype, engine.device)
    keep_tiles(key, {"qkv": {"num_warps": 4}, "attention": {"MIN_BLOCKS": 2}}, {})
    logits = []
    for max_seq_len in (512, 4096):
        with mg.load(str(folder), device="cuda", max_seq_len=max_seq_len) as engine:
            assert engine.load_stats.tiles["attention"] == "kept"
            logits.append(engine.logits(list(range(3, 300)), through="decode"))
    assert torch.equal(logits[0], logits[1])
