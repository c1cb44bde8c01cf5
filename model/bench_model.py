"""Measuring a model by name, as `monograph bench` does: how fast it answers here, and whether it should be faster.

A decode step reads every weight and the live keys and values once, so its time has a floor: those bytes over the most
that the GPU can read in a second, which is measured first.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from monograph.arena import device_free_nbytes
from monograph.errors import ConfigError
from monograph.model.clock import percentile
from monograph.model.engine import Engine
from monograph.model.generate import Stats
from monograph.model.load import load
from monograph.model.plan import choose_device
from monograph.model.processor import processor_name
from monograph.model.read_ceiling import NBYTES, read_ceiling_gb_s
from monograph.model.step_nbytes import step_nbytes
from monograph.model.upload import Progress

logger = logging.getLogger("monograph")

PROMPT_TOKENS, NEW_TOKENS = 512, 128  # where they fit, and the time allows
MOST_REPEATS = 20
PROBE_PROMPT, PROBE_NEW = 16, 8
# Of the ceiling. The smaller share is that of 1B models on an H200 at their worst length, less a little.
GOOD_PERCENT = 65.0
STEADY = 1.15  # the 80th percentile over the 20th, at most
# A step whose floor is shorter waits for launches rather than for memory.
SHORT_FLOOR_MS = 0.3
LEAST_CEILING_NBYTES = 1 << 30

Judgement = Literal["ok", "slow", "unsteady", "unjudged"]


@dataclass(frozen=True)
class Benchmark:
    """What a model does here.

    Attributes:
        device: Name of the GPU or the processor.
        on_gpu: Whether it is a GPU.
        dtype: Of weights and KV cache.
        max_seq_len: Room in the arena.
        prompt_tokens: Of each prompt.
        new_tokens: Of each answer.
        repeats: Answers that were timed.
        load_s: Seconds that loading took.
        first_token_ms: From the prompt to the first token, median.
        ms: A token after the first, median over the answers.
        p20_ms: 20th percentile.
        p80_ms: 80th percentile.
        step_nbytes: Bytes that a token cannot do without reading, mean over an answer.
        ceiling_gb_s: The most that this GPU reads in a second; None on a CPU, and where it could not be measured.
    """

    device: str
    on_gpu: bool
    dtype: str
    max_seq_len: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    load_s: float
    first_token_ms: float
    ms: float
    p20_ms: float
    p80_ms: float
    step_nbytes: int
    ceiling_gb_s: float | None

    @property
    def tokens_per_s(self) -> float:
        """Decode speed."""
        return 1e3 / self.ms

    @property
    def gb_s(self) -> float:
        """What the step's bytes come to in a second."""
        return self.step_nbytes / self.ms / 1e6

    @property
    def floor_ms(self) -> float | None:
        """The shortest that a token can take on this GPU."""
        return None if self.ceiling_gb_s is None else self.step_nbytes / self.ceiling_gb_s / 1e6

    @property
    def percent_of_ceiling(self) -> float | None:
        """How near the step comes to the ceiling."""
        return None if self.ceiling_gb_s is None else 100 * self.gb_s / self.ceiling_gb_s

    @property
    def judgement(self) -> Judgement:
        """Whether the speed is what it should be."""
        if self.p80_ms > STEADY * self.p20_ms:
            return "unsteady"
        percent, floor_ms = self.percent_of_ceiling, self.floor_ms
        if percent is None or floor_ms is None:
            return "unjudged"
        if percent >= GOOD_PERCENT:
            return "ok"
        return "unjudged" if floor_ms < SHORT_FLOOR_MS else "slow"

    @property
    def verdict(self) -> str:
        """The judgement in words, with the way out."""
        if self.judgement == "unsteady":
            spread = f"a token takes from {self.p20_ms:.3f} to {self.p80_ms:.3f} ms"
            return f"unsteady: {spread}; something else uses this machine, measure again when it is quiet"
        if self.judgement == "ok":
            return f"ok: {self.percent_of_ceiling:.0f} % of what this GPU can read"
        if self.judgement == "slow":
            return (
                f"slow: {self.percent_of_ceiling:.0f} % of what this GPU can read; 'monograph tune' looks for better "
                "block sizes, 'monograph doctor' for what is missing, and nvidia-smi shows who else uses the GPU"
            )
        if self.floor_ms is not None:
            return "unjudged: so small a model waits for launches, not for memory"
        if self.on_gpu:
            return "unjudged: the read ceiling of this GPU could not be measured"
        return "unjudged: on a CPU the PyTorch references run, which are made to be right; speed is for GPUs"

    def to_json(self) -> str:
        """All figures as JSON."""
        derived = ("tokens_per_s", "gb_s", "floor_ms", "percent_of_ceiling", "judgement", "verdict")
        return json.dumps({**asdict(self), **{name: getattr(self, name) for name in derived}}, indent=2)

    def __str__(self) -> str:
        room = f"{self.dtype}, max_seq_len {self.max_seq_len:,}"
        times = "once" if self.repeats == 1 else f"{self.repeats} times"
        reads = f"{self.step_nbytes / 1e9:,.3f} GB a token, {self.gb_s:,.1f} GB/s"
        if self.ceiling_gb_s is not None:
            reads += f", {self.percent_of_ceiling:.1f} % of the {self.ceiling_gb_s:,.0f} GB/s that this GPU can read"
        lines = {
            "device": f"{self.device}, {room}, loaded in {self.load_s:.1f} s",
            "work": f"{self.prompt_tokens:,} tokens of prompt, {self.new_tokens:,} of answer, {times}",
            "decode": f"{self.tokens_per_s:,.1f} tokens/s, {self.ms:,.3f} ms a token "
            f"(20 % under {self.p20_ms:,.3f}, 80 % under {self.p80_ms:,.3f})",
            "reads": reads,
            "first token": f"{self.first_token_ms:,.1f} ms",
            "verdict": self.verdict,
        }
        return "\n".join(f"{name:<12} {text}" for name, text in lines.items())


