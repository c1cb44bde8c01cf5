"""A process of its own that starts from nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class FreshProcess:
    """A process that runs tests/gpu/fresh_process.py while others go on.

    Args:
        cache: Folder for Triton's cache; None for the usual one.
        environment: Variables to set.
    """

    def __init__(self, cache: Path | None, **environment: str) -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        own = {"PYTHONPATH": paths} | ({} if cache is None else {"TRITON_CACHE_DIR": str(cache)})
        environment = {**os.environ, **own, **environment}
        command = [sys.executable, "-m", "tests.gpu.fresh_process"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._facts: Any = None

    def facts(self) -> Any:
        """Wait for its end and return what it reports."""
        if self._facts is None:
            out, errors = self._process.communicate(timeout=200)
            assert self._process.returncode == 0, errors[-4000:]
            self._facts = json.loads(out.splitlines()[-1])
        return self._facts

    def end(self) -> None:
        """End it, whatever it is at."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
