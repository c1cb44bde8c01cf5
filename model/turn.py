"""One answer of a conversation: its prompt, made to fit, and its pieces of text, also across a full arena."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from monograph.errors import PromptError
from monograph.model.generate import Completion, FinishReason, check_max_new_tokens
from monograph.model.sampling import Sampling
from monograph.model.transcript import Transcript

if TYPE_CHECKING:
    from monograph.model.engine import Engine
    from monograph.model.stream import Stream

logger = logging.getLogger("monograph")

Message = dict[str, Any]
OnFull = Literal["length", "trim"]
# Room that a conversation must leave for an answer before turns are dropped, and how much of the arena it may take once
# they are. Were that as much as just fits, every further turn would drop one more and read all the others anew.
ROOM = 1 / 4
TRIM_TO = 1 / 2


@dataclass(frozen=True)
class Cut:
    """The last answer of a conversation, as what is needed to go on with it.

    Attributes:
        messages: The conversation with it.
        prompt: What it answered.
        answer_ids: Its tokens; the newest of them the model has not read.
        sampling: The settings in force, the seed included.
        finish_reason: Why it ended.
    """

    messages: list[Message]
    prompt: Transcript
    answer_ids: list[int]
    sampling: Sampling
    finish_reason: FinishReason

    @property
    def ids(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt.ids, *self.answer_ids]

    @property
    def text(self) -> str:
        """The answer."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True)
class Trim:
    """Turns that were dropped because the arena was full.

    Attributes:
        turns: How many.
        tokens_before: Tokens of the conversation with them.
        tokens_after: And without.
    """

    turns: int
    tokens_before: int
    tokens_after: int


