"""What is missing or broken on a machine is said, with the way out, and ends nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monograph.cli import main
from monograph.model import cache_folder, doctor, toolchain
from monograph.model.finding import Diagnosis, Finding, worst

ROOT = Path(__file__).parents[2]
TOKEN = "hf_SecretSecretSecretSecretSecretSecret"
NOBODY = 65534


def examine(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Finding]]:
    """The exit status of `monograph doctor --json`, and its findings by name."""
    status = main(["doctor", "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    said = json.loads(out)
    assert said["can_run"] == (status == 0)
    return status, {fields["name"]: Finding(**fields) for fields in said["findings"]}


def doctor_process(code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`monograph doctor` in a process of its own that sees no GPU, after some code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRITON_"))}
    run = f"import sys\n{code}\nfrom monograph.cli import main\nstatus = main(['doctor'])\n"
    imported = "print(*({'torch', 'triton'} & {n for n, m in sys.modules.items() if m}), file=sys.stderr)\n"
    return subprocess.run(
        [sys.executable, "-c", f"{run}{imported}sys.exit(status)"],
        env={**kept, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@contextmanager
def powerless() -> Iterator[None]:
    """Root writes where permissions forbid it: be nobody meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)


@pytest.mark.usefixtures("no_gpu")
def test_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examine(capsys)
    assert status == 0
    assert {name for name, finding in found.items() if finding.status == "fail"} == set()
    assert found["GPU"].status == "warn"
    assert found["GPU"].text == "none found: models run on the CPU, slowly"
    assert "driver" in found["GPU"].remedy
    assert found["driver"].text == "no NVIDIA driver"
    assert found["Python"].text.startswith(".".join(map(str, sys.version_info[:3])))
    for name in ("PyTorch", "Triton", "Hub library", *doctor.LIBRARIES):
        assert re.search(r"\d+\.\d+", found[name].text), name
    assert all(finding.remedy for finding in found.values() if finding.status != "ok")

    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("monograph can run here, on the CPU; see GPU")
    assert re.search(r"^warn  GPU  +none found: models run on the CPU, slowly\n +-> if this machine", out, re.MULTILINE)


@pytest.mark.usefixtures("no_gpu")
def test_machine_without_a_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    status, found = examine(capsys)
    assert status == 0  # the CPU needs none
    compiler = found["C compiler"]
    assert compiler.status == "warn"
    assert compiler.text == "none: neither gcc nor clang is on PATH (a GPU needs it, the CPU does not)"
    assert "apt install build-essential" in compiler.remedy
    assert "dnf install gcc" in compiler.remedy
    (needed, _) = toolchain.toolchain_findings(needed=True)
    assert (needed.status, needed.text) == ("fail", "none: neither gcc nor clang is on PATH")
    monkeypatch.setenv("CC", "/no/such/cc")
    assert "CC names '/no/such/cc'" in toolchain.toolchain_findings(needed=True)[0].text


def test_process_with_an_empty_path() -> None:
    """Every program that is looked for is absent, the compiler among them; what is here is still said."""
    done = doctor_process(PATH="", CC="")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^warn  C compiler +none: neither gcc nor clang", done.stdout, re.MULTILINE)
    assert re.search(r"^ok    PyTorch ", done.stdout, re.MULTILINE)
    assert "Traceback" not in done.stderr


def test_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: note' >&2\necho 'cc: error: cannot find libc' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    compiler, headers = toolchain.toolchain_findings(needed=True)
    assert compiler.status == "fail"
    assert compiler.text == f"{broken} does not build an extension module: cc: error: cannot find libc"
    assert headers.status == "ok"
    broken.write_text("#!/bin/sh\nexit 3\n")
    assert toolchain.toolchain_findings(needed=False)[0].text.endswith("exit 3")
    monkeypatch.setattr(toolchain, "_COMPILE_TIMEOUT_S", 0.2)
    broken.write_text("#!/bin/sh\nexec sleep 20\n")
    assert toolchain.toolchain_findings(needed=False)[0].text.endswith("does not end within 0.2 s")


def test_compiler_of_this_machine_works() -> None:
    """As Triton's interpreter and every GPU run of the tests rely on it."""
    compiler, headers = toolchain.toolchain_findings(needed=True)
    assert (compiler.status, headers.status) == ("ok", "ok"), (compiler, headers)


