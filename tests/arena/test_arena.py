from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from monograph.arena import Arena, SlotRequest, Span, UnknownSlotError, plan
from monograph.arena import arena as arena_module
from monograph.errors import CapacityError, ConfigError

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
KV = (2, 10, 4)  # [num_kv_heads, max_seq_len, head_dim]


def make(dtype: torch.dtype = torch.float32) -> Arena:
    return Arena(
        plan(
            [
                SlotRequest("weight", (33,), dtype, "weight"),
                SlotRequest("k_cache", KV, dtype, "state"),
                SlotRequest("v_cache", KV, dtype, "state"),
                SlotRequest("position", (1,), torch.int64, "state"),
                SlotRequest("x", (31,), dtype, "scratch"),
                SlotRequest("partial_out", KV, dtype, "scratch"),
                SlotRequest("q", (9,), dtype, "scratch", Span("prefill", 0, 1)),
                SlotRequest("h", (65,), dtype, "scratch", Span("prefill", 2, 3)),
            ]
        )
    )


def test_state_starts_as_zeros() -> None:
    arena = make()
    for name in ("k_cache", "v_cache", "position"):
        assert (arena[name] == 0).all()


def test_zeroing_on_a_device_that_does_not_hand_out_zeros_touches_state_only() -> None:
    layout = make().layout
    dirty = torch.full((layout.nbytes,), 7, dtype=torch.uint8)
    arena_module._zero_state(dirty, layout)
    first, last = layout["k_cache"], layout["position"]
    assert (dirty[first.offset : last.end] == 0).all()
    assert (dirty[: first.offset] == 7).all()
    assert (dirty[last.end :] == 7).all()
    without = plan([SlotRequest("w", (4,), torch.float32, "weight")])
    arena_module._zero_state(dirty.fill_(7), without)
    assert (dirty == 7).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_makes_scratch_nan_and_nothing_else(dtype: torch.dtype) -> None:
    arena = make(dtype)
    for name in arena.layout:
        arena[name].copy_(torch.ones(arena[name].shape))
    kept = arena.fingerprint(["weight", "k_cache", "v_cache", "position"])
    arena.poison()
    for name in ("x", "partial_out", "q", "h"):
        assert arena[name].float().isnan().all()
        assert (arena[name].view(torch.uint8) == 0xFF).all()
    assert arena.fingerprint(["weight", "k_cache", "v_cache", "position"]) == kept
    arena.check_guards()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("live", [0, 1, 9, 10])
def test_poison_kv_tail_spares_live_rows(dtype: torch.dtype, live: int) -> None:
    arena = make(dtype)
    arena["k_cache"].copy_(torch.ones(KV))
    arena["v_cache"].copy_(torch.ones(KV))
    arena.poison_kv_tail(["k_cache"], live)
    rows = arena["k_cache"].float()
    assert (rows[:, :live] == 1).all()
    assert rows[:, live:].isnan().all()
    assert (arena["v_cache"].float() == 1).all()
    arena.check_guards()


def test_poison_kv_tail_checks_everything_before_it_writes() -> None:
    arena = make()
    before = arena.fingerprint()
    for names, live, text in [
        (["k_cache", "x"], 3, "slot 'x' must be state"),
        (["k_cache", "partial_out"], 3, "slot 'partial_out' must be state .* it is scratch"),
        (["k_cache", "position"], 3, "slot 'position' must be state .* it is state"),
        (["k_cache"], 11, "live must be 0 to 10, the rows of slot 'k_cache', got 11"),
        (["k_cache"], -1, "live must be an int of at least 0"),
        (["k_cache"], 1.0, "live must be an int"),
    ]:
        with pytest.raises(ConfigError, match=text):
            arena.poison_kv_tail(names, live)  # type: ignore[arg-type]
    with pytest.raises(UnknownSlotError, match="k_cash"):
        arena.poison_kv_tail(["v_cache", "k_cash"], 3)
    assert arena.fingerprint() == before


