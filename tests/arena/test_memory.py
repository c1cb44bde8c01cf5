from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from monograph.arena import Arena, GuardError, Layout, RebindError, SlotRequest, UnknownSlotError, plan
from monograph.errors import ConfigError, EngineError, MonographError


def small_layout(guard_nbytes: int = 256) -> Layout:
    return plan(
        [
            SlotRequest("codes", (3,), torch.uint8, "weight"),  # an odd end: the guard begins at an odd byte
            SlotRequest("norm", (4, 5), torch.bfloat16, "weight"),
            SlotRequest("position", (1,), torch.int32, "state"),
            SlotRequest("x", (7,), torch.float32, "scratch"),
        ],
        guard_nbytes,
    )


@pytest.fixture
def arena() -> Arena:
    return Arena(small_layout())


def all_bytes(arena: Arena) -> torch.Tensor:
    """The whole allocation, guards included, through the storage that every view shares."""
    whole = torch.empty(0, dtype=torch.uint8).set_(arena.view("codes").untyped_storage())
    assert whole.numel() == arena.layout.nbytes
    return whole


def test_views_have_their_form_and_place(arena: Arena) -> None:
    assert arena.data_ptr % 256 == 0
    for name, slot in arena.layout.slots.items():
        view = arena.view(name)
        assert (tuple(view.shape), view.dtype, view.is_contiguous()) == (slot.shape, slot.dtype, True)
        assert view.data_ptr() == arena.data_ptr + slot.offset
        assert arena.view(name) is view
        assert arena[name] is view
        assert name in arena
    assert arena.addresses() == {name: arena[name].data_ptr() for name in arena.layout}
    assert "y" not in arena


def test_views_share_the_one_allocation(arena: Arena) -> None:
    assert {arena[name].untyped_storage().data_ptr() for name in arena.layout} == {arena.data_ptr}
    arena["norm"].copy_(torch.arange(20).view(4, 5))
    slot = arena.layout["norm"]
    seen = all_bytes(arena)[slot.offset : slot.end].view(torch.bfloat16)
    assert seen.tolist() == list(range(20))


def test_a_slot_can_be_written_outside_inference_mode_wherever_the_arena_was_made() -> None:
    with torch.inference_mode():
        arena = Arena(small_layout())
    arena["x"].fill_(1)
    with torch.inference_mode():
        arena["x"].add_(1)
    assert arena["x"].tolist() == [2.0] * 7


def test_an_unknown_name_lists_near_ones(arena: Arena) -> None:
    for ask in (arena.view, arena.__getitem__):
        with pytest.raises(UnknownSlotError, match="no slot 'positions'; did you mean 'position'"):
            ask("positions")


def test_copy_goes_into_place(arena: Arena) -> None:
    values = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True).T  # strided, and part of a graph
    address = arena["norm"].data_ptr()
    assert arena.copy_("norm", values) is arena["norm"]
    assert torch.equal(arena["norm"], values)
    assert arena["norm"].data_ptr() == address
    assert not arena["norm"].requires_grad


