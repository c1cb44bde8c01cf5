"""transformers as it is compared: eager with a growing cache, and compiled with a static one.

Both are given the rows that monograph's cache has at the length, and then decode greedily by a loop that does nothing
but call the model and take the best token: less than ``generate`` does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from bench.systems.system import BATCH, Judged, Task, Timed


class _Streamer:
    """Passes the tokens of ``generate`` on."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token, self._prompt_seen = on_token, False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, and then with every token."""
        if self._prompt_seen:
            self._on_token(int(value))
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""


class _Huggingface:
    """What both ways share: the model, the judgement, the clock."""

    def __init__(self, task: Task) -> None:
        self._task, self._device = task, torch.device(task.device)
        path = Path(task.model)
        where: dict[str, Any] = {}
        if path.suffix == ".gguf":
            where["gguf_file"] = path.name
        if self._device.type == "cuda" and importlib.util.find_spec("accelerate") is not None:
            where["device_map"] = {"": task.device}  # straight to the GPU
        source = path.parent if path.suffix == ".gguf" else task.model
        dtype = getattr(torch, task.dtype)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **where)
        self._model: Any = model.to(self._device).eval()  # type: ignore[arg-type]
        config = self._model.config
        self._dtype, self._vocab_size = dtype, int(config.vocab_size)
        self._layers, self._kv_heads = int(config.num_hidden_layers), int(config.num_key_value_heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._cache: Any = None

    def answer(self, ids: list[int], count: int, on_token: Callable[[int], None]) -> None:
        """Answer greedily by ``generate``."""
        prompt = torch.tensor([ids], device=self._device)
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            streamer=_Streamer(on_token),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **self._cache_option(),
        )

    @torch.no_grad()
    def judge(self, length: int) -> Judged:
        """Fill the cache, run one step and compare its logits with the reference."""
        from bench.judge import relative_error

        facts = self._facts(length)
        self._prepare(length)
        logits = self._call(self._token(length), self._position(length - 1))[0, -1].float().cpu()
        self._check_rows(length)
        facts["graphs"] = self._graphs()
        want, bounds = load_reference(self._task, length)
        facts |= {"error": relative_error(logits, want), "plain_error": bounds.plain_error}
        facts["argmax_agrees"] = int(logits.argmax()) == int(want.argmax())
        return Judged("; ".join(bounds.faults(logits, want)) or "ok", facts)

    @torch.no_grad()
    def time(self, length: int) -> Timed:
        """Time batches of tokens in a row; the cache is put back between them, outside of what is timed."""
        from bench.common import Clock

        start = self._start(length)
        self._prepare(start)
        clock, token, position = Clock(self._device), self._token(start), self._position(start - 1)
        for _ in range(2 + -(-self._task.replays // BATCH)):  # two warm up
            best, place = token, position
            with clock.span():
                for _ in range(BATCH):
                    best = self._call(best, place)[:, -1].argmax(-1, keepdim=True)
                    place = place + 1
            self._check_rows(start - 1 + BATCH)
            self._put_back(start - 1)
        return Timed([span / BATCH for span in clock.times_ms()[2:]], start + (BATCH - 1) / 2)

    def _token(self, length: int) -> torch.Tensor:
        return torch.tensor([[self._task.token(length, self._vocab_size)]], device=self._device)

    def _position(self, position: int) -> torch.Tensor:
        return torch.tensor([[position]], device=self._device)

    def _rows(self, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        from bench.kv_rows import kv_rows

        return kv_rows(self._layers, self._kv_heads, count, self._head_dim, self._dtype, self._device)

    def _check_rows(self, count: int) -> None:
        found = int(self._cache.get_seq_length())
        if found != count:
            raise RuntimeError(f"the cache holds {found:,} rows, expected {count:,}")

    # What the two ways do each in their own manner.

    def _cache_option(self) -> dict[str, Any]:
        return {}

    def _facts(self, length: int) -> dict[str, Any]:
        raise NotImplementedError

    def _graphs(self) -> int:
        """CUDA graphs that a step is."""
        return 0

    def _start(self, length: int) -> int:
        """Live length of the first token of a batch."""
        return length

    def _prepare(self, length: int) -> None:
        """Have the cache hold the rows before the token at ``length``."""
        raise NotImplementedError

    def _put_back(self, rows: int) -> None:
        """Have the cache hold its first ``rows`` rows again."""
        raise NotImplementedError

    def _call(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """One step: logits [1, 1, vocab_size]."""
        raise NotImplementedError


class Eager(_Huggingface):
    """As it comes: kernels launched one by one, a cache that grows by concatenation."""

    def _facts(self, length: int) -> dict[str, Any]:
        return {"max_seq_len": None}

    def _prepare(self, length: int) -> None:
        self._cache = DynamicCache(config=self._model.config)
        if length > 1:
            for i, (keys, values) in enumerate(self._rows(length - 1)):
                self._cache.update(keys[None], values[None], i)

    def _put_back(self, rows: int) -> None:
        surplus = int(self._cache.get_seq_length()) - rows
        self._cache.crop(-surplus)

    def _call(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        out = self._model(input_ids=token, position_ids=position, past_key_values=self._cache, use_cache=True)
        logits: torch.Tensor = out.logits
        return logits


class Static(_Huggingface):
    """torch.compile in the mode reduce-overhead over a static cache: what ``generate`` makes of one, a graph for each
    capacity."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._capacity = 0
        mode = "reduce-overhead" if task.compile_backend == "inductor" else None
        # Sizes are compiled in, which is faster than leaving them open.
        self._compiled: Callable[..., Any] = torch.compile(
            self._model.__call__, backend=task.compile_backend, dynamic=False, mode=mode
        )

    def _cache_option(self) -> dict[str, Any]:
        return {"cache_implementation": "static"}

    def _facts(self, length: int) -> dict[str, Any]:
        return {"max_seq_len": self._capacity_for(length), "compile_backend": self._task.compile_backend}

    def _graphs(self) -> int:
        from torch._dynamo.utils import counters

        skipped = counters["inductor"]["cudagraph_skips"]  # by the compiler, which says why on standard error
        return 1 if self._device.type == "cuda" and not skipped else 0

    def _capacity_for(self, length: int) -> int:
        for capacity in self._task.static_max:
            if capacity >= length:
                return max(capacity, BATCH)
        if self._task.static_max:
            raise ValueError(f"length {length:,} does not fit a static cache of {self._task.static_max[-1]:,}")
        return max(1024, 1 << (length - 1).bit_length())

    def _start(self, length: int) -> int:
        return min(length, self._capacity_for(length) - BATCH + 1)

    def _prepare(self, length: int) -> None:
        capacity = self._capacity_for(length)
        if capacity != self._capacity:
            self._cache = None  # freed before the next is made
            self._cache = StaticCache(config=self._model.config, max_cache_len=capacity)
            # Made here and not while compiling, so that its addresses are known to be permanent.
            self._cache.early_initialization(1, self._kv_heads, self._head_dim, self._dtype, self._device)
            self._capacity = capacity
        for layer, (keys, values) in zip(self._cache.layers, self._rows(length - 1), strict=True):
            layer.keys[0, :, : length - 1].copy_(keys)
            layer.values[0, :, : length - 1].copy_(values)
        self._put_back(length - 1)

    def _put_back(self, rows: int) -> None:
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(rows)

    def _call(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        # The logits of the step before are no longer wanted: their memory may be used again.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        out = self._compiled(input_ids=token, position_ids=position, past_key_values=self._cache, use_cache=True)
        logits: torch.Tensor = out.logits
        return logits


def load_reference(task: Task, length: int) -> tuple[torch.Tensor, Any]:
    """The fp32 logits of a step at a length, and the bounds around them, as bench/prepare.py left them."""
    from bench.judge import Bounds

    kept = torch.load(task.reference)["lengths"].get(length)
    if kept is None:
        raise ValueError(f"length {length:,} is longer than the model or the arena: there is no reference")
    return kept["want"], Bounds(kept["error"], kept["worst"], kept["plain_error"])
