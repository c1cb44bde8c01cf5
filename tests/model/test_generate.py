"""The loop around a machine that runs ahead of its reader: how much is in flight, what comes out, how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from monograph.errors import NumericsError
from monograph.model.generate import Answer, Chunk
from monograph.model.runner import raise_if_not_finite
from monograph.model.sampling import Sampling
from monograph.model.state import Halted, StepState
from monograph.model.stream import Stream
from monograph.model.text_stream import TextStream

PROMPT = 5
GREEDY = Sampling(temperature=0.0, seed=0).resolve({})


def token_at(position: int) -> int:
    """What the machine makes: another token everywhere."""
    return 1000 + position


class Machine:
    """A GPU in slow motion, runner and step state in one: it makes tokens only while the host waits.

    Args:
        made_in_a_wait: Tokens that a wait takes, or so many for each in turn: what a busy thread does to the host.
        not_finite: Position at which it meets a number that is not finite.
    """

    def __init__(self, made_in_a_wait: int | Sequence[int] = 1, run_ahead: int = 32, not_finite: int = 10**9) -> None:
        self.run_ahead, self.max_run_ahead, self.pdl = run_ahead, 4 * run_ahead, False
        self._turns = [made_in_a_wait] if isinstance(made_in_a_wait, int) else list(made_in_a_wait)
        self._not_finite = not_finite
        self.submitted = self.newest = 0
        self.halted = Halted.RUNNING
        self.rows: list[int] = []  # decode steps of each submission
        self.waits = self.idle = 0
        self.in_flight: list[int] = []  # at each submission, beyond the newest token made
        self.events: list[str] = []

    def begin(self, ids: Sequence[int], *_: object) -> None:
        self.submitted = len(ids) - 1

    def prefill(self) -> None:
        self.submitted += 1

    def decode(self, count: int = 1) -> None:
        assert count > 0
        self.submitted += count
        self.rows.append(count)
        self.in_flight.append(self.submitted - max(self.newest, PROMPT - 1))

    def wait(self, position: int) -> None:
        assert self.newest < position <= self.submitted, (self.newest, position, self.submitted)
        turn = self._turns[min(self.waits, len(self._turns) - 1)]
        self.waits += 1
        self.make(turn)
        raise_if_not_finite(self.newest, position, self.halted)
        assert self.newest >= position

    def make(self, count: int) -> None:
        """Run for as long as ``count`` steps take."""
        start = max(self.newest, PROMPT - 1)
        end = min(start + count, self.submitted, self._not_finite - 1)
        self.idle += start + count - end
        self.newest = max(end, self.newest)
        if end == self._not_finite - 1 < start + count:
            self.halted = Halted.NOT_FINITE

    def status(self) -> tuple[int, Halted]:
        return self.newest, self.halted

    def token(self, position: int) -> int:
        assert position <= self.newest
        return token_at(position)

    def cancel(self) -> None:
        self.events.append("cancel")

    def drain(self) -> None:
        self.events.append("drain")

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()


def answer_of(machine: Machine, new_tokens: int, stop_ids: Sequence[int] = ()) -> Answer:
    return Answer(
        machine,
        cast("StepState", machine),
        list(range(PROMPT)),
        reused=0,
        position_limit=PROMPT + new_tokens,
        chunk_rows=64,
        stop_ids=stop_ids,
        sampling=GREEDY,
    )


class Letters:
    """Text of a stream: a letter a token, and what may end it."""

    def __init__(self, stop_at: int = 10**9) -> None:
        self.text, self.stopped = "", False
        self._stop_at = stop_at

    def push(self, ids: Sequence[int]) -> str:
        (token,) = ids
        self.stopped = token == token_at(self._stop_at)
        piece = "" if self.stopped else chr(ord("a") + token % 26)
        self.text += piece
        return piece

    def finish(self) -> str:
        return ""


def stream_of(answer: Answer, text: Letters | None = None) -> tuple[Stream, list[bool]]:
    left: list[bool] = []
    letters = cast("TextStream", text or Letters())
    return Stream(answer, letters, lambda: None, lambda: None, lambda _, trusted: left.append(trusted)), left


def wanted(count: int) -> list[int]:
    return [token_at(PROMPT + i) for i in range(count)]


@pytest.mark.parametrize("new_tokens", [1, 2, 7, 8, 31, 32, 33, 34, 200])
@pytest.mark.parametrize("made_in_a_wait", [1, 3, 7, 40])
@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4, 32])
def test_every_token_comes_once_and_none_is_made_in_vain(new_tokens: int, made_in_a_wait: int, run_ahead: int) -> None:
    machine = Machine(made_in_a_wait, run_ahead)
    answer = answer_of(machine, new_tokens)
    assert list(answer.tokens()) == answer.token_ids == wanted(new_tokens)
    assert answer.finish_reason == "length"
    assert sum(machine.rows) == new_tokens - 1  # the prefill makes the first
    assert machine.events == ["cancel", "drain"]


def test_steps_are_submitted_in_rows() -> None:
    """32 at first, then eight whenever that many are missing, and at the end what is left."""
    machine = Machine(1)
    list(answer_of(machine, 101).tokens())
    assert machine.rows[:-1] == [32, *[8] * 8]
    assert sum(machine.rows) == 100
    assert max(machine.in_flight) <= 33  # and the token that is waited for
    assert machine.idle == 0


def test_waking_up_takes_one_row() -> None:
    """A busy thread that costs the host seven tokens a turn: one submission for each wait or two, never one a token."""
    machine = Machine(7)
    assert len(list(answer_of(machine, 1000).tokens())) == 1000
    assert machine.waits <= 1000 // 7 + 2
    assert len(machine.rows) <= machine.waits
    assert machine.idle <= 7  # past the end
    assert machine.run_ahead == 32
    assert max(machine.in_flight) <= 40


def test_more_is_run_ahead_where_that_was_too_little() -> None:
    """Waits of 40 tokens with 32 in flight leave the machine idle until there are more, and not again."""
    machine = Machine(40)
    assert list(answer_of(machine, 1000).tokens()) == wanted(1000)
    assert max(machine.in_flight) > 64
    lost = machine.idle
    assert lost < 120
    longer = Machine(40)
    list(answer_of(longer, 3000).tokens())
    assert longer.idle <= lost + 40  # what was lost was lost at the start, and past the end


def test_no_more_than_the_most() -> None:
    machine = Machine(1000)
    assert list(answer_of(machine, 3000).tokens()) == wanted(3000)
    assert max(machine.rows) <= machine.max_run_ahead
    assert max(machine.in_flight) <= machine.max_run_ahead + 1


def test_a_short_wait_leaves_it_as_it_is() -> None:
    machine = Machine([1] * 30 + [12] + [1] * 300)
    list(answer_of(machine, 300).tokens())
    assert max(machine.in_flight) <= 33


def test_a_stop_token_ends_it() -> None:
    machine = Machine(7)
    answer = answer_of(machine, 500, stop_ids=(token_at(PROMPT + 20),))
    assert list(answer.tokens()) == wanted(21)
    assert answer.finish_reason == "stop"
    assert machine.submitted <= PROMPT + 20 + 32 + 8
    assert machine.events == ["cancel", "drain"]
    assert not answer.ready()


def test_closing_cancels_at_once() -> None:
    """Nothing is submitted after it, and what is in flight is waited for."""
    machine = Machine(7)
    answer = answer_of(machine, 500)
    with closing(answer.tokens()) as tokens:
        for _ in range(10):
            next(tokens)
        rows = list(machine.rows)
    assert machine.rows == rows
    assert machine.submitted <= PROMPT + 10 + 32
    assert machine.events == ["cancel", "drain"]
    assert answer.token_ids == wanted(10)
    assert answer.cached_ids() == [*range(PROMPT), *wanted(10)][:-1]


def test_a_number_that_is_not_finite_is_met_where_it_came_up() -> None:
    """The tokens before it come, although the host learns of it earlier."""
    machine = Machine(7, not_finite=PROMPT + 25)
    answer = answer_of(machine, 500)
    got: list[int] = []
    with pytest.raises(NumericsError, match=f"token {PROMPT + 26} "):
        got.extend(answer.tokens())
    assert answer.token_ids == wanted(25)
    assert machine.events == ["cancel", "drain"]


def test_a_quick_reader_gets_a_token_a_piece() -> None:
    machine = Machine(1)
    stream, left = stream_of(answer_of(machine, 100))
    assert [chunk.token_ids for chunk in stream] == [[token] for token in wanted(100)]
    assert left == [True]


def test_a_slow_reader_gets_what_came_in_one_piece() -> None:
    machine = Machine(1)
    stream, _ = stream_of(answer_of(machine, 100))
    pieces: list[Chunk] = [next(stream)]
    machine.make(12)  # while the reader is away
    pieces += [next(stream), next(stream)]
    assert [len(piece.token_ids) for piece in pieces] == [1, 12, 1]
    assert [len(piece.text) for piece in pieces] == [1, 12, 1]
    assert [token for piece in pieces for token in piece.token_ids] == wanted(14)
    stream.close()
    completion = stream.completion
    assert (completion.token_ids, completion.finish_reason) == (wanted(14), "cancelled")
    assert completion.text == "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("made_in_a_wait", [1, 7, 40])
def test_a_stop_string_takes_no_token_after_it(made_in_a_wait: int) -> None:
    """However many tokens the machine has made beyond it, in the same piece too."""
    machine = Machine(made_in_a_wait)
    answer = answer_of(machine, 500)
    stream, left = stream_of(answer, Letters(stop_at=PROMPT + 17))
    got = [token for piece in stream for token in piece.token_ids]
    assert got == stream.completion.token_ids == wanted(18)
    assert stream.completion.finish_reason == "stop"
    assert len(stream.completion.text) == 17
    assert answer.cached_ids() == [*range(PROMPT), *wanted(18)][:-1]
    assert (machine.events, left) == (["cancel", "drain"], [True])


@pytest.mark.parametrize("made_in_a_wait", [1, 7, 40])
def test_a_stop_token_is_the_last_of_its_piece_and_no_text(made_in_a_wait: int) -> None:
    machine = Machine(made_in_a_wait)
    stream, _ = stream_of(answer_of(machine, 500, stop_ids=(token_at(PROMPT + 9),)))
    pieces = list(stream)
    assert [token for piece in pieces for token in piece.token_ids] == wanted(10)
    assert len("".join(piece.text for piece in pieces)) == 9


class Driver:
    """NVIDIA's driver: notes launches, and the contexts that are pushed and popped."""

    def __init__(self, context: int = 77, fails_at: int = 10**9) -> None:
        self.calls: list[Any] = []
        self._context, self._fails_at = context, fails_at
        self.launches = 0

    def cuCtxGetCurrent(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self._context
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.calls.append(("push", context.value))
        return 0

    def cuCtxPopCurrent_v2(self, out: Any) -> int:  # noqa: N802
        self.calls.append("pop")
        return 0

    def cuGraphLaunch(self, handle: Any, stream: Any) -> int:  # noqa: N802
        self.calls.append((handle.value, stream.value))
        self.launches += 1
        return 719 if self.launches == self._fails_at else 0


def replays_of(driver: Driver, **graph: Any) -> Any:
    from monograph.model.replay import Replays

    return Replays(cast("Any", SimpleNamespace(**graph)), cast("Any", SimpleNamespace(cuda_stream=5)), driver)


def test_a_row_of_replays_is_one_visit_to_the_driver() -> None:
    driver = Driver()
    replays = replays_of(driver, raw_cuda_graph_exec=lambda: 9)
    assert replays.keeps_lock
    replays(3)
    assert driver.calls == [("push", 77), (9, 5), (9, 5), (9, 5), "pop"]


def test_a_replay_that_fails_says_so_and_leaves_the_context() -> None:
    driver = Driver(fails_at=2)
    with pytest.raises(RuntimeError, match="CUDA error 719 from cuGraphLaunch"):
        replays_of(driver, raw_cuda_graph_exec=lambda: 9)(3)
    assert driver.calls == [("push", 77), (9, 5), (9, 5), "pop"]


@pytest.mark.parametrize("why", ["an older PyTorch", "no context"])
def test_what_cannot_be_launched_by_the_driver_is_by_pytorch(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    replayed: list[int] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    facts: dict[str, Any] = {"replay": lambda: replayed.append(1)}
    if why == "no context":
        facts["raw_cuda_graph_exec"] = lambda: 9
    driver = Driver(context=0)
    replays = replays_of(driver, **facts)
    assert not replays.keeps_lock
    replays(3)
    assert (len(replayed), driver.launches) == (3, 0)
