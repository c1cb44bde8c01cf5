"""How the text of a conversation was spelled in token ids, so that what the model has read is never spelled anew.

A tokenizer may spell a text otherwise than the model did when it wrote it: the model chose "a", "b" where "ab" is one
token. A conversation that is encoded as a whole each turn would then differ from what the KV cache holds, from that
place on. A transcript keeps the ids of every prompt and answer beside their text, and encodes only what is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Speller(Protocol):
    """What a transcript needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """The token's own text."""
        ...


@dataclass(frozen=True)
class Piece:
    """A stretch of a conversation: what was added to a prompt, or an answer.

    Attributes:
        text: As the chat template writes it.
        ids: The tokens that the model read for it, or wrote.
    """

    text: str
    ids: tuple[int, ...]


class Transcript:
    """The pieces of a conversation so far, oldest first.

    Args:
        pieces: To begin with.

    Attributes:
        pieces: All of them. Their texts and ids, joined, are those of the conversation.
    """

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces = list(pieces)

    @property
    def ids(self) -> list[int]:
        """The tokens of all pieces."""
        return [token_id for piece in self.pieces for token_id in piece.ids]

    def spell(self, text: str, tokenizer: Speller) -> Transcript:
        """Spell the text of a conversation that may go on from this one, or from a part of it.

        The pieces that ``text`` begins with keep their ids. What follows them is encoded by itself where it begins with
        a special token, at which every encoding is cut, end of turn for one; otherwise the whole text is encoded.

        Returns:
            The transcript of ``text``; the first pieces of this one, then what is new.
        """
        kept, rest = self._shared(text)
        if not rest:
            return Transcript(kept)
        if kept:
            ids = tokenizer.encode(rest, add_special_tokens=False)
            if _begins_with_special(rest, ids, tokenizer):
                return Transcript([*kept, Piece(rest, tuple(ids))])
        return Transcript([Piece(text, tuple(tokenizer.encode(text, add_special_tokens=False)))])

    def part_of(self, text: str) -> Transcript:
        """The first pieces of this transcript that ``text`` begins with."""
        return Transcript(self._shared(text)[0])

    def with_answer(self, text: str, ids: Sequence[int], tokenizer: Speller) -> Transcript:
        """This transcript and an answer to it.

        Args:
            text: The answer as it will stand in the conversation.
            ids: Its tokens, without the one that ended it.
            tokenizer: Whose ids they are.

        Returns:
            The same transcript if the tokens do not say just that text, as where a stop string was cut off.
        """
        if not text or tokenizer.decode(ids, skip_special_tokens=False) != text:
            return self
        return Transcript([*self.pieces, Piece(text, tuple(ids))])

    def _shared(self, text: str) -> tuple[list[Piece], str]:
        kept: list[Piece] = []
        start = 0
        for piece in self.pieces:
            if not text.startswith(piece.text, start):
                break
            kept.append(piece)
            start += len(piece.text)
        return kept, text[start:]


def _begins_with_special(text: str, ids: Sequence[int], tokenizer: Speller) -> bool:
    token = tokenizer.id_to_token(ids[0]) if ids else None
    return bool(token) and text.startswith(token or "") and tokenizer.decode(ids[:1], skip_special_tokens=True) == ""
