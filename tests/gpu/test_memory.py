"""The step touches what it may and nothing else: no stale byte, no neighbour, nothing at all while halted."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import monograph.arena.arena
from bench.shapes import SHAPES, caches, random_cache, random_decoder
from bench.step import Step
from monograph.model.decoder import Decoder
from monograph.model.state import Halted
from tests.gpu import tiny

pytestmark = pytest.mark.gpu

POISON = {"nan": float("nan"), "inf": float("inf"), "1e30": 1e30}
CANARY = 0xA5
MARGIN = 1 << 20  # bytes of canary on either side of an arena


def poison(decoder: Decoder, live: int, value: float) -> None:
    """Fill KV rows from ``live`` on and all scratch with a value, tokens that are not there yet with a wild id."""
    tiny.settle()
    for pair in caches(decoder.arena, tiny.CONFIG):
        for cache in pair:
            cache[:, live:].fill_(value)
    decoder.arena.view("tokens")[live + 1 :].fill_(2**30)
    for slot in decoder.arena.layout.entries:
        if slot.lifetime == "scratch":
            view = decoder.arena.view(slot.name)
            view.fill_(value if view.dtype.is_floating_point else 2**30)
    tiny.settle()


@pytest.mark.parametrize("value", POISON.values(), ids=POISON)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_poison_beyond_the_live_length_changes_nothing(
    dtype: str, value: float, request: pytest.FixtureRequest
) -> None:
    """Before every pass, at lengths with one split and with many, at the first row of a block and at the last."""
    decoder = request.getfixturevalue(dtype)
    for prompt_tokens in (1, 63, 127, 513, 1500):
        ids = tiny.random_ids(prompt_tokens)
        tiny.replay(decoder, ids, 6)
        clean = tiny.bits(decoder, prompt_tokens + 6)
        tiny.clean(decoder)
        tiny.begin(decoder, ids)
        for start in range(0, prompt_tokens, decoder.capacity.chunk_rows):
            poison(decoder, start, value)
            decoder.arena.view("tokens")[:prompt_tokens].copy_(torch.tensor(ids, dtype=torch.int32))
            tiny.prefill(decoder)
        for step in range(6):
            poison(decoder, prompt_tokens + step, value)
            tiny.decode(decoder)
        assert tiny.differing(clean, tiny.bits(decoder, prompt_tokens + 6)) == [], prompt_tokens


def test_the_poison_reaches_what_is_read(bf16: Decoder) -> None:
    """One live row of NaN is seen."""
    tiny.replay(bf16, tiny.random_ids(40), 2)
    poison(bf16, 41, float("nan"))
    tiny.decode(bf16)
    assert int(bf16.arena.view("halted")) == Halted.NOT_FINITE


@pytest.mark.parametrize("reason", [Halted.STOP, Halted.LENGTH, Halted.CANCELLED, Halted.NOT_FINITE])
def test_halted_replays_write_nothing(bf16: Decoder, reason: Halted) -> None:
    """Not a byte of the whole arena, nor of the memory that the host reads, whichever pass it is."""
    tiny.replay(bf16, tiny.random_ids(600), 10)
    bf16.arena.view("halted").fill_(int(reason))
    before, status = bf16.arena.fingerprint(), bf16.state.status()  # waits
    for _ in range(10):
        bf16.runner.decode()
        bf16.runner.prefill()
    assert bf16.arena.fingerprint() == before
    assert bf16.state.status() == status
    bf16.arena.view("halted").fill_(0)
    tiny.decode(bf16)
    assert bf16.arena.fingerprint() != before


def test_an_answer_that_ends_on_the_device_leaves_the_run_ahead_without_effect(bf16: Decoder) -> None:
    """Replays submitted past a stop token, past the limit and past a cancel do nothing: the rows after the end are as
    they were."""
    ids = tiny.random_ids(30)
    tokens = tiny.answer(bf16, ids, 40)
    stop = tokens[20]
    cases = [
        ((stop,), tiny.NEVER, False, 30 + tokens.index(stop), Halted.STOP),
        ((), 45, False, 44, Halted.LENGTH),
        ((), tiny.NEVER, True, 31, Halted.CANCELLED),
    ]
    for stop_ids, limit, cancelled, position, reason in cases:
        tiny.clean(bf16)
        tiny.begin(bf16, ids, limit=limit, stop_ids=stop_ids)
        tiny.prefill(bf16)
        if cancelled:
            bf16.state.cancel()
        for _ in range(60):
            bf16.runner.decode()
        tiny.settle()
        assert int(bf16.arena.view("position")) == position, reason
        assert bf16.state.status() == (position, reason)
        for pair in caches(bf16.arena, tiny.CONFIG):
            for cache in pair:
                assert cache[:, :position].any(dim=2).all(), reason
                assert not cache[:, position:].any(), reason


@pytest.fixture(scope="module")
def llama() -> Iterator[Step]:
    """The shape by which speed is judged."""
    config = SHAPES["llama-3.2-1b"]
    decoder = random_decoder(config, torch.bfloat16, 4096, tiny.DEVICE)
    random_cache(decoder.arena, config)
    step = Step(decoder)
    yield step
    vars(step).clear()
    decoder.close()
    gc.collect()


@pytest.mark.usefixtures("quiet")
def test_a_halted_replay_costs_at_most_a_fifth_of_a_step(llama: Step) -> None:
    assert str(llama.check(1024)) == "ok"
    timing = llama.time(1024, replays=96, alone=4)
    step_ms = sorted(timing.batched)[len(timing.batched) // 2]
    halted_ms = llama.halted_ms(12)
    assert halted_ms < step_ms / 5, (halted_ms, step_ms)


def test_graphs_and_decode_scratch_are_small(llama: Step) -> None:
    """Under 64 MiB for both; the graphs' part is what the driver has taken beyond the arena while one more is made."""
    layout = llama.arena.layout
    scratch = sum(slot.nbytes for slot in layout.entries if slot.lifetime == "scratch" and slot.span is None)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(tiny.DEVICE)[0]
    graph = llama.runner.capture(llama.program.decode)  # type: ignore[attr-defined]
    tiny.settle()
    taken = before - torch.cuda.mem_get_info(tiny.DEVICE)[0]
    del graph
    assert scratch + taken < 64 << 20, (scratch, taken)


