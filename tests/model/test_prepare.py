"""Which launches are made ahead, and how: on several threads, the first alone, faults and a stop heeded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.shapes import random_decoder
from monograph.kernels.triton_import import triton
from monograph.model import prepare as prepare_module
from monograph.model.prepare import Prepared, cache_folder, distinct_launches, passes, prepare, preparing, starting
from monograph.model.program import Launch, Program
from tests.bench.tiny import CONFIG

CPU = torch.device("cpu")
COMPILER: Any = triton.knobs.compilation  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and devices that do nothing; launches then run their references, which are the tests' own."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(prepare_module, "num_threads", lambda: 4)


def fake_program(*calls: Callable[[], None]) -> Program:
    """A program with one launch for each call, none like another."""

    def kernel(*_: object, **__: object) -> None:
        raise AssertionError("there is no GPU")

    def launch(number: int, call: Callable[[], None]) -> Launch:
        return Launch(f"layers.0.part{number}", kernel, lambda *_, **__: call(), (torch.empty(number),))

    launches = tuple(launch(number, call) for number, call in enumerate(calls))
    return Program(decode=launches[:2], prefill=launches[2:], prefill_logits=())


def compile_something(cache_hit: bool = False) -> None:
    """What Triton does when it has compiled a kernel, or found one."""
    COMPILER.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)


def test_every_launch_is_like_one_that_is_made() -> None:
    decoder = random_decoder(CONFIG, torch.float32, 64, CPU)
    assert CONFIG.num_layers == 2
    for pdl in (False, True):
        chosen = distinct_launches(decoder.program, pdl)
        names = {launch.name for launch, _ in chosen}
        assert {"layers.0.qkv", "layers.0.down", "head", "sample", "last_row", "logits"} <= names
        assert not [name for name in names if name.startswith("layers.1.")]
        made = {(launch.kernel, overlaps) for launch, overlaps in chosen}
        for launches in passes(decoder.program):
            assert {(launch.kernel, pdl and i > 0) for i, launch in enumerate(launches)} <= made
    # The first of a pass never overlaps: the norm that the logits begin with does so elsewhere.
    assert [overlaps for launch, overlaps in chosen if launch.kernel.__name__ == "norm_rows"] == [True, False]
    decoder.close()


def test_passes_leave_no_launch_out() -> None:
    decoder = random_decoder(CONFIG, torch.float32, 64, CPU)
    covered = {id(launch) for launches in passes(decoder.program) for launch in launches}
    for field in fields(Program):
        assert {id(launch) for launch in getattr(decoder.program, field.name)} <= covered, field.name
    decoder.close()


@pytest.mark.usefixtures("_no_gpu_needed")
def test_the_first_alone_and_the_rest_together() -> None:
    alone: list[int] = []
    barrier = threading.Barrier(4, timeout=20)  # broken, and the test red, unless four run at once

    def first() -> None:
        alone.append(threading.active_count())

    def together() -> None:
        barrier.wait()

    program = fake_program(together, together, first, together, together)  # a prefill pass comes first, from the third
    before = threading.active_count()
    done = prepare(program, CPU, pdl=False)
    assert len(done) == 5
    assert alone == [before]
    assert threading.active_count() == before


@pytest.mark.usefixtures("_no_gpu_needed")
def test_reports_and_what_was_compiled() -> None:
    heard: list[bool] = []
    before = COMPILER.listener
    COMPILER.listener = lambda *, cache_hit, **_: heard.append(cache_hit)
    try:
        program = fake_program(compile_something, lambda: None, lambda: compile_something(cache_hit=True))
        said: list[tuple[Prepared, int, int]] = []
        done = prepare(program, CPU, False, lambda *report: said.append(report))
        assert sorted(heard) == [False, True]  # a listener that was there hears as before
        compile_something()
        assert len(heard) == 3
    finally:
        COMPILER.listener = before
    assert [kernel for kernel, _, _ in said] == done
    assert [(number, count) for _, number, count in said] == [(1, 3), (2, 3), (3, 3)]
    assert {kernel.name: kernel.compiled for kernel in done} == {
        "kernel (part0)": True,
        "kernel (part1)": False,
        "kernel (part2)": False,
    }


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_kernel_that_fails_ends_it() -> None:
    def fail() -> None:
        raise ZeroDivisionError("does not compile")

    before = COMPILER.listener
    for program in (fake_program(*[fail] * 9), fake_program(*[lambda: None] * 8, fail)):
        with pytest.raises(ZeroDivisionError, match="does not compile"):
            prepare(program, CPU, False)
        with pytest.raises(ZeroDivisionError, match="does not compile"), preparing(program, CPU, False):
            pass
    assert COMPILER.listener is before


@pytest.mark.usefixtures("_no_gpu_needed")
def test_meanwhile() -> None:
    """What is done in the statement goes on beside it, and the kernels are there after it."""
    filled = threading.Event()

    def wait() -> None:
        assert filled.wait(20)

    with preparing(fake_program(wait, wait, wait), CPU, False) as found:
        filled.set()
    assert len(found) == 3


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_fault_meanwhile_leaves_the_rest_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a checkpoint is damaged, or Ctrl-C comes: what has not begun is not begun, what has is waited for."""
    begun: list[str] = []
    going, stops = threading.Event(), []

    def watched(*arguments: Any) -> list[Prepared]:
        stops.append(arguments[-1])
        return prepare(*arguments)

    def first() -> None:
        begun.append("first")
        going.set()
        assert stops[0].wait(20)

    def interrupted() -> None:
        with preparing(fake_program(other, other, first, *[other] * 5), CPU, False):
            assert going.wait(20)
            raise KeyboardInterrupt

    def other() -> None:
        begun.append("other")

    monkeypatch.setattr(prepare_module, "prepare", watched)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert begun == ["first"]
    assert threading.active_count() == before


def test_nothing_is_started_for_a_cpu() -> None:
    before = threading.active_count()
    with starting(CPU):
        assert threading.active_count() == before


def test_a_device_that_does_not_start_is_for_others_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def fail(*_: object, device: torch.device) -> None:
        started.append((device, threading.current_thread()))
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch, "empty", fail)
    with starting(torch.device("cuda", 7)):
        pass
    ((device, thread),) = started
    assert device == torch.device("cuda", 7)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    assert str(cache_folder()) == "/somewhere/else"
