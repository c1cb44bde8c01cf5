"""Saved conversations: the same bits as if they had never stopped; refused where they do not belong or are damaged."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import monograph as mg
from monograph.model import session_file
from monograph.model.fingerprint import machine_fingerprint
from monograph.model.tiles import current_tiles
from tests import session_process
from tests.checkpoints import tiny_config, tiny_tensors
from tests.engines import tiny_engine, write_model

NO_SPECIAL = dict.fromkeys(range(3), -math.inf)
NEVER_ENDS = mg.Sampling(logit_bias=NO_SPECIAL, seed=5)
PENALISED = mg.Sampling(logit_bias=NO_SPECIAL, temperature=0.8, presence_penalty=0.4, seed=5)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[mg.Engine]:
    with tiny_engine(tmp_path / "model") as loaded:
        yield loaded


def talk(engine: mg.Engine, turns: int = 2, sampling: mg.Sampling = NEVER_ENDS) -> mg.Chat:
    chat = engine.chat(system="s")
    for turn in range(turns):
        list(chat.send(f"q{turn}", max_new_tokens=6, sampling=sampling))
    return chat


def session_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["session"])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_process_goes_on_to_the_bit(tmp_path: Path, dtype: str) -> None:
    write_model(tmp_path / "model", tiny_config(max_position_embeddings=256))
    assert session_process.in_a_process("save", tmp_path / "model", "cpu", dtype, tmp_path) is None
    found = session_process.in_a_process("go_on", tmp_path / "model", "cpu", dtype, tmp_path)
    with mg.load(str(tmp_path / "model"), device="cpu", dtype=dtype, max_seq_len=256) as engine:
        wanted = {str(seed): session_process.never_stopped(engine, seed) for seed in session_process.SEEDS}
    assert found == wanted
    assert len({tuple(facts["second"]) for facts in wanted.values()}) == len(session_process.SEEDS)


def test_what_the_file_holds(engine: mg.Engine, tmp_path: Path) -> None:
    """Live rows only, in a form that any reader of safetensors takes."""
    chat = talk(engine, sampling=PENALISED)
    path = tmp_path / "chat.session"
    chat.save(path)
    assert chat.completion is not None
    tensors = load_file(path)
    ids = engine.tokenizer.apply_chat_template(chat.messages[:-1]) + chat.completion.token_ids
    assert tensors["tokens"].tolist() == ids[:-1]
    assert tensors["pending"].tolist() == ids[-1:]
    for name in ("layers.0.k_cache", "layers.1.v_cache"):
        assert torch.equal(tensors[name], engine.arena.view(name)[:, : len(ids) - 1])
    dense = torch.zeros(96, dtype=torch.int32)
    for name in ("context_counts", "output_counts"):
        counts = dense.clone()
        counts[tensors[name][:, 0].long()] = tensors[name][:, 1]
        assert torch.equal(counts, engine.arena.view(name)), name  # what the steps have counted themselves
    session = session_of(path)
    assert session["messages"] == chat.messages
    assert session["answer"]["sampling"]["seed"] == 5
    assert path.stat().st_size < 40_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat.session", "model"]


def test_loading_reads_nothing_again(engine: mg.Engine, tmp_path: Path) -> None:
    chat = talk(engine)
    chat.save(tmp_path / "f")
    same = list(chat.send("more", max_new_tokens=5, sampling=NEVER_ENDS))
    wanted = chat.completion
    engine.generate("something else", 3)
    again = engine.load_chat(tmp_path / "f")
    assert list(again.send("more", max_new_tokens=5, sampling=NEVER_ENDS)) == same
    assert wanted is not None
    assert again.completion is not None
    assert again.completion.token_ids == wanted.token_ids
    assert again.completion.stats.reused_tokens == wanted.stats.reused_tokens > 0


def test_an_arena_of_another_size(engine: mg.Engine, tmp_path: Path) -> None:
    """max_seq_len is nothing that bits depend on; too small a one is refused."""
    chat = talk(engine)
    chat.save(tmp_path / "f")
    wanted = list(chat.resume(max_new_tokens=8))
    with mg.load(str(tmp_path / "model"), device="cpu", max_seq_len=100) as smaller:
        assert list(smaller.load_chat(tmp_path / "f").resume(max_new_tokens=8)) == wanted
    with (
        mg.load(str(tmp_path / "model"), device="cpu", max_seq_len=20) as tiny,
        pytest.raises(
            mg.CapacityError, match=r"has \d+ rows of KV cache, more than max_seq_len 20; load the model with"
        ),
    ):
        tiny.load_chat(tmp_path / "f")


def test_empty_rewound_and_edited_conversations(engine: mg.Engine, tmp_path: Path) -> None:
    path = tmp_path / "f"
    engine.chat(system="s").save(path)
    assert engine.load_chat(path).messages == [{"role": "system", "content": "s"}]

    chat = talk(engine, 3)
    chat.rewind()
    chat.save(path)
    assert load_file(path)["tokens"].shape[0] < len(engine.tokenizer.apply_chat_template(chat.messages))
    loaded = engine.load_chat(path)
    assert loaded.messages == chat.messages
    with pytest.raises(mg.PromptError, match="resume: there is no answer to go on with"):
        loaded.resume()
    answer = list(loaded.send("x", max_new_tokens=5))
    assert loaded.completion is not None
    assert loaded.completion.stats.reused_tokens > 20
    assert answer == list(chat.send("x", max_new_tokens=5))

    chat.messages[1]["content"] = "changed by hand"
    chat.save(path)
    assert load_file(path)["tokens"].shape[0] == 0
    assert engine.load_chat(path).messages == chat.messages


def test_rows_that_another_conversation_has_overwritten(engine: mg.Engine, tmp_path: Path) -> None:
    """Only what two conversations share is still there; the rest is read anew."""
    chat = talk(engine)
    whole = len(engine.tokenizer.apply_chat_template(chat.messages))
    other = engine.chat(system="s")
    list(other.send("else", max_new_tokens=3, sampling=NEVER_ENDS))
    chat.save(tmp_path / "f")
    assert load_file(tmp_path / "f")["tokens"].shape[0] < whole / 2
    loaded = engine.load_chat(tmp_path / "f")
    assert list(loaded.send("x", max_new_tokens=5)) == list(chat.send("x", max_new_tokens=5))


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        ({"num_hidden_layers": 1}, {}, r"num_layers \(2 there, 1 here\), weights$"),
        ({"rope_theta": 20000.0}, {}, r"rope theta \(10000\.0 there, 20000\.0 here\)$"),
        ({}, {"dtype": "bfloat16"}, r"dtype \('float32' there, 'bfloat16' here\), weights$"),
    ],
)
def test_another_model_is_refused(
    engine: mg.Engine, tmp_path: Path, config: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    talk(engine).save(tmp_path / "f")
    with (
        tiny_engine(tmp_path / "other", tiny_config(**config), load=options) as other,
        pytest.raises(mg.ConfigError, match=rf"f: was saved with another model; what differs: {named}"),
    ):
        other.load_chat(tmp_path / "f")


def test_one_other_weight_is_another_model(engine: mg.Engine, tmp_path: Path) -> None:
    talk(engine).save(tmp_path / "f")
    tensors = tiny_tensors(tiny_config())
    tensors["model.layers.1.mlp.down_proj.weight"][63, 127] += 1e-6
    with tiny_engine(tmp_path / "other", tensors=tensors) as other:
        before = other.arena.fingerprint()
        with pytest.raises(mg.ConfigError, match=r"what differs: weights$"):
            other.load_chat(tmp_path / "f")
        assert other.arena.fingerprint() == before


def test_another_machine_is_said(
    engine: mg.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = talk(engine)
    chat.save(tmp_path / "f")
    engine.load_chat(tmp_path / "f")
    assert not caplog.records
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    engine.load_chat(tmp_path / "f")
    assert "last bits may differ" in caplog.text
    assert "torch ('" in caplog.text


@pytest.mark.parametrize("at", [0, 3, 40, 300, -3000, -1])
def test_a_damaged_byte_is_found(engine: mg.Engine, tmp_path: Path, at: int) -> None:
    path = tmp_path / "f"
    talk(engine).save(path)
    content = bytearray(path.read_bytes())
    content[at] ^= 0x01
    path.write_bytes(content)
    with pytest.raises(mg.CheckpointError, match=r"f: (is damaged|is not a saved|is cut short|is of the form)"):
        engine.load_chat(path)
    assert list(engine.chat().send("still works", max_new_tokens=2))


@pytest.mark.parametrize("nbytes", [0, 4, 8, 100, 5000, -1])
def test_a_shortened_file_is_refused(engine: mg.Engine, tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "f"
    talk(engine).save(path)
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(mg.CheckpointError, match=r"f: (is cut short|is not a saved conversation)"):
        engine.load_chat(path)


def test_files_of_other_kinds(engine: mg.Engine, tmp_path: Path) -> None:
    for path, text in (
        (tmp_path / "model" / "model.safetensors", "is not a saved conversation"),
        (tmp_path / "model" / "config.json", "is not a saved conversation"),
        (tmp_path / "missing", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(mg.CheckpointError, match=text):
            engine.load_chat(path)
    bomb = tmp_path / "pickle"
    bomb.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(mg.CheckpointError):
        engine.load_chat(bomb)
    assert not (tmp_path / "ran").exists()


def test_parts_that_do_not_belong_together(engine: mg.Engine, tmp_path: Path) -> None:
    """A file with a right digest whose content is wrong all the same: made by hand."""
    path = tmp_path / "f"
    talk(engine, sampling=PENALISED).save(path)
    session, tensors = session_of(path), load_file(path)
    for name, wrong, text in (
        ("output_counts", tensors["output_counts"] + 1, "output_counts are not those of its tokens"),
        ("layers.1.k_cache", tensors["layers.1.k_cache"][:, :-1].contiguous(), r"layers\.1\.k_cache: expected"),
    ):
        changed = {**tensors, name: wrong}
        session_file.write(path, session, [session_file.whole(t, n) for n, t in changed.items()])
        with pytest.raises(mg.CheckpointError, match=text):
            engine.load_chat(path)
    for broken in ({"model": session["model"]}, {**session, "pieces": [["x", 3]]}, {**session, "answer": {}}):
        session_file.write(path, broken, [session_file.whole(t, n) for n, t in tensors.items()])
        with pytest.raises(mg.CheckpointError, match="holds what this version does not understand"):
            engine.load_chat(path)


def test_a_save_that_fails_leaves_the_old_file(
    engine: mg.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = talk(engine)
    folder = tmp_path / "saved"
    folder.mkdir()
    path = folder / "f"
    chat.save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            chat.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in folder.iterdir()] == ["f"]
    with pytest.raises(IsADirectoryError):
        chat.save(folder)
    with pytest.raises(FileNotFoundError):
        chat.save(folder / "missing" / "f")
    chat.messages[0]["extra"] = object()
    with pytest.raises(mg.PromptError, match="cannot be saved"):
        chat.save(path)
    assert path.read_bytes() == before


def test_a_failed_save_names_the_file_that_was_asked_for(engine: mg.Engine, tmp_path: Path) -> None:
    chat = talk(engine, 1)
    with pytest.raises(FileNotFoundError) as caught:
        chat.save(tmp_path / "missing" / "f")
    assert caught.value.filename == str(tmp_path / "missing" / "f")
    for path in (None, 3, "", "a\0b"):
        for use in (chat.save, engine.load_chat):
            with pytest.raises(mg.ConfigError, match="path: expected the name of a file, got"):
                use(path)  # type: ignore[arg-type]


def test_a_pipe_or_device_is_not_replaced_by_a_file(engine: mg.Engine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no regular file"):
        talk(engine, 1).save(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert [file.name for file in tmp_path.iterdir() if file.name != "model"] == ["pipe"]


def test_settings_of_other_number_types_are_saved(engine: mg.Engine, tmp_path: Path) -> None:
    chat = talk(engine, 1, mg.Sampling(temperature=np.float32(0.5), top_p=Fraction(1, 2), seed=1))  # type: ignore[arg-type]
    chat.save(tmp_path / "f")
    list(engine.load_chat(tmp_path / "f").resume(max_new_tokens=1))


def test_other_tiles_are_said(
    engine: mg.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decide last bits. Those that are launched count: neither when a kernel triggers, nor who chose its tile."""

    def launched(**tiles: dict[str, int]) -> None:
        machine = machine_fingerprint(engine.capacity, engine.device, tiles)
        monkeypatch.setattr(engine, "_machine", lambda: machine)

    chat = talk(engine, 1)
    launched(qkv={"BLOCK_N": 4, "num_warps": 4, "trigger": 1}, o={"BLOCK_N": 2})
    chat.save(tmp_path / "f")
    launched(o={"BLOCK_N": 2}, qkv={"trigger": 3, "num_warps": 4, "BLOCK_N": 4})
    engine.load_chat(tmp_path / "f")
    assert not caplog.records
    launched(qkv={"BLOCK_N": 8, "num_warps": 4, "trigger": 1}, o={"BLOCK_N": 2})
    engine.load_chat(tmp_path / "f")
    assert "last bits may differ" in caplog.text
    assert "tile of qkv ('BLOCK_N 4, num_warps 4' there, 'BLOCK_N 8, num_warps 4' here)" in caplog.text
    assert "tile of o" not in caplog.text


