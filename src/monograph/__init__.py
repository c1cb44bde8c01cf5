"""monograph: a single-stream LLM decoder in one arena and one captured graph.

``import monograph as mg`` is cheap: PyTorch is imported by the first name that needs it, and by
``load`` when it is called.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from monograph.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineError,
    HubError,
    MonographError,
    NumericsError,
    PromptError,
)

if TYPE_CHECKING:
    from monograph.model.chat import Chat
    from monograph.model.engine import Engine
    from monograph.model.generate import Chunk, Completion, Stats
    from monograph.model.load import load
    from monograph.model.load_stats import LoadStats
    from monograph.model.plan import Plan, plan_model
    from monograph.model.sampling import Sampling

    __version__: str

__all__ = [
    "CapacityError",
    "Chat",
    "CheckpointError",
    "Chunk",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineError",
    "HubError",
    "LoadStats",
    "MonographError",
    "NumericsError",
    "Plan",
    "PromptError",
    "Sampling",
    "Stats",
    "__version__",
    "load",
    "plan_model",
]

_HOME = {
    "Chat": "monograph.model.chat",
    "Chunk": "monograph.model.generate",
    "Completion": "monograph.model.generate",
    "Engine": "monograph.model.engine",
    "LoadStats": "monograph.model.load_stats",
    "Plan": "monograph.model.plan",
    "Sampling": "monograph.model.sampling",
    "Stats": "monograph.model.generate",
    "load": "monograph.model.load",
    "plan_model": "monograph.model.plan",
}


def _check_links(package: Path) -> None:
    """Says what is wrong with a checkout in which git wrote the links as text files.

    Args:
        package: the folder of this package.

    Raises:
        ImportError: one of the three folders is not there.
    """
    broken = [name for name in ("arena", "kernels", "model") if not (package / name).is_dir()]
    if broken:
        raise ImportError(
            f"monograph is incomplete: {', '.join(str(package / name) for name in broken)} should be a folder, or a "
            f"link to one. A git checkout without symbolic links (common on Windows) leaves text files there: run "
            f"'git config core.symlinks true' and 'git checkout -- src/monograph' in it (Windows: with Developer Mode "
            f"on), or install the wheel, which has no links."
        )


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module 'monograph' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("monograph")
    except PackageNotFoundError:  # a bare checkout on PYTHONPATH
        return "0+checkout"


_check_links(Path(__file__).parent)
