"""Decoding id by id gives the text of decoding them all, for every kind of decoder, at the cost of one id each."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from monograph.errors import PromptError
from monograph.model.incremental_decoder import IncrementalDecoder
from monograph.model.tokenizer import Tokenizer
from monograph.model.tokenizer_files import TokenizerParts
from tests.model.tiny_tokenizers import byte_level, sentencepiece

BYTE_LEVEL = Tokenizer.from_parts(byte_level(merges=(("a", "b"), ("ð", "Ł"))))
SENTENCEPIECE = Tokenizer.from_parts(sentencepiece())

# Bytes that make and break UTF-8: parts of an emoji, of the euro sign, surrogates, overlong forms, never legal.
AWKWARD_BYTES = [0x20, 0x61, 0xF0, 0x9F, 0x99, 0x82, 0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0x80, 0xED, 0xA0, 0xE0, 0xF4, 0x90]
AWKWARD_BYTES += [0xC0, 0xFF, 0xEF, 0xBF, 0xBD, 0xCC, 0x81]

OTHER_DECODERS: dict[str, Any] = {
    "metaspace": decoders.Metaspace(),
    "metaspace-never": decoders.Metaspace("▁", "never"),
    "bytes-metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "first")]),
    "no-strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "strip-each": decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.ByteFallback()]),
    "strip-three": decoders.Sequence([decoders.Fuse(), decoders.Strip("▁", 3, 0)]),
    "replace-fused": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁a", "Q")]),
    "wordpiece": decoders.WordPiece("t", True),
    "suffix": decoders.BPEDecoder("e"),
    "ctc": decoders.CTC("a", "▁", True),
}


def ids_of(awkward: list[int], vocab_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.one_of(st.sampled_from(awkward), st.integers(0, vocab_size - 1)), max_size=24)


def incremental(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    texts = [text for token_id in ids for _, text in decoder.push(token_id)]
    return "".join([*texts, *(text for _, text in decoder.finish())])


@given(ids_of(AWKWARD_BYTES, BYTE_LEVEL.vocab_size))
@example([*"🙂".encode()[:2], *"é".encode()])
@example([0xE2, 0x82, 0x41, 0xE2, 0xE2, 0x82, 0xAC, 0xF0])
@settings(max_examples=400, deadline=None)
def test_byte_level_adds_up_to_full_decode(ids: list[int]) -> None:
    assert incremental(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids)


@given(ids_of([1 + byte for byte in AWKWARD_BYTES] + [257, 258], SENTENCEPIECE.vocab_size))
@example([257, 1 + 0xC3, 1 + 0xA9, 1 + 0x80, 259])  # a character that a later byte of its run takes back
@settings(max_examples=400, deadline=None)
def test_sentencepiece_adds_up_to_full_decode(ids: list[int]) -> None:
    assert incremental(SENTENCEPIECE, ids) == SENTENCEPIECE.decode(ids)


@pytest.mark.parametrize("name", OTHER_DECODERS)
def test_other_decoders_add_up_to_full_decode(name: str) -> None:
    tokenizer = Tokenizer.from_parts(sentencepiece(decoder=OTHER_DECODERS[name]))

    @given(ids_of([1 + byte for byte in AWKWARD_BYTES] + [257, 258, 259, 278], tokenizer.vocab_size))
    @settings(max_examples=60, deadline=None)
    def check(ids: list[int]) -> None:
        assert incremental(tokenizer, ids) == tokenizer.decode(ids)

    check()


def test_without_a_decoder_tokens_are_joined_by_blanks() -> None:
    tokenizer = Tokenizer.from_parts(Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[])))
    assert incremental(tokenizer, [0, 1, 1]) == tokenizer.decode([0, 1, 1]) == "a b b"


@given(st.lists(st.sampled_from([*range(257, 300), 1 + 0x20, 1 + 0x2E]), max_size=30))
@settings(max_examples=200, deadline=None)
def test_cleaned_up_text_adds_up_to_full_decode(ids: list[int]) -> None:
    parts = TokenizerParts(sentencepiece(), {}, None, cleans_up=True)
    tokenizer = Tokenizer(parts)
    assert incremental(tokenizer, ids) == tokenizer.decode(ids)


def test_clean_up_removes_blanks_before_punctuation() -> None:
    tokenizer = Tokenizer(TokenizerParts(sentencepiece(), {}, None, cleans_up=True))
    ids = tokenizer.encode("he , she do n't . a ' ' b", add_special_tokens=False)
    assert incremental(tokenizer, ids) == tokenizer.decode(ids) == "he, she don't. a'' b"


def test_text_comes_with_the_id_that_completed_it() -> None:
    decoder = IncrementalDecoder(BYTE_LEVEL)
    pieces = [decoder.push(token_id) for token_id in "a€b".encode()]
    assert pieces == [[(1, "a")], [], [], [(4, "€")], [(5, "b")]]


def test_an_unfinished_character_comes_with_the_id_that_began_it() -> None:
    decoder = IncrementalDecoder(BYTE_LEVEL)
    assert [decoder.push(token_id) for token_id in b"a\xe2\x82b"] == [[(1, "a")], [], [], [(2, "\ufffd"), (4, "b")]]
    assert decoder.push(0xF0) == []
    assert decoder.finish() == [(5, "\ufffd")]


def test_a_run_of_byte_tokens_is_given_out_character_by_character() -> None:
    decoder = IncrementalDecoder(SENTENCEPIECE)
    for byte in "é€".encode():
        assert decoder.push(1 + byte) == []
    letter = SENTENCEPIECE.token_to_id("b")
    assert letter is not None
    assert decoder.push(letter) == [(2, "é"), (5, "€"), (6, "b")]


def test_bytes_that_turn_out_not_to_be_text_come_with_the_id_that_made_them_so() -> None:
    decoder = IncrementalDecoder(SENTENCEPIECE)
    for byte in (0x61, 0x61, 0xC3):  # text after the first and the second, but not after the third
        assert decoder.push(1 + byte) == []
    assert decoder.finish() == [(3, "\ufffd")] * 3


def test_ids_without_a_token_have_no_text_and_negative_ones_are_refused() -> None:
    decoder = IncrementalDecoder(BYTE_LEVEL)
    assert decoder.push(BYTE_LEVEL.vocab_size + 7) == []
    assert decoder.push(2**40) == []
    with pytest.raises(PromptError, match=r"-1 is not a token id; the vocabulary has 264 tokens"):
        decoder.push(-1)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_the_cost_of_an_id_does_not_grow(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> str:
        raise AssertionError("the whole answer was decoded")

    monkeypatch.setattr(Tokenizer, "decode", refuse)
    decoder = IncrementalDecoder(tokenizer)
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def cost(num_ids: int) -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            for i in range(num_ids):
                decoder.push(100 + i % 100)
        finally:
            sys.setprofile(None)
        return calls

    early = cost(200)
    for i in range(20_000):
        decoder.push(100 + i % 100)
    assert cost(200) <= 1.05 * early
