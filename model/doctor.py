"""What monograph needs of a machine, looked at part by part: ``monograph doctor``.

Nothing here asks the network, and nothing that is missing or broken ends the examination: it is what is reported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from monograph.model.cache_folder import monograph_folder, tiles_folder, triton_folder
from monograph.model.finding import Diagnosis, Finding, Status, worst
from monograph.model.gpu_check import driver_finding, driver_version, gpu_findings, kernel_findings
from monograph.model.toolchain import toolchain_findings

OLDEST_PYTHON = (3, 11)
# The oldest version of each library that will do, as the package's metadata has it, and what is lost without it.
LIBRARIES: dict[str, tuple[str, Status, str]] = {
    "numpy": ("1.26", "fail", ""),
    "safetensors": ("0.5", "fail", ""),
    "tokenizers": ("0.22.1", "fail", ""),
    "jinja2": ("3.1", "warn", "chat templates cannot be rendered"),
    "gguf": ("0.19", "warn", "quantised GGUF files cannot be read"),
}
TORCH, TRITON, HUB = "2.11", "3.6", "1.0"
FEW_NBYTES = 1 << 30
_MEASURE_S = 2.0


def diagnose() -> Diagnosis:
    """Examine this machine."""
    torch, torch_found = torch_finding()
    driver = driver_version()
    gpus, count = gpu_findings(torch, driver)
    on_gpu = count > 0
    findings = [python_finding(), platform_finding(), torch_found, driver_finding(torch, driver), *gpus]
    if torch is not None:
        findings.append(memory_finding(torch))
    triton, toolchain = triton_finding(on_gpu), toolchain_findings(on_gpu)
    cache = folder_finding(
        "Triton cache",
        triton_folder(),
        "fail" if on_gpu else "warn",
        "kernels cannot be kept there" if on_gpu else "kernels cannot be kept there (a GPU needs it, the CPU not)",
        "set TRITON_CACHE_DIR to a folder that can be written",
    )
    kernels: list[Finding] = []
    if on_gpu and triton.status != "fail" and not _is_interpreted():
        kernels = kernel_findings(torch)
        if worst(*(finding.status for finding in kernels)) != "fail":
            toolchain, cache = [_built_before(finding) for finding in toolchain], _built_before(cache)
    findings += [triton, *toolchain, cache, *kernels]
    way_out = "set MONOGRAPH_CACHE_DIR to a folder that can be written"
    findings.append(
        folder_finding("monograph cache", monograph_folder(), "warn", "tuned tiles cannot be kept there", way_out)
    )
    findings.append(tiles_finding())
    findings += hub_findings()
    findings += [library_finding(name) for name in LIBRARIES]
    return Diagnosis(tuple(findings), on_gpu)


def _built_before(finding: Finding) -> Finding:
    """What is missing, on a machine whose kernels run nevertheless."""
    if finding.status != "fail":
        return finding
    text = f"{finding.text}; kernels run, as Triton's cache has what was built before"
    return replace(finding, status="warn", text=text)


def python_finding() -> Finding:
    """The interpreter."""
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("Python", "fail", f"{text}; 3.11 or newer is needed", "make an environment with a newer Python")
    return Finding("Python", "ok", text)


def platform_finding() -> Finding:
    """The operating system."""
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if sys.platform == "linux":
        return Finding("platform", "ok", text)
    return Finding("platform", "warn", f"{text}: untested, and without Triton, CPU only", "use Linux")


def torch_finding() -> tuple[Any, Finding]:
    """PyTorch.

    Returns:
        The module, None where it is missing or does not import; and what to say of it.
    """
    install = f"pip install 'torch>={TORCH}' (https://pytorch.org/get-started/locally names the index for each CUDA)"
    if importlib.util.find_spec("torch") is None:
        return None, Finding("PyTorch", "fail", "not installed", install)
    try:
        import torch

        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        if getattr(torch.version, "hip", None):
            build = f"ROCm {torch.version.hip}"
        text = f"{torch.__version__}, {build}"
    except Exception as error:  # a damaged installation raises what it likes: it is shown, not caught by kind
        text = f"is installed and cannot be imported: {_in_a_line(error)}"
        return None, Finding(
            "PyTorch", "fail", text, f"install it anew: pip install --force-reinstall 'torch>={TORCH}'"
        )
    if _numbers(torch.__version__) < _numbers(TORCH):
        return torch, Finding("PyTorch", "fail", f"{text}; {TORCH} or newer is needed", install)
    return torch, Finding("PyTorch", "ok", text)


def memory_finding(torch: Any) -> Finding:
    """Memory for models on the CPU."""
    from monograph.arena import device_free_nbytes, format_nbytes

    free = device_free_nbytes(torch.device("cpu"))
    count = torch.get_num_threads()
    threads = f"{count} thread{'' if count == 1 else 's'}"
    if free is None:
        return Finding("CPU", "ok", f"{threads}, free memory unknown")
    text = f"{threads}, {format_nbytes(free)} of memory free"
    if free < FEW_NBYTES:
        return Finding(
            "CPU", "warn", f"{text}; little for a model", "end other programs, or raise the container's limit"
        )
    return Finding("CPU", "ok", text)


def triton_finding(needed: bool) -> Finding:
    """Triton.

    Args:
        needed: Whether models will run on a GPU.
    """
    status: Status = "fail" if needed else "warn"
    why = "" if needed else " (a GPU needs it, the CPU does not)"
    install = f"pip install 'triton>={TRITON}'"
    version = _version("triton")
    if version is None:
        remedy = install if sys.platform == "linux" else "Triton is published for Linux alone"
        return Finding("Triton", status, f"not installed{why}", remedy)
    if _numbers(version) < _numbers(TRITON):
        return Finding("Triton", status, f"{version}; {TRITON} or newer is needed{why}", install)
    if needed:
        try:
            importlib.import_module("triton")
        except Exception as error:  # as for PyTorch
            text = f"is installed and cannot be imported: {_in_a_line(error)}"
            return Finding("Triton", "fail", text, f"{install} --force-reinstall")
    if needed and _is_interpreted():
        text = f"{version}, but TRITON_INTERPRET=1 runs kernels in its interpreter, very slowly"
        return Finding("Triton", "warn", text, "unset TRITON_INTERPRET")
    return Finding("Triton", "ok", version)


def folder_finding(name: str, folder: Path, status: Status, lost: str, remedy: str) -> Finding:
    """A cache folder: whether it can be written, how much is in it, and what its disk has free.

    A folder that is not there is not made: then the nearest one above it counts.

    Args:
        name: What the finding is called.
        folder: The folder.
        status: Of a folder that cannot be written.
        lost: What that means.
        remedy: The way out.
    """
    fault = write_fault(folder)
    if fault is not None:
        return Finding(name, status, f"{folder}: cannot be written ({fault}): {lost}", remedy)
    free = shutil.disk_usage(_nearest(folder)).free
    text = f"{folder}: {_size_text(folder)}, {_gb(free)} free on its disk"
    if free < FEW_NBYTES:
        return Finding(name, "warn", text, f"free some space, or {remedy}")
    return Finding(name, "ok", text)


def write_fault(folder: Path) -> str | None:
    """Why no file can be made in a folder, found by making one that has no name; None where it can."""
    try:
        nearest = _nearest(folder)
        if not nearest.is_dir():
            return f"{nearest} is no folder"
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return error.strerror or str(error)


def tiles_finding() -> Finding:
    """Tuned tiles that are kept for loads to come."""
    try:
        names = sorted(path.stem for path in tiles_folder().glob("*.json"))
    except OSError as error:
        return Finding("tuned tiles", "warn", f"{tiles_folder()}: {error.strerror or error}", "set MONOGRAPH_CACHE_DIR")
    if not names:
        return Finding("tuned tiles", "ok", "none kept: the defaults are used ('monograph tune' looks for better)")
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Finding("tuned tiles", "ok", f"{len(names)} kept: {shown}")


def hub_findings() -> list[Finding]:
    """The Hub's library, its cache, its endpoint and, never shown, the token."""
    lost = "models of the Hugging Face Hub cannot be fetched; folders and .gguf files can be loaded"
    install = f"pip install 'huggingface_hub>={HUB}'"
    version = _version("huggingface_hub")
    if version is None:
        return [Finding("Hub library", "warn", f"not installed: {lost}", install)]
    if _numbers(version) < _numbers(HUB):
        return [Finding("Hub library", "warn", f"{version}; {HUB} or newer is needed: {lost}", install)]
    try:
        from huggingface_hub import constants
    except Exception as error:  # as for PyTorch
        return [Finding("Hub library", "warn", f"{version} does not work ({_in_a_line(error)}): {lost}", install)]
    cache, set_home = Path(constants.HF_HUB_CACHE), "set HF_HOME to a folder that can be written"
    endpoint = without_user(str(constants.ENDPOINT))
    offline = constants.HF_HUB_OFFLINE
    return [
        Finding("Hub library", "ok", f"huggingface_hub {version}"),
        folder_finding("Hub cache", cache, "warn", "models cannot be fetched", set_home),
        Finding("Hub endpoint", "ok", f"{endpoint}{', offline (HF_HUB_OFFLINE)' if offline else ''}, not asked"),
        token_finding(),
    ]


