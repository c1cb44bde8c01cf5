"""A conversation: messages, the template that turns them into a prompt, and the KV cache that carries over."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from monograph.errors import ConfigError, PromptError
from monograph.model.generate import Completion
from monograph.model.sampling import Sampling
from monograph.model.transcript import Transcript
from monograph.model.turn import Cut, Message, OnFull, Trim, Turn, turn_starts

if TYPE_CHECKING:
    from monograph.model.engine import Engine


@dataclass(frozen=True)
class ChatState:
    """A conversation without the engine that it runs on.

    Attributes:
        messages: The conversation.
        on_full: As ``Chat``.
        transcript: How it was spelled, as far as it stands.
        cut: Its last answer, if it ends with that.
    """

    messages: list[Message]
    on_full: OnFull
    transcript: Transcript
    cut: Cut | None

    @property
    def ids(self) -> list[int]:
        """Its tokens; those of the transcript are the first of them."""
        return self.transcript.ids if self.cut is None else self.cut.ids


class Chat:
    """A conversation with one engine. Made by ``engine.chat()``.

    Each turn renders all messages with the model's template, keeps the KV rows of the longest common prefix with what
    the cache holds, and prefills the rest; ``completion.stats`` says how many tokens each was. Going back is free: no
    graph is touched, and rows that still belong to the conversation are not read again. An answer that was cut short
    (its iterator closed, or Ctrl-C) stays in the history as far as it got; one that failed leaves the conversation as
    it was before.

    Args:
        engine: The engine; chats of one engine may take turns, each re-reads what the other has overwritten.
        system: Content of a system message, or None for the template's default.
        on_full: What happens when the arena is full: "length" ends the answer with that reason and refuses further
            turns; "trim" drops the oldest turns, reads what is left anew and goes on. System messages stay.

    Attributes:
        messages: The conversation as role/content mappings. May be edited between turns.
        completion: The last answer with its stats; None before the first.
        trims: Every time that turns were dropped. Each is logged as a warning too.

    Raises:
        ConfigError: ``on_full`` is neither.
    """

    def __init__(self, engine: Engine, system: str | None = None, *, on_full: OnFull = "length") -> None:
        if on_full not in get_args(OnFull):
            raise ConfigError(f"on_full: expected 'length' or 'trim', got {on_full!r}")
        self._engine = engine
        self._transcript = Transcript()
        self._last: Cut | None = None
        self.on_full: OnFull = on_full
        self.messages: list[Message] = []
        self.completion: Completion | None = None
        self.trims: list[Trim] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    @property
    def num_turns(self) -> int:
        """User messages in the conversation."""
        return len(turn_starts(self.messages))

    @property
    def is_full(self) -> bool:
        """Whether the last answer took the arena's last token."""
        last = self._standing()
        return last is not None and len(last.ids) >= self._engine.capacity.max_seq_len

    def send(
        self,
        content: str,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Generator[str, None, None]:
        """Add a user message and stream the answer.

        Args:
            content: The user's message.
            max_new_tokens: The most tokens of the answer; None for as many as fit.
            sampling: Settings of this answer.
            stop: Strings that end the answer.

        Returns:
            Pieces of the answer's text. The message is part of the history once the answer has begun.

        Raises:
            PromptError: The conversation does not fit, or the template refuses it; nothing was added. At the first
                piece: the conversation has changed since this call.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        return self._answer(messages, max_new_tokens, sampling, stop)

    def regenerate(
        self, *, max_new_tokens: int | None = None, sampling: Sampling | None = None, stop: Sequence[str] = ()
    ) -> Generator[str, None, None]:
        """Answer the last user message once more, in the place of the answer that it has. Arguments as ``send``.

        The same seed gives the same answer; none draws another. If it fails before its first token, the old one stays.

        Raises:
            PromptError: There is no user message yet.
        """
        return self._answer(self.messages[: self._start_of(-1) + 1], max_new_tokens, sampling, stop)

    def edit(
        self,
        turn: int,
        content: str,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Generator[str, None, None]:
        """Put another message in the place of an earlier one, forget all that followed, and stream the answer.

        Args:
            turn: Which: 1 is the first user message, -1 the last.
            content: The new message.
            max_new_tokens: As ``send``, like the arguments that follow.
            sampling: Settings of this answer.
            stop: Strings that end the answer.

        Raises:
            PromptError: There is no such turn, or as ``send``.
        """
        messages = [*self.messages[: self._start_of(turn)], {"role": "user", "content": content}]
        return self._answer(messages, max_new_tokens, sampling, stop)

    def resume(
        self, *, max_new_tokens: int | None = None, sampling: Sampling | None = None, stop: Sequence[str] = ()
    ) -> Generator[str, None, None]:
        """Go on with the last answer where it was cut: by ``max_new_tokens``, by closing its iterator, or by Ctrl-C.

        With its settings (the default) its bits are those of an answer that was never cut, as long as nothing else has
        used the engine since.

        Args:
            max_new_tokens: The most tokens to add.
            sampling: Other settings; None for those of the answer so far, its seed included.
            stop: As ``send``.

        Returns:
            Pieces of the text that is added.

        Raises:
            PromptError: The last answer had ended by itself, the messages were changed since, or the arena is full.
        """
        last = self._standing()
        if last is None:
            raise PromptError("resume: there is no answer to go on with; send a message")
        if last.finish_reason == "stop":
            raise PromptError("resume: the last answer had ended by itself; send a message, or regenerate")
        return self._answer(last.messages[:-1], max_new_tokens, sampling or last.sampling, stop, resumed=last)

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns, each a user message and what followed it.

        Args:
            turns: How many, at least 1.

        Raises:
            PromptError: There are not that many turns.
        """
        starts = turn_starts(self.messages)
        if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= len(starts):
            wanted = f"a number of turns from 1 to {len(starts)}" if starts else "a conversation with a turn"
            raise PromptError(f"rewind: expected {wanted}, got {turns!r}")
        del self.messages[starts[-turns] :]

    def branch(self) -> Chat:
        """A second conversation that begins as this one stands; from here on neither sees the other.

        They share the KV rows of what they have in common, which going from one to the other does not read again.
        """
        twin = Chat.of_state(self._engine, ChatState(self.messages, self.on_full, self._transcript, self._last))
        twin.completion, twin.trims = self.completion, list(self.trims)
        return twin

    def save(self, path: str | Path) -> None:
        """Write the conversation and its KV rows to a file, whole or not at all; ``engine.load_chat`` goes on with it.

        Args:
            path: The file. One of that name is replaced once the new one is safely on disk.

        Raises:
            EngineError: Closed, or busy with an answer.
            OSError: It cannot be written.
        """
        self._engine.save_chat(self._state(), path)

    @classmethod
    def of_state(cls, engine: Engine, state: ChatState) -> Chat:
        """The conversation of a state, on an engine."""
        chat = cls(engine, on_full=state.on_full)
        chat.messages = copy.deepcopy(state.messages)
        chat._transcript, chat._last = state.transcript, state.cut
        return chat

    def _state(self) -> ChatState:
        cut, transcript = self._standing(), self._transcript
        if cut is None and transcript.pieces:
            # Turns were taken back, or messages changed by hand: keep what they still begin with.
            text = ""
            with contextlib.suppress(PromptError):  # a template may refuse a conversation without a user message
                text = self._engine.tokenizer.apply_chat_template(
                    self.messages, add_generation_prompt=False, tokenize=False
                )
            transcript = transcript.part_of(text)
        return ChatState(copy.deepcopy(self.messages), self.on_full, transcript, cut)

    def _answer(
        self,
        messages: list[Message],
        max_new_tokens: int | None,
        sampling: Sampling | None,
        stop: Sequence[str],
        resumed: Cut | None = None,
    ) -> Generator[str, None, None]:
        """Answer a conversation; ``resumed`` is an answer to it that goes on."""
        turn = Turn(
            self._engine,
            self._transcript,
            messages,
            on_full=self.on_full,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            resumed=resumed,
        )
        asked = list(self.messages)

        def pieces() -> Generator[str, None, None]:
            before = list(self.messages)
            if before != asked:  # to go on would take back what came between
                raise PromptError("the conversation has changed since this answer was asked for; ask for it again")
            self.messages[:] = turn.messages
            kept = False
            try:
                yield from turn.pieces()
                kept = turn.began
            except (GeneratorExit, KeyboardInterrupt):
                kept = turn.began
                raise
            finally:
                self.completion = turn.completion(resumed)
                self.messages[:] = before
                if kept:
                    self._keep(turn, self.completion)

        return pieces()

    def _keep(self, turn: Turn, completion: Completion) -> None:
        """Make an answer part of the conversation."""
        self.messages[:] = [*turn.messages, {"role": "assistant", "content": completion.text}]
        self.trims += turn.trims
        ids = completion.token_ids
        spelled = ids[:-1] if completion.finish_reason == "stop" else ids  # a stop token is the template's to write
        self._transcript = turn.prompt.with_answer(completion.text, spelled, self._engine.tokenizer)
        self._last = Cut(
            messages=copy.deepcopy(self.messages),
            prompt=turn.prompt,
            answer_ids=ids,
            sampling=completion.stats.sampling,
            finish_reason=completion.finish_reason,
        )

    def _standing(self) -> Cut | None:
        """The last answer, unless the messages are no longer those that it ended with."""
        return self._last if self._last is not None and self._last.messages == self.messages else None

    def _start_of(self, turn: int) -> int:
        starts = turn_starts(self.messages)
        if isinstance(turn, bool) or not isinstance(turn, int) or turn == 0 or not -len(starts) <= turn <= len(starts):
            wanted = f"a turn from 1 to {len(starts)}, or -1 for the last" if starts else "a conversation with a turn"
            raise PromptError(f"turn: expected {wanted}, got {turn!r}")
        return starts[turn - 1 if turn > 0 else turn]
