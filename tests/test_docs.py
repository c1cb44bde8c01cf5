"""What the README and its kin say is true: output of commands, names of targets, files and functions, the example."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from monograph.cli import make_parser
from tests import smollm2

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/design.md",
        "docs/benchmarks.md",
        "docs/models.md",
    )
]


def refresh_readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh_readme", ROOT / "docs" / "refresh_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_of_the_readme_are_current() -> None:
    """If this fails: `make readme`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = refresh_readme().BLOCK.findall(readme)
    assert len(blocks) == 9
    assert all(output.strip() for _, _, output, _ in blocks)
    assert refresh_readme().refresh(readme) == readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_things_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", commands, re.MULTILINE)) <= targets
    known = set(re.findall(r"^    ([a-z]+) ", make_parser().format_help(), re.MULTILINE))
    assert set(re.findall(r"^monograph ([a-z]+)", commands, re.MULTILINE)) <= known
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:arena|kernels|model|tests|docs|examples|src)/[\w./]*)`", text):
        if path not in ("kernels/x.py", "tests/kernels/test_x.py"):
            assert (ROOT / path).exists(), path


def test_python_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    code = found[1].replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm2.path()))
    assert code != found[1]
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert len(out) > 20
    assert "finish_reason" not in out
    assert "Stats(prompt_tokens=4" in out
