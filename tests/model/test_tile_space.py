"""The closed set of tiles: what is a step away, what a file may not say, and that the kernels' own tiles are in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.shapes import SHAPES
from monograph.arena import Arena, HostMemory
from monograph.kernels.tile import default_tile
from monograph.model.layout import Capacity, plan_host_layout, plan_layout
from monograph.model.program import build_program, with_tiles
from monograph.model.tile_space import LAYER, SPACE, TRIGGERS, faults, joint_triggers, neighbours
from monograph.model.tiles import current_tiles
from tests.bench.tiny import CONFIG

CPU = torch.device("cpu")
SMS = 132
QKV = {"BLOCK_N": 2, "num_warps": 4, "trigger": 1}


def test_neighbours_are_one_step_away() -> None:
    found = neighbours("qkv", QKV, SMS)
    assert len(found) == len({tuple(sorted(tile.items())) for tile in found})
    assert QKV not in found
    singles = {(key, tile[key]) for tile in found for key in tile if sum(tile[k] != QKV[k] for k in tile) == 1}
    singles = {(key, value) for key, value in singles if QKV[key] != value}
    steps = {("BLOCK_N", 1), ("BLOCK_N", 4), ("num_warps", 2), ("num_warps", 8), ("trigger", 2), ("trigger", 3)}
    assert singles == steps
    pairs = {(tile["BLOCK_N"], tile["num_warps"]) for tile in found if tile["BLOCK_N"] != 2 and tile["num_warps"] != 4}
    assert pairs == {(1, 2), (1, 8), (4, 2), (4, 8)}


def test_neighbours_end_at_the_edge() -> None:
    edge = {"BLOCK_N": 1, "num_warps": 16, "trigger": 3, "programs": 2 * SMS}
    found = neighbours("down", edge, SMS)
    assert {tile["programs"] for tile in found} == {0, SMS, 2 * SMS, 3 * SMS, 4 * SMS}
    assert min(tile["BLOCK_N"] for tile in found) == 1
    assert max(tile["num_warps"] for tile in found) == 16


def test_without_triggers_none_are_tried() -> None:
    """As where launches do not overlap."""
    tile = {"BLOCK_N": 2, "num_warps": 4}
    assert all(set(other) == set(tile) for other in neighbours("qkv", tile, SMS))
    assert not list(joint_triggers(dict.fromkeys(LAYER, tile)))


def test_every_neighbour_may_be_kept() -> None:
    tiles = {use: {key: values[1] for key, values in keys.items()} for use, keys in SPACE.items()}
    for use in ("down", "o"):
        tiles[use]["programs"] *= SMS
    assert not list(faults(tiles, SMS))
    for use, tile in tiles.items():
        for other in neighbours(use, tile, SMS):
            assert not list(faults({use: other}, SMS))


def test_joint_triggers_change_several_kernels() -> None:
    tiles = {use: dict(QKV) for use in (*LAYER, "head")}
    found = list(joint_triggers(tiles))
    assert {use: {**QKV, "trigger": 3} for use in LAYER} | {"head": QKV} in found
    for changed in found:
        assert changed["head"] == QKV
        assert sum(changed[use] != tiles[use] for use in LAYER) in (2, 5)
    # The last of a layer is followed by the first of the next.
    assert {**tiles, "down": {**QKV, "trigger": 2}, "qkv": {**QKV, "trigger": 2}} in found


@pytest.mark.parametrize(
    ("tiles", "said"),
    [
        (None, "not an object"),
        ({"embed": {}}, "no kernel is tuned for 'embed'"),
        ({"qkv": 3}, "the tile of qkv is not an object"),
        ({"qkv": {"BLOCK_N": 3}}, "qkv: BLOCK_N is 3, expected one of 1, 2, 4, 8"),
        ({"qkv": {"BLOCK_N": True}}, "BLOCK_N is True"),
        ({"qkv": {"BLOCK_N": 2.0}}, "BLOCK_N is 2.0"),
        ({"qkv": {"BLOCK_N": "2"}}, "BLOCK_N is '2'"),
        ({"qkv": {"depth": 2}}, "qkv: depth is 2, expected one of nothing"),
        ({"down": {"programs": 100}}, "programs is 100, expected one of 0, 132"),
        ({"head": {"trigger": 0}}, "trigger is 0"),
    ],
)
def test_faults(tiles: Any, said: str) -> None:
    assert said in next(faults(tiles, SMS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*SHAPES, "tiny"])
def test_the_kernels_own_tiles_are_in_the_set(name: str, dtype: torch.dtype) -> None:
    """So that what tuning keeps is never refused; and the kernels have every key that it may change."""
    config = replace(SHAPES.get(name, CONFIG), num_layers=1)
    capacity = Capacity.for_model(config, 64, dtype)
    with Arena(plan_layout(config, capacity), CPU) as arena, HostMemory(plan_host_layout(capacity), CPU) as host:
        program = build_program(config, capacity, arena, host)
        tiles = current_tiles(program)
        assert set(tiles) == set(SPACE)
        assert not list(faults(tiles, SMS))
        for use, tile in tiles.items():
            assert set(tile) == set(SPACE[use])
            assert tile["trigger"] in TRIGGERS
            assert neighbours(use, tile, SMS)
        changed = {"qkv": {"num_warps": 8}, "o": {"programs": SMS}}
        again = current_tiles(with_tiles(program, changed))
        assert again == tiles | {use: {**tiles[use], **tile} for use, tile in changed.items()}


def test_default_tile_launches_nothing_and_checks() -> None:
    config = CONFIG
    capacity = Capacity.for_model(config, 64, torch.float32)
    with Arena(plan_layout(config, capacity), CPU) as arena, HostMemory(plan_host_layout(capacity), CPU) as host:
        launch = next(one for one in build_program(config, capacity, arena, host).decode if one.use == "o")
        arena.view("x").fill_(3.0)
        assert default_tile(launch.kernel, *launch.args)["BLOCK_N"] >= 1
        assert bool((arena.view("x") == 3.0).all())
        with pytest.raises(ValueError, match="linear_add: "):
            default_tile(launch.kernel, torch.empty(1), *launch.args[1:])


def test_a_wrapper_that_asks_nobody_is_a_bug() -> None:
    def wrapper(tile: object) -> None:
        """Launches at once."""

    with pytest.raises(AssertionError, match="wrapper launched without choosing a tile"):
        default_tile(wrapper)
