"""The KV cache is the conversation: what is read again, what going back costs, and what a full arena does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend

import monograph as mg
from tests import session_process
from tests.checkpoints import tiny_config, tiny_ids
from tests.engines import tiny_engine, write_model
from tests.model.tiny_tokenizers import byte_level, sentencepiece

# fp32: rows that decode steps wrote against rows of prefill.
RELATIVE_ERROR = 2e-5
# None of the three special tokens, which text does not show.
NO_SPECIAL = dict.fromkeys(range(3), -math.inf)
NEVER_ENDS = mg.Sampling(logit_bias=NO_SPECIAL, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mg.Engine]:
    config = tiny_config(max_position_embeddings=2048)
    with tiny_engine(tmp_path_factory.mktemp("long"), config) as loaded:
        yield loaded


@pytest.fixture
def engine(shared: mg.Engine) -> mg.Engine:
    """With nothing in its cache that a test could go on from."""
    shared.generate([5], 1)
    return shared


def say(chat: mg.Chat, text: str, count: int = 8, sampling: mg.Sampling = NEVER_ENDS) -> str:
    return "".join(chat.send(text, max_new_tokens=count, sampling=sampling))


def stats(chat: mg.Chat) -> mg.Stats:
    assert chat.completion is not None
    return chat.completion.stats


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def test_turn_20_reads_its_own_tokens_only(engine: mg.Engine) -> None:
    """And its logits equal those of a cold run."""
    chat = engine.chat(system="be brief")
    for turn in range(1, 21):
        live = 0 if turn == 1 else stats(chat).prompt_tokens + stats(chat).completion_tokens - 1
        say(chat, f"question number {turn}")
        found = stats(chat)
        assert found.reused_tokens == live
        assert found.prefilled_tokens == found.prompt_tokens - live
        if turn > 1:  # the token that was not read yet, the end of the turn, the message, the start of the answer
            assert found.prefilled_tokens == 1 + len(f"[user]question number {turn}[assistant]") + 1
    warm = list(chat.messages)
    list(chat.regenerate(max_new_tokens=1, sampling=NEVER_ENDS))
    logits = engine.arena.view("logits").clone()
    assert stats(chat).prompt_tokens > 850
    cold = engine.logits(engine.tokenizer.apply_chat_template(warm[:-1]))[-1]
    assert relative_error(logits, cold) < RELATIVE_ERROR


def test_regenerate(engine: mg.Engine) -> None:
    chat = engine.chat()
    say(chat, "one")
    say(chat, "two")
    kept = list(chat.messages)
    again = "".join(chat.regenerate(max_new_tokens=8, sampling=NEVER_ENDS))
    assert chat.messages == kept
    assert again == kept[-1]["content"]
    assert stats(chat).prefilled_tokens == 1
    other = "".join(chat.regenerate(max_new_tokens=8, sampling=mg.Sampling(temperature=1.5, seed=9)))
    assert chat.messages == [*kept[:-1], {"role": "assistant", "content": other}]
    assert other != again
    with pytest.raises(mg.PromptError, match="expected a conversation with a turn"):
        engine.chat(system="s").regenerate()


def test_a_regeneration_that_fails_keeps_the_old_answer(engine: mg.Engine) -> None:
    chat = engine.chat()
    say(chat, "one")
    kept = list(chat.messages)
    with engine.stream([5, 6]) as busy:
        next(busy)
        with pytest.raises(mg.EngineError, match="busy"):
            list(chat.regenerate())
    assert chat.messages == kept
    chat.regenerate().close()  # before it began
    assert chat.messages == kept
    assert say(chat, "two")


def test_edit(engine: mg.Engine) -> None:
    chat = engine.chat(system="s")
    for text in ("one", "two", "three"):
        say(chat, text)
    before = list(chat.messages)
    answer = "".join(chat.edit(2, "twin", max_new_tokens=8, sampling=NEVER_ENDS))
    assert chat.messages == [
        *before[:3],
        {"role": "user", "content": "twin"},
        {"role": "assistant", "content": answer},
    ]
    shared = len(engine.tokenizer.apply_chat_template(before[:3], add_generation_prompt=False)) + len("[user]tw")
    assert stats(chat).reused_tokens == shared
    fresh = engine.chat()
    fresh.messages = before[:3]
    assert say(fresh, "twin") == answer
    for turn in (0, 3, -3, True, "1"):
        with pytest.raises(mg.PromptError, match=r"turn: expected a turn from 1 to 2, or -1 for the last, got"):
            chat.edit(turn, "x")  # type: ignore[arg-type]
    assert chat.num_turns == 2
    assert "".join(chat.edit(-1, "twin", max_new_tokens=8, sampling=NEVER_ENDS)) == answer


def test_rewound_turns_are_not_read_again(engine: mg.Engine) -> None:
    chat = engine.chat(system="s")
    answers = [say(chat, text) for text in ("one", "two", "three")]
    chat.rewind(2)
    assert say(chat, "two") == answers[1]
    assert stats(chat).prefilled_tokens == 1
    assert say(chat, "three") == answers[2]


def test_branches_share_what_they_have_in_common(engine: mg.Engine) -> None:
    left = engine.chat(system="s")
    say(left, "a long beginning")
    common = stats(left).prompt_tokens + stats(left).completion_tokens - 1
    right = left.branch()
    lefts = say(left, "left")
    rights = say(right, "right")
    assert stats(right).reused_tokens >= common
    assert [len(chat.messages) for chat in (left, right)] == [5, 5]
    assert left.messages[:3] == right.messages[:3]
    say(left, "left again")
    assert stats(left).reused_tokens >= common
    fresh = engine.chat()
    fresh.messages = [dict(message) for message in left.messages[:3]]
    assert say(fresh, "right") == rights
    assert lefts != rights
    right.messages[0]["content"] = "changed"
    assert left.messages[0]["content"] == "s"


@pytest.mark.parametrize("seed", session_process.SEEDS)
def test_resumed_answers_are_those_that_were_never_cut(engine: mg.Engine, seed: int) -> None:
    """To the bit, counts of penalties included: cut by length, and cut by its reader."""
    wanted = session_process.never_stopped(engine, seed)
    for closed in (False, True):
        chat = session_process.until_the_break(engine, seed, session_process.CUT, closed=closed)
        assert chat.completion is not None
        assert chat.completion.token_ids == wanted["second"][: session_process.CUT]
        added = "".join(chat.resume(max_new_tokens=session_process.WHOLE - session_process.CUT))
        assert chat.messages[-1]["content"].endswith(added)
        assert stats(chat).prefilled_tokens == 1
        assert session_process.after_the_break(engine, chat, seed) == wanted


def test_what_cannot_be_resumed(engine: mg.Engine) -> None:
    chat = engine.chat()
    with pytest.raises(mg.PromptError, match="resume: there is no answer"):
        chat.resume()
    stop = engine.tokenizer.decode([40])
    list(chat.send("x", sampling=mg.Sampling(logit_bias={40: 1e4}), stop=[stop]))
    with pytest.raises(mg.PromptError, match="ended by itself"):
        chat.resume()
    say(chat, "y")
    chat.messages[-1]["content"] = "put into its mouth"
    with pytest.raises(mg.PromptError, match="resume: there is no answer"):
        chat.resume()


def test_resuming_across_a_stop_string(engine: mg.Engine) -> None:
    """What was shown is not shown again, and a stop string may begin before the cut and end behind it."""
    bias = mg.Sampling(logit_bias={40: 1e4})
    stop = engine.tokenizer.decode([40] * 6)
    chat = engine.chat()
    assert list(chat.send("x", max_new_tokens=4, sampling=bias, stop=[stop]))
    shown = chat.messages[-1]["content"]
    assert shown == engine.tokenizer.decode([40] * 4)
    assert "".join(chat.resume(max_new_tokens=8, stop=[stop])) == ""
    assert chat.messages[-1]["content"] == ""
    assert chat.completion is not None
    assert chat.completion.finish_reason == "stop"
    plain = engine.chat()
    first = say(plain, "x", 4)
    rest = "".join(plain.resume(max_new_tokens=4))
    assert plain.messages[-1]["content"] == first + rest == say(engine.chat(), "x", 8)


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_a_character_that_was_cut_is_shown_whole(kind: Callable[[], Backend], tmp_path: Path) -> None:
    """Its first bytes were shown as one replacement character, or as one each; nothing behind it is lost."""
    backend = kind()
    spelled = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    if None in spelled:
        spelled = list("😀".encode())
    config = tiny_config(vocab_size=backend.get_vocab_size(with_added_tokens=True), max_position_embeddings=256)
    write_model(tmp_path, config)
    backend.save(str(tmp_path / "tokenizer.json"))

    def forced(token_id: int | None) -> dict[str, Any]:
        assert token_id is not None
        return {"max_new_tokens": 1, "sampling": mg.Sampling(temperature=0.0, logit_bias={token_id: 1e4})}

    with mg.load(str(tmp_path), device="cpu") as engine:
        chat = engine.chat()
        assert "".join(chat.send("hi", **forced(spelled[0]))) == "\ufffd"
        for byte in spelled[1:3]:
            list(chat.resume(**forced(byte)))
        assert set(chat.messages[-1]["content"]) == {"\ufffd"}
        assert "".join(chat.resume(**forced(spelled[3]))) == "😀"
        assert "".join(chat.resume(**forced(backend.token_to_id("a")))) == "a"
        assert chat.messages[-1]["content"] == "😀a"


def test_penalties_count_what_is_left_after_going_back(engine: mg.Engine) -> None:
    """Counts after rewind, edit and regenerate are those of the conversation as it stands, and of the answer alone."""
    penalised = mg.Sampling(
        logit_bias=NO_SPECIAL, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, seed=1
    )
    chat = engine.chat(system="s")
    for text in ("one", "two"):
        say(chat, text, 12, penalised)
    for answer in (
        lambda: chat.regenerate(max_new_tokens=12, sampling=penalised),
        lambda: chat.edit(1, "other", max_new_tokens=12, sampling=penalised),
        lambda: chat.resume(max_new_tokens=12),
        lambda: chat.send("two", max_new_tokens=12, sampling=penalised),
    ):
        list(answer())
        assert chat.completion is not None
        ids = engine.tokenizer.apply_chat_template(chat.messages[:-1]) + chat.completion.token_ids
        for name, counted in (("context_counts", ids), ("output_counts", chat.completion.token_ids)):
            expected = torch.bincount(torch.tensor(counted), minlength=96)
            assert torch.equal(engine.arena.view(name), expected.int()), name
        cold = engine.generate(ids[: -len(chat.completion.token_ids)], 40, sampling=penalised)
        assert cold.token_ids[: len(chat.completion.token_ids)] == chat.completion.token_ids


def test_answered_is_checked(engine: mg.Engine) -> None:
    for answered in (-1, 3, True, "1"):
        with pytest.raises(mg.ConfigError, match="answered: expected an integer from 0 to 2"):
            engine.stream([5, 6, 7], answered=answered)  # type: ignore[arg-type]
    with pytest.raises(mg.PromptError, match="answered: that answer has ended, with the stop string"):
        engine.stream([5, 6, 7], answered=2, stop=[engine.tokenizer.decode([6, 7])])


class TestFull:
    """An arena of 160 tokens."""

    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[mg.Engine]:
        with tiny_engine(tmp_path, load={"max_seq_len": 160}) as loaded:
            yield loaded

    def test_length(self, small: mg.Engine) -> None:
        """The answer ends with "length", and the next turn is refused with the ways out; going back makes room."""
        chat = small.chat(system="s")
        say(chat, "one", 40)
        list(chat.send("two", sampling=NEVER_ENDS))
        assert chat.completion is not None
        assert chat.completion.finish_reason == "length"
        assert stats(chat).prompt_tokens + stats(chat).completion_tokens == 160
        kept = list(chat.messages)
        match = r"conversation has 1\d\d tokens and leaves no room in max_seq_len 160.*max_seq_len=256 .*on_full='trim'"
        with pytest.raises(mg.PromptError, match=match):
            say(chat, "three")
        with pytest.raises(mg.PromptError, match="conversation has 160 tokens"):
            chat.resume()
        assert chat.messages == kept
        chat.rewind()
        assert say(chat, "three", 4)

    def test_trim_before_an_answer(self, small: mg.Engine, caplog: pytest.LogCaptureFixture) -> None:
        chat = small.chat(system="keep me", on_full="trim")
        for turn in range(12):
            say(chat, f"question {turn}", 10)
            assert chat.completion is not None
            assert len(chat.completion.token_ids) == 10  # none was cut
            assert chat.messages[0] == {"role": "system", "content": "keep me"}
            assert chat.messages[-2] == {"role": "user", "content": f"question {turn}"}
        assert 2 <= len(chat.trims) <= 6  # not at every turn
        assert sum(trim.turns for trim in chat.trims) == 12 - chat.num_turns
        for trim in chat.trims:
            assert trim.tokens_after <= 80 < 150 < trim.tokens_before
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == len(chat.trims)
        assert said[0].startswith(
            f"the conversation ({chat.trims[0].tokens_before} tokens) fills max_seq_len 160: dropped"
        )
        fresh = small.chat()
        fresh.messages = [dict(message) for message in chat.messages]
        assert say(chat, "next", 4) == say(fresh, "next", 4)

    def test_trim_in_an_answer(self, small: mg.Engine) -> None:
        """The answer goes on behind fewer turns; what it says is one text."""
        chat = small.chat(system="keep me", on_full="trim")
        for text in ("one", "two"):
            say(chat, text, 10)
        pieces = list(chat.send("three", max_new_tokens=90, sampling=NEVER_ENDS))
        assert chat.completion is not None
        assert len(chat.completion.token_ids) == 90
        assert "".join(pieces) == chat.completion.text == small.tokenizer.decode(chat.completion.token_ids)
        assert [message["content"] for message in chat.messages] == ["keep me", "three", chat.completion.text]
        (trim,) = chat.trims
        assert (trim.turns, trim.tokens_before) == (2, 160)
        before = 160 - stats(chat).prompt_tokens
        prompt = small.tokenizer.apply_chat_template(chat.messages[:-1])
        ids = [*prompt, *chat.completion.token_ids]
        cold = small.generate(ids[: len(prompt) + before], 90 - before, sampling=NEVER_ENDS)
        assert cold.token_ids == chat.completion.token_ids[before:]
        # This turn alone fills what is left.
        list(chat.resume())
        assert chat.completion.finish_reason == "length"
        assert len(chat.messages) == 3

    def test_one_turn_that_cannot_be_trimmed(self, small: mg.Engine) -> None:
        chat = small.chat(system="s", on_full="trim")
        list(chat.send("one", sampling=NEVER_ENDS))
        assert chat.completion is not None
        assert chat.completion.finish_reason == "length"
        with pytest.raises(mg.PromptError, match=r"conversation has \d+ tokens and leaves no room(?!.*on_full)"):
            say(chat, "x" * 200)
        assert chat.num_turns == 1
        assert not chat.trims
        assert say(chat, "two", 4)
        assert chat.num_turns == 1

    def test_unknown(self, small: mg.Engine) -> None:
        with pytest.raises(mg.ConfigError, match="on_full: expected 'length' or 'trim', got 'stop'"):
            small.chat(on_full="stop")  # type: ignore[arg-type]


def test_logits_in_pieces(engine: mg.Engine) -> None:
    """The same rows as all at once, a piece at a time; the engine is busy from the first to the last."""
    ids = tiny_ids(tiny_config(), 700)
    for through in ("prefill", "decode"):
        pieces = engine.logits_pieces(ids, through=through)
        assert engine.generate([5], 1).token_ids  # nothing runs before the first piece
        first = next(pieces)
        with pytest.raises(mg.EngineError, match="busy"):
            engine.generate([5], 1)
        rows = [first, *pieces]
        assert max(map(len, rows)) == engine.capacity.logits_rows
        assert torch.equal(torch.cat(rows), engine.logits(ids, through=through))
        abandoned = engine.logits_pieces(ids, through=through)
        next(abandoned)
        abandoned.close()  # type: ignore[attr-defined]
        assert engine.generate([5], 3, reuse=True).stats.reused_tokens == 0
    with pytest.raises(mg.ConfigError, match="through"):
        engine.logits_pieces(ids, through="both")  # type: ignore[arg-type]
    with pytest.raises(mg.PromptError, match="expected token ids"):
        engine.logits_pieces([96])
