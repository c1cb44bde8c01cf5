"""Streamed text: whole characters, the same text as a full decode, and nothing of a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monograph.errors import ConfigError, EngineError, PromptError
from monograph.model.text_stream import TextStream
from monograph.model.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import byte_level, sentencepiece

# The 256 byte symbols, a few merges so that some tokens hold several characters, and the added tokens.
BYTES = Tokenizer.from_parts(byte_level())
MERGED = Tokenizer.from_parts(byte_level(merges=(("a", "b"), ("ab", "c"), ("o", "w"), ("ow", "n"), ("Ġ", "f"))))
SENTENCEPIECE = Tokenizer.from_parts(sentencepiece())

FOX = "alpha own fox tail"


def streamed(tokenizer: Tokenizer, ids: list[int], stop: list[str], cut: int = 1) -> tuple[str, TextStream]:
    """Push ids in groups of ``cut`` and check on the way that returned text and ``text`` agree."""
    stream = TextStream(tokenizer, stop)
    out = ""
    for i in range(0, len(ids), cut):
        out += stream.push(ids[i : i + cut])
        assert stream.text == out
        assert not any(s in out for s in stop)
    out += stream.finish()
    assert stream.text == out
    return out, stream


def before_first(text: str, stop: list[str]) -> str:
    return text[: min([at for s in stop if (at := text.find(s)) >= 0], default=len(text))]


def test_b24_characters_of_several_tokens_are_never_torn() -> None:
    text = "a🙂é漢e\u0301z"
    ids = [*text.encode()]
    stream = TextStream(BYTES)
    pieces = [stream.push([token_id]) for token_id in ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[:5] == ["a", "", "", "", "🙂"]
    assert stream.finish() == ""
    assert stream.text == BYTES.decode(ids) == text


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_b24_an_unfinished_character_is_shown_as_full_decode_shows_it(num_bytes: int) -> None:
    ids = [*b"a", *"🙂".encode()[:num_bytes]]
    stream = TextStream(BYTES)
    assert [stream.push([token_id]) for token_id in ids] == ["a"] + [""] * num_bytes
    assert stream.finish() == "\ufffd"
    assert stream.text == BYTES.decode(ids) == "a\ufffd"


def test_b24_invalid_bytes_in_the_middle_leave_the_rest_whole() -> None:
    ids = [*"é".encode(), 0xC3, 0x28, *"🙂".encode(), 0xFF, *"漢".encode()]
    out, _ = streamed(BYTES, ids, [])
    assert out == BYTES.decode(ids) == "é\ufffd(🙂\ufffd漢"


def test_b24_byte_tokens_of_a_sentencepiece_vocabulary() -> None:
    ids = SENTENCEPIECE.encode("the 🙂 cat", add_special_tokens=False)
    assert len(ids) == 10
    out, _ = streamed(SENTENCEPIECE, ids, [])
    assert out == SENTENCEPIECE.decode(ids) == "the 🙂 cat"


@pytest.mark.parametrize("cut", [1, 2, 5, 100])
@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merged"])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (FOX, ["own fox"], "alpha "),
        (FOX, ["tail"], "alpha own fox "),  # by the last token
        (FOX, ["tails"], FOX),  # unfinished at the end: released
        (FOX, ["fox", "own"], "alpha "),  # two at once, the later listed first
        (FOX, ["wn", "own fox"], "alpha "),  # one inside another that begins earlier
        (FOX, ["wn", "own dog"], "alpha o"),  # the one that began earlier comes to nothing
        (FOX, ["a"], ""),
        (FOX, ["hare", "wolf"], FOX),
        ("one\n\nUser: two", ["\n\nUser:"], "one"),
        ("one\n\nUsers", ["\n\nUser:"], "one\n\nUsers"),
        ("aaab", ["aab"], "a"),
        ("xabcx", ["b"], "xa"),  # inside one token of the merged vocabulary
        ("é🙂漢", ["🙂"], "é"),
        ("abcabd", ["abd", "abcx"], "abc"),
    ],
)
def test_b26_text_ends_where_the_first_stop_string_begins(
    tokenizer: Tokenizer, text: str, stop: list[str], expected: str, cut: int
) -> None:
    ids = tokenizer.encode(text)
    assert expected == before_first(text, stop)
    out, stream = streamed(tokenizer, ids, stop, cut)
    assert out == expected
    assert stream.stopped == (expected != text)
    assert (stream.stop_string is not None) == stream.stopped
    if stream.stop_string:
        assert text.startswith(stream.stop_string, len(expected))


def test_b26_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    stream = TextStream(BYTES, ["own fox", "ow!"])
    shown = [stream.push([token_id]) for token_id in b"o owe own fur"]
    assert shown == ["", "o ", "", "", "owe", " ", "", "", "", "", "", "own fu", "r"]
    assert stream.finish() == ""


def test_b26_after_the_stop_nothing_more_comes() -> None:
    stream = TextStream(BYTES, ["own"])
    assert stream.push(list(b"alpha ow")) == "alpha "
    assert not stream.stopped
    assert stream.push(list(b"n fox")) == ""
    assert stream.stopped
    assert stream.stop_string == "own"
    assert stream.push(list(b" tail")) == stream.finish() == ""
    assert stream.text == "alpha "


def test_stop_that_waits_for_an_earlier_one_is_settled_at_the_end() -> None:
    stream = TextStream(BYTES, ["wn", "own fox"])
    assert stream.push(list(b"alpha own")) == "alpha "
    assert not stream.stopped
    assert stream.finish() == "o"
    assert stream.stopped
    assert stream.stop_string == "wn"
    assert (stream.tokens_until_stop, stream.tokens_through_stop) == (7, 9)


@pytest.mark.parametrize("cut", [1, 3, 100])
def test_number_of_tokens_at_the_stop(cut: int) -> None:
    ids = MERGED.encode("xabcown fox")
    assert [MERGED.decode([token_id]) for token_id in ids] == ["x", "abc", "own", " f", "o", "x"]
    for stop, until, through in [("bc", 2, 2), ("own", 2, 3), ("wn f", 3, 4), ("x", 0, 1), ("fox", 4, 6)]:
        _, stream = streamed(MERGED, ids, [stop], cut)
        assert (stop, stream.tokens_until_stop, stream.tokens_through_stop) == (stop, until, through)
    _, stream = streamed(MERGED, ids, ["wolf"], cut)
    assert stream.tokens_until_stop is stream.tokens_through_stop is None


def test_special_tokens_have_no_text_and_no_part_in_a_stop_string() -> None:
    ids = [*b"ow", 257, *b"n", 258, *b"x"]
    out, stream = streamed(BYTES, ids, ["own"])
    assert out == ""
    assert (stream.tokens_until_stop, stream.tokens_through_stop) == (0, 4)
    assert streamed(BYTES, [256, 97, 260, 257], [])[0] == "a<tool>"


def test_the_first_blank_of_a_sentencepiece_answer_goes_as_in_full_decode() -> None:
    blank, word = SENTENCEPIECE.token_to_id("▁"), SENTENCEPIECE.token_to_id("▁the")
    assert blank is not None
    assert word is not None
    for ids in ([word, word], [blank, word], [blank], [blank, blank, word]):
        assert streamed(SENTENCEPIECE, ids, [])[0] == SENTENCEPIECE.decode(ids)
    assert streamed(SENTENCEPIECE, [word, word], [" "])[0] == "the"


IDS = {
    "bytes": (BYTES, st.sampled_from([*b"ab \n", *"🙂é".encode(), 257, 260])),
    "merged": (MERGED, st.sampled_from([*b"abc", 256, 257, 258, 259, 260, 0xC3, 0xA9])),
    "sentencepiece": (SENTENCEPIECE, st.sampled_from([*range(257, 262), 0xC3 + 1, 0xA9 + 1, 0x61 + 1, 284, 285])),
}
STOPS = st.lists(st.text(alphabet="ab \né🙂\ufffdt", min_size=1, max_size=4), max_size=3)


@pytest.mark.parametrize("kind", IDS)
def test_any_answer_equals_the_full_text_up_to_the_first_stop(kind: str) -> None:
    tokenizer, token_ids = IDS[kind]

    @given(st.lists(token_ids, max_size=16), STOPS, st.integers(1, 5))
    @example([257, 258], [" "], 1)
    @settings(max_examples=200, deadline=None)
    def check(ids: list[int], stop: list[str], cut: int) -> None:
        full = tokenizer.decode(ids)
        out, stream = streamed(tokenizer, ids, stop, cut)
        assert out == before_first(full, stop)
        assert stream.stopped == any(s in full for s in stop)
        if stream.stop_string is None:
            assert stream.tokens_until_stop is stream.tokens_through_stop is None
            return
        until, through = stream.tokens_until_stop, stream.tokens_through_stop
        assert until is not None
        assert through is not None
        assert until <= through
        # Enough ids for the text, and one fewer would not do.
        assert tokenizer.decode(ids[:until]).startswith(out)
        assert not out or not tokenizer.decode(ids[: until - 1]).startswith(out)
        whole = out + stream.stop_string
        assert tokenizer.decode(ids[:through]).startswith(whole)
        assert not tokenizer.decode(ids[: through - 1]).startswith(whole)

    check()


def test_an_id_that_only_pads_the_vocabulary_has_no_text() -> None:
    stream = TextStream(BYTES)
    assert stream.push([97, 5000, 98]) == "ab"
    with pytest.raises(PromptError, match="id -3 is not a token id"):
        stream.push([-3])


def test_a_finished_stream_takes_no_more() -> None:
    stream = TextStream(BYTES)
    stream.push([97])
    assert stream.finish() == ""
    assert stream.finish() == ""
    with pytest.raises(EngineError, match="push: the stream was finished"):
        stream.push([97])


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("own", r"stop: expected a list of strings, got the string 'own'; write \['own'\]"),
        (["own", ""], r"stop\[1\]: expected at least one character, got an empty string"),
        (["own", 3], r"stop\[1\]: expected a string, got int"),
        (None, "stop: expected a list of strings, got NoneType"),
        ({"own"}, "stop: expected a list of strings, got set"),
    ],
)
def test_stop_strings_are_checked(stop: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextStream(BYTES, stop)


def test_long_answers_in_one_push() -> None:
    ids = list(FOX.encode()) * 10_000
    stream = TextStream(BYTES, ["wolf", "tailspin"])
    assert stream.push(ids) + stream.finish() == FOX * 10_000


def test_what_is_held_does_not_grow_with_the_answer() -> None:
    stream = TextStream(BYTES, ["aaaaaaab"])
    for _ in range(5_000):
        stream.push([97])
    assert len(stream._held) == 7
    assert len(stream._ends) <= 8
    assert stream.push([98]) == ""
    assert stream.text == "a" * 4_993
    assert (stream.tokens_until_stop, stream.tokens_through_stop) == (4_993, 5_001)
