"""The GPUs of a machine, as PyTorch and Triton can use them; or why they cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

from monograph.model.finding import Finding

OLDEST_CAPABILITY = (8, 0)
PDL_CAPABILITY = (9, 0)
FEW_NBYTES = 1 << 30
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_GET_CUDA_BUILD = "install PyTorch's CUDA build: https://pytorch.org/get-started/locally names the index for pip"
_GET_DRIVER = "install NVIDIA's driver (nvidia-smi must list the GPU); start a container with --gpus all"
_REINSTALL = "install PyTorch and Triton anew, with the versions that belong together, and update NVIDIA's driver"
_USERS = "nvidia-smi lists the programs that hold it; end some, or take another GPU with --device cuda:1"


def driver_version() -> str | None:
    """Version of the NVIDIA driver, from the kernel's own file or nvidia-smi; None where there is none."""
    try:
        found = re.search(r"(\d+\.\d+(?:\.\d+)?)", _DRIVER_FILE.read_text())
    except OSError:
        found = None
    if found is not None:
        return found[1]
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = said.stdout.split()
    return lines[0] if said.returncode == 0 and lines else None


def driver_finding(torch: Any, driver: str | None) -> Finding:
    """The driver, and the CUDA version that it can serve.

    Args:
        torch: The module; None where it cannot be imported.
        driver: From ``driver_version``.
    """
    if driver is None:
        return Finding("driver", "ok", "no NVIDIA driver")
    try:
        number = int(torch._C._cuda_getDriverVersion()) if torch is not None and torch.version.cuda else 0
    except (AttributeError, RuntimeError):
        number = 0
    serves = f", for CUDA up to {number // 1000}.{number % 1000 // 10}" if number else ""
    return Finding("driver", "ok", f"NVIDIA {driver}{serves}")


def gpu_findings(torch: Any, driver: str | None) -> tuple[list[Finding], int]:
    """Every GPU that PyTorch can use, or one finding that says why there is none.

    Args:
        torch: The module; None where it cannot be imported.
        driver: From ``driver_version``.

    Returns:
        The findings, and the number of GPUs.
    """
    if torch is None:
        return [Finding("GPU", "warn", "unknown: PyTorch is needed to look", "install PyTorch first")], 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        findings = [_device_finding(torch, i) for i in range(count)]
    if count:
        return findings, count
    return [_no_gpu(torch, driver, " ".join(" ".join(str(w.message) for w in said).split()))], 0


def _device_finding(torch: Any, index: int) -> Finding:
    from monograph.arena import format_nbytes

    name, place = "GPU", f"cuda:{index}"
    try:
        device = torch.cuda.get_device_properties(index)
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return Finding(name, "warn", f"{place} cannot be used: {_first_line(error)}", _USERS)
    text = (
        f"{place}: {device.name}, sm_{capability[0]}{capability[1]}, "
        f"{format_nbytes(free)} of {format_nbytes(total)} free"
    )
    if capability < OLDEST_CAPABILITY:
        return Finding(name, "warn", f"{text}; older than sm_80, which monograph is made for", "use --device cpu")
    if free < FEW_NBYTES:
        return Finding(name, "warn", f"{text}; little for a model", _USERS)
    return Finding(name, "ok", text)


def _no_gpu(torch: Any, driver: str | None, said: str) -> Finding:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    slow = "models run on the CPU, slowly"
    if getattr(torch.version, "hip", None):
        return Finding("GPU", "warn", f"PyTorch is a ROCm build, for AMD GPUs: {slow}", _GET_CUDA_BUILD)
    if driver is None:
        return Finding("GPU", "warn", f"none found: {slow}", f"if this machine has one, {_GET_DRIVER}")
    if torch.version.cuda is None:
        return Finding("GPU", "warn", f"a driver is here, but PyTorch is a CPU build: {slow}", _GET_CUDA_BUILD)
    if hidden is not None and not re.match(r"\s*(\d|GPU-|MIG-)", hidden):
        text = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}: {slow}"
        return Finding("GPU", "warn", text, "unset CUDA_VISIBLE_DEVICES, or set it to 0")
    text = f"PyTorch for CUDA {torch.version.cuda} cannot use what is here: {slow}{f' ({said})' if said else ''}"
    return Finding("GPU", "warn", text, f"update NVIDIA's driver, or {_GET_CUDA_BUILD}")


def kernel_findings(torch: Any) -> list[Finding]:
    """Compile and run a Triton kernel on the current GPU, and try whether its launches can overlap.

    Args:
        torch: The module, on a machine with a GPU.
    """
    from monograph.kernels.pdl_probe import pdl_probe, pdl_probe_torch
    from monograph.model.graph import supports_pdl

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with torch.cuda.device(device), torch.inference_mode():
            start = torch.arange(256 * 32, dtype=torch.int32, device=device)
            found, wanted = torch.empty_like(start), torch.empty_like(start)
            pdl_probe(start, found)
            pdl_probe_torch(start, wanted)
            if not torch.equal(found, wanted):
                return [Finding("kernels", "fail", "a Triton kernel computes something else than PyTorch", _REINSTALL)]
        overlaps = supports_pdl(device)
    except Exception as error:  # whatever a compiler, a driver or a linker raises is what is to be shown
        remedy = "see what is said of Triton, C compiler, Python headers and cache above; 'monograph chat' fails alike"
        return [Finding("kernels", "fail", f"a Triton kernel does not run: {_first_line(error)}", remedy)]
    findings = [Finding("kernels", "ok", "a Triton kernel was compiled and has run")]
    if overlaps:
        findings.append(Finding("PDL", "ok", "launches can overlap (programmatic dependent launch)"))
    elif torch.cuda.get_device_capability(device) < PDL_CAPABILITY:
        findings.append(Finding("PDL", "ok", "not on this GPU: it is there from sm_90 on; kernels run one by one"))
    else:
        text = "launches do not overlap rightly here: kernels run one by one, slower by a few percent"
        findings.append(Finding("PDL", "warn", text, "update NVIDIA's driver"))
    return findings


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
