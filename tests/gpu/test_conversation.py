"""Conversations on the GPU: bits of a prompt in pieces, turns that read their own tokens, saved and resumed answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import monograph as mg
from bench.shapes import caches
from monograph.model.decoder import Decoder
from tests import session_process, smollm2
from tests.checkpoints import tiny_config, tiny_ids
from tests.engines import write_model
from tests.gpu import tiny

pytestmark = pytest.mark.gpu

RELATIVE_ERROR = 0.1  # bf16 through 30 layers, worst of 49,152 logits; a wrong row of the cache shows as 1


@pytest.fixture(scope="module")
def engine() -> Iterator[mg.Engine]:
    with mg.load(str(smollm2.path()), device="cuda", dtype="bfloat16", max_seq_len=4096) as loaded:
        yield loaded


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_prompt_rows_do_not_depend_on_the_pieces(name: str, request: pytest.FixtureRequest) -> None:
    """All layers, by the graph: KV rows and the logits after the last."""
    decoder: Decoder = request.getfixturevalue(name)
    ids = tiny.random_ids(1100, seed=4)

    def prefill(piece: int) -> tuple[list[bytes], bytes]:
        tiny.clean(decoder)
        for pair in caches(decoder.arena, tiny.CONFIG):
            for cache in pair:
                cache.fill_(float("nan"))
        for start in range(0, len(ids), piece):
            end = min(len(ids), start + piece)
            tiny.begin(decoder, ids[:end], start)
            for _ in range(start, end, decoder.capacity.chunk_rows):
                tiny.prefill(decoder)
        tiny.settle()
        rows = [tiny.raw(cache[:, : len(ids)]) for pair in caches(decoder.arena, tiny.CONFIG) for cache in pair]
        return rows, tiny.raw(decoder.arena.view("logits"))

    whole = prefill(len(ids))
    for piece in (1, 7, 64, 1000):
        assert prefill(piece) == whole, piece
    tiny.clean(decoder)
    decoder.remember(())


def test_turn_20_reads_its_own_tokens_only(engine: mg.Engine) -> None:
    """And its logits are as near to float32 as those of a cold run: at most twice its error."""
    chat = engine.chat(system="Be brief.")
    live, stats = 0, None
    for turn in range(1, 21):
        list(chat.send(f"Number {turn}?", max_new_tokens=24, sampling=mg.Sampling(temperature=1.0, seed=11)))
        assert chat.completion is not None
        stats = chat.completion.stats
        assert stats.reused_tokens == live
        live = stats.prompt_tokens + stats.completion_tokens - 1
    assert stats is not None
    assert stats.prefilled_tokens < 32
    list(chat.regenerate(max_new_tokens=1, sampling=mg.Sampling(temperature=0)))
    warm = engine.arena.view("logits").cpu()
    assert chat.completion is not None
    read = engine.arena.view("tokens")[: chat.completion.stats.prompt_tokens].tolist()
    engine.generate(read, 1, sampling=mg.Sampling(temperature=0))
    cold = engine.arena.view("logits").cpu()
    with mg.load(str(smollm2.path()), device="cuda", dtype="float32", max_seq_len=4096) as reference:
        want = reference.logits(read)[-1]
    warm_rms, cold_rms = (float((got - want).square().mean().sqrt()) for got in (warm, cold))
    assert 0 < warm_rms < 2 * cold_rms
    assert tiny.relative_error(warm, want) < RELATIVE_ERROR


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_another_process_goes_on_to_the_bit(tmp_path: Path, dtype: str) -> None:
    write_model(tmp_path / "model", tiny_config(max_position_embeddings=256))
    assert session_process.in_a_process("save", tmp_path / "model", "cuda", dtype, tmp_path) is None
    found = session_process.in_a_process("go_on", tmp_path / "model", "cuda", dtype, tmp_path)
    with mg.load(str(tmp_path / "model"), device="cuda", dtype=dtype, max_seq_len=256) as engine:
        assert found == {str(seed): session_process.never_stopped(engine, seed) for seed in session_process.SEEDS}


@pytest.mark.parametrize("seed", session_process.SEEDS)
def test_the_real_model_goes_on_to_the_bit(engine: mg.Engine, seed: int, tmp_path: Path) -> None:
    """Saved, another conversation in between, loaded; and resumed without a file, cut by its reader in run-ahead."""
    wanted = session_process.never_stopped(engine, seed)
    chat = session_process.until_the_break(engine, seed, session_process.CUT)
    chat.save(tmp_path / "f")
    list(engine.chat(system="Other.").send("Hello?", max_new_tokens=40))
    loaded = engine.load_chat(tmp_path / "f")
    list(loaded.resume(max_new_tokens=session_process.WHOLE - session_process.CUT))
    assert session_process.after_the_break(engine, loaded, seed) == wanted
    closed = session_process.until_the_break(engine, seed, session_process.CUT, closed=True)
    list(closed.resume(max_new_tokens=session_process.WHOLE - session_process.CUT))
    assert session_process.after_the_break(engine, closed, seed) == wanted


def test_going_back_touches_no_graph(engine: mg.Engine, compilations: list[str], tmp_path: Path) -> None:
    """Rewind, edit, regenerate, branch, save and load: the same graphs, no kernel made, no memory taken for good."""
    chat = engine.chat(system="Be brief.")
    list(chat.send("One?", max_new_tokens=8))
    chat.save(tmp_path / "f")
    graphs = tiny.graphs_of(engine._decoder.runner)
    compilations.clear()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    list(chat.send("Two?", max_new_tokens=8))
    list(chat.regenerate(max_new_tokens=8))
    list(chat.edit(1, "Three?", max_new_tokens=8))
    twin = chat.branch()
    list(twin.send("Four?", max_new_tokens=8))
    list(chat.send("Five?", max_new_tokens=8))
    chat.rewind()
    chat.save(tmp_path / "f")
    list(engine.load_chat(tmp_path / "f").send("Six?", max_new_tokens=8))
    assert not compilations
    assert torch.cuda.memory_allocated() == allocated
    assert tiny.graphs_of(engine._decoder.runner) == graphs
    assert len(graphs) == 2


def test_trim(tmp_path: Path) -> None:
    """An answer longer than the room that is left goes on behind fewer turns."""
    with mg.load(str(smollm2.path()), device="cuda", dtype="bfloat16", max_seq_len=256) as small:
        chat = small.chat(system="Be brief.", on_full="trim")
        for text in ("Tell me a story.", "And another.", "And one more."):
            list(chat.send(text, max_new_tokens=90, sampling=mg.Sampling(temperature=0.8, seed=1)))
        assert chat.trims
        assert chat.messages[0] == {"role": "system", "content": "Be brief."}
        assert chat.completion is not None
        assert chat.completion.text == chat.messages[-1]["content"]


def test_logits_in_pieces(engine: mg.Engine) -> None:
    ids = tiny_ids({"vocab_size": engine.config.vocab_size}, 700)
    pieces = []
    before = torch.cuda.current_stream()
    for piece in engine.logits_pieces(ids):
        assert torch.cuda.current_stream() == before  # the caller's stream is the caller's
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces), engine.logits(ids))
    assert not torch.cat(pieces).is_cuda