def test_tiles_are_those_of_the_launches_now(engine: mg.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, after tuning too; a CPU has none."""
    assert not [name for name in engine._machine() if name.startswith("tile")]
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    before = engine._machine()
    assert [name for name in before if name.startswith("tile")] == [
        f"tile of {use}" for use in current_tiles(engine._decoder.program)
    ]
    rows = current_tiles(engine._decoder.program)["qkv"]["BLOCK_N"]
    engine._decoder.set_tiles({"qkv": {"BLOCK_N": 2 * rows}})
    assert [name for name in before if before[name] != engine._machine()[name]] == ["tile of qkv"]


def test_a_busy_engine_neither_saves_nor_loads(engine: mg.Engine, tmp_path: Path) -> None:
    chat = talk(engine)
    chat.save(tmp_path / "f")
    with engine.stream("abc") as stream:
        next(stream)
        with pytest.raises(mg.EngineError, match="busy"):
            chat.save(tmp_path / "f")
        with pytest.raises(mg.EngineError, match="busy"):
            engine.load_chat(tmp_path / "f")
    chat.save(tmp_path / "f")
    engine.close()
    with pytest.raises(mg.EngineError, match="closed"):
        chat.save(tmp_path / "f")


def test_settings_survive(engine: mg.Engine, tmp_path: Path) -> None:
    chosen = mg.Sampling(
        temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, logit_bias={2: -math.inf, 7: 1.5}, seed=2**64 - 1
    )
    chat = talk(engine, 1, chosen)
    chat.save(tmp_path / "f")
    loaded = engine.load_chat(tmp_path / "f")
    list(loaded.resume(max_new_tokens=3))
    assert loaded.completion is not None
    assert chat.completion is not None
    assert asdict(loaded.completion.stats.sampling) == asdict(chat.completion.stats.sampling)
