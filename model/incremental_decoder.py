"""Token ids to text one id at a time, with the text of the whole sequence and the work of one token.

A tokenizer's decoder is a row of steps over a list of tokens. Decoding token by token goes wrong where a step looks
across tokens: a character's bytes arrive in several tokens, a run of byte tokens is valid or not as a whole, the blank
before the first word goes away. Each step here does what the library's does, but takes tokens as they come and lets go
of what no later token can change. The pieces of any sequence therefore add up to ``Tokenizer.decode`` of it, bit for
bit, and no token is decoded twice.

A decoder with a step that is not known here gives its text at the end only.
"""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monograph.errors import PromptError

if TYPE_CHECKING:
    from monograph.model.tokenizer import Tokenizer

Piece = tuple[int, str]  # (how many ids had come when this text came up, the text)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder:
    """Decodes one sequence of ids.

    Args:
        tokenizer: Whose ids they are. Special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {
            token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special
        }
        self._steps = _steps(tokenizer.backend.decoder)
        self._steps += [_ReplaceText(old, new) for old, new in tokenizer.replacements]
        self._num_ids = 0

    def push(self, token_id: int) -> list[Piece]:
        """Take the next id.

        A row that pads the vocabulary to a round size has an id but no token, and so no text.

        Returns:
            The text that is final now, and how many ids it took.

        Raises:
            PromptError: The id is negative.
        """
        if token_id < 0:
            raise PromptError(
                f"id {token_id} is not a token id; the vocabulary has {self._tokenizer.vocab_size:,} tokens"
            )
        self._num_ids += 1
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._special:
            return []
        pieces: list[Piece] = [(self._num_ids, token)]
        for step in self._steps:
            pieces = _through(step, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """End the sequence. Returns the text that was waiting for ids which now never come."""
        pieces: list[Piece] = []
        for step in self._steps:
            pieces = [*_through(step, pieces), *step.end()]
        return pieces


class _Step(Protocol):
    def take(self, num_ids: int, text: str) -> Iterable[Piece]:
        """Take the next token, as the step before left it. Returns what no later token can change."""
        ...

    def end(self) -> Iterable[Piece]:
        """Returns what was held back, now that no token follows."""
        ...


def _through(step: _Step, pieces: Iterable[Piece]) -> list[Piece]:
    return [out for num_ids, text in pieces for out in step.take(num_ids, text)]


class _ByteLevel:
    """Every character of a token stands for a byte; the bytes of all tokens together are UTF-8 or not."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun_at = 0  # the id that brought the first byte of an unfinished character; 0 for none

    def take(self, num_ids: int, text: str) -> Iterable[Piece]:
        out = self._decoder.decode(_bytes_of(text))
        begun_at, waiting = self._begun_at, self._decoder.getstate()[0]
        if begun_at and out.startswith(_REPLACEMENT):  # it was never finished; what follows is this token's
            yield begun_at, _REPLACEMENT
            out, begun_at = out[1:], 0
        if out:
            yield num_ids, out
            begun_at = 0
        self._begun_at = (begun_at or num_ids) if waiting else 0

    def end(self) -> Iterable[Piece]:
        out = self._decoder.decode(b"", final=True)
        return [(self._begun_at, out)] if out else []


class _ByteFallback:
    """Tokens such as <0xE2> are bytes. A run of them is text if all of it is UTF-8, and else a U+FFFD for each byte."""

    def __init__(self) -> None:
        self._run: list[tuple[int, int]] = []  # (ids, byte)

    def take(self, num_ids: int, text: str) -> Iterable[Piece]:
        match = _BYTE_TOKEN.fullmatch(text)
        if match:
            self._run.append((num_ids, int(match[1], 16)))
            return []
        return [*self.end(), (num_ids, text)]

    def end(self) -> Iterable[Piece]:
        run, self._run = self._run, []
        decoder = codecs.getincrementaldecoder("utf-8")()
        pieces: list[Piece] = []
        not_text: list[int] = []  # the places at which the run so far is not text
        for at, (num_ids, byte) in enumerate(run):
            try:
                text = decoder.decode(bytes([byte]))
            except UnicodeDecodeError:
                not_text += range(at, len(run))
                break
            if text:
                pieces.append((num_ids, text))
            if decoder.getstate()[0]:
                not_text.append(at)
        if not not_text or not_text[-1] < len(run) - 1:
            return pieces
        # So many bytes show as so many U+FFFD, but only once the run has come to a place where it is not text.
        return [(run[not_text[bisect_left(not_text, at)]][0], _REPLACEMENT) for at in range(len(run))]