def test_python_without_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "headers_folder", lambda: tmp_path)
    compiler, headers = toolchain.toolchain_findings(needed=True)
    assert compiler.status == "ok"
    assert (headers.status, headers.text) == ("fail", f"none: no Python.h to read in {tmp_path}")
    assert f"apt install python3.{sys.version_info.minor}-dev" in headers.remedy
    assert toolchain.toolchain_findings(needed=False)[1].status == "warn"


@pytest.mark.usefixtures("no_gpu")
def test_read_only_caches(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three are named, with the variable that moves each; nothing is written."""
    main(["doctor"])  # so that all is imported that nobody may not read
    capsys.readouterr()
    root = Path(tempfile.mkdtemp())  # below no folder that others may not enter, as those of pytest are
    root.chmod(0o755)
    request.addfinalizer(lambda: shutil.rmtree(root))
    caches = {name: root / name for name in ("triton", "monograph", "hub")}
    for folder in caches.values():
        folder.mkdir()
        folder.chmod(0o555)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(caches["triton"]))
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(caches["monograph"]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(caches["hub"]))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with powerless():
        status, found = examine(capsys)
    assert status == 0
    for name, cache, variable in (
        ("Triton cache", "triton", "TRITON_CACHE_DIR"),
        ("monograph cache", "monograph", "MONOGRAPH_CACHE_DIR"),
        ("Hub cache", "hub", "HF_HOME"),
    ):
        assert found[name].status == "warn"
        assert found[name].text.startswith(f"{caches[cache]}: cannot be written (Permission denied): ")
        assert variable in found[name].remedy
        assert list(caches[cache].iterdir()) == []
    with powerless():
        on_gpu = doctor.folder_finding("Triton cache", caches["triton"], "fail", "lost", "remedy")
    assert on_gpu.status == "fail"


def test_cache_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "kernel").write_bytes(bytes(1500))
    (tmp_path / "a" / "file").write_bytes(bytes(500))
    found = doctor.folder_finding("x", tmp_path / "a", "warn", "lost", "remedy")
    assert (found.status, found.remedy) == ("ok", "")
    assert found.text.startswith(f"{tmp_path / 'a'}: 2.0 kB in 2 files, ")
    found = doctor.folder_finding("x", tmp_path / "new" / "er", "warn", "lost", "remedy")
    assert "not there yet" in found.text
    assert not (tmp_path / "new").exists()
    found = doctor.folder_finding("x", tmp_path / "a" / "file" / "er", "warn", "lost", "remedy")
    assert "file is no folder" in found.text
    monkeypatch.setattr(doctor, "FEW_NBYTES", 1 << 62)
    found = doctor.folder_finding("x", tmp_path, "warn", "lost", "remedy")
    assert (found.status, found.remedy) == ("warn", "free some space, or remedy")


def test_triton_folder_is_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton") if sys.platform != "linux" else __import__("triton")
    for name, value in (("", ""), ("TRITON_HOME", "/t/home"), ("TRITON_CACHE_DIR", "/t/cache")):
        if name:
            monkeypatch.setenv(name, value)
        knobs = triton.knobs.cache_knobs()
        assert str(cache_folder.triton_folder()) == knobs.dir


def test_kept_tiles_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    assert doctor.tiles_finding().text.startswith("none kept")
    (tmp_path / "tiles").mkdir()
    for i in range(6):
        (tmp_path / "tiles" / f"h200-{i}.json").write_text("{}")
    assert doctor.tiles_finding().text == "6 kept: h200-0, h200-1, h200-2, h200-3 and 2 more"


def test_token_and_password_are_not_shown() -> None:
    endpoint = "https://me:hf_Password@hub.example:8443/x?key=hf_Query"
    done = doctor_process(HF_TOKEN=TOKEN, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "present (from HF_TOKEN)" in done.stdout
    assert "https://hub.example:8443/x, offline (HF_HUB_OFFLINE), not asked" in done.stdout
    for secret in (TOKEN, "hf_Password", "hf_Query", "me:"):
        assert secret not in done.stdout + done.stderr


def test_token_of_a_login(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    done = doctor_process(HF_HOME=str(tmp_path))
    assert "present (logged in)" in done.stdout
    assert TOKEN not in done.stdout
    (tmp_path / "token").unlink()
    assert re.search(r"Hub token +none: public models only", doctor_process(HF_HOME=str(tmp_path)).stdout)


def test_token_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_token() -> str:
        raise PermissionError(13, "Permission denied", "/home/me/token")

    monkeypatch.setattr("huggingface_hub.get_token", get_token)
    found = doctor.hub_findings()[-1]
    assert (found.name, found.status) == ("Hub token", "warn")
    assert "PermissionError" in found.text


def test_no_network_is_asked() -> None:
    code = (
        "import socket\n"
        "def refuse(*_, **__): raise SystemExit('the network was asked')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse"
    )
    done = doctor_process(code)
    assert done.returncode == 0, done.stderr


def test_without_pytorch() -> None:
    done = doctor_process("sys.modules['torch'] = None")
    assert done.returncode == 1
    assert done.stderr.split() == []  # neither PyTorch nor Triton was imported
    assert re.search(r"^fail  PyTorch +not installed\n +-> pip install 'torch>=2.11'", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "monograph cannot run here: PyTorch"


def test_pytorch_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    fault = "raise OSError('libcudart.so.13: cannot open\\nshared object file')"
    (tmp_path / "torch" / "__init__.py").write_text(fault)
    done = doctor_process(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert done.returncode == 1
    text = "is installed and cannot be imported: OSError: libcudart.so.13: cannot open shared object file"
    assert text in done.stdout
    assert "--force-reinstall" in done.stdout


def test_libraries_that_are_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str | None] = {
        "tokenizers": "0.21.4",
        "gguf": None,
        "triton": "3.5.1",
        "huggingface_hub": "0.36.0",
    }
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "99.0"))
    old = doctor.library_finding("tokenizers")
    assert (old.status, old.text) == ("fail", "0.21.4; 0.22.1 or newer is needed")
    assert old.remedy == "pip install 'tokenizers>=0.22.1'"
    missing = doctor.library_finding("gguf")
    assert (missing.status, missing.text) == ("warn", "not installed: quantised GGUF files cannot be read")
    assert doctor.library_finding("numpy").status == "ok"
    assert [doctor.triton_finding(needed).status for needed in (False, True)] == ["warn", "fail"]
    assert doctor.hub_findings()[0].status == "warn"
    versions["triton"] = versions["huggingface_hub"] = None
    assert doctor.triton_finding(True).text == "not installed"
    assert doctor.hub_findings()[0].text.startswith("not installed: models of the Hugging Face Hub cannot be fetched")


def test_interpreter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = doctor.triton_finding(True)
    assert (found.status, found.remedy) == ("warn", "unset TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert doctor.triton_finding(True).status == "ok"


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {name: oldest for name, (oldest, _, _) in doctor.LIBRARIES.items()}
    ours |= {"torch": doctor.TORCH, "triton": doctor.TRITON, "huggingface_hub": doctor.HUB}
    theirs = dict(text.partition(";")[0].split(">=") for text in project["dependencies"])
    assert ours == theirs
    assert project["requires-python"] == f">={'.'.join(map(str, doctor.OLDEST_PYTHON))}"


def test_verdict() -> None:
    fine, slow, bad = Finding("a", "ok", "x"), Finding("b", "warn", "y", "do"), Finding("c", "fail", "z", "do")
    assert Diagnosis((fine,), True).verdict == "monograph can run here, on the GPU"
    assert Diagnosis((fine, slow, slow), False).verdict == "monograph can run here, on the CPU; see b"
    failed = Diagnosis((slow, bad), True)
    assert (failed.can_run, failed.verdict) == (False, "monograph cannot run here: c")
    assert str(failed).splitlines()[:3] == ["warn  b  y", "         -> do", "fail  c  z"]
    assert worst("ok", "warn") == "warn"
    assert worst("fail", "warn") == "fail"


def test_control_characters_of_the_environment_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "\x1b[2Jcc")
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", "/tmp/\x1b]0;x\x07")
    main(["doctor"])
    out = capsys.readouterr().out
    assert not [c for c in out if ord(c) < 32 and c != "\n"]
