"""The comparison: every system does the same step from the same rows, is judged before it is timed, and fails alone."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import bench.compare
import bench.compare_worker
import bench.prepare
from bench.child import Outcome
from bench.common import percentile
from bench.compare_table import markdown
from bench.compare_worker import measure, start
from bench.judge import SUM_ORDER
from bench.kv_rows import kv_rows
from bench.prepare import prepare
from bench.shapes import SHAPES
from bench.systems.generating import Sglang, Vllm
from bench.systems.huggingface import Eager, Static
from bench.systems.llama_cpp_python import LlamaCpp
from bench.systems.monograph_engine import MonographEngine
from bench.systems.system import SYSTEMS, Entry, System, Task
from tests.bench.test_decode import FORM
from tests.bench.tiny import CONFIG

LENGTHS = [1, 60, 100]
ROPE = replace(SHAPES["llama-3.2-1b"].rope, original_max_position_embeddings=16)
COMPILER_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of its own doing
TINY = replace(CONFIG, rope=ROPE, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The first process of a comparison, in this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", TINY)
        task = Task("tiny", "cpu", "float32", LENGTHS, [200], 16, 256, [128], "eager")
        yield prepare(task, tmp_path_factory.mktemp("compare"))


@pytest.fixture
def task(prepared: dict[str, Any]) -> Task:
    return Task.from_json(prepared["task"])


def test_prepared(prepared: dict[str, Any], task: Task) -> None:
    assert Path(task.model, "config.json").exists()
    assert list(torch.load(task.reference)["lengths"]) == LENGTHS
    assert prepared["kv_row_nbytes"] == 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert prepared["weights_nbytes"] > 4 * TINY.vocab_size * TINY.hidden_size


def test_rows_are_those_of_the_arguments() -> None:
    one, two = (list(kv_rows(2, 3, 5, 8, torch.bfloat16, torch.device("cpu"))) for _ in range(2))
    assert [keys.shape for keys, _ in one] == [(3, 5, 8)] * 2
    assert all(
        torch.equal(a, b) for left, right in zip(one, two, strict=True) for a, b in zip(left, right, strict=True)
    )
    assert not torch.equal(one[0][0], one[0][1])
    assert not torch.equal(one[0][0], one[1][0])


@COMPILER_WARNS
@pytest.mark.parametrize(
    ("kind", "capacity"), [(MonographEngine, 256), (Eager, None), (Static, 128)], ids=lambda value: str(value)
)
def test_a_system(kind: Any, capacity: int | None, task: Task) -> None:
    system, found = start(kind, task, 0.0)
    assert found["verdict"] == "ok"
    assert 0 < found["first_ms"] <= found["settled_ms"]
    rows = list(measure(system, [*LENGTHS, 300]))
    for row in rows[:-1]:
        assert row["verdict"] == "ok"
        assert row["error"] < SUM_ORDER  # so it has the weights, the rows, the position and the RoPE of the reference
        assert row["argmax_agrees"]
        assert row["max_seq_len"] == capacity
        assert row["mean_seq_len"] == row["seq_len"] + 7.5
        assert 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"]
    assert rows[-1]["verdict"] != "ok"
    assert "ms" not in rows[-1]


def test_a_static_cache_is_as_long_as_asked(task: Task) -> None:
    system = Static(replace(task, static_max=[]))
    assert [system._capacity_for(length) for length in (1, 1024, 1025, 16384)] == [1024, 1024, 2048, 16384]
    assert system._start(1024) == 1009  # the last token of a batch has the longest length


@pytest.mark.parametrize("kind", [MonographEngine, Eager])
def test_a_step_from_other_rows_is_judged_wrong(kind: Any, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(layers: int, heads: int, count: int, *rest: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((keys.flip(1), values) for keys, values in kv_rows(layers, heads, count, *rest))

    if kind is MonographEngine:  # its own references read the same cache: there the graph's rows are spoilt
        system: Any = kind(task)
        decode = system._engine._decoder.runner.decode

        def spoilt() -> None:
            decode()
            system._engine.arena.view("logits").mul_(1.01)

        monkeypatch.setattr(system._engine._decoder.runner, "decode", spoilt)
    else:
        monkeypatch.setattr("bench.kv_rows.kv_rows", other)
        system = kind(task)
    (row,) = measure(system, [60])
    assert "error" in row["verdict"]
    assert "ms" not in row


@COMPILER_WARNS
@pytest.mark.parametrize("kind", [Eager, Static])
def test_a_cache_that_is_not_put_back_is_not_timed(kind: Any, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    system = kind(task)
    judged = system.judge(60)
    assert judged.verdict == "ok"
    put_back, calls = system._put_back, []

    def once(rows: int) -> None:
        calls.append(rows)
        if len(calls) == 1:
            put_back(rows)

    monkeypatch.setattr(system, "_put_back", once)
    with pytest.raises(RuntimeError, match="the cache holds 91 rows, expected 75"):
        system.time(60)


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("right", [True, False])
def test_systems_that_only_generate(task: Task, monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    """vLLM and SGLang as documented: what is asked of them, and that the first token decides."""
    want = torch.load(task.reference)["prompt"]
    token = int(want.argmax() if right else want.argmin())
    asked: list[tuple[int, int]] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            assert options["skip_tokenizer_init"]
            assert options["model"] == task.model

        def generate(self, prompts: Any, how: Any, use_tqdm: bool) -> Any:
            (ids,) = (prompt["prompt_token_ids"] for prompt in prompts)
            asked.append((len(ids), how.max_tokens))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(token,) * how.max_tokens)])]

    class Engine:
        def __init__(self, **options: Any) -> None:
            assert options["model_path"] == task.model

        def generate(self, input_ids: list[int], sampling_params: dict[str, Any]) -> Any:
            asked.append((len(input_ids), sampling_params["max_new_tokens"]))
            return {"output_ids": [token] * sampling_params["max_new_tokens"]}

    fake_module(monkeypatch, "vllm", LLM=LLM, SamplingParams=lambda **options: SimpleNamespace(**options))
    fake_module(monkeypatch, "sglang", Engine=Engine)
    for kind in (Vllm, Sglang):
        asked.clear()
        system, found = start(kind, task, 0.0)
        (row,) = measure(system, [100])
        assert (found["verdict"] == row["verdict"] == "ok") is right
        assert ("ms" in row) is right
        assert ((99, 1 + 64) in asked) is right
        assert row["judged_at"] == len(task.prompt)


def test_llama_cpp(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the binding; that the rest is so, only the real one shows."""
    want = torch.load(task.reference)["prompt"]
    logits = (ctypes.c_float * len(want))(*want.tolist())
    read: list[int] = []

    class Llama:
        _ctx = SimpleNamespace(get_logits_ith=lambda i: ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)))

        def __init__(self, path: str, **options: Any) -> None:
            assert path == "model.gguf"
            assert options["n_ctx"] >= 100 + 16

        def reset(self) -> None: ...

        def eval(self, ids: list[int]) -> None:
            assert ids == task.prompt

        def n_vocab(self) -> int:
            return len(want)

        def generate(self, ids: list[int], temp: float, repeat_penalty: float) -> Iterator[int]:
            assert temp == 0.0
            read.append(len(ids))
            while True:
                yield int(want.argmax())

    fake_module(monkeypatch, "llama_cpp", Llama=Llama)
    system, found = start(LlamaCpp, replace(task, gguf="model.gguf"), 0.0)
    assert found["verdict"] == "ok"
    (row,) = measure(system, [100])
    assert row["verdict"] == "ok"
    assert row["mean_seq_len"] == 107.5
    assert read == [len(task.prompt), *[99] * 3]
    logits[0] += 1000
    (row,) = measure(system, [100])
    assert "error" in row["verdict"]
    with pytest.raises(ValueError, match="needs a GGUF file"):
        LlamaCpp(task)


