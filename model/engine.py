"""A loaded model: one arena, one program, one answer at a time."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch

from monograph.arena import Arena, Layout
from monograph.errors import ConfigError, EngineError, MonographError, PromptError
from monograph.model.chat import Chat, ChatState
from monograph.model.checkpoint import Source, check_complete
from monograph.model.config import ModelConfig
from monograph.model.decoder import Decoder
from monograph.model.fingerprint import Fingerprint, machine_fingerprint, model_fingerprint
from monograph.model.generate import Answer, Completion, Stats, check_max_new_tokens
from monograph.model.generation_config import GenerationDefaults, merged_eos_token_ids
from monograph.model.layout import MAX_STOP_IDS, Capacity
from monograph.model.load_stats import LoadStats
from monograph.model.open import OpenModel, open_model
from monograph.model.plan import Plan, choose_device, choose_dtype, make_plan
from monograph.model.prepare import Prepared, starting
from monograph.model.sampling import Sampling, check_sampling
from monograph.model.session import read_session, session_path, write_session
from monograph.model.stream import Stream, collect
from monograph.model.text_stream import TextStream, checked_stop
from monograph.model.tiles import ChosenTiles, Tune, check_tune, choose_tiles, current_tiles
from monograph.model.tokenizer import Tokenizer
from monograph.model.turn import OnFull
from monograph.model.upload import Progress
from monograph.model.weights import load_weights

if TYPE_CHECKING:
    from monograph.model.tune import Report, Tuned


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
    tune: Tune,
    tokenizer: Tokenizer | None,
    started: float,
) -> Engine:
    """Load a model: what is left of ``monograph.load`` once PyTorch is imported.

    Args:
        model: As for ``monograph.load``, like those that follow, up to ``tune``.
        revision: See there.
        device: See there.
        dtype: See there.
        max_seq_len: See there.
        token: See there.
        local_files_only: See there.
        progress: See there.
        debug: See there.
        tune: See there.
        tokenizer: The model's, if it has been read already.
        started: When the load began, by ``time.perf_counter``.

    Returns:
        The engine.
    """
    times = [started, time.perf_counter()]
    check_tune(tune)
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
        return Engine(opened, tokenizer, source, plan, times, progress, debug, tune)


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
        tune: Tune = "auto",
    ) -> None:
        self.config: ModelConfig = opened.config
        self.tokenizer = tokenizer
        self.defaults: GenerationDefaults = opened.defaults
        self.capacity: Capacity = plan.capacity
        self.layout: Layout = plan.layout
        self.device = plan.device

        def fill(arena: Arena) -> None:
            load_weights(source, opened.config, arena, progress)

        tiles = choose_tiles(opened.config, plan.capacity.dtype, plan.device, kept=tune not in ("off", False))
        self._decoder = Decoder(opened.config, plan.capacity, plan.layout, plan.device, fill, debug, tiles.tiles)
        self.load_stats = _load_stats(times, self._decoder, tiles)
        self.arena: Arena = self._decoder.arena
        self._busy = threading.Lock()
        self._closed = False
        if tune is True and tiles.source != "kept":
            try:
                self.tune()
            except BaseException:
                self.close()
                raise

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
        answered: int = 0,
    ) -> Stream:
        """Answer a prompt piece by piece.

        Args:
            prompt: Text, encoded as it stands with the tokenizer's special tokens (for a chat use ``chat``), or ids.
            max_new_tokens: The most tokens of the answer; None for the model author's value, or as many as fit.
            sampling: Settings; what they leave open the model's generation_config.json decides.
            stop: Strings that end the answer; neither they nor anything after them is in its text.
            reuse: Keep the KV rows of the longest prefix that the cache holds already. Faster; rows written by an
                earlier answer can differ in their last bits from those of a cold run.
            answered: How many of the prompt's last ids are the beginning of this answer, which goes on: penalties and
                stop strings take them for such, and the final text begins with theirs. With ``reuse``, right after an
                answer that was cut and with its settings (the seed included), the bits are those of one that was not.

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
        check_sampling(sampling)
        settings = (sampling or Sampling()).resolve(self.defaults.sampling())
        settings.check_vocabulary(self.config.vocab_size)
        if isinstance(answered, bool) or not isinstance(answered, int) or not 0 <= answered < len(ids):
            raise ConfigError(f"answered: expected an integer from 0 to {len(ids) - 1}, got {answered!r}")
        text = TextStream(self.tokenizer, [*checked_stop(stop), *self.defaults.stop_strings])
        text.push(ids[len(ids) - answered :])
        if text.stopped:
            raise PromptError(f"answered: that answer has ended, with the stop string {text.stop_string!r}")
        answer = self._decoder.answer(
            ids,
            reuse=reuse,
            position_limit=self._position_limit(len(ids), max_new_tokens),
            stop_ids=self._stop_ids(),
            sampling=settings,
            answered=answered,
        )
        return Stream(answer, text, self._enter, self._check_open, self._leave)

    def chat(self, system: str | None = None, *, on_full: OnFull = "length") -> Chat:
        """Start a conversation.

        Args:
            system: Content of a system message; None leaves it to the template.
            on_full: What a conversation that fills the arena does: "length" ends, "trim" drops its oldest turns.
        """
        self._check_open()
        return Chat(self, system, on_full=on_full)

    def load_chat(self, path: str | Path) -> Chat:
        """Go on with a conversation that ``chat.save`` wrote: its KV rows go where they were, and are not read again.

        Args:
            path: The file.

        Raises:
            CheckpointError: It is damaged, or not such a file.
            ConfigError: It was written with another model; says what differs. Or ``path`` is none.
            CapacityError: Its rows do not fit in ``max_seq_len``.
            EngineError: Closed, or busy with an answer.
        """
        file = session_path(path)
        with self._held():
            return read_session(file, self, self._decoder, self.fingerprint, self._machine())

    def save_chat(self, state: ChatState, path: str | Path) -> None:
        """What ``chat.save`` does."""
        file = session_path(path)
        with self._held():
            write_session(file, state, self._decoder, self.fingerprint, self._machine())

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What makes another engine the same model: configuration, dtype, digests of weights and vocabulary.

        Reads every weight the first time: half a second for 1 GB, a few seconds for 16 GB on a GPU.
        """
        return model_fingerprint(self.config, self.capacity, self.arena, self.tokenizer)

    def _machine(self) -> Fingerprint:
        tiles = current_tiles(self._decoder.program) if self.device.type == "cuda" else {}
        return machine_fingerprint(self.capacity, self.device, tiles)

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
        checked = self._checked_forced(ids, through)
        with self._held():
            return self._decoder.logits(checked, through)

    def logits_pieces(
        self, ids: Sequence[int], *, through: Literal["prefill", "decode"] = "prefill"
    ) -> Iterator[torch.Tensor]:
        """Teacher-forced logits a piece at a time, where all rows at once are too many: 67 GB for 131,072 of Llama 3.

        Args:
            ids: As ``logits``.
            through: As ``logits``.

        Returns:
            An iterator of [rows, vocab_size] float32 on the CPU, at most 64 rows each, in order. From the first piece
            to the last, or until it is closed, the engine is busy.

        Raises:
            PromptError: As ``stream``.
            EngineError: Closed; or, at the first piece, busy.
        """
        checked = self._checked_forced(ids, through)

        def pieces() -> Iterator[torch.Tensor]:
            with self._held(), closing(self._decoder.logits_pieces(checked, through)) as made:
                for piece in made:
                    yield piece
                    self._check_open()

        return pieces()

    def measure(self, ids: Sequence[int], new_tokens: int) -> Stats:
        """Time a greedy answer that ends at its length and nowhere else, not at a stop token either.

        Args:
            ids: The prompt.
            new_tokens: Tokens of the answer, at least 2.

        Returns:
            What it took.

        Raises:
            ConfigError: Too few tokens, or more than there is room for.
            PromptError: As ``stream``.
            EngineError: Closed or busy.
        """
        self._check_open()
        checked = self._checked_ids(ids)
        room = self.capacity.max_seq_len - len(checked)
        if not 2 <= new_tokens <= room:
            raise ConfigError(
                f"new_tokens: expected 2 to {room:,} after {len(checked):,} of prompt, got {new_tokens!r}"
            )
        with self._held():
            answer = self._decoder.answer(
                checked,
                reuse=False,
                position_limit=len(checked) + new_tokens,
                stop_ids=(),
                sampling=Sampling(temperature=0.0, seed=0).resolve({}),
            )
            self._decoder.remember(())
            for _ in answer.tokens():
                pass
            self._decoder.remember(answer.cached_ids())
            return answer.stats()

    def tune(self, seconds: float = 30.0, report: Report | None = None) -> Tuned | None:
        """Look for faster tiles of the decode kernels on this GPU, use them, and keep them for later loads.

        Nothing of an earlier answer is left in the KV cache. ``load_stats`` says what came of it.

        Args:
            seconds: Budget, compiling and all.
            report: Called as it goes on.

        Returns:
            What was found; None on a CPU, where there is nothing to tune.

        Raises:
            ConfigError: ``seconds`` is too few, the arena too short to time anything, or the outcome cannot be kept.
            CapacityError: There is no memory for the check of the logits.
            EngineError: Closed or busy.
        """
        self._enter()
        try:
            if self.device.type != "cuda":
                return None
            from monograph.model.tune_step import tune_and_keep

            found, tiles = tune_and_keep(self._decoder, seconds, report)
            self.load_stats = replace(
                self.load_stats,
                tune_s=found.seconds,
                total_s=self.load_stats.total_s + found.seconds,
                tiles=tiles.sources(),
                tiles_from=tiles.where,
            )
            return found
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

    @contextmanager
    def _held(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        except Exception as error:
            if self._closed and not isinstance(error, MonographError):  # by another thread, in the middle of the work
                raise EngineError("this engine was closed meanwhile; load the model again") from error
            raise
        finally:
            self._busy.release()

    def _leave(self, answer: Answer, trusted: bool) -> None:
        if not self._closed:
            self._decoder.remember(answer.cached_ids() if trusted else ())
        self._busy.release()

    def _checked_forced(self, ids: Sequence[int], through: str) -> list[int]:
        if through not in ("prefill", "decode"):
            raise ConfigError(f"through: expected 'prefill' or 'decode', got {through!r}")
        self._check_open()
        return self._checked_ids(ids, spare=0)

    def _checked_ids(self, ids: Sequence[int], spare: int = 1) -> list[int]:
        if isinstance(ids, bytes | bytearray) or not isinstance(ids, Iterable):  # bytes would pass for ids
            raise PromptError(f"prompt: expected text or token ids, got {type(ids).__name__}")
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
                f"{self.config.longest_seq_len:,})"
            )
        return checked

    def _position_limit(self, prompt_tokens: int, max_new_tokens: int | None) -> int:
        check_max_new_tokens(max_new_tokens)
        if max_new_tokens is None:
            max_new_tokens = self.defaults.max_new_tokens
        if max_new_tokens is None:
            return self.capacity.max_seq_len
        return min(prompt_tokens + max_new_tokens, self.capacity.max_seq_len)

    def _stop_ids(self) -> tuple[int, ...]:
        stop_ids = merged_eos_token_ids(self.config, self.defaults) or self.tokenizer.eos_token_ids
        stop_ids = tuple(i for i in stop_ids if i < self.config.vocab_size)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ConfigError(f"eos_token_id: expected at most {MAX_STOP_IDS} ids, got {len(stop_ids)}")
        return stop_ids


def _load_stats(times: Sequence[float], decoder: Decoder, tiles: ChosenTiles) -> LoadStats:
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
        tiles=tiles.sources() if decoder.arena.device.type == "cuda" else {},
        tiles_from=tiles.where,
    )
