"""What is built from the sources holds the package and nothing that it should not."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("src", "arena", "kernels", "model", "tests", "docs", "examples", "pyproject.toml", "README.md", "LICENSE")


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist as pip would, without the network."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, str(out)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return out / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist of a copy of the sources, links kept."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for name in PARTS:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    return build("wheel", source, out), build("sdist", source, out)


def modules() -> set[str]:
    """The files that the package consists of, as they are named in a wheel."""
    files = {"monograph/py.typed"}
    for folder in ("arena", "kernels", "model"):
        files |= {f"monograph/{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
    package = ROOT / "src" / "monograph"
    files |= {f"monograph/{path.name}" for path in package.glob("*.py")}
    return files | {f"monograph/chat/{path.name}" for path in (package / "chat").glob("*.py")}


def test_wheel(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith("monograph-")}
        assert names == modules()  # no top-level arena, kernels or model, no tests, nothing forgotten
        assert "monograph/kernels/__init__.py" not in names
        metadata_folder = next(name.partition("/")[0] for name in wheel.namelist() if name.startswith("monograph-"))
        metadata = email.message_from_bytes(wheel.read(f"{metadata_folder}/METADATA"))
        assert wheel.read(f"{metadata_folder}/top_level.txt") == b"monograph\n"
        assert b"monograph = monograph.cli:main" in wheel.read(f"{metadata_folder}/entry_points.txt")
        assert wheel.read(f"{metadata_folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    requires = metadata.get_all("Requires-Dist") or []
    assert "torch>=2.11" in requires
    assert 'triton>=3.6; sys_platform == "linux"' in [text.replace("'", '"') for text in requires]


def test_wheel_from_sdist(built: tuple[Path, Path], tmp_path: Path) -> None:
    """An sdist has files where the sources have links, and makes the same wheel."""
    with tarfile.open(built[1]) as sdist:
        assert not [member for member in sdist if member.issym() or member.islnk()]
        sdist.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    wheel = build("wheel", source, tmp_path)
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(built[0]) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())
        for name in ours.namelist():
            if not name.endswith("/RECORD"):
                assert ours.read(name) == theirs.read(name), name
