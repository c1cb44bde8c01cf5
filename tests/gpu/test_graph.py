"""A replay is the launches it was captured from, bit for bit, wherever and whenever it was captured."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch

import monograph.model.graph
from monograph.arena import GuardError, RebindError
from monograph.model.decoder import Decoder
from monograph.model.program import Launch
from tests.gpu import fresh_process as fresh
from tests.gpu import tiny
from tests.gpu.process import FreshProcess

pytestmark = pytest.mark.gpu

PROMPT = 700  # a whole chunk and part of another
STEPS = 40


def run_of(decoder: Decoder) -> tiny.Bits:
    tiny.replay(decoder, tiny.random_ids(PROMPT), STEPS, tiny.DRAWN)
    return tiny.bits(decoder, PROMPT + STEPS)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_eager_launches_equal_the_graph(dtype: str, request: pytest.FixtureRequest) -> None:
    """KV cache, logits, tokens and state, in bytes: text alone can hide a row that is off by one."""
    decoder = request.getfixturevalue(dtype)
    replayed = run_of(decoder)
    pdl = decoder.runner.pdl
    tiny.launch(decoder, tiny.random_ids(PROMPT), STEPS, pdl, tiny.DRAWN)
    assert tiny.differing(replayed, tiny.bits(decoder, PROMPT + STEPS)) == []


def test_dependent_launch_changes_no_bit(bf16: Decoder) -> None:
    assert bf16.runner.pdl == (torch.cuda.get_device_capability(tiny.DEVICE) >= (9, 0))
    replayed = run_of(bf16)
    tiny.launch(bf16, tiny.random_ids(PROMPT), STEPS, False, tiny.DRAWN)
    assert tiny.differing(replayed, tiny.bits(bf16, PROMPT + STEPS)) == []


def test_replays_repeat(bf16: Decoder) -> None:
    first = run_of(bf16)
    for _ in range(5):
        assert tiny.differing(first, run_of(bf16)) == []


def test_max_seq_len_changes_no_bit(bf16: Decoder) -> None:
    with tiny.made(max_seq_len=1024) as small:
        small_bits, bits = run_of(small), run_of(bf16)
        assert tiny.differing(small_bits, bits) == []


def test_processes_agree_b15_capture_is_the_first_gpu_work(bf16: Decoder, fresh_process: FreshProcess) -> None:
    """In a process of its own with an empty cache nothing is compiled while capturing, nor afterwards, and its bits are
    those of this process."""
    facts = fresh_process.facts()
    assert facts["compiled"]["before"] > 10
    assert facts["compiled"]["capturing"] == 0
    assert facts["compiled"]["after"] == 0
    tiny.replay(bf16, tiny.random_ids(fresh.PROMPT_TOKENS), fresh.STEPS, tiny.DRAWN)
    assert facts["digest"] == tiny.digest(tiny.bits(bf16, fresh.PROMPT_TOKENS + fresh.STEPS))


def test_capture_takes_less_than_a_second(bf16: Decoder) -> None:
    assert 0 < bf16.runner.capture_ms < 1000  # type: ignore[attr-defined]


def test_another_current_stream(bf16: Decoder) -> None:
    """Built and used while a stream of the caller's is current, which stays so."""
    side = torch.cuda.Stream(tiny.DEVICE)
    with torch.cuda.stream(side):
        with tiny.made() as decoder:
            found = run_of(decoder)
            tokens = tiny.answer(decoder, tiny.random_ids(20), 30)
        assert torch.cuda.current_stream() == side
    assert tiny.differing(found, run_of(bf16)) == []
    assert tokens == tiny.answer(bf16, tiny.random_ids(20), 30)


def test_threads_that_use_the_gpu_during_capture(bf16: Decoder) -> None:
    """Other threads multiply, allocate, copy and wait for their streams all the while. They draw nothing from PyTorch's
    default generator of the device, which PyTorch refuses to any thread while another one captures."""
    stop = threading.Event()
    faults: list[BaseException] = []
    rounds = [0, 0]

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(tiny.DEVICE)):
                while not stop.is_set():
                    a = torch.full((256 + rounds[number] % 64, 256), 0.5, device=tiny.DEVICE)
                    assert bool(torch.isfinite((a.T @ a).sum()).item())
                    a.cpu()
                    rounds[number] += 1
        except BaseException as fault:  # handed to the test
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while not faults and not all(rounds):  # a thread's first work on a GPU takes longer than a capture
        time.sleep(0.001)
    started = list(rounds)
    try:
        with tiny.made() as decoder:
            found = run_of(decoder)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert faults == []
    assert all(count > before for count, before in zip(rounds, started, strict=True))
    assert tiny.differing(found, run_of(bf16)) == []


def test_a_failed_capture_leaves_the_process_clean(bf16: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that raises in the middle of capture: its error comes out, and the next decoder is built as ever."""
    before = run_of(bf16)
    gc.collect()
    run = monograph.model.graph.run  # type: ignore[attr-defined]

    def failing(launches: tuple[Launch, ...], pdl: bool = False) -> None:
        if torch.cuda.is_current_stream_capturing():
            run(launches[:4], pdl)
            raise ZeroDivisionError("in the middle of capture")
        run(launches, pdl)

    allocated = torch.cuda.memory_allocated(tiny.DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(monograph.model.graph, "run", failing)
        with pytest.raises(ZeroDivisionError, match="in the middle of capture"):
            tiny.make()
    gc.collect()
    assert not torch.cuda.is_current_stream_capturing()
    with tiny.made() as decoder:
        assert tiny.differing(before, run_of(decoder)) == []
    assert tiny.differing(before, run_of(bf16)) == []
    assert torch.cuda.memory_allocated(tiny.DEVICE) == allocated


def test_b16_a_slot_cannot_be_re_bound(bf16: Decoder) -> None:
    other = torch.zeros_like(bf16.arena.view("final_norm"))
    for bind in (lambda: bf16.arena.__setitem__("final_norm", other), lambda: bf16.arena.bind("final_norm", other)):
        with pytest.raises(RebindError, match="copy the values into place"):
            bind()


def test_b16_values_copied_into_place_take_effect() -> None:
    """Other weights in the same slots: the replay computes what a decoder that was built with them computes."""
    with tiny.made() as decoder, tiny.made(seed=1) as other:
        first = run_of(decoder)
        for slot in decoder.arena.layout.entries:
            if slot.lifetime == "weight":
                decoder.arena.copy_(slot.name, other.arena.view(slot.name))
        assert tiny.differing(run_of(decoder), run_of(other)) == []
        assert "logits" in tiny.differing(first, run_of(decoder))


def test_debug_mode_finds_what_strays(bf16: Decoder) -> None:
    with tiny.made(debug=True) as decoder:
        assert tiny.differing(run_of(decoder), run_of(bf16)) == []
        view = decoder.arena.view("final_norm")
        data = view.data
        view.data = data.clone()  # B16: eager code would follow, captured launches would not
        with pytest.raises(RebindError, match="final_norm"):
            decoder.runner.decode()
        view.data = data
        decoder.runner.decode()
        slot = decoder.arena.layout["x"]
        whole = torch.empty(0, dtype=torch.uint8, device=tiny.DEVICE).set_(view.untyped_storage())
        whole[slot.end] += 1
        with pytest.raises(GuardError, match="'x'"):
            decoder.runner.decode()
        whole[slot.end] -= 1
        decoder.runner.prefill()
    wrong: Any = bf16.arena.view("final_norm")
    data = wrong.data
    wrong.data = data.clone()
    bf16.runner.decode()  # off by default, and free then: nobody looks
    wrong.data = data
    tiny.settle()
