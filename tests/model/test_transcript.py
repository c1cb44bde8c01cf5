"""How a conversation is spelled: what was read keeps its ids, what is new is encoded as part of the whole would be."""

from __future__ import annotations

from collections.abc import Sequence

from monograph.model.transcript import Piece, Transcript

# "ab" is one token where a text is encoded; a model may write it as two. <end> is special.
WORDS = ["<end>", "ab", "a", "b", "c", "x", " "]


class Merging:
    """A tokenizer that takes the longest word."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        ids = []
        while text:
            word = next(word for word in WORDS if text.startswith(word))
            ids.append(WORDS.index(word))
            text = text[len(word) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(WORDS[i] for i in ids if i or not skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return WORDS[token_id]


END, AB, A, B, C, X, SPACE = range(len(WORDS))


def test_b28_an_answer_keeps_its_spelling() -> None:
    tokenizer = Merging()
    first = Transcript().spell("x", tokenizer).with_answer("ab", [A, B], tokenizer)
    assert first.ids == [X, A, B]
    second = first.spell("xab<end>c", tokenizer)
    assert second.ids == [X, A, B, END, C]
    assert tokenizer.encoded == ["x", "<end>c"]  # no more than what is new
    third = second.with_answer("c", [C], tokenizer).spell("xab<end>cc<end>ab", tokenizer)
    assert third.ids == [X, A, B, END, C, C, END, AB]
    assert third.spell("xab<end>c", tokenizer).ids == second.ids  # back again
    assert third.spell("xab<end>x", tokenizer).ids == [X, A, B, END, X]


def test_nothing_is_cut_but_at_special_tokens() -> None:
    """Encoded by itself, "b" after "a" would not become part of "ab"."""
    tokenizer = Merging()
    written = Transcript().spell("x", tokenizer).with_answer("a", [A], tokenizer)
    assert written.spell("xab", tokenizer).ids == [X, AB]
    assert written.spell("xa<end>", tokenizer).ids == [X, A, END]


def test_what_was_changed_is_encoded_anew() -> None:
    tokenizer = Merging()
    written = Transcript().spell("x", tokenizer).with_answer("ab", [A, B], tokenizer)
    assert written.spell("cab<end>", tokenizer).ids == [C, AB, END]
    assert written.spell("", tokenizer).ids == []
    assert written.part_of("xab<end>").ids == [X, A, B]
    assert written.part_of("xc").ids == [X]
    assert written.part_of("").ids == []


def test_an_answer_that_says_something_else_is_not_kept() -> None:
    """A stop string was cut off, or a special token is in it that the text does not show."""
    tokenizer = Merging()
    prompt = Transcript([Piece("x", (X,))])
    assert prompt.with_answer("a", [A, B], tokenizer) is prompt
    assert prompt.with_answer("ab", [A, END, B], tokenizer) is prompt
    assert prompt.with_answer("", [], tokenizer) is prompt