def test_fingerprint_changes_exactly_when_bytes_do() -> None:
    arena = make()
    for name in arena.layout:
        arena[name].zero_()
    before = arena.fingerprint()
    assert len(before) == 32
    assert int(before, 16) >= 0
    assert arena.fingerprint() == before
    for name, slot in arena.layout.slots.items():
        raw = arena[name].view(torch.uint8).view(-1)
        for at in (0, slot.nbytes // 2, slot.nbytes - 1):
            raw[at] ^= 1
            assert arena.fingerprint() != before
            assert arena.fingerprint([name]) != make_zero([name])
            raw[at] ^= 1
            assert arena.fingerprint() == before


def make_zero(names: list[str]) -> str:
    arena = make()
    for name in arena.layout:
        arena[name].zero_()
    return arena.fingerprint(names)


def test_fingerprint_is_of_bytes_not_of_values() -> None:
    arena = make()
    arena["x"].fill_(0.0)
    zero = arena.fingerprint(["x"])
    arena["x"].fill_(-0.0)
    assert arena.fingerprint(["x"]) != zero
    arena["x"].fill_(float("nan"))
    assert arena.fingerprint(["x"]) == arena.fingerprint(["x"])


def test_fingerprint_takes_slots_in_any_order_and_leaves_others_out() -> None:
    arena = make()
    both = arena.fingerprint(["v_cache", "k_cache"])
    assert arena.fingerprint(("k_cache", "v_cache", "k_cache")) == both
    assert arena.fingerprint({"k_cache"}) == arena.fingerprint("k_cache") != arena.fingerprint(["v_cache"])
    arena["x"].fill_(1)
    assert arena.fingerprint(["v_cache", "k_cache"]) == both
    with pytest.raises(UnknownSlotError, match="k_cash"):
        arena.fingerprint(["k_cash"])
    assert arena.fingerprint([]) != both


def test_fingerprint_does_not_depend_on_the_pieces_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make()
    arena["h"].copy_(torch.arange(65))
    whole = arena.fingerprint()
    for piece in (1, 7, 64, 10_000):
        monkeypatch.setattr(arena_module, "_PIECE_NBYTES", piece)
        assert arena.fingerprint() == whole


def test_fingerprint_knows_the_form() -> None:
    """The same bytes as another shape or dtype are something else."""
    digests = set()
    for shape, dtype in [((4, 2), torch.float32), ((2, 4), torch.float32), ((4, 2), torch.int32)]:
        digests.add(Arena(plan([SlotRequest("s", shape, dtype, "state")])).fingerprint())
    assert len(digests) == 3


def test_a_plan_that_does_not_fit_is_refused_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make().layout
    monkeypatch.setattr(arena_module, "device_free_nbytes", lambda device: layout.nbytes)
    Arena(layout).close()
    monkeypatch.setattr(arena_module, "_allocate", lambda nbytes, device: pytest.fail("allocated"))
    monkeypatch.setattr(arena_module, "device_free_nbytes", lambda device: layout.nbytes - 1)
    with pytest.raises(CapacityError, match=r"1 B short; the longest max_seq_len that fits is 7$"):
        Arena(layout, hint="the longest max_seq_len that fits is 7")


def test_a_plan_larger_than_any_machine_is_refused() -> None:
    layout = plan([SlotRequest("k_cache", (8, 1 << 40, 128), torch.bfloat16, "state")])
    with pytest.raises(CapacityError, match=r"arena needs 2\.0 PiB"):
        Arena(layout)


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), torch.OutOfMemoryError("CUDA out of memory")])
def test_an_allocation_that_fails_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    layout = make().layout

    def fail(nbytes: int, device: torch.device) -> torch.Tensor:
        raise error

    monkeypatch.setattr(arena_module, "_allocate", fail)
    with pytest.raises(CapacityError, match="looked free on cpu, yet the allocation failed; a hint") as caught:
        Arena(layout, hint="a hint")
    assert caught.value.__cause__ is error


def test_a_mapping_that_the_kernel_refuses_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "device_free_nbytes", lambda device: None)
    for rows in (1 << 40, 1 << 60):  # more than the address space; more than a length can say
        layout = plan([SlotRequest("k_cache", (8, rows, 128), torch.bfloat16, "state")])
        with pytest.raises(CapacityError, match="arena needs"):
            Arena(layout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_mapping_is_private() -> None:
    """Shared pages would count as shm, and a forked process would write into its parent's."""
    arena = make()
    modes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode, *_ = line.split()
        start, end = (int(address, 16) for address in place.split("-"))
        if start <= arena.data_ptr < end:
            modes.append(mode)
    assert modes == ["rw-p"]


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_untouched_pages_of_a_large_arena_are_not_committed() -> None:
    """2.2 GiB of state, past every 32-bit offset: zero and guarded, at the price of the guards' pages."""
    shape = (1 << 10, 560, 1 << 10)
    layout = plan([SlotRequest(f"layers.{i}.k_cache", shape, torch.bfloat16, "state") for i in range(2)])
    assert layout.nbytes > 1 << 31
    Arena(make().layout)  # whatever the first use brings in is not counted
    before = resident_nbytes()
    with Arena(layout) as arena:
        arena.check_guards()
        assert arena["layers.1.k_cache"][-1, -1].tolist() == [0.0] * shape[-1]
        arena["layers.1.k_cache"][-1, -1, -1] = 1
        assert resident_nbytes() - before < 32 << 20
        assert arena.layout["layers.1.k_cache"].end > 1 << 31
        arena.check_guards()
