"""The command line: arguments reach the engine, output is what scripts and terminals can take, exit statuses hold."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import monograph
from monograph.chat.terminal import LoadLine
from monograph.cli import FILE_NAMES, SAMPLING_FLAGS, main, make_parser
from monograph.model.prepare import Prepared
from monograph.model.tune import Tuned, TuneProgress
from monograph.model.tune_model import TunedModel
from monograph.model.warm import Warmed
from tests import smollm2
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The engines that commands of this test have loaded, the newest last."""
    made: list[FakeEngine] = []

    def load(model: str, **options: Any) -> FakeEngine:
        made.append(FakeEngine(model=model, **options))
        return made[-1]

    monkeypatch.setitem(vars(monograph), "load", load)
    return made


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def fake_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(ROOT / "tests" / "fake_engine.py"), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, timeout=60, check=False, **options)


def test_generate_applies_the_template(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a/model", "hello", "--system", "Be brief."]) == 0
    assert capsys.readouterr() == ("You said: hello.\n", "")
    assert engines[0].asked[0]["prompt"] == "system: Be brief.\nuser: hello"
    assert engines[0].asked[0]["was_ids"]
    assert engines[0].closed


def test_generate_raw_passes_text_on(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a/model", "Once upon", "--raw"]) == 0
    assert engines[0].asked[0]["prompt"] == "Once upon"
    assert not engines[0].asked[0]["was_ids"]
    capsys.readouterr()


def test_model_without_template(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(chat_template=None)
    monkeypatch.setitem(vars(monograph), "load", lambda model, **options: engine)
    assert main(["generate", "m", "Once upon"]) == 0
    assert engine.asked[0]["prompt"] == "Once upon"
    assert main(["generate", "m", "Once upon", "--system", "Be brief."]) == 1
    pipe_in(monkeypatch, b"hello")
    assert main(["chat", "m"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == "monograph: --system needs a model with a chat template, and this one has none"
    assert errors[1].startswith("monograph: this model has no chat template")


def test_load_options(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["generate", "org/name", "x"])
    nothing = {"revision": None, "device": "auto", "dtype": "auto", "max_seq_len": None, "token": None}
    assert engines[0].options == {"model": "org/name", "local_files_only": False, **nothing}
    flags = "--revision r --device cpu --dtype float32 --max-seq-len 64 --token t --local-files-only"
    main(["generate", "org/name", "x", *flags.split()])
    said = {"revision": "r", "device": "cpu", "dtype": "float32", "max_seq_len": 64, "token": "t"}
    assert engines[1].options == {"model": "org/name", "local_files_only": True, **said}


def test_answer_options(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not said is None, so that the model's defaults apply; an explicit 0 is 0."""
    main(["generate", "m", "x"])
    asked = engines[0].asked[0]
    assert (asked["max_new_tokens"], asked["stop"], asked["sampling"]) == (None, [], monograph.Sampling())

    flags = [part for name in SAMPLING_FLAGS for part in (f"--{name.replace('_', '-')}", "0")]
    flags[flags.index("--repetition-penalty") + 1] = "1.5"
    main(["generate", "m", "x", "--max-new-tokens", "3", "--stop", "a", "--stop", "b", *flags])
    asked = engines[1].asked[0]
    assert (asked["max_new_tokens"], asked["stop"]) == (3, ["a", "b"])
    zeros = {name: kind(0) for name, (kind, _) in SAMPLING_FLAGS.items()}
    assert asked["sampling"] == monograph.Sampling(**{**zeros, "repetition_penalty": 1.5})

    pipe_in(monkeypatch, b"x\n")
    main(["chat", "m", "--max-new-tokens", "3", "--temperature", "0"])
    assert engines[2].asked[0]["max_new_tokens"] == 3
    assert engines[2].asked[0]["sampling"] == monograph.Sampling(temperature=0.0)


@pytest.mark.parametrize("prompt", ["- a list", "$5 'and' \\"])
def test_arguments_in_any_order(prompt: str, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--seed", "1", "m", "--temperature", "0", "--", prompt]) == 0
    assert capsys.readouterr().out == f"You said: {prompt}.\n"


def test_every_sampling_field_has_a_flag() -> None:
    fields = set(monograph.Sampling.__dataclass_fields__)
    assert set(SAMPLING_FLAGS) == fields - {"logit_bias"}


@pytest.mark.parametrize("arguments", [["generate", "m", "-"], ["chat", "m"]])
def test_prompt_from_stdin(
    arguments: list[str], engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, "two\nlínes\n\r\n".encode())
    assert main(arguments) == 0
    assert capsys.readouterr().out == "You said: two\nlínes\n.\n"


def test_stdin_that_is_not_text(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, b"ab\xff")
    assert main(["generate", "m", "-"]) == 1
    assert capsys.readouterr().err == "monograph: standard input is not UTF-8 text (byte 2)\n"
    assert not engines  # said before a model is loaded


def test_prompt_from_a_file(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes("two\nlínes\n".encode())
    assert main(["generate", "m", "--file", str(prompt)]) == 0
    assert capsys.readouterr().out == "You said: two\nlínes.\n"
    prompt.write_bytes(b"ab\xff")
    assert main(["generate", "m", "--file", str(prompt)]) == 1
    assert main(["generate", "m", "--file", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"monograph: {prompt} is not UTF-8 text (byte 2)",
        f"monograph: {tmp_path / 'none'}: the prompt cannot be read: No such file or directory",
    ]
    assert len(engines) == 1  # said before a model is loaded


@pytest.mark.parametrize("arguments", [["generate", "m", "steer"], ["chat", "m"]])
def test_control_characters_do_not_reach_the_terminal(
    arguments: list[str], engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, b"steer")
    main(arguments)
    assert capsys.readouterr().out == "a[2Jb31mc\n\tdé\n"


def test_json(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "steer", "--json", "--temperature", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert not [c for c in out[:-1] if ord(c) < 32 or 127 <= ord(c) < 160]
    assert "é" in out
    result = json.loads(out)
    assert result["text"] == "a\x1b[2J\x07b\x9b31m\x7fc\r\n\td\x85é"
    assert result["finish_reason"] == "stop"
    assert result["token_ids"] == [3, 6, 13]
    assert result["stats"]["completion_tokens"] == 3
    assert result["stats"]["tokens_per_s"] == 25.0
    assert result["stats"]["sampling"]["temperature"] == 0.5


@pytest.mark.parametrize("arguments", [["generate", "m", "hi", "--stats"], ["chat", "m", "--stats"]])
def test_stats(
    arguments: list[str], engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, b"hi")
    main(arguments)
    expected = "prompt 8 tokens, first token 12.5 ms, answer 3 tokens at 25.0 tokens/s\n"
    assert capsys.readouterr() == ("You said: hi.\n", expected)


def test_faults_are_one_line(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "m", "too long"]) == 1
    assert capsys.readouterr() == ("", "monograph: prompt of 9,000 tokens exceeds max_seq_len 8,192\n")
    assert main(["generate", "m", "not finite"]) == 1
    assert capsys.readouterr() == ("half an \n", "monograph: the logits are not finite\n")
    assert main(["generate", "m", "x", "--temperature", "-1"]) == 1
    assert capsys.readouterr().err.startswith("monograph: temperature: expected")
    pipe_in(monkeypatch, b"too long")
    assert main(["chat", "m"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("load with max_seq_len=287 or more", "load with --max-seq-len 287 or more"),
        ("not on this machine; use device='cpu'", "not on this machine; use --device cpu"),
        ("a wider range (pass dtype=).", "a wider range (pass --dtype)."),
        ("max_seq_len 64, my_dtype=1, x=2", "max_seq_len 64, my_dtype=1, x=2"),
    ],
)
def test_faults_speak_of_flags(
    said: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(model: str, **options: Any) -> FakeEngine:
        raise monograph.ConfigError(said)

    monkeypatch.setitem(vars(monograph), "load", load)
    assert main(["generate", "m", "x"]) == 1
    assert capsys.readouterr().err == f"monograph: {shown}\n"


def test_b33_interrupted(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an answer and while a model loads: the line is ended, the engine closed, the status 130."""
    assert main(["generate", "m", "interrupt"]) == 130
    assert capsys.readouterr() == ("half an \n", "")
    assert engines[0].closed

    def load(model: str, **options: Any) -> FakeEngine:
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(monograph), "load", load)
    assert main(["generate", "m", "x"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_keeps_its_traceback(engines: list[FakeEngine]) -> None:
    with pytest.raises(ZeroDivisionError):
        main(["generate", "m", "crash"])


def test_warnings_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load(model: str, **options: Any) -> FakeEngine:
        warnings.simplefilter("always")
        warnings.warn("max_seq_len is 4,096:\nthe longest that fits", stacklevel=1)
        logging.getLogger("monograph").warning("%d tokens", 7)
        return FakeEngine()

    monkeypatch.setitem(vars(monograph), "load", load)
    assert main(["generate", "m", "x"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "monograph: warning: max_seq_len is 4,096: the longest that fits",
        "monograph: warning: 7 tokens",
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "arguments are required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["generate", "m"], "arguments are required: PROMPT"),
        (["bench", "m", "--seconds", "0"], "--seconds: expected 1 to 3600"),
        (["generate", "m", "x", "--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["generate", "m", "x", "--max-seq-len", "many"], "--max-seq-len: invalid number value: 'many'"),
        (["generate", "m", "x", "--temperature", "hot"], "--temperature: invalid float value: 'hot'"),
        (["generate", "m", "x", "--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
        (["generate", "m", "x", "--raw", "--system", "s"], "--system is part of the chat template"),
        (["generate", "m", "caf\udce9"], "argument PROMPT: not UTF-8 text (character 4)"),
        (["chat", "m", "--system", "caf\udce9"], "argument --system: not UTF-8 text (character 4)"),
    ],
)
def test_wrong_usage(
    arguments: list[str], complaint: str, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not engines


def test_help_and_usage_errors_do_not_wait_for_torch() -> None:
    code = (
        "import sys, monograph.cli\n"
        "for arguments in (['--help'], ['generate', '--help'], ['--version'], []):\n"
        "    try: monograph.cli.main(arguments)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'triton', 'tokenizers', 'huggingface_hub', 'jinja2', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, capture_output=True, timeout=60)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"monograph {monograph.__version__}\n"


def test_shells_complete_file_names() -> None:
    """By the attribute that shtab reads, for every shell that it knows."""
    (commands,) = [action for action in make_parser()._actions if isinstance(action.choices, dict)]
    assert isinstance(commands.choices, dict)
    for name, command in commands.choices.items():
        for action in command._actions:
            is_file = (
                action.dest == "model" or action.metavar == "FILE" or (name, action.dest) == ("generate", "prompt")
            )
            assert getattr(action, "complete", None) == (FILE_NAMES if is_file else None), (name, action.dest)


def test_later_commands_are_not_promised() -> None:
    text = make_parser().format_help()
    assert not [word for word in ("serve",) if word in text]


def test_python_m_monograph() -> None:
    command = [sys.executable, "-m", "monograph", "--help"]
    result = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout == make_parser().format_help()


def test_b33_broken_pipe_is_quiet() -> None:
    """The reader of an endless answer leaves after its first bytes."""
    reader, writer = os.pipe()
    command = [sys.executable, str(ROOT / "tests" / "fake_engine.py"), "generate", "m", "never"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


def test_b33_closed_stdout_from_the_start() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = fake_command("--help", stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (0, b"")


def test_narrow_encoding() -> None:
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, str(ROOT / "tests" / "fake_engine.py"), "generate", "m", "steer"]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    assert result.stdout == b"a[2Jb31mc\n\td?\n"


def test_generate_with_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    question = "What is the capital of France? Answer in one sentence."
    assert main(["generate", str(smollm2.path()), question, "--temperature", "0", "--max-seq-len", "256"]) == 0
    assert capsys.readouterr() == ("The capital of France is Paris.\n", "")


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(smollm2.path()), "--device", "cpu", "--max-seq-len", "2048"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("max_seq_len 2,048 in float32 on cpu: needs ")
    assert "layers.{i}.k_cache" in text

    assert main([*arguments, "--json"]) == 0
    half = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--json", "--max-seq-len", "4096", "--dtype", "bf16"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (half["max_seq_len"], half["dtype"], whole["max_seq_len"], whole["dtype"]) == (
        2048,
        "float32",
        4096,
        "bfloat16",
    )
    assert half["need_nbytes"] > 134.5e6 * 4 + 30 * 2 * 3 * 64 * 2048 * 4


def test_warm_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """It says that there is nothing to do, whatever the model, and asks nobody for it."""
    assert main(["warm", "no/model", "--device", "cpu"]) == 0
    out, error = capsys.readouterr()
    assert out == "nothing to warm: on a CPU PyTorch runs the program and nothing is compiled\n"
    assert not error
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "monograph", "warm", "no/model"]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith("nothing to warm: no CUDA device here, and on a CPU ")
    assert main(["warm", "no/model", "--device", "cuda:99"]) == 1
    assert "use --device cpu" in capsys.readouterr().err


def test_tune_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The model is not even looked for."""
    assert main(["tune", "no/model", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == "nothing to tune: on a CPU PyTorch runs the program, and there are no block sizes to choose\n"
    assert err == ""
    hidden = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "monograph", "tune", "no/model"]
    result = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("nothing to tune: no CUDA device here, and on a CPU PyTorch runs the program")
    for seconds in ("0", "-3", "nan", "soon"):
        with pytest.raises(SystemExit) as left:
            main(["tune", "m", "--seconds", seconds])
        assert left.value.code == 2


def test_tune_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def tune_model(model: str, *, report: Any, progress: Any, **options: Any) -> TunedModel:
        asked.append({"model": model, **options})
        report(TuneProgress(0.2, "compile", 3, 70, 0.0))
        report(TuneProgress(0.4, "compile", 9, 70, 0.0))  # within the same second: not said
        report(TuneProgress(1.0, "measure", 1, 70, 0.0, "qkv trigger 1 -> 3: 1.2% faster"))
        report(TuneProgress(9.5, "verify", 2, 15, 0.012))
        found = Tuned({}, {}, [0.7, 0.8], [0.6, 0.75], 0.05, timed=61, unusable=2, left_out=7, seconds=24.5)
        return TunedModel("NVIDIA H200", torch.bfloat16, (64, 1024), found, "/c/tiles/a.json")

    monkeypatch.setattr("monograph.model.tune_model.tune_model", tune_model)
    assert main(["tune", "org/name", "--max-seq-len", "4096", "--seconds", "12"]) == 0
    assert (asked[0]["model"], asked[0]["max_seq_len"], asked[0]["seconds"]) == ("org/name", 4096, 12.0)
    assert capsys.readouterr().out.splitlines() == [
        "  0.2 s: compile 3 of 70, 0.0% faster so far",
        "  1.0 s: qkv trigger 1 -> 3: 1.2% faster",
        "  9.5 s: verify 2 of 15, 1.2% faster so far",
        "length 64: 0.7000 ms a token before, 0.6000 after",
        "length 1,024: 0.8000 ms a token before, 0.7500 after",
        "5.0% faster on NVIDIA H200 in bfloat16: 61 candidates timed, 2 unusable, 7 left out for time, in 24.5 s",
        "kept in /c/tiles/a.json; every load of this shape, dtype and GPU takes it from there",
    ]


def test_warm_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    kernels = [Prepared("qkv", 1.26, True), Prepared("linear_add (down)", 0.01, False)]

    def warm_model(model: str, *, report: Any, **options: Any) -> Warmed:
        asked.append({"model": model, **options})
        for number, kernel in enumerate(kernels, 1):
            report(kernel, number, 2)
        return Warmed("NVIDIA H200", torch.bfloat16, 4096, kernels, 1.3, Path("/home/me/.triton/cache"), 3 << 20, 14)

    monkeypatch.setattr("monograph.model.warm.warm_model", warm_model)
    assert main(["warm", "org/name", "--max-seq-len", "4096", "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "kernel 1 of 2: qkv, 1.3 s",
        "kernel 2 of 2: linear_add (down), in the cache",
        "2 kernels for NVIDIA H200 in bfloat16, at every max_seq_len that 16 divides: 1 compiled in 1.3 s, "
        "added 3.0 MiB in 14 files to /home/me/.triton/cache",
    ]
    ((model, *_),) = [list(options.values()) for options in asked]
    assert model == "org/name"
    assert (asked[0]["max_seq_len"], asked[0]["dtype"], asked[0]["device"]) == (4096, "bf16", "auto")


def test_progress_is_for_terminals(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", "m", "x"])
    assert "progress" not in engines[0].options
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["generate", "m", "x"])
    assert isinstance(engines[1].options["progress"], LoadLine)
    assert capsys.readouterr().err == ""  # it was there at once


def test_plan_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, with the longest length that fits: the model's own, or what memory leaves."""
    model = str(smollm2.path())
    assert main(["plan", model, "--max-seq-len", "8193"]) == 1
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "8,192" in error

    monkeypatch.setattr("monograph.model.plan.device_free_nbytes", lambda device: 700 * 2**20)
    assert main(["plan", model, "--device", "cpu", "--max-seq-len", "8192"]) == 1
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    found = re.search(r"pass --max-seq-len (\d+) or less", error)
    assert found is not None
    longest = int(found[1])
    assert main(["plan", model, "--device", "cpu", "--max-seq-len", str(longest)]) == 0
    assert main(["plan", model, "--device", "cpu", "--max-seq-len", str(longest + 1)]) == 1
    capsys.readouterr()


def test_chat_saves_and_goes_on(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "chat.session"
    pipe_in(monkeypatch, b"hello\n")
    assert main(["chat", "m", "--system", "Be brief.", "--save", str(path)]) == 0
    pipe_in(monkeypatch, b"history\n")
    assert main(["chat", "m", "--load", str(path), "--on-full", "trim"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == "system: Be brief. | user: hello | assistant: You said: hello. | user: history"
    assert err == ""
    pipe_in(monkeypatch, b"hello\n")
    assert main(["chat", "m", "--load", str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err == f"monograph: {tmp_path / 'missing'}: No such file or directory\n"
    pipe_in(monkeypatch, b"hello\n")
    assert main(["chat", "m", "--save", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"monograph: {tmp_path}: Is a directory")
    for arguments in (["--load", "f", "--system", "s"], ["--on-full", "stop"]):
        with pytest.raises(SystemExit) as caught:
            main(["chat", "m", *arguments])
        assert caught.value.code == 2


def test_what_was_said_is_saved_when_the_answer_is_cut(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By Ctrl-C, and by a reader who leaves."""
    pipe_in(monkeypatch, b"interrupt")
    assert main(["chat", "m", "--save", str(tmp_path / "f")]) == 130
    assert [m["content"] for m in json.loads((tmp_path / "f").read_text())] == ["interrupt", "half an "]
    reader, writer = os.pipe()
    command = [sys.executable, str(ROOT / "tests" / "fake_engine.py"), "chat", "m", "--save", str(tmp_path / "g")]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=writer) as process:
        os.close(writer)
        assert process.stdin is not None
        process.stdin.write(b"never")
        process.stdin.close()
        assert os.read(reader, 1)
        os.close(reader)
        assert process.wait(60) == 0
    said = json.loads((tmp_path / "g").read_text())
    assert said[1]["content"].startswith("0 1 ")


def test_a_place_that_cannot_be_saved_to_is_refused_first(
    engines: list[FakeEngine], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "missing" / "f", "there is no folder"),
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "is no regular file"),
        ("", "expected the name of a file"),
    ):
        assert main(["chat", "m", "--save", str(path)]) == 1
        assert f"{path}: {message}" in capsys.readouterr().err
    assert not engines


@pytest.mark.parametrize("closed", ["1", "2"])
def test_closed_output_is_no_fault(closed: str, tmp_path: Path) -> None:
    """As with >&- in a shell: nothing is shown, and complaints do not turn up among the output."""
    command = f"{sys.executable} {ROOT / 'tests' / 'fake_engine.py'} chat m --stats --save {tmp_path / 'f'} {closed}>&-"
    result = subprocess.run(command, shell=True, env=ENVIRONMENT, input=b"hi", capture_output=True, timeout=60)
    assert (result.returncode, b"Traceback" in result.stderr) == (0, False)
    assert result.stdout == (b"" if closed == "1" else b"You said: hi.\n")
    assert (tmp_path / "f").exists()


def test_trim_is_announced_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On the real model, with room for two short turns."""
    saved = str(tmp_path / "f")
    arguments = ["chat", str(smollm2.path()), "--device", "cpu", "--max-seq-len", "80", "--max-new-tokens", "16"]
    pipe_in(monkeypatch, b"Name a colour.")
    assert main([*arguments, "--save", saved]) == 0
    pipe_in(monkeypatch, b"Name another colour, and tell me in one sentence where it can be seen in nature.")
    assert main([*arguments, "--load", saved, "--on-full", "trim"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) >= 2
    warning = (
        r"the conversation \(\d+ tokens\) fills max_seq_len 80: dropped its oldest turn; \d+ tokens left, read anew"
    )
    assert re.fullmatch(rf"monograph: warning: {warning}\n", err), err
