"""Which tiles the decode kernels of a model take: tuned here and kept, shipped for this GPU, or the kernels' own.

The kernels' own rules (kernels/tile.py, and the wrappers of attention and gate_up) come from a joint search on an H200;
they are the fallback for every GPU and shape. ``SHIPPED`` holds what was measured to be better than the fallback
somewhere: it has neither entries for a GPU that nobody has measured nor copies of the fallback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from monograph.errors import ConfigError
from monograph.kernels.tile import default_tile, multiprocessors
from monograph.model.config import ModelConfig
from monograph.model.kept_tiles import kept_tiles, tiles_path
from monograph.model.program import Program
from monograph.model.tile_key import TileKey
from monograph.model.tile_space import SPACE, Tiles

Source = Literal["default", "shipped", "kept", "tuned"]
Tune = bool | Literal["auto", "off"]


@dataclass(frozen=True)
class ShippedTiles:
    """Tiles that come with the package.

    Attributes:
        gpu: A GPU's name as CUDA has it, or a generation ("sm_90") for all of it that have no entry of their own.
        dtype: Of weights and KV cache.
        shape: As ``shape_class`` has it.
        tiles: By use.
        measured: Where the measurement is: a file in bench/results.
    """

    gpu: str
    dtype: str
    shape: str
    tiles: Tiles
    measured: str


SHIPPED: tuple[ShippedTiles, ...] = ()


@dataclass(frozen=True)
class ChosenTiles:
    """Tiles and where they came from.

    Attributes:
        tiles: By use; a use that is missing takes the kernel's own.
        source: Of those that are there.
        where: A file, or "".
    """

    tiles: Tiles = field(default_factory=dict)
    source: Source = "default"
    where: str = ""

    def sources(self) -> dict[str, str]:
        """Where the tile of every tuned kernel comes from, by use."""
        return {use: self.source if use in self.tiles else "default" for use in SPACE}


def choose_tiles(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kept: bool = True,
    shipped: Sequence[ShippedTiles] | None = None,
) -> ChosenTiles:
    """Choose the tiles of a model: kept ones, else shipped ones, else none.

    Args:
        config: The model.
        dtype: Of weights and KV cache.
        device: Where it runs; on a CPU there are no tiles.
        kept: Whether to look for what tuning has kept.
        shipped: The table; that of the package when None.
    """
    if device.type != "cuda":
        return ChosenTiles()
    key = TileKey.of(config, dtype, device)
    tuned = kept_tiles(key, multiprocessors(device)) if kept else None
    if tuned is not None:
        return ChosenTiles(tuned, "kept", str(tiles_path(key)))
    entry = find_shipped(key, SHIPPED if shipped is None else shipped)
    return ChosenTiles() if entry is None else ChosenTiles(entry.tiles, "shipped", entry.measured)


def find_shipped(key: TileKey, table: Sequence[ShippedTiles]) -> ShippedTiles | None:
    """The entry for a key: that of the GPU's name before that of its generation."""
    for gpu in (key.gpu, key.gpu_class):
        for entry in table:
            if (entry.gpu, entry.dtype, entry.shape) == (gpu, key.dtype, key.shape):
                return entry
    return None


def current_tiles(program: Program) -> dict[str, dict[str, int]]:
    """The tile of every tuned decode kernel as the program launches it, by use: all keys of the closed set."""
    found: dict[str, dict[str, int]] = {}
    for launch in program.decode:
        if launch.use in SPACE and launch.use not in found:
            whole = default_tile(launch.kernel, *launch.args, **launch.constants) | dict(launch.tile)
            found[launch.use] = {key: value for key, value in whole.items() if key in SPACE[launch.use]}
    return found


def check_tune(tune: object) -> Tune:
    """Refuse what ``tune=`` of a load cannot be.

    Raises:
        ConfigError: None of the four.
    """
    if isinstance(tune, bool) or tune in ("auto", "off"):
        return tune
    raise ConfigError(f"tune: expected 'auto', True, False or 'off', got {tune!r}")


def only_changed(tiles: Tiles, start: Tiles) -> dict[str, Mapping[str, int]]:
    """The uses whose tile differs from where tuning began."""
    return {use: tile for use, tile in tiles.items() if tile != start.get(use)}