def test_canaries_around_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena in the middle of a larger allocation, run from its first row to its last."""
    held: list[torch.Tensor] = []

    def between_canaries(nbytes: int, device: torch.device) -> torch.Tensor:
        held.append(torch.full((nbytes + 2 * MARGIN,), CANARY, dtype=torch.uint8, device=device))
        return held[0][MARGIN : MARGIN + nbytes]

    with monkeypatch.context() as patch:
        patch.setattr(monograph.arena.arena, "_allocate", between_canaries)
        decoder = tiny.make(max_seq_len=544)
    assert decoder.arena.data_ptr == held[0].data_ptr() + MARGIN
    for prompt_tokens in (1, 512, 520, 543):
        tiny.replay(decoder, tiny.random_ids(prompt_tokens), 544 - prompt_tokens)
        assert (
            int(decoder.arena.view("position")) == 544
        )  # the last step read the last token: there is no room for more
        decoder.arena.check_guards()
    whole, end = held[0], MARGIN + decoder.arena.layout.nbytes
    assert bool((whole[:MARGIN] == CANARY).all())
    assert bool((whole[end:] == CANARY).all())
    decoder.close()


def test_building_and_closing_leaks_nothing() -> None:
    """Five times: allocated bytes are exactly those of before, and the driver has as much free as after the first."""

    def build_and_close() -> tuple[int, int, int]:
        with tiny.made() as decoder:
            tiny.answer(decoder, tiny.random_ids(600), 20)
        gc.collect()
        torch.cuda.empty_cache()
        tiny.settle()
        free = torch.cuda.mem_get_info(tiny.DEVICE)[0]
        return torch.cuda.memory_allocated(tiny.DEVICE), torch.cuda.memory_reserved(tiny.DEVICE), free

    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(tiny.DEVICE), torch.cuda.memory_reserved(tiny.DEVICE)
    rounds = [build_and_close() for _ in range(5)]
    assert {found[0] for found in rounds} == {allocated}
    assert all(found[1] <= reserved for found in rounds)
    assert rounds[-1][2] >= rounds[0][2] - (4 << 20), [found[2] for found in rounds]
