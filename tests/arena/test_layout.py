from __future__ import annotations

import copy
import json
import pickle
import time
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monograph.arena import Layout, Lifetime, Slot, SlotRequest, Span, UnknownSlotError, plan
from monograph.errors import ConfigError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32, torch.uint8]
LIFETIMES: list[Lifetime] = ["weight", "state", "scratch"]
any_lifetime: st.SearchStrategy[Lifetime] = st.sampled_from([*LIFETIMES, "scratch", "scratch"])  # mostly scratch


@st.composite
def spans(draw: st.DrawFn) -> Span:
    first = draw(st.integers(0, 9))
    return Span(draw(st.sampled_from(["decode", "prefill"])), first, draw(st.integers(first, 12)))


@st.composite
def request_lists(draw: st.DrawFn) -> list[SlotRequest]:
    requests = []
    for index in range(draw(st.integers(1, 14))):
        lifetime = draw(any_lifetime)
        requests.append(
            SlotRequest(
                name=f"slot.{index}",
                shape=tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))),
                dtype=draw(st.sampled_from(DTYPES)),
                lifetime=lifetime,
                span=draw(st.none() | spans()) if lifetime == "scratch" else None,
            )
        )
    return requests


patient = settings(deadline=None)  # a busy machine is no fault of the plan
guard_sizes = st.sampled_from([1, 16, 256, 257, 1000])


def live_together(a: SlotRequest, b: SlotRequest) -> bool:
    """Written from the definition, not through Span.overlaps: some launch needs both."""
    if a.span is None or b.span is None or a.span.pass_name != b.span.pass_name:
        return True
    return bool(set(range(a.span.first, a.span.last + 1)) & set(range(b.span.first, b.span.last + 1)))


@patient
@given(request_lists(), guard_sizes)
def test_every_slot_is_as_requested_aligned_and_inside(requests: list[SlotRequest], guard: int) -> None:
    layout = plan(requests, guard)
    assert sorted(layout.slots) == sorted(request.name for request in requests)
    for request in requests:
        slot = layout[request.name]
        assert (slot.name, slot.shape, slot.dtype) == (request.name, request.shape, request.dtype)
        assert (slot.lifetime, slot.span, slot.nbytes) == (request.lifetime, request.span, request.nbytes)
        assert slot.offset % 256 == 0
        assert guard <= slot.offset
        assert slot.end + guard <= layout.nbytes


@patient
@given(request_lists(), guard_sizes)
def test_slots_that_live_together_have_a_guard_between(requests: list[SlotRequest], guard: int) -> None:
    for a, b in combinations(plan(requests, guard).entries, 2):
        if live_together(a, b):
            assert a.end + guard <= b.offset or b.end + guard <= a.offset, (a, b)


@patient
@given(request_lists(), guard_sizes)
def test_guards_are_the_bytes_of_no_slot(requests: list[SlotRequest], guard: int) -> None:
    layout = plan(requests, guard)
    owners = torch.zeros(layout.nbytes, dtype=torch.int32)
    for slot in layout.entries:
        owners[slot.offset : slot.end] += 1
    for start, end in layout.guards:
        assert start < end
        owners[start:end] += 1000
    assert not (owners == 0).any()
    assert ((owners == 1000) | (owners < 1000)).all()  # no guard byte twice, none in a slot
    assert layout.guards[0] == (0, min(slot.offset for slot in layout.entries))
    assert layout.guards[-1][1] == layout.nbytes
    for slot in layout.entries:
        if slot.span is None:
            assert any(end == slot.offset and end - start >= guard for start, end in layout.guards), slot
            assert any(start == slot.end and end - start >= guard for start, end in layout.guards), slot


@patient
@given(request_lists(), guard_sizes)
def test_order_is_weights_state_scratch_each_as_requested(requests: list[SlotRequest], guard: int) -> None:
    layout = plan(requests, guard)
    for lifetime in ("weight", "state"):
        named = [request.name for request in requests if request.lifetime == lifetime]
        placed = sorted((slot for slot in layout.entries if slot.lifetime == lifetime), key=lambda slot: slot.offset)
        assert [slot.name for slot in placed] == named
        for before, after in pairwise(placed):
            assert after.offset - before.end < guard + 256  # next to each other: a guard, and alignment, no more
    rank = [LIFETIMES.index(slot.lifetime) for slot in sorted(layout.entries, key=lambda slot: slot.offset)]
    assert rank == sorted(rank)