class Broken:
    """Loads, and nothing more."""

    def __init__(self, task: Task) -> None:
        raise OSError("out of order")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the comparison from its command line, its processes in this one; what it wrote."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(SYSTEMS, "broken", Entry("torch", __name__, "Broken"))

    def run_child(script: Path, arguments: list[str], stem: Path, limit_s: float, environment: Any = None) -> Outcome:
        out = stem.with_suffix(".jsonl")
        monkeypatch.setattr("sys.argv", [script.name, *arguments, "--out", str(out), "--started", "1"])
        try:
            (bench.prepare if script.stem == "prepare" else bench.compare_worker).main()
            fault = None
        except OSError as error:
            fault = f"exit status 1: {error}"
        lines = out.read_text().splitlines() if out.exists() else []
        return Outcome([json.loads(line) for line in lines], fault)

    monkeypatch.setattr(bench.compare, "run_child", run_child)

    def run(*arguments: str) -> Any:
        fixed = ["--model", "tiny", "--device", "cpu", "--ceiling", "10", "--replays", "16", "--max-seq-len", "256"]
        files = ["--json", str(tmp_path / "run.json"), "--markdown", str(tmp_path / "run.md")]
        monkeypatch.setattr("sys.argv", ["compare.py", *fixed, *files, *arguments])
        bench.compare.main()
        return json.loads((tmp_path / "run.json").read_text())

    return run


