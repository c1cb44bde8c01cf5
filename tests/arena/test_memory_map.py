from __future__ import annotations

import torch

from monograph.arena import Layout, SlotRequest, Span, plan

MAP = """\
lifetime  slot                     count  dtype     shape              each      total   share  first offset
------------------------------------------------------------------------------------------------------------
weight    embed                        1  bfloat16  1000 x 64     125.0 KiB  125.0 KiB  33.9 %           256
weight    layers.{i}.attn_norm         3  bfloat16  64                128 B      384 B   0.1 %       128,512
weight    layers.{i}.qkv               2  bfloat16  96 x 64        12.0 KiB   24.0 KiB   6.5 %       129,024
weight    layers.2.qkv                 1  float32   96 x 64        24.0 KiB   24.0 KiB   6.5 %       155,136
state     layers.{i}.k_cache           3  bfloat16  1 x 500 x 64   62.5 KiB  187.5 KiB  50.8 %       179,968
state     position                     1  int32     1                   4 B        4 B   0.0 %       372,736
scratch   x                            1  float32   64                256 B      256 B   0.1 %       373,248
scratch   prefill.q (prefill 1-2)      1  float32   8 x 64          2.0 KiB    2.0 KiB   0.5 %       373,760
scratch   prefill.h (prefill 5-6)      1  float32   8 x 128         4.0 KiB    4.0 KiB   1.1 %       373,760
------------------------------------------------------------------------------------------------------------
weight   173.4 KiB   47.0 %  177,536 B
state    187.5 KiB   50.8 %  192,004 B
scratch    4.2 KiB    1.2 %    4,352 B
guard      4.1 KiB    1.1 %    4,220 B
total    369.2 KiB  100.0 %  378,112 B"""


def model_like() -> Layout:
    requests = [SlotRequest("embed", (1000, 64), torch.bfloat16, "weight")]
    for i in range(3):
        requests += [
            SlotRequest(f"layers.{i}.attn_norm", (64,), torch.bfloat16, "weight"),
            SlotRequest(f"layers.{i}.qkv", (96, 64), torch.float32 if i == 2 else torch.bfloat16, "weight"),
            SlotRequest(f"layers.{i}.k_cache", (1, 500, 64), torch.bfloat16, "state"),
        ]
    requests += [
        SlotRequest("position", (1,), torch.int32, "state"),
        SlotRequest("x", (64,), torch.float32, "scratch"),
        SlotRequest("prefill.q", (8, 64), torch.float32, "scratch", Span("prefill", 1, 2)),
        SlotRequest("prefill.h", (8, 128), torch.float32, "scratch", Span("prefill", 5, 6)),
    ]
    return plan(requests)


def test_memory_map_text() -> None:
    assert str(model_like()) == MAP


def test_repr_is_one_short_line() -> None:
    assert repr(model_like()) == (
        "Layout(14 slots, 369.2 KiB: weight 173.4 KiB, state 187.5 KiB, scratch 4.2 KiB, guard 4.1 KiB)"
    )


def test_only_the_first_number_between_dots_is_the_layer() -> None:
    names = ["layers.0.expert.0.w", "layers.1.expert.0.w", "layers.0.expert.1.w", "v2.norm", "v3.norm", "7.b", "8.b"]
    lines = str(plan([SlotRequest(name, (4,), torch.float32, "weight") for name in names])).splitlines()
    listed = [tuple(line.split()[1:3]) for line in lines if line.startswith("weight") and "float32" in line]
    assert listed == [
        ("layers.{i}.expert.0.w", "2"),
        ("layers.0.expert.1.w", "1"),
        ("v2.norm", "1"),
        ("v3.norm", "1"),
        ("{i}.b", "2"),
    ]