class _ByToken:
    """A step that sees each token alone, but may treat the first one of a text in its own way."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._first = True

    def take(self, num_ids: int, text: str) -> Iterable[Piece]:
        before, self._first = ([] if self._first else [""]), False
        return [(num_ids, self._decoder.decode([*before, text]))]

    def end(self) -> Iterable[Piece]:
        return []


class _StripStart:
    """Takes up to a number of a character from the start of the text."""

    def __init__(self, char: str, most: int) -> None:
        self._char, self._left = char, most

    def take(self, num_ids: int, text: str) -> Iterable[Piece]:
        while self._left and text:
            if text.startswith(self._char):
                text, self._left = text[1:], self._left - 1
            else:
                self._left = 0
        return [(num_ids, text)]

    def end(self) -> Iterable[Piece]:
        return []


class _ReplaceText:
    """``str.replace`` over text that comes in pieces."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._held: Piece = (0, "")

    def take(self, num_ids: int, text: str) -> Iterable[Piece]:
        *done, rest = (self._held[1] + text).split(self._old)
        keep = next((n for n in range(len(self._old) - 1, 0, -1) if rest.endswith(self._old[:n])), 0)
        self._held = (num_ids, rest[len(rest) - keep :])
        out = self._new.join([*done, rest[: len(rest) - keep]])
        return [(num_ids, out)] if out else []

    def end(self) -> Iterable[Piece]:
        held, self._held = self._held, (0, "")
        return [held] if held[1] else []


class _JoinWords:
    """What the library does without a decoder: a blank between tokens."""

    def __init__(self) -> None:
        self._blank = ""

    def take(self, num_ids: int, text: str) -> Iterable[Piece]:
        piece, self._blank = (num_ids, self._blank + text), " "
        return [piece]

    def end(self) -> Iterable[Piece]:
        return []


class _AtTheEnd:
    """Any decoder at all: keeps the tokens, and decodes them together once they are complete."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._tokens: list[str] = []
        self._num_ids = 0

    def take(self, num_ids: int, text: str) -> Iterable[Piece]:
        self._tokens.append(text)
        self._num_ids = num_ids
        return []

    def end(self) -> Iterable[Piece]:
        tokens, self._tokens = self._tokens, []
        return [(self._num_ids, self._decoder.decode(tokens))]


def _steps(decoder: Any) -> list[_Step]:
    if decoder is None:
        return [_JoinWords()]
    described = json.loads(decoder.__getstate__())
    steps: list[_Step] = []
    fused = False  # once tokens are one text, a step that looks at tokens would look at all of it
    for part in described["decoders"] if described["type"] == "Sequence" else [described]:
        step = _step(part, fused)
        if step is None:
            return [_AtTheEnd(decoder)]
        steps += step
        fused = fused or part["type"] in ("Fuse", "ByteLevel")
    return steps


def _step(part: dict[str, Any], fused: bool) -> Sequence[_Step] | None:
    """The step that a decoder's description asks for; none where it changes nothing, None where it is not known."""
    from tokenizers import Regex, decoders

    match part:
        case {"type": "Fuse"}:
            return []
        case {"type": "ByteLevel"} if not fused:
            return [_ByteLevel()]
        case {"type": "ByteFallback"} if not fused:
            return [_ByteFallback()]
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if fused and old:
            return [_ReplaceText(old, new)]
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
            return [_ByToken(decoders.Replace(old, new))]
        case {"type": "Replace", "pattern": {"Regex": str(old)}, "content": str(new)} if not fused:
            return [_ByToken(decoders.Replace(Regex(old), new))]
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0} if not fused:
            return [_ByToken(decoders.Strip(char, start, 0))]
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return [_StripStart(char, start)]
        case {"type": "Metaspace", "replacement": str(blank), "prepend_scheme": scheme} if not fused:
            return [_ByToken(decoders.Metaspace(blank, scheme))]
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)} if not fused:
            return [_ByToken(decoders.WordPiece(prefix, cleanup))]
    return None


def _bytes_of(token: str) -> bytes:
    """The bytes that a byte-level token stands for. One that holds anything but byte symbols is plain text."""
    try:
        return bytes(map(_BYTE_OF_SYMBOL.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 byte stands for itself, the other 68 are moved to U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF_SYMBOL = _byte_of_symbol()