def test_from_the_command_line(run: Any, tmp_path: Path) -> None:
    systems = "monograph,transformers eager,broken,gpt-fast"
    content = run("--systems", systems, "--lengths", "40,90", "--long-lengths", "200")
    rows = content["rows"]
    assert {row["system"] for row in rows} == set(systems.split(","))
    for row in rows:
        assert list(row)[: len(FORM) + 1] == [*FORM, "verdict"]
    decode = {(row["system"], row["seq_len"]): row for row in rows if row["bench"] == "decode"}
    assert set(decode) == {
        *(("monograph", length) for length in (40, 90, 200)),
        *((name, length) for name in ("transformers eager", "broken") for length in (40, 90)),
        ("gpt-fast", None),
    }
    for (name, length), row in decode.items():
        assert row["verdict"] == {"broken": "exit status 1: out of order", "gpt-fast": "not installed"}.get(name, "ok")
        if row["verdict"] == "ok":
            assert row["floor_ms"] == pytest.approx(row["nbytes"] / 10 / 1e6, rel=1e-3)
            assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"], rel=1e-3)
            assert row["nbytes"] == decode["monograph", length]["nbytes"]
    starts = {(row["system"], row["cache"]): row for row in rows if row["bench"] == "start"}
    assert len(starts) == 6
    assert all(row["settled_ms"] >= row["ms"] > 0 for (name, _), row in starts.items() if name != "broken")
    text = (tmp_path / "run.md").read_text()
    assert text == markdown(content)
    assert "| ms a token at live length | 40 | 90 | 200 |" in text
    assert "5 of 5 choose the very token" in text
    assert ", length 40: exit status 1: out of order." in text
    assert "Not installed: gpt-fast." in text


def test_without_weights_there_are_rows_that_say_so(run: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        run("--model", "./nowhere", "--systems", "monograph,broken")
    assert end.value.code == 1
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    wanted = "no weights and reference: exit status 1: ./nowhere: no such file or folder"
    assert [(row["system"], row["verdict"]) for row in rows] == [("monograph", wanted), ("broken", wanted)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--systems", "monograf"), "monograf not known"), (("--starts", "0"), "expected 1 or more")],
)
def test_usage(run: Any, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], text: str) -> None:
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_a_system_without_an_adapter_says_so(task: Task) -> None:
    with pytest.raises(NotImplementedError, match="torch is installed, but"):
        Entry("torch").load(task)


def test_only_the_registry_is_imported_before_a_system() -> None:
    """What a worker imports counts as start-up of every system."""
    code = (
        "import sys, bench.compare_worker\n"
        "sys.exit(' '.join({'torch', 'numpy', 'transformers', 'monograph'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == ""


def test_starts_of_several_processes(task: Task) -> None:
    head = {"model": "m", "system": "s", "dtype": "d"}
    starts = [
        Outcome([{"kind": "start", "first_ms": ms, "settled_ms": 2 * ms, "verdict": "ok"}], None) for ms in (9, 1, 2, 4)
    ]
    cold, warm, *more = bench.compare._start_rows(head, [*starts, Outcome([], "not done within 3 s")], 16)
    assert not more
    assert (cold["cache"], cold["ms"], cold["settled_ms"], cold["verdict"]) == ("cold", 9, 18, "ok")
    assert (warm["cache"], warm["ms"], warm["verdict"]) == ("warm", percentile([1, 2, 4], 50), "not done within 3 s")


def _protocol(system: MonographEngine | Eager | Static | LlamaCpp | Vllm | Sglang) -> System:
    return system  # type checkers hold every system to the protocol
