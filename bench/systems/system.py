"""What every system that is compared must do, and where to find it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

BATCH = 16  # tokens in a row that are timed together, as bench/step.py does


@dataclass
class Task:
    """One comparison, as every process of it is told.

    Attributes:
        model: Folder, .gguf file or repository that all systems load.
        device: As PyTorch names it.
        dtype: Of weights and KV cache.
        lengths: Live lengths that every system is measured at.
        long_lengths: Those that monograph alone is measured at.
        replays: Tokens that are timed at each length, at least.
        max_seq_len: Capacity of monograph's arena; None for the model's own.
        static_max: Capacities of the static cache, ascending; () rounds every length up.
        compile_backend: Of torch.compile.
        prompt: Token ids of the prompt whose first token ends the start-up.
        reference: File with the logits to judge by.
        gguf: The same weights as a GGUF file; empty if there is none.
    """

    model: str
    device: str
    dtype: str
    lengths: list[int]
    long_lengths: list[int] = field(default_factory=list)
    replays: int = 200
    max_seq_len: int | None = None
    static_max: list[int] = field(default_factory=list)
    compile_backend: str = "inductor"
    prompt: list[int] = field(default_factory=list)
    reference: str = ""
    gguf: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Task:
        """From what ``to_json`` gave."""
        return cls(**{item.name: content[item.name] for item in fields(cls)})

    def token(self, length: int, vocab_size: int) -> int:
        """The token that a step at this length reads, the same in every system."""
        return (1000 + 777 * length) % vocab_size


@dataclass
class Judged:
    """What was found of a step before it is timed.

    Attributes:
        verdict: "ok", or what is wrong.
        facts: More for the row: "error", "argmax_agrees", "max_seq_len", "graphs".
    """

    verdict: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Timed:
    """Milliseconds a token.

    Attributes:
        ms: One figure for each batch of tokens.
        mean_seq_len: Mean live length of the tokens of a batch.
    """

    ms: list[float]
    mean_seq_len: float


class System(Protocol):
    """A way to run a model, loaded by its constructor from a ``Task``."""

    def answer(self, ids: list[int], count: int, on_token: Callable[[int], None]) -> None:
        """Answer a prompt greedily as its users would have it, and say each token as it becomes known."""
        ...

    def judge(self, length: int) -> Judged:
        """Run one step at a live length and compare it with the reference."""
        ...

    def time(self, length: int) -> Timed:
        """Time steps at a live length. Called after ``judge`` with the same length."""
        ...


@dataclass(frozen=True)
class Entry:
    """A system that is known.

    Attributes:
        package: What must be importable.
        module: Where its class is; empty where there is none.
        kind: Name of the class.
        distribution: What it is installed as, if under another name.
    """

    package: str
    module: str = ""
    kind: str = ""
    distribution: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether its package is found; nothing of it is imported."""
        return importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str | None:
        """Of what is installed; None for a checkout on the path."""
        try:
            return version(self.distribution or self.package)
        except PackageNotFoundError:
            return None

    def load(self, task: Task) -> System:
        """Make the system, its model in memory."""
        if not self.module:
            raise NotImplementedError(f"{self.package} is installed, but bench/systems/ has no adapter for it")
        system: System = getattr(import_module(self.module), self.kind)(task)
        return system


SYSTEMS = {
    "monograph": Entry("monograph", "bench.systems.monograph_engine", "MonographEngine"),
    "transformers eager": Entry("transformers", "bench.systems.huggingface", "Eager"),
    "transformers static": Entry("transformers", "bench.systems.huggingface", "Static"),
    "llama.cpp": Entry("llama_cpp", "bench.systems.llama_cpp_python", "LlamaCpp", "llama-cpp-python"),
    "vllm": Entry("vllm", "bench.systems.generating", "Vllm"),
    "sglang": Entry("sglang", "bench.systems.generating", "Sglang"),
    "gpt-fast": Entry("gpt_fast", distribution="gpt-fast"),
}
OURS = "monograph"
