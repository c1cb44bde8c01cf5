"""Conversations over a tiny engine: history, reuse, cuts, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import monograph as mg
from tests.engines import tiny_engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[mg.Engine]:
    with tiny_engine(tmp_path) as loaded:
        yield loaded


def send(chat: mg.Chat, text: str, count: int = 8) -> str:
    return "".join(chat.send(text, max_new_tokens=count))


def test_turns_are_remembered_and_reused(engine: mg.Engine) -> None:
    chat = engine.chat(system="be brief")
    for turn in range(4):
        before = list(chat.messages)
        answer = send(chat, f"question {turn}")
        assert chat.messages == [
            *before,
            {"role": "user", "content": f"question {turn}"},
            {"role": "assistant", "content": answer},
        ]
        ids = engine.tokenizer.apply_chat_template(chat.messages[:-1])
        cold = engine.generate(ids, 8)
        assert cold.text == answer  # the same as without any history in the cache
        assert chat.completion is not None
        assert chat.completion.stats.prompt_tokens == len(ids)
        if turn:
            assert chat.completion.stats.reused_tokens > len(engine.tokenizer.apply_chat_template(before)) - 20


def test_two_chats_take_turns(engine: mg.Engine) -> None:
    left, right = engine.chat(), engine.chat(system="other")
    answers = [send(left, "one"), send(right, "two"), send(left, "three"), send(right, "four")]
    again = engine.chat()
    assert [send(again, "one"), send(again, "three")] == [answers[0], answers[2]]


def test_a_cut_answer_stays_as_far_as_it_got(engine: mg.Engine) -> None:
    chat = engine.chat()
    pieces = chat.send("hello", max_new_tokens=20)
    got = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": got}
    assert chat.completion is not None
    assert chat.completion.finish_reason == "cancelled"
    twin = engine.chat()
    twin.messages = [dict(message) for message in chat.messages]
    assert send(chat, "go on") == send(twin, "go on")


def test_a_turn_that_never_began_leaves_no_trace(engine: mg.Engine) -> None:
    chat = engine.chat()
    chat.send("never asked for")
    assert chat.messages == []
    with pytest.raises(mg.PromptError, match="max_seq_len 256"):
        send(chat, "x" * 300)
    assert chat.messages == []
    busy = engine.stream("abc")
    next(busy)
    with pytest.raises(mg.EngineError, match="busy"):
        send(chat, "hello")
    assert chat.messages == []
    busy.close()
    assert send(chat, "hello") == send(engine.chat(), "hello")


def test_rewind_forgets_turns(engine: mg.Engine) -> None:
    chat = engine.chat(system="s")
    first = send(chat, "one")
    second = send(chat, "two")
    chat.rewind()
    assert [message["content"] for message in chat.messages] == ["s", "one", first]
    assert send(chat, "two") == second
    chat.rewind(2)
    assert [message["role"] for message in chat.messages] == ["system"]
    assert send(chat, "one") == first
    for turns in (0, 2, -1, True, "1"):
        with pytest.raises(mg.PromptError, match=r"rewind: expected a number of turns from 1 to 1"):
            chat.rewind(turns)  # type: ignore[arg-type]


def test_an_edited_history_is_answered_as_if_new(engine: mg.Engine) -> None:
    chat = engine.chat()
    send(chat, "one")
    send(chat, "two")
    chat.messages[0]["content"] = "changed"
    edited = [dict(message) for message in chat.messages]
    answer = send(chat, "three")
    fresh = engine.chat()
    fresh.messages = edited
    assert send(fresh, "three") == answer


def test_settings_reach_the_answer(engine: mg.Engine) -> None:
    chat = engine.chat()
    text = "".join(chat.send("hi", max_new_tokens=12, sampling=mg.Sampling(logit_bias={40: 1e4})))
    assert text == engine.tokenizer.decode([40] * 12)
    chat = engine.chat()
    stop = engine.tokenizer.decode([40, 40, 40])
    assert "".join(chat.send("hi", sampling=mg.Sampling(logit_bias={40: 1e4}), stop=[stop])) == ""
    assert chat.messages[-1] == {"role": "assistant", "content": ""}


def test_an_answer_asked_for_before_another_takes_nothing_back(engine: mg.Engine) -> None:
    chat = engine.chat()
    first, second = chat.send("one", max_new_tokens=4), chat.send("two", max_new_tokens=4)
    list(first)
    before = list(chat.messages)
    with pytest.raises(mg.PromptError, match="has changed since this answer was asked for"):
        next(second)
    assert chat.messages == before
    under_way = chat.send("three", max_new_tokens=4)
    next(under_way)
    third = chat.send("four", max_new_tokens=4)
    list(under_way)
    with pytest.raises(mg.PromptError, match="has changed"):
        next(third)
    assert [message["content"] for message in chat.messages[::2]] == ["one", "three"]


def test_wrong_arguments_are_named(engine: mg.Engine) -> None:
    with pytest.raises(mg.PromptError, match="rewind: expected a conversation with a turn, got 1"):
        engine.chat().rewind()
    trimmed = engine.chat(on_full="trim")
    with pytest.raises(mg.ConfigError, match="max_new_tokens: expected an integer of at least 1, got '3'"):
        trimmed.send("x", max_new_tokens="3")  # type: ignore[arg-type]
    chat = engine.chat()
    chat.messages += [{"role": "user", "content": "x"}, {"content": "no role"}]
    assert chat.num_turns == 1
    with pytest.raises(mg.PromptError, match=r"messages\[1\]\.role: missing"):
        chat.send("y")