@pytest.mark.parametrize(
    "tensor", [torch.zeros(20, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(4, 5)]
)
def test_copy_refuses_another_form(arena: Arena, tensor: torch.Tensor) -> None:
    arena["norm"].fill_(3)
    with pytest.raises(ConfigError, match=r"slot 'norm' holds torch\.bfloat16 \[4, 5\], got torch"):
        arena.copy_("norm", tensor)
    assert (arena["norm"] == 3).all()


def test_b16_binding_another_tensor_is_refused_with_the_way_out(arena: Arena) -> None:
    other = torch.ones(7)
    before = arena["x"]
    with pytest.raises(RebindError, match=r"copy the values into place with copy_\('x', tensor\)"):
        arena["x"] = other
    with pytest.raises(RebindError, match="'x' stays at 0x"):
        arena.bind("x", other)
    with pytest.raises(UnknownSlotError):
        arena["y"] = other
    assert arena["x"] is before


@pytest.mark.parametrize(
    ("name", "move"),
    [
        ("x", lambda view: setattr(view, "data", view.data * 2)),
        ("x", lambda view: view.set_(torch.zeros(7))),
        ("x", lambda view: view.resize_(6)),
        ("norm", lambda view: view.t_()),
        ("norm", lambda view: view.as_strided_((4, 5), (1, 4))),
        ("norm", lambda view: setattr(view, "data", view.data.view(torch.float16))),
    ],
)
def test_b16_a_view_re_pointed_from_outside_is_found(
    arena: Arena, name: str, move: Callable[[torch.Tensor], object]
) -> None:
    arena.check_addresses()
    move(arena[name])
    with pytest.raises(RebindError, match=f"slot '{name}'"):
        arena.check_addresses()


def test_a_region_is_the_bytes_from_one_slot_to_another(arena: Arena) -> None:
    region = arena.region("norm", "position")
    first, last = arena.layout["norm"], arena.layout["position"]
    assert (region.dtype, region.data_ptr()) == (torch.uint8, arena["norm"].data_ptr())
    assert region.shape == (last.end - first.offset,)
    arena["norm"].fill_(2)
    arena["position"].fill_(7)
    kept = region.clone()
    arena["norm"].zero_()
    arena["position"].zero_()
    region.copy_(kept)
    assert (arena["norm"] == 2).all()
    assert arena["position"].item() == 7
    arena.check_guards()
    assert arena.region("x", "x").numel() == arena.layout["x"].nbytes


def test_a_region_must_run_forward_between_slots_there_are(arena: Arena) -> None:
    with pytest.raises(ConfigError, match="expected last to lie after 'position', got 'norm'"):
        arena.region("position", "norm")
    with pytest.raises(UnknownSlotError, match="positions"):
        arena.region("norm", "positions")


def test_guards_read_as_nan_and_are_whole_at_the_start(arena: Arena) -> None:
    arena.check_guards()
    for start, end in arena.layout.guards:
        even = all_bytes(arena)[start + start % 2 : end - end % 2]
        for dtype in (torch.float16, torch.bfloat16):
            assert even.view(dtype).isnan().all()
        start4, end8 = start + -start % 8, end - end % 8
        for dtype in (torch.float32, torch.float64):
            assert all_bytes(arena)[start4:end8].view(dtype).isnan().all()


@pytest.mark.parametrize("value", [0x00, 0xFF, 0xFE, 0x7F])
def test_every_guard_byte_is_watched(arena: Arena, value: int) -> None:
    """Any two neighbouring bytes: 0xFF and 0xFE are each what every other byte holds already."""
    memory = all_bytes(arena)
    for start, end in arena.layout.guards:
        for at in range(start, end - 1):
            kept = memory[at : at + 2].clone()
            memory[at : at + 2] = value
            with pytest.raises(GuardError):
                arena.check_guards()
            memory[at : at + 2] = kept
    arena.check_guards()


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (0, r"guard before 'codes', the first slot, was written: first at byte 0 \(256 bytes before 'codes'; "),
        (255, r"guard before 'codes', .* byte 255 \(1 bytes before 'codes'; expected 0xff, found 0x05\)"),
        (259, r"between 'codes' and 'norm' .* byte 259 \(0 bytes past the end of 'codes', 509 bytes before 'norm'; "),
        (767, r"between 'codes' and 'norm' .* byte 767 \(508 bytes past the end of 'codes', 1 bytes before 'norm'; "),
        (808, r"between 'norm' and 'position' .* byte 808 \(0 bytes past the end of 'norm'"),
        (1284, r"between 'position' and 'x' .* byte 1,284 .*expected 0xfe, found 0x05\), 1 damaged"),
        (2303, r"guard after 'x', the last slot, .* byte 2,303 \(.* bytes past the end of 'x'; expected"),
    ],
)
def test_damage_is_named_with_its_exact_place(arena: Arena, at: int, text: str) -> None:
    assert arena.layout.nbytes == 2304
    all_bytes(arena)[at] = 5
    with pytest.raises(GuardError, match=text):
        arena.check_guards()


def test_the_first_damage_is_named_and_all_of_it_counted(arena: Arena) -> None:
    memory = all_bytes(arena)
    memory[1290:1300] = 0
    memory[2300] = 0
    with pytest.raises(GuardError, match=r"between 'position' and 'x' .* byte 1,290 .* 11 damaged bytes") as caught:
        arena.check_guards()
    assert isinstance(caught.value, MonographError)


def test_writing_whole_slots_damages_nothing(arena: Arena) -> None:
    for name in arena.layout:
        arena[name].view(torch.uint8).fill_(0)
    arena.check_guards()


@pytest.mark.parametrize("guard_nbytes", [1, 255, 257, 4096])
def test_guards_of_any_size(guard_nbytes: int) -> None:
    arena = Arena(small_layout(guard_nbytes))
    arena.check_guards()
    all_bytes(arena)[arena.layout["norm"].offset - 1] ^= 1
    with pytest.raises(GuardError, match="1 bytes before 'norm'"):
        arena.check_guards()


def test_use_after_close_raises_and_close_is_idempotent(arena: Arena) -> None:
    assert not arena.closed
    arena.close()
    arena.close()
    assert arena.closed
    uses: list[Callable[[], object]] = [
        lambda: arena.view("x"),
        lambda: arena["x"],
        lambda: arena.view("no such slot"),
        lambda: arena.data_ptr,
        lambda: arena.region("norm", "x"),
        arena.addresses,
        arena.check_addresses,
        arena.check_guards,
        arena.poison,
        arena.fingerprint,
        lambda: arena.poison_kv_tail(["x"], 0),
        lambda: arena.copy_("x", torch.zeros(7)),
        lambda: arena.bind("x", torch.zeros(7)),
        lambda: arena.__setitem__("x", torch.zeros(7)),
        arena.__enter__,
    ]
    for use in uses:
        with pytest.raises(EngineError, match="Arena was closed"):
            use()
    assert arena.layout == small_layout()
    assert "closed" in repr(arena)


def test_close_gives_the_memory_back() -> None:
    with Arena(small_layout()) as arena:
        alive = weakref.ref(arena["x"].untyped_storage())
        views = [weakref.ref(arena[name]) for name in arena.layout]
        assert all(view() is not None for view in views)
    gc.collect()
    assert arena.closed
    assert alive() is None
    assert all(view() is None for view in views)


def test_repr_is_short(arena: Arena) -> None:
    assert repr(arena) == f"Arena({arena.layout!r}, device='cpu', {arena.data_ptr:#x})"
