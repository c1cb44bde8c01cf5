"""Writes the generated parts of README.md anew, each the output of the command above it: ``make readme``."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from monograph.cli import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- generated: (?P<command>[^\n]+) -->\n+```text\n)(?P<output>.*?)(```\n)", re.DOTALL)
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def refresh(text: str) -> str:
    """The text with every generated block replaced by what its command prints now."""
    return BLOCK.sub(lambda match: match[1] + output(match["command"]) + match[4], text)


def output(command: str) -> str:
    """What a command prints; what this machine has free is left out, so that machines agree."""
    if command.startswith("python "):
        here = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        script = [sys.executable, *shlex.split(command)[1:]]
        return subprocess.run(script, cwd=ROOT, env=here, capture_output=True, text=True, check=True).stdout
    arguments = [str(smollm2_path()) if part == MODEL else part for part in shlex.split(command)[1:]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(arguments)
    return re.sub(r", [^,]+ free", ", ... free", printed.getvalue())


def smollm2_path() -> Path:
    """The model of the demo, found as the example finds it."""
    spec = importlib.util.spec_from_file_location("find_smollm2", ROOT / "examples" / "find_smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.smollm2_path())


if __name__ == "__main__":
    README.write_text(refresh(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