def bench_model(
    model: str,
    *,
    revision: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    max_seq_len: int | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    seconds: float = 10.0,
    progress: Progress | None = None,
    loaded: Callable[[], None] | None = None,
) -> Benchmark:
    """Load a model and time its answers: greedy, to prompts of any tokens, for speed does not depend on which.

    Args:
        model: As for ``load``, like what follows.
        revision: Branch, tag or commit on the Hub.
        device: "auto", "cpu", "cuda" or "cuda:1".
        dtype: "auto", "bfloat16", "float16" or "float32".
        max_seq_len: Room in the arena; it does not change the speed.
        token: Hub access token.
        local_files_only: Never ask the network.
        prompt_tokens: Length of the prompts; None for 512, or fewer where they do not fit or take too long.
        new_tokens: Length of the answers; None for 128, likewise.
        seconds: How long to measure, about; at least two answers are made, and the first is not counted.
        progress: As for ``load``.
        loaded: Called once the model is loaded, before it is measured.

    Returns:
        The figures.

    Raises:
        ConfigError: Prompt and answer do not fit in the arena.
        MonographError: As ``load``.
    """
    where = choose_device(device)
    ceiling = measured_ceiling_gb_s(where) if where.type == "cuda" else None
    engine = load(
        model,
        revision=revision,
        device=where,
        dtype=dtype,
        max_seq_len=max_seq_len,
        token=token,
        local_files_only=local_files_only,
        progress=progress,
    )
    with engine:
        if loaded is not None:
            loaded()
        return bench_engine(engine, prompt_tokens, new_tokens, seconds, ceiling)


def bench_engine(
    engine: Engine, prompt_tokens: int | None, new_tokens: int | None, seconds: float, ceiling_gb_s: float | None
) -> Benchmark:
    """Time the answers of an engine. Arguments as ``bench_model``; the ceiling has been measured."""
    started = time.perf_counter()
    prompt, new = _lengths(engine, prompt_tokens, new_tokens, seconds)
    vocab_size, found = engine.config.vocab_size, list[Stats]()
    while len(found) < 2 or (len(found) <= MOST_REPEATS and time.perf_counter() - started < seconds):
        ids = [(7919 * (i + 1) + len(found)) % vocab_size for i in range(prompt)]
        found.append(engine.measure(ids, new))
    times = [stats.decode_ms / (new - 1) for stats in found[1:]]
    mean_seq_len = prompt + new / 2  # steps read prompt + 1 to prompt + new - 1 rows
    on_gpu = engine.device.type == "cuda"
    return Benchmark(
        device=torch.cuda.get_device_name(engine.device) if on_gpu else processor_name(),
        on_gpu=on_gpu,
        dtype=str(engine.capacity.dtype).removeprefix("torch."),
        max_seq_len=engine.capacity.max_seq_len,
        prompt_tokens=prompt,
        new_tokens=new,
        repeats=len(times),
        load_s=engine.load_stats.total_s,
        first_token_ms=percentile([stats.first_token_ms for stats in found[1:]], 50),
        ms=percentile(times, 50),
        p20_ms=percentile(times, 20),
        p80_ms=percentile(times, 80),
        step_nbytes=round(step_nbytes(engine.layout, engine.config, mean_seq_len)),
        ceiling_gb_s=ceiling_gb_s,
    )


def measured_ceiling_gb_s(device: torch.device) -> float | None:
    """The read ceiling of a GPU over as much memory as is free, up to the method's 8 GiB; None where that fails."""
    free = device_free_nbytes(device)
    nbytes = NBYTES if free is None else min(NBYTES, free // 2)
    if nbytes < LEAST_CEILING_NBYTES:
        return None
    try:
        return float(read_ceiling_gb_s(device, nbytes)["ceiling_gb_s"])
    except RuntimeError as error:
        logger.warning("the read ceiling of %s could not be measured: %s", device, error)
        return None


def _lengths(engine: Engine, prompt_tokens: int | None, new_tokens: int | None, seconds: float) -> tuple[int, int]:
    """Lengths of prompt and answer: what was asked for, else what fits in the arena and in a third of the time."""
    room = engine.capacity.max_seq_len
    prompt = prompt_tokens or min(PROMPT_TOKENS, room // 2)
    new = new_tokens or min(NEW_TOKENS, room - prompt)
    if new < 2 or prompt + new > room:
        raise ConfigError(
            f"prompt of {prompt:,} and answer of {new:,} tokens: expected at least 2 of answer and both within "
            f"max_seq_len {room:,}; measure fewer, or pass max_seq_len={prompt + max(new, 2)}"
        )
    if prompt_tokens is not None and new_tokens is not None:
        return prompt, new
    probe = engine.measure([1] * min(PROBE_PROMPT, prompt), max(2, min(PROBE_NEW, new)))
    each_ms = probe.decode_ms / (probe.completion_tokens - 1)
    if new_tokens is None:
        new = max(2, min(new, max(PROBE_NEW, int(seconds * 1e3 / 3 / max(each_ms, 1e-6)))))
    if prompt_tokens is None:
        affordable = int(seconds * 1e3 / 3 / max(probe.first_token_ms, 1e-6)) * probe.prompt_tokens
        prompt = min(prompt, max(PROBE_PROMPT, affordable - affordable % PROBE_PROMPT))
    return prompt, new