@patient
@given(request_lists(), guard_sizes)
def test_size_lies_between_what_is_live_and_what_sharing_nothing_takes(requests: list[SlotRequest], guard: int) -> None:
    def total(chosen: list[SlotRequest]) -> int:
        return sum(-(-(request.nbytes + guard) // 256) * 256 for request in chosen)

    layout = plan(requests, guard)
    edge = -(-guard // 256) * 256
    alone = total([request for request in requests if request.span is None])
    assert layout.nbytes <= edge + total(requests)
    busiest = 0
    for pass_name in ("decode", "prefill"):
        members = [r for r in requests if r.span is not None and r.span.pass_name == pass_name]
        busiest += max(
            (total([r for r in members if r.span is not None and r.span.first <= t <= r.span.last]) for t in range(13)),
            default=0,
        )
    assert edge + alone + busiest <= layout.nbytes
    if all(r.span is None for r in requests):
        assert layout.nbytes == edge + total(requests)


@patient
@given(request_lists(), guard_sizes)
def test_planning_again_changes_nothing(requests: list[SlotRequest], guard: int) -> None:
    layout = plan(requests, guard)
    assert plan(requests, guard) == layout
    assert plan(layout.slots.values(), guard) == layout


@patient
@given(request_lists(), guard_sizes)
def test_bytes_by_lifetime_add_up(requests: list[SlotRequest], guard: int) -> None:
    layout = plan(requests, guard)
    sizes = layout.nbytes_by_lifetime()
    assert list(sizes) == ["weight", "state", "scratch", "guard"]
    assert sum(sizes.values()) == layout.nbytes
    assert sizes["guard"] == sum(end - start for start, end in layout.guards)
    for lifetime in ("weight", "state"):
        assert sizes[lifetime] == sum(r.nbytes for r in requests if r.lifetime == lifetime)


@patient
@given(request_lists(), guard_sizes)
def test_json_round_trip(requests: list[SlotRequest], guard: int) -> None:
    layout = plan(requests, guard)
    text = layout.to_json()
    assert Layout.from_json(text) == layout
    assert Layout.from_json(text).to_json() == text


def scratch(name: str, rows: int, first: int, last: int, pass_name: str = "prefill") -> SlotRequest:
    return SlotRequest(name, (rows, 64), torch.float32, "scratch", Span(pass_name, first, last))  # 256 bytes a row


def test_disjoint_spans_take_the_largest_only() -> None:
    layout = plan([scratch("a", 3, 0, 1), scratch("b", 10, 2, 3), scratch("c", 7, 4, 9)])
    assert {slot.offset for slot in layout.entries} == {256}
    assert layout.nbytes == 256 + 10 * 256 + 256


def test_two_small_ones_lie_inside_a_large_one_of_another_time() -> None:
    layout = plan([scratch("q", 3, 0, 1), scratch("k", 4, 0, 1), scratch("h", 10, 2, 3)])
    assert layout.nbytes == 256 + 10 * 256 + 256
    assert layout["k"].offset == layout["h"].offset == 256
    assert layout["q"].offset == layout["k"].end + 256


def test_overlapping_spans_and_other_passes_share_nothing() -> None:
    same = plan([scratch("a", 3, 0, 2), scratch("b", 10, 2, 3)])
    assert same.nbytes == 256 * (1 + 3 + 1 + 10 + 1)
    other = plan([scratch("a", 3, 0, 1, "decode"), scratch("b", 10, 2, 3, "prefill")])
    assert other.nbytes == 256 * (1 + 3 + 1 + 10 + 1)
    assert other["a"].end <= other["b"].offset


def test_first_fit_takes_the_lowest_gap() -> None:
    # Largest first: "big" at the bottom, "mid" above it; "low" fits where "big" was, before "mid".
    layout = plan([scratch("low", 2, 4, 5), scratch("mid", 6, 0, 5), scratch("big", 9, 0, 3)])
    assert [layout[name].offset for name in ("big", "mid", "low")] == [256, 256 * 11, 256]


def test_shared_bytes_count_once() -> None:
    layout = plan([scratch("a", 3, 0, 1), scratch("b", 10, 2, 3)])
    assert layout.nbytes_by_lifetime() == {"weight": 0, "state": 0, "scratch": 10 * 256, "guard": 512}


@pytest.mark.parametrize("guard", [0, -256, True, 1.5, None])
def test_a_guard_must_be_a_positive_int(guard: int) -> None:
    with pytest.raises(ConfigError, match="guard_nbytes"):
        plan([scratch("a", 1, 0, 0)], guard)


def test_duplicate_names_and_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="two slots have the name 'a'"):
        plan([scratch("a", 1, 0, 0), scratch("b", 1, 0, 0), SlotRequest("a", (1,), torch.int32, "weight")])
    with pytest.raises(ConfigError, match="at least one slot"):
        plan([])


def test_hundreds_of_gibibytes_plan_in_milliseconds() -> None:
    kv = (8, 131_072, 128)  # one layer's keys in bf16: 256 MiB
    requests = [SlotRequest(f"layers.{i}.{c}", kv, torch.bfloat16, "state") for i in range(400) for c in ("k", "v")]
    requests += [scratch(f"s.{i}", 1 + i % 7, i, i + 3) for i in range(200)]
    start = time.perf_counter()
    layout = plan(requests)
    elapsed = time.perf_counter() - start
    assert layout.nbytes_by_lifetime()["state"] == 800 * (256 << 20)  # 200 GiB
    last = layout["layers.399.v"]
    assert last.offset == 256 + 799 * ((256 << 20) + 256)
    assert all(type(slot.offset) is int for slot in layout.entries)
    assert elapsed < 1, f"{len(requests)} slots took {elapsed:.3f} s"  # 20 ms alone; the room is for busy machines


def small() -> Layout:
    return plan([SlotRequest("w", (5,), torch.float32, "weight"), SlotRequest("p", (1,), torch.int64, "state")])


@pytest.mark.parametrize(
    ("offsets", "nbytes", "fault"),
    [
        ((256, 768), 2048, None),
        ((256, 512), 2048, "nearer than 256"),
        ((256, 256), 2048, "nearer than 256"),
        ((0, 768), 2048, "leaves no guard"),
        ((256, 776), 2048, "not a multiple of 256"),
        ((256, 768), 1031, "leaves no guard"),
        ((256, 768), 1032, None),
    ],
)
def test_no_layout_exists_that_breaks_the_rules(offsets: tuple[int, int], nbytes: int, fault: str | None) -> None:
    entries = tuple(
        Slot(name=s.name, shape=s.shape, dtype=s.dtype, lifetime=s.lifetime, offset=offset)
        for s, offset in zip(small().entries, offsets, strict=True)
    )
    if fault is None:
        assert Layout(entries, 256, nbytes).nbytes == nbytes
    else:
        with pytest.raises(ConfigError, match=fault):
            Layout(entries, 256, nbytes)


def test_json_form() -> None:
    layout = plan([SlotRequest("position", (1,), torch.int32, "state"), scratch("x", 2, 0, 3)])
    assert json.loads(layout.to_json()) == {
        "format": "monograph-layout",
        "version": 1,
        "alignment": 256,
        "guard_nbytes": 256,
        "nbytes": 1536,
        "nbytes_by_lifetime": {"weight": 0, "state": 4, "scratch": 512, "guard": 1020},
        "slots": [
            {
                "name": "position",
                "lifetime": "state",
                "dtype": "int32",
                "shape": [1],
                "offset": 256,
                "nbytes": 4,
                "span": None,
            },
            {
                "name": "x",
                "lifetime": "scratch",
                "dtype": "float32",
                "shape": [2, 64],
                "offset": 768,
                "nbytes": 512,
                "span": {"pass_name": "prefill", "first": 0, "last": 3},
            },
        ],
    }
    assert len(layout.to_json().splitlines()) == 7 + len(layout) + 3  # a line for each slot, so that diffs read well


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 1', '"version": 2'),
        ('"monograph-layout"', '"other"'),
        ('"nbytes": 20', '"nbytes": 24'),
        ('"state": 8', '"state": 9'),
        ('"offset": 256', '"offset": 300'),
        ('"offset": 256', '"offset": "256"'),
        ('"dtype": "float32"', '"dtype": "float31"'),
        ('"dtype": "float32"', '"dtype": ["float32"]'),
        ('"span": null', '"span": {"first": 1}'),
        ('"lifetime": "weight", ', ""),
        ('"guard_nbytes": 256', '"guard_nbytes": "256"'),
        ('"slots": [', '"slots": [7, '),
        ("{", ""),
    ],
)
def test_json_that_contradicts_itself_is_refused(old: str, new: str) -> None:
    text = small().to_json()
    assert old in text
    with pytest.raises(ConfigError, match=r"layout|slot"):
        Layout.from_json(text.replace(old, new, 1))


def test_layout_is_a_frozen_mapping_of_names() -> None:
    layout = small()
    assert list(layout) == ["w", "p"]
    assert len(layout) == 2
    assert "w" in layout
    assert "q" not in layout
    assert layout["w"] is layout.slots["w"]
    with pytest.raises(TypeError):
        layout.slots["w"] = layout["p"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        layout.nbytes = 1  # type: ignore[misc]
    assert hash(layout) == hash(small())
    for twin in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert twin == layout
        assert twin.slots == layout.slots


def test_an_unknown_slot_lists_near_names() -> None:
    layout = plan([SlotRequest(f"layers.{i}.k_cache", (4,), torch.float32, "state") for i in range(12)])
    with pytest.raises(UnknownSlotError) as caught:
        layout["layers.3.k_cahce"]
    assert str(caught.value).startswith("no slot 'layers.3.k_cahce'; did you mean 'layers.3.k_cache'")
    assert isinstance(caught.value, KeyError)
    with pytest.raises(UnknownSlotError, match="the layout holds 12 other slots"):
        layout["zzz"]
