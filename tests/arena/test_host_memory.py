from __future__ import annotations

import gc
import weakref

import pytest
import torch

from monograph.arena import HostMemory, Layout, RebindError, SlotRequest, UnknownSlotError, plan
from monograph.errors import CapacityError, ConfigError, EngineError


def outbox() -> Layout:
    return plan(
        [
            SlotRequest("outbox_tokens", (100,), torch.int32, "state"),
            SlotRequest("outbox_status", (2,), torch.int32, "state"),
            SlotRequest("cancel", (1,), torch.int32, "state"),
            SlotRequest("seed", (1,), torch.int64, "state"),
            SlotRequest("logit", (1,), torch.float32, "state"),
        ]
    )


def test_slots_are_zero_aligned_host_tensors_at_fixed_addresses() -> None:
    memory = HostMemory(outbox())
    assert not memory.pinned
    for name, slot in memory.layout.slots.items():
        view = memory.view(name)
        assert (tuple(view.shape), view.dtype, view.device.type) == (slot.shape, slot.dtype, "cpu")
        assert view.data_ptr() % 256 == 0
        assert memory.view(name) is view
        assert (view == 0).all()
    memory.check_guards()
    with pytest.raises(RebindError):
        memory["cancel"] = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(UnknownSlotError, match="did you mean 'cancel'"):
        memory.view("cancle")


def test_numbers_are_the_same_bytes_as_the_view() -> None:
    memory = HostMemory(outbox())
    tokens, seed = memory.numbers("outbox_tokens"), memory.numbers("seed")
    assert (len(tokens), tokens.format, seed.format) == (100, "i", "q")
    memory.view("outbox_tokens")[99] = -7
    memory.view("seed").fill_(-(1 << 62))
    assert tokens[99] == -7
    assert seed[0] == -(1 << 62)
    memory.numbers("cancel")[0] = 1
    assert memory.view("cancel").item() == 1
    memory.check_guards()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_numbers_read_every_integer_dtype(dtype: torch.dtype) -> None:
    memory = HostMemory(plan([SlotRequest("n", (3, 2), dtype, "state")]))
    memory.view("n").copy_(torch.tensor([[1, 2], [3, 4], [5, torch.iinfo(dtype).max]]))
    assert memory.numbers("n").tolist() == [1, 2, 3, 4, 5, torch.iinfo(dtype).max]


def test_numbers_refuse_floats() -> None:
    with pytest.raises(ConfigError, match=r"slot 'logit' holds torch\.float32, expected an integer dtype"):
        HostMemory(outbox()).numbers("logit")


def test_numbers_keep_the_memory_after_close_and_let_it_go_with_them() -> None:
    memory = HostMemory(outbox())
    tokens = memory.numbers("outbox_tokens")
    tokens[5] = 42
    alive = weakref.ref(memory.view("outbox_tokens"))
    memory.close()
    gc.collect()
    assert alive() is not None
    assert tokens[5] == 42
    with pytest.raises(EngineError, match="HostMemory was closed"):
        memory.numbers("outbox_tokens")
    del tokens
    gc.collect()
    assert alive() is None


def test_memory_that_the_host_refuses_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*size: int, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nlong advice")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(CapacityError, match=r"on host memory; the system answers: CUDA error: out of memory$"):
        HostMemory(outbox())