class Turn:
    """One answer, in as many streams as it takes: one, and one more each time that the arena was full.

    Args:
        engine: Runs it.
        transcript: How the conversation has been spelled so far.
        messages: The conversation, up to the user message that is answered.
        on_full: "trim" drops the oldest turns where the arena would be full.
        max_new_tokens: The most tokens; None for the model author's value, or as many as fit.
        sampling: Settings.
        stop: Strings that end the answer.
        resumed: An answer to ``messages`` that goes on.

    Attributes:
        messages: Those of the conversation that are left.
        prompt: Their spelling.
        trims: What was dropped.
        began: Whether a token has come.

    Raises:
        PromptError: It does not fit, or the template refuses it.
    """

    def __init__(
        self,
        engine: Engine,
        transcript: Transcript,
        messages: list[Message],
        *,
        on_full: OnFull,
        max_new_tokens: int | None,
        sampling: Sampling | None,
        stop: Sequence[str],
        resumed: Cut | None = None,
    ) -> None:
        self._engine, self._transcript, self._trims_allowed = engine, transcript, on_full == "trim"
        self._max_new_tokens, self._sampling, self._stop = max_new_tokens, sampling, stop
        self.messages = messages
        self.prompt = self._spell(messages) if resumed is None else resumed.prompt
        self.trims: list[Trim] = []
        self.began = False
        self._answer_ids = [] if resumed is None else list(resumed.answer_ids)
        self._shown = "" if resumed is None else resumed.text  # of the answer
        check_max_new_tokens(max_new_tokens)
        if self._trims_allowed:
            limit = engine.capacity.max_seq_len
            room = min(limit if max_new_tokens is None else max_new_tokens, int(limit * ROOM))
            if self._num_tokens() + max(1, room) > limit:
                self._trim()
        self._check_room()
        self._streams = [self._stream(max_new_tokens)]

    def pieces(self) -> Iterator[str]:
        """Run the answer.

        Yields:
            Its text, less what an answer that goes on has said already.
        """
        for trim in self.trims:
            self._announce(trim)
        while True:
            yield from self._read(self._streams[-1])
            made = self._streams[-1].completion
            self._answer_ids += made.token_ids
            if made.finish_reason != "length" or not self._trims_allowed or not self._is_full():
                return
            budget = self._budget()
            if budget == 0 or not self._trim():
                return
            self._announce(self.trims[-1])
            if self._is_full():
                return  # by this turn alone
            self._sampling = made.stats.sampling
            self._streams.append(self._stream(budget))

    def completion(self, resumed: Cut | None = None) -> Completion:
        """The answer so far, what it began with (``resumed``) in its tokens and text; the stats are of this run."""
        made = [stream.completion for stream in self._streams]
        told = [completion for completion in made if completion.token_ids] or made[:1]
        first, later = made[0].stats, [completion.stats for completion in made[1:]]
        ids = [] if resumed is None else list(resumed.answer_ids)
        return Completion(
            token_ids=ids + [token_id for completion in made for token_id in completion.token_ids],
            text=told[-1].text,
            finish_reason=made[-1].finish_reason,
            stats=replace(
                first,
                completion_tokens=sum(completion.stats.completion_tokens for completion in made),
                decode_ms=first.decode_ms + sum(max(0.0, stats.first_token_ms) + stats.decode_ms for stats in later),
            ),
        )

    def _read(self, stream: Stream) -> Iterator[str]:
        # Of what comes, text that was shown before. It may come otherwise: half a character was shown as a replacement
        # character, or several, and is whole now.
        unsaid = self._shown[len(stream.completion.text) :]
        with stream:
            for chunk in stream:
                self.began = True
                said = _num_shared(unsaid, chunk.text)
                text = chunk.text[said:]
                unsaid = "" if text else unsaid[said:]
                if text:
                    self._shown += text
                    yield text

    def _stream(self, max_new_tokens: int | None) -> Stream:
        return self._engine.stream(
            [*self.prompt.ids, *self._answer_ids],
            max_new_tokens=max_new_tokens,
            sampling=self._sampling,
            stop=self._stop,
            reuse=True,
            answered=len(self._answer_ids),
        )

    def _budget(self) -> int | None:
        """Tokens that the answer may still have; None for no limit but the arena's."""
        most = self._engine.defaults.max_new_tokens if self._max_new_tokens is None else self._max_new_tokens
        return None if most is None else max(0, most - sum(len(s.completion.token_ids) for s in self._streams))

    def _num_tokens(self) -> int:
        return len(self.prompt.ids) + len(self._answer_ids)

    def _is_full(self) -> bool:
        return self._num_tokens() >= self._engine.capacity.max_seq_len

    def _check_room(self) -> None:
        tokens, limit = self._num_tokens(), self._engine.capacity.max_seq_len
        if self._is_full():
            way_out = "" if self._trims_allowed else ", or chat with on_full='trim', which drops the oldest turns"
            raise PromptError(
                f"the conversation has {tokens:,} tokens and leaves no room in max_seq_len {limit:,}; shorten it, or "
                f"load with max_seq_len={min(tokens + 256, self._engine.config.max_position_embeddings)} or more (the "
                f"model's limit is {self._engine.config.max_position_embeddings:,}){way_out}"
            )

    def _trim(self) -> bool:
        """Drop oldest turns until the rest takes no more than its share. Whether there was one to drop."""
        starts = turn_starts(self.messages)
        if len(starts) < 2:
            return False

        def without(turns: int) -> list[Message]:
            return [*self.messages[: starts[0]], *self.messages[starts[turns] :]]

        def fits(turns: int) -> bool:
            tokens = len(self._spell(without(turns)).ids) + len(self._answer_ids)
            return tokens <= self._engine.capacity.max_seq_len * TRIM_TO

        turns = min(1 + bisect_left(range(1, len(starts)), True, key=fits), len(starts) - 1)
        before, self.messages = self._num_tokens(), without(turns)
        self.prompt = self._spell(self.messages)
        self.trims.append(Trim(turns, before, self._num_tokens()))
        return True

    def _announce(self, trim: Trim) -> None:
        logger.warning(
            "the conversation (%s tokens) fills max_seq_len %s: dropped its oldest %s; %s tokens left, read anew",
            f"{trim.tokens_before:,}",
            f"{self._engine.capacity.max_seq_len:,}",
            "turn" if trim.turns == 1 else f"{trim.turns} turns",
            f"{trim.tokens_after:,}",
        )

    def _spell(self, messages: list[Message]) -> Transcript:
        tokenizer = self._engine.tokenizer
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._transcript.spell(text, tokenizer)


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """Where the turns of a conversation begin: at its user messages."""
    # A message that is none is for the template to refuse, which names it.
    return [i for i, message in enumerate(messages) if isinstance(message, Mapping) and message.get("role") == "user"]


def _num_shared(left: str, right: str) -> int:
    """How many characters two texts begin with alike."""
    return next(
        (i for i, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), min(len(left), len(right))
    )
