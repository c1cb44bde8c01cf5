"""What is begun before PyTorch is imported: in which order, when not at all, and that nothing depends on it."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import monograph as mg
from monograph.model import early, load
from monograph.model.early import Beginning, gpu_number, libraries
from monograph.model.engine import load_engine
from tests.engines import write_model

ROOT = Path(__file__).parents[2]


def process(code: str, **environment: str) -> Any:
    """Run code in a fresh process; what it prints last, as JSON."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def fake_torch(folder: Path, *names: str, version: str = "cuda: str | None = '13.0'") -> Path:
    """A folder like that of an installed PyTorch."""
    (folder / "lib").mkdir(parents=True)
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so", *names):
        (folder / "lib" / name).touch()
    (folder / "version.py").write_text(f"__version__ = '2.11.0'\n{version}\nhip: str | None = None\n")
    return folder


class FakeDriver:
    """NVIDIA's driver library: notes what is called, and fails from a call on."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self._fails = fails

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._answer("cuInit", flags)

    def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        return self._answer("cuDeviceGet", number)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        return self._answer("cuDevicePrimaryCtxRetain", None)

    def _answer(self, name: str, value: int | None) -> int:
        self.calls.append((name, value))
        return 100 if name == self._fails else 0


def test_the_order_is_that_of_pytorch(tmp_path: Path) -> None:
    torch_folder = fake_torch(tmp_path / "torch", "libtorch_cuda.so")
    for name in ("cu13/lib/libcublas.so.13", "cu13/lib/libcublasLt.so.13", "cu12/lib/libcudart.so.12"):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    cudnn = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    cudnn.parent.mkdir(parents=True)
    cudnn.touch()
    found = list(libraries(torch_folder, [str(tmp_path / "nowhere"), str(tmp_path)]))
    names = [path.name for path, _ in found]
    wanted = ["libcublasLt.so.13", "libcublas.so.13", "libcudnn.so.9"]  # and not those of another CUDA
    assert names == ["libtorch_global_deps.so", *wanted, "libtorch_cuda.so"]
    assert [mode for _, mode in found] == [os.RTLD_NOW | os.RTLD_GLOBAL, *[os.RTLD_NOW] * 4]


def test_without_cuda_and_with_another_gpu(tmp_path: Path) -> None:
    plain = fake_torch(tmp_path / "plain")
    assert [path.name for path, _ in libraries(plain, [])] == ["libtorch_global_deps.so", "libtorch_cpu.so"]
    rocm = fake_torch(tmp_path / "rocm", "libtorch_cuda.so", version="cuda: str | None = None")
    assert [path.name for path, _ in libraries(rocm, [])] == ["libtorch_global_deps.so"]


@pytest.mark.parametrize(
    ("device", "visible", "number"),
    [
        ("auto", None, 0),
        ("cuda", None, 0),
        ("cuda:3", "5,6,7,8", 3),
        ("cpu", None, None),
        ("auto", "", None),
        ("cuda", "-1", None),
        ("cuda:x", None, None),
        (object(), None, None),
    ],
)
def test_which_gpu_is_started(
    device: object, visible: str | None, number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_number(device) == number


@pytest.mark.parametrize("fails", ["", "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_cuda_is_started_after_the_libraries(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(fails)
    order: list[str] = []
    folder = fake_torch(tmp_path / "torch", "libtorch_cuda.so")

    def dlopen(path: bytes, mode: int) -> int:
        order.append(Path(os.fsdecode(path)).name)
        assert not driver.calls
        return 1

    fake_dlopen = SimpleNamespace(dlopen=Function(dlopen))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake_dlopen if name is None else driver)
    begun = Beginning(folder, 2)
    begun.join()
    assert order[0] == "libtorch_global_deps.so"
    assert order[-1] == "libtorch_cuda.so"
    assert [path.name for path in begun.loaded] == order
    assert begun.started == (not fails)
    every = [("cuInit", 0), ("cuDeviceGet", 2), ("cuDevicePrimaryCtxRetain", None)]
    assert driver.calls == every[: [*[name for name, _ in every], ""].index(fails) + 1]


class Function:
    """A function of a library: can be called, and told its types."""

    def __init__(self, call: Any) -> None:
        self.argtypes = self.restype = None
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


def test_a_cpu_is_asked_for_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def driver() -> None:
        raise AssertionError("the driver was loaded")

    monkeypatch.setattr(early, "_driver", driver)
    for folder, gpu in (
        (fake_torch(tmp_path / "with", "libtorch_cuda.so", version="cuda = None"), None),
        (fake_torch(tmp_path / "without"), 0),
    ):
        begun = Beginning(folder, gpu)
        begun.hash_triton()
        begun.join()
        assert not begun.started
        assert begun.loaded == []  # empty files are no libraries, which is nobody's fault


@pytest.mark.parametrize(("switch", "works"), [("1", True), ("0", False)])
def test_a_load_begins_early_and_leaves_nothing(switch: str, works: bool, tmp_path: Path) -> None:
    """The first load of a process, with the switch on and off: the same answer, no thread left, nothing changed."""
    write_model(tmp_path)
    code = (
        "import gc, json, sys, threading, monograph as mg, monograph.model.early as early\n"
        "seen = []\n"
        "class Seen(early.Beginning):\n"
        "    def join(self):\n"
        "        super().join()\n"
        "        seen.extend(path.name for path in self.loaded)\n"
        "early.Beginning = Seen\n"
        "from monograph.model.tokenizer import Tokenizer\n"
        "read, when = Tokenizer.from_folder, []\n"
        "Tokenizer.from_folder = lambda path: [when.append('torch' in sys.modules), read(path)][1]\n"
        "greedy, _ = mg.Sampling(temperature=0.0), mg.load\n"
        "assert 'torch' not in sys.modules\n"
        "interval = sys.getswitchinterval()\n"
        f"engine = mg.load({str(tmp_path)!r}, device='cpu')\n"
        "tokens = engine.generate([5, 6, 7], 4, sampling=greedy).token_ids\n"
        "assert (gc.isenabled(), sys.getswitchinterval()) == (True, interval)\n"
        "names = [thread.name for thread in threading.enumerate()]\n"
        "print(json.dumps([tokens, seen, when, engine.load_stats.import_s > 0.05, names]))\n"
    )
    tokens, seen, torch_was_there, imported, names = process(code, MONOGRAPH_EARLY=switch)
    with mg.load(str(tmp_path), device="cpu") as engine:
        assert engine.generate([5, 6, 7], 4, sampling=mg.Sampling(temperature=0.0)).token_ids == tokens
        assert engine.load_stats.import_s < 0.05  # PyTorch is imported here: nothing to begin
    assert (bool(seen), torch_was_there, imported) == (works, [not works], True)
    assert not works or seen[0] == "libtorch_global_deps.so"
    assert names == ["MainThread"]


def test_what_is_wrong_is_said_in_the_usual_order(tmp_path: Path) -> None:
    """A tokenizer that is damaged is read ahead, and complained of only when its turn comes."""
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    config = json.loads((tmp_path / "config.json").read_text())
    code = (
        "import json, monograph as mg\n"
        f"try: mg.load({str(tmp_path)!r}, device='cpu')\n"
        "except mg.MonographError as error: print(json.dumps([type(error).__name__, str(error)]))\n"
    )
    kind, message = process(code)
    assert kind == "CheckpointError"
    assert "tokenizer.json" in message
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    kind, message = process(code)
    assert kind == "ConfigError"
    assert "gpt2" in message


def test_the_door_has_the_arguments_of_the_house() -> None:
    """`load` passes on all that `load_engine` takes, but for what it adds itself."""
    outer, inner = inspect.signature(load.load).parameters, inspect.signature(load_engine).parameters
    assert [*outer, "tokenizer", "started"] == list(inner)
    assert all(outer[name].annotation == inner[name].annotation for name in outer)


def test_two_loads_at_once_leave_the_interpreter_as_it_was() -> None:
    """Before PyTorch is imported: the second does not take the first one's settings for the caller's."""
    code = (
        "import gc, json, sys, monograph.model.early as early\n"
        "interval = sys.getswitchinterval()\n"
        "first, second = early.beginning('cpu'), early.beginning('cpu')\n"
        "begun = [first.__enter__() is not None, second.__enter__() is not None]\n"
        "first.__exit__(None, None, None), second.__exit__(None, None, None)\n"
        "print(json.dumps([begun, sys.getswitchinterval() == interval, gc.isenabled()]))\n"
    )
    assert process(code) == [[True, False], True, True]
