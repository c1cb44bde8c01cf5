"""GPUs, or the reason why there are none, in words."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monograph.kernels import pdl_probe as probe_module
from monograph.model import doctor, gpu_check
from monograph.model import graph as graph_module
from monograph.model.finding import Finding


def fake_torch(
    *devices: tuple[str, tuple[int, int], int, int], cuda: str | None = "13.0", hip: str | None = None, warn: str = ""
) -> Any:
    """PyTorch on a machine with these GPUs: name, capability, bytes free and in all."""

    def is_available() -> bool:
        if warn:
            warnings.warn(warn, stacklevel=1)
        return bool(devices)

    def mem_get_info(index: int) -> tuple[int, int]:
        if devices[index][2] < 0:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore\n")
        return devices[index][2:]

    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=is_available,
            device_count=lambda: len(devices),
            get_device_properties=lambda i: SimpleNamespace(name=devices[i][0]),
            get_device_capability=lambda i: devices[i][1],
            mem_get_info=mem_get_info,
        ),
        version=SimpleNamespace(cuda=cuda, hip=hip),
        _C=SimpleNamespace(_cuda_getDriverVersion=lambda: 13020),
    )


def test_gpus_are_listed() -> None:
    gib = 1 << 30
    machine = fake_torch(
        ("NVIDIA H200", (9, 0), 130 * gib, 140 * gib),
        ("Tesla V100", (7, 0), 30 * gib, 32 * gib),
        ("NVIDIA A10", (8, 6), gib // 2, 24 * gib),
        ("NVIDIA A10", (8, 6), -1, 24 * gib),
    )
    found, count = gpu_check.gpu_findings(machine, "570.86")
    assert count == 4
    assert [finding.status for finding in found] == ["ok", "warn", "warn", "warn"]
    assert found[0].text == "cuda:0: NVIDIA H200, sm_90, 130.0 GiB of 140.0 GiB free"
    assert "older than sm_80" in found[1].text
    assert found[2].text.endswith("little for a model")
    assert found[3].text == "cuda:3 cannot be used: CUDA error: all CUDA-capable devices are busy"
    assert "nvidia-smi" in found[3].remedy


@pytest.mark.parametrize(
    ("machine", "driver", "hidden", "text", "remedy"),
    [
        (fake_torch(), None, None, "none found", "container with --gpus all"),
        (fake_torch(cuda=None), "570.86", None, "PyTorch is a CPU build", "CUDA build"),
        (fake_torch(), "570.86", "", "hidden by CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
        (fake_torch(), "570.86", "-1", "hidden by CUDA_VISIBLE_DEVICES='-1'", "unset CUDA_VISIBLE_DEVICES"),
        (fake_torch(warn="driver too old\n(found 11040)"), "470.1", "0", "(driver too old (found 11040))", "update"),
        (fake_torch(cuda=None, hip="6.4"), None, None, "ROCm build", "CUDA build"),
        (None, None, None, "PyTorch is needed to look", "install PyTorch"),
    ],
)
def test_why_there_is_no_gpu(
    machine: Any, driver: str | None, hidden: str | None, text: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    (found,), count = gpu_check.gpu_findings(machine, driver)
    assert (count, found.status) == (0, "warn")
    assert text in found.text
    assert remedy in found.remedy


def test_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gpu_check.driver_finding(fake_torch(), "595.12").text == "NVIDIA 595.12, for CUDA up to 13.2"
    assert gpu_check.driver_finding(None, "595.12").text == "NVIDIA 595.12"
    assert gpu_check.driver_finding(torch, None).text == "no NVIDIA driver"

    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    monkeypatch.setattr(gpu_check, "_DRIVER_FILE", version)
    assert gpu_check.driver_version() == "580.95.05"
    version.unlink()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 550.54.14\necho 550.54.14\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu_check.driver_version() == "550.54.14"
    program.write_text("#!/bin/sh\necho failed\nexit 9\n")
    assert gpu_check.driver_version() is None

    def slow(*args: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(subprocess, "run", slow)
    assert gpu_check.driver_version() is None
    monkeypatch.setenv("PATH", "")
    assert gpu_check.driver_version() is None


def kernel_findings(
    monkeypatch: pytest.MonkeyPatch, probe: Callable[..., None], overlaps: bool, capability: tuple[int, int]
) -> list[Finding]:
    """What is said of kernels, with the probe's arithmetic on the CPU and the rest of the GPU faked."""
    monkeypatch.setattr(probe_module, "pdl_probe", probe)
    monkeypatch.setattr(graph_module, "supports_pdl", lambda device: overlaps)
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "device", lambda *_: cpu)
    return gpu_check.kernel_findings(torch)


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = probe_module.pdl_probe_torch, lambda source, out: out.copy_(source)

    def broken(source: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("libcuda.so cannot found!\nmore")

    found = kernel_findings(monkeypatch, right, True, (9, 0))
    assert [(f.name, f.status) for f in found] == [("kernels", "ok"), ("PDL", "ok")]
    found = kernel_findings(monkeypatch, right, False, (8, 9))
    assert [f.status for f in found] == ["ok", "ok"]
    assert "from sm_90 on" in found[1].text
    assert [f.status for f in kernel_findings(monkeypatch, right, False, (12, 0))] == ["ok", "warn"]
    (found_wrong,) = kernel_findings(monkeypatch, wrong, True, (9, 0))
    assert (found_wrong.status, "something else" in found_wrong.text) == ("fail", True)
    (found_broken,) = kernel_findings(monkeypatch, broken, True, (9, 0))
    assert found_broken.text == "a Triton kernel does not run: libcuda.so cannot found!"


def test_machine_with_a_gpu_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """There monograph cannot run, unless an earlier start has left in Triton's cache what a compiler is needed for."""
    gpu, fine = Finding("GPU", "ok", "cuda:0: NVIDIA H200"), Finding("kernels", "ok", "has run")
    kernels = [Finding("kernels", "fail", "Failed to find C compiler", "see above")]
    monkeypatch.setattr(doctor, "gpu_findings", lambda torch, driver: ([gpu], 1))
    monkeypatch.setattr(doctor, "kernel_findings", lambda torch: kernels)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "")
        bare.delenv("CC", raising=False)
        assert doctor.diagnose().verdict == "monograph cannot run here: C compiler, kernels"
        kernels[:] = [fine]
        warmed = doctor.diagnose()
        assert warmed.can_run
        assert "C compiler" in warmed.named("warn")
        assert "kernels run, as Triton's cache has what was built before" in str(warmed)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/cache")
    assert "Triton cache" in doctor.diagnose().named("warn")  # what is in it can be read
    kernels[:] = [Finding("kernels", "fail", "Not a directory", "see above")]
    assert doctor.diagnose().named("fail") == ["Triton cache", "kernels"]
    kernels[:] = [fine]
    monkeypatch.delenv("TRITON_CACHE_DIR")
    whole = doctor.diagnose()
    assert "C compiler" not in whole.named("warn")
    assert whole.verdict.startswith("monograph can run here, on the GPU")


@pytest.mark.parametrize(("interpret", "version", "failed"), [("1", "3.9.0", []), ("0", "3.5.0", ["Triton"])])
def test_no_kernel_is_tried_in_vain(
    interpret: str, version: str, failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter it shows nothing; without a Triton that will do it cannot work."""
    monkeypatch.setattr(doctor, "gpu_findings", lambda torch, driver: ([Finding("GPU", "ok", "cuda:0")], 1))
    versions = {"triton": version}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "99.0"))
    monkeypatch.setenv("TRITON_INTERPRET", interpret)

    def tried(torch: Any) -> list[Finding]:
        raise AssertionError("a kernel was tried")

    monkeypatch.setattr(doctor, "kernel_findings", tried)
    assert doctor.diagnose().named("fail") == failed


@pytest.mark.gpu
def test_this_gpu() -> None:
    diagnosis = doctor.diagnose()
    assert diagnosis.on_gpu
    assert diagnosis.can_run, str(diagnosis)
    found = {finding.name: finding for finding in diagnosis.findings}
    assert torch.cuda.get_device_name(0) in str(diagnosis)
    assert found["kernels"].status == "ok"
    assert ("overlap" in found["PDL"].text) == graph_module.supports_pdl(torch.device("cuda", 0))
