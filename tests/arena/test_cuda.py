"""The arena on CUDA devices. The second device is used where there is one, and is the point of half of these."""

from __future__ import annotations

import pytest
import torch

from monograph.arena import Arena, GuardError, HostMemory, Layout, SlotRequest, device_free_nbytes, plan
from monograph.errors import CapacityError, ConfigError

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    """The last device, while the first stays current."""
    torch.cuda.set_device(0)
    return torch.device("cuda", torch.cuda.device_count() - 1)


def layout() -> Layout:
    return plan(
        [
            SlotRequest("norm", (5,), torch.bfloat16, "weight"),
            SlotRequest("k_cache", (2, 100, 64), torch.bfloat16, "state"),
            SlotRequest("position", (1,), torch.int32, "state"),
            SlotRequest("x", (77,), torch.float32, "scratch"),
        ]
    )


def test_state_is_zero_even_on_memory_that_was_in_use(device: torch.device) -> None:
    used = torch.full((layout().nbytes,), 7, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    del used
    with Arena(layout(), device) as arena:
        assert arena.data_ptr % 256 == 0
        assert arena["k_cache"].device == device
        assert not arena["k_cache"].any()
        assert not arena["position"].any()
        arena.check_guards()


def test_b18_the_current_device_is_neither_used_nor_changed(device: torch.device) -> None:
    before = torch.cuda.memory_allocated(0)
    with Arena(layout(), device) as arena, HostMemory(layout(), device) as host:
        arena.poison()
        arena.fingerprint()
        arena.check_guards()
        assert host.pinned
        assert torch.cuda.current_device() == 0
        allocated = layout().nbytes if device.index == 0 else 0
        assert torch.cuda.memory_allocated(0) - before <= -(-allocated // 512) * 512
        assert torch.cuda.memory_allocated(device) >= layout().nbytes


def test_b18_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="PyTorch sees"):
        Arena(layout(), f"cuda:{torch.cuda.device_count()}")


def test_fingerprint_equals_that_of_the_same_bytes_on_the_cpu(device: torch.device) -> None:
    names = ["norm", "k_cache"]
    values = torch.randn(2, 100, 64).bfloat16()
    digests = []
    for where in ("cpu", device):
        with Arena(layout(), where) as arena:
            arena.copy_("norm", torch.arange(5).bfloat16())
            arena.copy_("k_cache", values)
            digests.append(arena.fingerprint(names))
            arena["k_cache"][1, 99, 63] += 1
            assert arena.fingerprint(names) != digests[-1]
    assert digests[0] == digests[1]


def test_checks_wait_for_work_on_other_streams(device: torch.device) -> None:
    """A slow launch on a side stream writes last: poison must not be overtaken, a fingerprint must see it."""
    with Arena(layout(), device) as arena:
        ones = torch.ones(77, device=device)
        torch.cuda.synchronize(device)
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            arena["x"].copy_(ones)
        arena.poison()
        assert arena["x"].isnan().all()
        nan = arena.fingerprint(["x"])
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            arena["x"].copy_(ones)
        assert arena.fingerprint(["x"]) != nan


def test_guard_damage_is_found(device: torch.device) -> None:
    with Arena(layout(), device) as arena:
        slot = arena.layout["x"]
        whole = torch.empty(0, dtype=torch.uint8, device=device).set_(arena["x"].untyped_storage())
        whole[slot.end] = 0
        with pytest.raises(GuardError, match="guard after 'x', the last slot"):
            arena.check_guards()


def test_kv_tail_is_poisoned(device: torch.device) -> None:
    with Arena(layout(), device) as arena:
        arena.poison_kv_tail(["k_cache"], 63)
        assert not arena["k_cache"][:, :63].any()
        assert arena["k_cache"][:, 63:].isnan().all()
        arena.check_guards()


def test_close_gives_the_memory_back_to_the_driver(device: torch.device) -> None:
    big = plan([SlotRequest("k_cache", (8, 1 << 18, 128), torch.bfloat16, "state")])  # 512 MiB
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    with Arena(big, device):
        assert before - torch.cuda.mem_get_info(device)[0] >= big.nbytes
    assert torch.cuda.mem_get_info(device)[0] >= before - (32 << 20)


def test_more_than_is_free_is_refused_before_allocating(device: torch.device) -> None:
    free = device_free_nbytes(device)
    assert free is not None
    too_much = plan([SlotRequest("k_cache", (1, free // 128 + 1, 128), torch.uint8, "state")])
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    with pytest.raises(CapacityError, match=f"is free on {device}, .* short; hint"):
        Arena(too_much, device, hint="hint")
    assert torch.cuda.max_memory_allocated(device) == allocated


def test_memory_that_the_cache_holds_counts_as_free(device: torch.device) -> None:
    torch.cuda.empty_cache()
    before = device_free_nbytes(device)
    block = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    held = device_free_nbytes(device)
    del block
    after = device_free_nbytes(device)
    assert before is not None
    assert held is not None
    assert after is not None
    assert before - held >= 1 << 30
    assert after - held >= 1 << 30


def test_a_graph_replays_on_what_lies_at_the_addresses(device: torch.device) -> None:
    with Arena(layout(), device) as arena, torch.cuda.device(device):
        x = arena["x"]
        x.fill_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.mul_(2)
        graph.replay()
        arena.copy_("x", torch.full((77,), 5.0))
        graph.replay()
        assert x.tolist() == [10.0] * 77
        arena.check_addresses()
        del graph


def test_a_launch_reads_and_writes_host_memory_in_place(device: torch.device) -> None:
    triton = pytest.importorskip("triton")

    @triton.jit
    def _add_one_kernel(value_ptr, out_ptr):  # type: ignore[no-untyped-def]
        value = triton.language.load(value_ptr)
        triton.language.store(out_ptr, value + 1)

    with HostMemory(layout(), device) as host:
        numbers = host.numbers("position")
        numbers[0] = 41
        assert host["position"].is_pinned()
        with torch.cuda.device(device):
            _add_one_kernel[(1,)](host["position"], host["position"])
        torch.cuda.synchronize(device)
        assert numbers[0] == 42
        host.check_guards()
