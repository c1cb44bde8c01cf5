"""The C compiler and the Python headers: Triton builds a small library with them before its first kernel can run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from monograph.model.finding import Finding, Status

_COMPILE_TIMEOUT_S = 60
_SOURCE = "#include <Python.h>\nint monograph_probe(void) { return PY_MAJOR_VERSION; }\n"
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_GET_COMPILER = (
    "Debian, Ubuntu: apt install build-essential; Fedora, RHEL: dnf install gcc; Arch: pacman -S gcc; SUSE: zypper "
    "install gcc; without root: conda install -c conda-forge gcc; one that is elsewhere: set CC to its path"
)
_GET_HEADERS = (
    f"Debian, Ubuntu: apt install python{_VERSION}-dev; Fedora, RHEL: dnf install python{_VERSION}-devel "
    "(python3-devel for the system's own); SUSE: zypper install python3-devel; or a Python from conda, "
    "uv or python.org, which bring theirs"
)


def toolchain_findings(needed: bool) -> list[Finding]:
    """Look for what Triton needs to build, and build something small with it.

    Args:
        needed: Whether models will run on a GPU; on a CPU nothing is built, and what is missing is a warning.

    Returns:
        A finding for the compiler, one for the headers, and a third if the two do not work together.
    """
    status: Status = "fail" if needed else "warn"
    why = "" if needed else " (a GPU needs it, the CPU does not)"
    compiler, headers = find_compiler(), headers_folder()
    findings = []
    if compiler is None:
        given = os.environ.get("CC")
        text = f"none: CC names {given!r}, which is no program" if given else "none: neither gcc nor clang is on PATH"
        findings.append(Finding("C compiler", status, text + why, _GET_COMPILER))
    else:
        findings.append(Finding("C compiler", "ok", compiler))
    if os.access(headers / "Python.h", os.R_OK):
        findings.append(Finding("Python headers", "ok", str(headers)))
    else:
        findings.append(Finding("Python headers", status, f"none: no Python.h to read in {headers}{why}", _GET_HEADERS))
    if compiler is not None and findings[-1].status == "ok":
        fault = build_fault(compiler, headers)
        if fault is not None:
            text = f"{compiler} does not build an extension module{why}: {fault}"
            findings[0] = Finding("C compiler", status, text, _GET_COMPILER)
    return findings


def find_compiler() -> str | None:
    """The compiler that Triton would take: CC, or gcc, or clang."""
    given = os.environ.get("CC")
    return shutil.which(given) if given else shutil.which("gcc") or shutil.which("clang")


def headers_folder() -> Path:
    """Where Python.h should be."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme has no headers; Triton looks in the same place.
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def build_fault(compiler: str, headers: Path) -> str | None:
    """Build a library that includes Python.h, in a temporary folder.

    Returns:
        None if it was built, else what the compiler said, in a line.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "probe.c"), Path(folder, "probe.so")
            source.write_text(_SOURCE)
            command = [compiler, str(source), "-shared", "-fPIC", f"-I{headers}", "-o", str(library)]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
            if done.returncode == 0 and library.is_file():
                return None
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    except subprocess.TimeoutExpired:
        return f"it does not end within {_COMPILE_TIMEOUT_S} s"
    except OSError as error:
        return str(error.strerror or error)
    return next((line for line in said if "error" in line.lower()), said[-1] if said else f"exit {done.returncode}")
