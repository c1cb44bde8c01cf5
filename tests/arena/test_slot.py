from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from monograph.arena.slot import DTYPES, Slot, SlotRequest, Span, checked_int
from monograph.errors import ConfigError


def request(**changes: Any) -> SlotRequest:
    return SlotRequest(
        **{"name": "layers.0.qkv", "shape": (3, 5), "dtype": torch.bfloat16, "lifetime": "weight", **changes}
    )


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"name": ""}, "name"),
        ({"name": 7}, "name"),
        ({"name": "two words"}, "name"),
        ({"name": "layers..qkv"}, "name"),
        ({"name": "qkv\n"}, "name"),
        ({"shape": ()}, "shape"),
        ({"shape": 4}, "shape"),
        ({"shape": (4, 0)}, "shape"),
        ({"shape": (-1,)}, "shape"),
        ({"shape": (True,)}, "shape"),
        ({"shape": (2.0,)}, "shape"),
        ({"shape": ("2",)}, "shape"),
        ({"dtype": torch.bool}, "dtype"),
        ({"dtype": torch.complex64}, "dtype"),
        ({"dtype": "float32"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"lifetime": "cache"}, "lifetime"),
        ({"span": ("prefill", 0, 1), "lifetime": "scratch"}, "span"),
        ({"span": Span("prefill", 0, 1), "lifetime": "weight"}, "span"),
        ({"span": Span("prefill", 0, 1), "lifetime": "state"}, "span"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigError, match=argument):
        request(**changes)


def test_an_error_names_the_slot_and_the_dimension() -> None:
    with pytest.raises(ConfigError, match=r"slot 'layers\.0\.qkv': shape \(3, 0\): dimension 1 must be .* got 0"):
        request(shape=(3, 0))


@pytest.mark.parametrize(
    ("pass_name", "first", "last"), [("", 0, 1), (None, 0, 1), ("p", -1, 1), ("p", 2, 1), ("p", 0.0, 1), ("p", 0, True)]
)
def test_a_wrong_span_is_refused(pass_name: Any, first: Any, last: Any) -> None:
    with pytest.raises(ConfigError, match="Span"):
        Span(pass_name, first, last)


def test_any_sequence_of_integers_is_a_shape() -> None:
    dimension = torch.tensor(3)  # an integer by __index__ only
    assert request(shape=[dimension, 5]).shape == (3, 5)
    assert type(request(shape=[dimension, 5]).shape[0]) is int
    assert request(shape=torch.Size([3, 5])) == request()


@pytest.mark.parametrize("name", DTYPES)
def test_nbytes_is_what_torch_would_take(name: str) -> None:
    dtype = DTYPES[name]
    made = request(dtype=dtype)
    assert made.nbytes == torch.empty(3, 5, dtype=dtype).untyped_storage().nbytes()
    assert made.dtype_name == name
    assert getattr(torch, name) is dtype


def test_nbytes_does_not_overflow() -> None:
    shape = (np.int32(1_000_000), np.int32(1_000_000))
    assert request(shape=shape, dtype=torch.float32).nbytes == 4 * 10**12


@pytest.mark.parametrize(
    ("a", "b", "overlap"),
    [
        (Span("p", 0, 2), Span("p", 3, 5), False),
        (Span("p", 3, 5), Span("p", 0, 2), False),
        (Span("p", 0, 3), Span("p", 3, 5), True),  # both ends count
        (Span("p", 0, 9), Span("p", 3, 5), True),
        (Span("p", 4, 4), Span("p", 4, 4), True),
        (Span("p", 0, 2), Span("q", 3, 5), True),  # no common order
    ],
)
def test_spans_overlap(a: Span, b: Span, overlap: bool) -> None:
    assert a.overlaps(b) is overlap
    assert b.overlaps(a) is overlap


def test_only_scratch_with_disjoint_spans_may_share() -> None:
    early = request(lifetime="scratch", span=Span("prefill", 0, 1))
    late = request(lifetime="scratch", span=Span("prefill", 2, 3))
    without = request(lifetime="scratch")
    assert early.may_share(late)
    assert not early.may_share(early)
    assert not early.may_share(without)
    assert not without.may_share(late)
    assert not without.may_share(without)


def test_a_slot_is_a_request_with_a_place() -> None:
    slot = Slot(name="x", shape=(3, 5), dtype=torch.float32, lifetime="state", offset=512)
    assert (slot.offset, slot.nbytes, slot.end) == (512, 60, 572)
    with pytest.raises(ConfigError, match="dtype"):
        Slot(name="x", shape=(3, 5), dtype=torch.bool, lifetime="state", offset=512)
    with pytest.raises(ConfigError, match="offset"):
        Slot(name="x", shape=(3, 5), dtype=torch.float32, lifetime="state", offset=-256)
    with pytest.raises(AttributeError):
        slot.offset = 0  # type: ignore[misc]


def test_checked_int_keeps_the_minimum() -> None:
    assert checked_int(2, "n", 2) == 2
    with pytest.raises(ConfigError, match="n must be an int of at least 2, got 1"):
        checked_int(1, "n", 2)