def token_finding() -> Finding:
    """Whether the Hub's library has a token, and from where."""
    import huggingface_hub

    try:
        token = huggingface_hub.get_token()
    except Exception as error:  # a file that cannot be read, a keyring that is locked
        text = f"cannot be read ({type(error).__name__}): public models only"
        return Finding("Hub token", "warn", text, "log in with 'hf auth login' or set HF_TOKEN")
    if token is None:
        text = "none: public models only ('hf auth login' or HF_TOKEN, for gated and private ones)"
    else:
        text = "present (from HF_TOKEN)" if os.environ.get("HF_TOKEN") else "present (logged in)"
    return Finding("Hub token", "ok", text)


def library_finding(name: str) -> Finding:
    """One of the other libraries."""
    oldest, status, lost = LIBRARIES[name]
    version, meaning = _version(name), f": {lost}" if lost else ""
    if version is None:
        return Finding(name, status, f"not installed{meaning}", f"pip install '{name}>={oldest}'")
    if _numbers(version) < _numbers(oldest):
        return Finding(
            name, status, f"{version}; {oldest} or newer is needed{meaning}", f"pip install '{name}>={oldest}'"
        )
    return Finding(name, "ok", version)


def without_user(url: str) -> str:
    """An address without the name and password that may stand in it."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _version(name: str) -> str | None:
    """Version of an installed library; None if it cannot be found, whatever its metadata say."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(name), "__version__", "0"))


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else (0,)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def _size_text(folder: Path) -> str:
    """How much is in a folder; counting stops after two seconds, as a large cache on a slow disk needs."""
    if not folder.is_dir():
        return "not there yet"
    nbytes, files, until = 0, 0, time.monotonic() + _MEASURE_S
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                nbytes += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118  # a Path a file is slow
                files += 1
            except OSError:  # removed meanwhile
                continue
        if time.monotonic() > until:
            return f"more than {_gb(nbytes)} in {files:,} files"
    return f"{_gb(nbytes)} in {files:,} files" if files else "empty"


def _gb(nbytes: int) -> str:
    """Bytes for people. The arena's own words for them come with PyTorch, which may be missing."""
    if nbytes < 10**6:
        return f"{nbytes / 1e3:.1f} kB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 10**9 else f"{nbytes / 1e9:,.1f} GB"


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
