"""Which tiles the decode kernels may have, and which are worth a try beside one: a closed set, small steps in it.

The kernels that tuning leaves alone are `embed`, which takes a quarter of a percent of a step, and `sample`, whose time
is in settings that a greedy step does not use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Tile = Mapping[str, int]
Tiles = Mapping[str, Tile]

TRIGGERS = (1, 2, 3)  # kernels/tile.py says what they mean
_WARPS = (1, 2, 4, 8, 16)
_MATRIX: dict[str, tuple[int, ...]] = {"BLOCK_N": (1, 2, 4, 8, 16, 32), "num_warps": _WARPS, "trigger": TRIGGERS}
_LINEAR = {**_MATRIX, "programs": (0, 1, 2, 3, 4)}  # times the multiprocessors; 0: one for each tile
_ATTENTION: dict[str, tuple[int, ...]] = {
    "BLOCK_T": (8, 16, 32, 64, 128, 256),
    "MIN_BLOCKS": (1, 2, 4, 8, 16, 32, 64),
    "COMBINE_STEP": (2, 4, 8, 16, 32),
    "NUM_STAGES": (1, 2, 3, 4, 5),
    "num_warps": _WARPS,
    "trigger": TRIGGERS,
}
# By use, the largest share of a step first (Llama 1B on an H200: 36, 19, 17, 16, 9 and 5 %).
SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "gate_up": _MATRIX,
    "down": _LINEAR,
    "head": _MATRIX,
    "attention": _ATTENTION,
    "qkv": _MATRIX,
    "o": _LINEAR,
}
# In the order of a layer: the next of each may start early when it triggers.
LAYER = ("qkv", "attention", "o", "gate_up", "down")
# Steps in two directions at once, where one alone changes the bytes in flight of a thread or the rows of a split.
_DIAGONALS = (("BLOCK_N", "num_warps"), ("BLOCK_T", "MIN_BLOCKS"))


def faults(tiles: object, multiprocessors: int) -> Iterator[str]:
    """What keeps tiles, from a file perhaps, from being given to kernels; nothing, if they can be.

    Args:
        tiles: By use.
        multiprocessors: Of the GPU.
    """
    if not isinstance(tiles, Mapping):
        yield "tiles are not an object"
        return
    for use, tile in tiles.items():
        if use not in SPACE:
            yield f"no kernel is tuned for {use!r}"
        elif not isinstance(tile, Mapping):
            yield f"the tile of {use} is not an object"
        else:
            for key, value in tile.items():
                allowed = _values(use, key, multiprocessors)
                if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
                    yield f"{use}: {key} is {value!r}, expected one of {', '.join(map(str, allowed)) or 'nothing'}"


def neighbours(use: str, tile: Tile, multiprocessors: int) -> list[dict[str, int]]:
    """Tiles a step away from one: each key to its next values, other triggers, and some pairs of keys.

    Args:
        use: Which kernel.
        tile: All keys of it.
        multiprocessors: Of the GPU.
    """
    found: list[dict[str, int]] = []
    for key in SPACE[use]:
        if key in tile:
            found += ({**tile, key: value} for value in _steps(use, key, tile[key], multiprocessors))
    for left, right in _DIAGONALS:
        if left in tile and right in tile and left in SPACE[use]:
            found += (
                {**tile, left: one, right: other}
                for one in _steps(use, left, tile[left], multiprocessors)
                for other in _steps(use, right, tile[right], multiprocessors)
            )
    return found


def joint_triggers(tiles: Tiles) -> Iterator[dict[str, Tile]]:
    """Tiles with the triggers of several kernels changed together: of the whole layer, and of two that follow another.

    A kernel's trigger decides when the next may begin, so that two changes can be worth what neither is.
    """
    uses = [use for use in LAYER if "trigger" in tiles.get(use, {})]
    pairs = [(uses[i - 1], uses[i]) for i in range(len(uses))] if len(uses) > 2 else []
    for group in (tuple(uses), *pairs):
        for trigger in TRIGGERS:
            changed = {**tiles, **{use: {**tiles[use], "trigger": trigger} for use in group}}
            if sum(changed[use] != tiles[use] for use in group) > 1:
                yield changed


def _values(use: str, key: str, multiprocessors: int) -> tuple[int, ...]:
    values = SPACE[use].get(key, ())
    return tuple(value * multiprocessors for value in values) if key == "programs" else values


def _steps(use: str, key: str, value: int, multiprocessors: int) -> tuple[int, ...]:
    values = _values(use, key, multiprocessors)
    if key in ("trigger", "programs"):  # no order in them
        return tuple(other for other in values if other != value)
    below, above = [v for v in values if v < value], [v for v in values if v > value]
    return (*below[-1:], *above[:1])
