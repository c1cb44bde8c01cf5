"""A conversation: messages, the template that turns them into a prompt, and the KV cache that carries over."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from monograph.errors import PromptError
from monograph.model.generate import Completion
from monograph.model.sampling import Sampling

if TYPE_CHECKING:
    from monograph.model.engine import Engine


class Chat:
    """A conversation with one engine. Made by ``engine.chat()``.

    Each turn renders all messages with the model's template, keeps the KV rows of the longest common prefix with what
    the cache holds, and prefills the rest. An answer that was cut short (its iterator closed, or Ctrl-C) stays in the
    history as far as it got; one that failed leaves no trace of its turn.

    Args:
        engine: The engine; chats of one engine may take turns, each re-reads what the other has overwritten.
        system: Content of a system message, or None for the template's default.

    Attributes:
        messages: The conversation as role/content mappings. May be edited between turns.
        completion: The last answer with its stats; None before the first.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self._engine = engine
        self.messages: list[dict[str, Any]] = []
        self.completion: Completion | None = None
        if system is not None:
            self.messages.append({"role": "system", "content": system})

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
            PromptError: The conversation does not fit, or the template refuses it; nothing was added.
        """
        user = {"role": "user", "content": content}
        ids = self._engine.tokenizer.apply_chat_template([*self.messages, user], add_generation_prompt=True)
        stream = self._engine.stream(ids, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, reuse=True)

        def pieces() -> Generator[str, None, None]:
            kept = len(self.messages)
            self.messages.append(user)
            answered = False
            try:
                with stream:
                    for chunk in stream:
                        answered = True
                        if chunk.text:
                            yield chunk.text
            except (GeneratorExit, KeyboardInterrupt):
                raise
            except BaseException:
                answered = False
                raise
            finally:
                self.completion = stream.completion
                if answered:
                    self.messages.append({"role": "assistant", "content": self.completion.text})
                else:
                    del self.messages[kept:]

        return pieces()

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns, each a user message and what followed it.

        Args:
            turns: How many, at least 1.

        Raises:
            PromptError: There are not that many turns.
        """
        starts = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= len(starts):
            raise PromptError(f"rewind: expected a number of turns from 1 to {len(starts)}, got {turns!r}")
        del self.messages[starts[-turns] :]
