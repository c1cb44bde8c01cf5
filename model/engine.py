"""A loaded model: one arena, one program, one answer at a time."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from types import TracebackType
from typing import Literal

import torch

from monograph.arena import Arena, Layout
from monograph.errors import ConfigError, EngineError, PromptError
from monograph.model.chat import Chat
from monograph.model.checkpoint import Source, check_complete
from monograph.model.config import ModelConfig
from monograph.model.decoder import Decoder
from monograph.model.generate import Answer, Completion
from monograph.model.generation_config import GenerationDefaults, merged_eos_token_ids
from monograph.model.layout import MAX_STOP_IDS, Capacity
from monograph.model.load_stats import LoadStats
from monograph.model.open import OpenModel, open_model
from monograph.model.plan import Plan, choose_device, choose_dtype, make_plan
from monograph.model.prepare import Prepared, starting
from monograph.model.sampling import Sampling
from monograph.model.stream import Stream, collect
from monograph.model.text_stream import TextStream
from monograph.model.tokenizer import Tokenizer
from monograph.model.upload import Progress
from monograph.model.weights import load_weights


def load_engine(
    model: str,
    *,
    revision: str | None,
    device: str | torch.device,
    dtype: str | torch.dtype,
    max_seq_len: int | None,
    token: str | None,
    local_files_only: bool,
    progress: Progress | None,
    debug: bool,
    tokenizer: Tokenizer | None,
    started: float,
) -> Engine:
    """Load a model: what is left of ``monograph.load`` once PyTorch is imported.

    Args:
        model: As for ``monograph.load``, like those that follow, up to ``debug``.
        revision: See there.
        device: See there.
        dtype: See there.
        max_seq_len: See there.
        token: See there.
        local_files_only: See there.
        progress: See there.
        debug: See there.
        tokenizer: The model's, if it has been read already.
        started: When the load began, by ``time.perf_counter``.

    Returns:
        The engine.
    """
    times = [started, time.perf_counter()]
    where = choose_device(device)
    with ExitStack() as stack:
        with starting(where):
            opened = open_model(model, revision=revision, token=token, local_files_only=local_files_only)
            plan = None
            if not opened.is_local and (opened.config.dtype is not None or dtype != "auto"):
                # Refuse what does not fit before weights are fetched.
                plan = make_plan(opened.config, where, choose_dtype(dtype, opened.config, where), max_seq_len)
            source = stack.enter_context(closing(opened.source()))
            check_complete(source, opened.config)  # before anything is allocated
            times.append(time.perf_counter())
            tokenizer = opened.tokenizer() if tokenizer is None else tokenizer
            times.append(time.perf_counter())
        if plan is None:
            plan = make_plan(opened.config, where, choose_dtype(dtype, opened.config, where, source), max_seq_len)
        times.append(time.perf_counter())
        return Engine(opened, tokenizer, source, plan, times, progress, debug)


class Engine:
    """A model in its arena. Made by ``monograph.load``.

    One answer runs at a time; starting a second while one is unfinished raises EngineError.

    Attributes:
        config: The model's configuration.
        tokenizer: Text to ids and back, chat template.
        layout: The memory map.
        arena: The memory itself; read what you like, and write only what you understand.
        capacity: What the arena was planned for.
        defaults: What the model's generation_config.json says.
        device: Where the arena is.
        load_stats: What loading took.
    """

    def __init__(
        self,
        opened: OpenModel,
        tokenizer: Tokenizer,
        source: Source,
        plan: Plan,
        times: Sequence[float],
        progress: Progress | None = None,
        debug: bool = False,
    ) -> None:
        self.config: ModelConfig = opened.config
        self.tokenizer = tokenizer
        self.defaults: GenerationDefaults = opened.defaults
        self.capacity: Capacity = plan.capacity
        self.layout: Layout = plan.layout
        self.device = plan.device

        def fill(arena: Arena) -> None:
            load_weights(source, opened.config, arena, progress)

        self._decoder = Decoder(opened.config, plan.capacity, plan.layout, plan.device, fill, debug)
        self.load_stats = _load_stats(times, self._decoder)
        self.arena: Arena = self._decoder.arena
        self._busy = threading.Lock()
        self._closed = False

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int | None = None,
        *,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        reuse: bool = False,
    ) -> Completion:
        """Answer a prompt. Arguments and errors as ``stream``.

        Returns:
            The whole answer.
        """
        return collect(self.stream(prompt, max_new_tokens, sampling=sampling, stop=stop, reuse=reuse))

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int | None = None,
        *,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        reuse: bool = False,
    ) -> Stream:
        """Answer a prompt piece by piece.

        Args:
            prompt: Text, encoded as it stands with the tokenizer's special tokens (for a chat use ``chat``), or ids.
            max_new_tokens: The most tokens of the answer; None for the model author's value, or as many as fit.
            sampling: Settings; what they leave open the model's generation_config.json decides.
            stop: Strings that end the answer; neither they nor anything after them is in its text.
            reuse: Keep the KV rows of the longest prefix that the cache holds already. Faster; rows written by an
                earlier answer can differ in their last bits from those of a cold run.

        Returns:
            An iterator of chunks; closing it cancels the answer.

        Raises:
            PromptError: Empty, too long for the arena, or with an id that the model does not have.
            ConfigError: A setting out of range.
            EngineError: Closed; or, at the first chunk, busy with another answer.
            NumericsError: While iterating: the model's logits are not finite.
        """
        self._check_open()
        ids = self._checked_ids(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        settings = (sampling or Sampling()).resolve(self.defaults.sampling())
        settings.check_vocabulary(self.config.vocab_size)
        answer = self._decoder.answer(
            ids,
            reuse=reuse,
            position_limit=self._position_limit(len(ids), max_new_tokens),
            stop_ids=self._stop_ids(),
            sampling=settings,
        )
        text = TextStream(self.tokenizer, [*stop, *self.defaults.stop_strings])
        return Stream(answer, text, self._enter, self._check_open, self._leave)

    def chat(self, system: str | None = None) -> Chat:
        """Start a conversation.

        Args:
            system: Content of a system message; None leaves it to the template.
        """
        self._check_open()
        return Chat(self, system)

    def logits(self, ids: Sequence[int], *, through: Literal["prefill", "decode"] = "prefill") -> torch.Tensor:
        """Teacher-forced logits.

        Args:
            ids: A sequence of at least one token, at most ``max_seq_len``.
            through: Which pass makes them: chunks, or one token at a time.

        Returns:
            [len(ids), vocab_size] float32 on the CPU; row i belongs to the token after ``ids[i]``.

        Raises:
            PromptError: As ``stream``.
            EngineError: Closed or busy.
        """
        if through not in ("prefill", "decode"):
            raise ConfigError(f"through: expected 'prefill' or 'decode', got {through!r}")
        self._check_open()
        checked = self._checked_ids(ids, spare=0)
        self._enter()
        try:
            return self._decoder.logits(checked, through)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Free the engine's memory. Closing twice does no harm; any other use afterwards raises EngineError."""
        if not self._closed:
            self._closed = True
            self._decoder.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        dtype = str(self.capacity.dtype).removeprefix("torch.")
        state = "closed" if self._closed else f"on {self.device}"
        return f"Engine({self.config.model_type}, {dtype}, max_seq_len {self.capacity.max_seq_len:,}, {state})"

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this engine was closed; load the model again")

    def _enter(self) -> None:
        self._check_open()
        if not self._busy.acquire(blocking=False):
            raise EngineError("this engine is busy with another answer; finish that or close its stream first")

    def _leave(self, answer: Answer, trusted: bool) -> None:
        if not self._closed:
            self._decoder.remember(answer.cached_ids() if trusted else ())
        self._busy.release()

    def _checked_ids(self, ids: Sequence[int], spare: int = 1) -> list[int]:
        vocab_size = self.config.vocab_size
        checked: list[int] = []
        for i, token_id in enumerate(ids):
            try:
                number = -1 if isinstance(token_id, bool) else operator.index(token_id)
            except TypeError:
                number = -1
            if not 0 <= number < vocab_size:
                raise PromptError(f"prompt: expected token ids 0..{vocab_size - 1}, got {token_id!r} at position {i}")
            checked.append(number)
        if not checked:
            raise PromptError("prompt: expected at least one token, got none; give some text, or a BOS token")
        if len(checked) + spare > self.capacity.max_seq_len:
            raise PromptError(
                f"prompt of {len(checked):,} tokens leaves no room in max_seq_len {self.capacity.max_seq_len:,}; "
                f"shorten it, or load with max_seq_len={len(checked) + 256} or more (the model's limit is "
                f"{self.config.max_position_embeddings:,})"
            )
        return checked

    def _position_limit(self, prompt_tokens: int, max_new_tokens: int | None) -> int:
        if max_new_tokens is None:
            max_new_tokens = self.defaults.max_new_tokens
        if max_new_tokens is None:
            return self.capacity.max_seq_len
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: expected an integer of at least 1, got {max_new_tokens!r}")
        return min(prompt_tokens + max_new_tokens, self.capacity.max_seq_len)

    def _stop_ids(self) -> tuple[int, ...]:
        stop_ids = merged_eos_token_ids(self.config, self.defaults) or self.tokenizer.eos_token_ids
        stop_ids = tuple(i for i in stop_ids if i < self.config.vocab_size)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ConfigError(f"eos_token_id: expected at most {MAX_STOP_IDS} ids, got {len(stop_ids)}")
        return stop_ids


def _load_stats(times: Sequence[float], decoder: Decoder) -> LoadStats:
    """Sum up a load that began at ``times[0]``, with imports, files, tokenizer and plan done at those that follow."""
    capture_s = getattr(decoder.runner, "capture_ms", 0.0) / 1e3
    prepared: list[Prepared] = getattr(decoder.runner, "prepared", [])
    import_s, open_s, tokenizer_s, plan_s = (after - before for before, after in pairwise(times))
    return LoadStats(
        import_s=import_s,
        open_s=open_s,
        tokenizer_s=tokenizer_s,
        plan_s=plan_s,
        arena_s=decoder.arena_s,
        weights_s=decoder.weights_s,
        kernels_s=decoder.runner_s - capture_s,
        capture_s=capture_s,
        total_s=time.perf_counter() - times[0],
        weights_nbytes=decoder.arena.layout.nbytes_by_lifetime()["weight"],
        kernels=len(prepared),
        compiled=sum(kernel.compiled for kernel in prepared),
    )
