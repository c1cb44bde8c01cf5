"""Which tiles a model takes: kept before shipped before the kernels' own; and files that cannot be believed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import monograph as mg
from bench.shapes import SHAPES, random_decoder
from monograph.model import tiles as tiles_module
from monograph.model import tune_step
from monograph.model.cache_folder import tiles_folder
from monograph.model.kept_tiles import FORMAT, keep_tiles, kept_tiles, tiles_path
from monograph.model.prepare import distinct_launches
from monograph.model.program import with_tiles
from monograph.model.tile_key import TileKey, kernels_digest, shape_class
from monograph.model.tile_space import SPACE, faults
from monograph.model.tiles import SHIPPED, ShippedTiles, check_tune, choose_tiles, find_shipped
from tests.bench.tiny import CONFIG
from tests.engines import tiny_engine

SMS = 132
KEY = TileKey("NVIDIA H200", "9.0", "3.9.0", "0123456789abcdef", "bfloat16", shape_class(CONFIG))
TILES = {"qkv": {"BLOCK_N": 4, "num_warps": 8, "trigger": 2}, "down": {"programs": 2 * SMS}}
CUDA: Any = SimpleNamespace(type="cuda")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tiles"


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that answers to its name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(tiles_module, "multiprocessors", lambda device: SMS)


def test_what_is_kept_is_found_again(folder: Path) -> None:
    assert kept_tiles(KEY, SMS) is None
    path = keep_tiles(KEY, TILES, {"gain": 0.02})
    assert path.parent == folder
    assert kept_tiles(KEY, SMS) == TILES
    assert json.loads(path.read_text())["measured"] == {"gain": 0.02}
    keep_tiles(KEY, {"o": {"BLOCK_N": 2}}, {})
    assert kept_tiles(KEY, SMS) == {"o": {"BLOCK_N": 2}}
    assert list(folder.iterdir()) == [path]  # nothing left of what was written on the way


@pytest.mark.parametrize("name", list(asdict(KEY)))
def test_other_keys_find_nothing(name: str) -> None:
    keep_tiles(KEY, TILES, {})
    assert kept_tiles(replace(KEY, **{name: "another"}), SMS) is None


def test_a_write_that_fails_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    path = keep_tiles(KEY, TILES, {})

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(mg.ConfigError, match=r"cannot be kept in .*: No space left on device; set MONOGRAPH_CACHE_DIR"):
        keep_tiles(KEY, {}, {})
    assert kept_tiles(KEY, SMS) == TILES
    assert list(folder.iterdir()) == [path]


def damage(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return write


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_text(path.read_text()[:-40]), "not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "UTF-8"),
        (lambda path: path.write_text("[]"), "expected a JSON object"),
        (lambda path: path.write_text("{}"), "its format is None, expected 1"),
        (damage(lambda record: record.update(format=FORMAT + 1)), "its format is 2"),
        (damage(lambda record: record["key"].update(gpu="NVIDIA A100")), "another GPU"),
        (damage(lambda record: record.pop("key")), "another GPU"),
        (damage(lambda record: record.pop("tiles")), "not an object"),
        (damage(lambda record: record["tiles"]["qkv"].update(BLOCK_N=1 << 20)), "BLOCK_N is 1048576"),
        (damage(lambda record: record["tiles"].update(sample={})), "no kernel is tuned for 'sample'"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_aloud(
    spoil: Callable[[Path], object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = keep_tiles(KEY, TILES, {})
    spoil(path)
    spoiled = path.read_bytes()
    with caplog.at_level(logging.WARNING, "monograph"):
        assert kept_tiles(KEY, SMS) is None
    (message,) = caplog.messages
    assert message.startswith(f"tuned tiles in {path} are ignored: ")
    assert said in message
    assert path.read_bytes() == spoiled  # it is the user's
    keep_tiles(KEY, TILES, {})
    assert kept_tiles(KEY, SMS) == TILES


def test_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tiles_folder() == tmp_path / "cache" / "tiles"
    monkeypatch.delenv("MONOGRAPH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert tiles_folder() == Path("/x/monograph/tiles")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, as the rule says
    monkeypatch.setenv("HOME", "/home/me")
    assert tiles_folder() == Path("/home/me/.cache/monograph/tiles")


def test_no_place_to_keep_tiles_is_no_fault_of_a_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user without a home folder, as in many containers, and a folder that cannot be looked into."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", "/" + "x" * 300)
    assert kept_tiles(KEY, SMS) is None
    assert "are ignored: File name too long" in caplog.text
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", "~nobody-of-that-name")
    assert kept_tiles(KEY, SMS) is None
    with pytest.raises(mg.ConfigError, match=r"tuned tiles have no place: .*MONOGRAPH_CACHE_DIR"):
        keep_tiles(KEY, TILES, {})


@pytest.mark.usefixtures("_gpu")
def test_tuning_does_not_begin_where_it_could_not_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuned: list[object] = []
    monkeypatch.setattr(tune_step, "tune_decoder", lambda *arguments: tuned.append(arguments))
    (tmp_path / "file").touch()
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path / "file"))
    decoder: Any = SimpleNamespace(
        config=CONFIG, capacity=SimpleNamespace(dtype=torch.bfloat16), arena=SimpleNamespace(device=CUDA)
    )
    with pytest.raises(mg.ConfigError, match=r"cannot be kept in .*file/tiles: .*set MONOGRAPH_CACHE_DIR"):
        tune_step.tune_and_keep(decoder)
    assert tuned == []


def test_file_names_are_plain_and_differ_by_key() -> None:
    name = tiles_path(KEY).name
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
    assert name.startswith("nvidia-h200-hidden48-")
    assert tiles_path(replace(KEY, triton="3.9.1")).name != name


def test_the_key_is_of_what_kernels_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither depth nor length, which must not decide the bits."""
    assert shape_class(replace(CONFIG, num_layers=7, max_position_embeddings=64)) == shape_class(CONFIG)
    others: list[dict[str, Any]] = [
        {"hidden_size": 96},
        {"intermediate_size": 96},
        {"num_q_heads": 12},
        {"num_kv_heads": 3},
        {"head_dim": 16},
        {"vocab_size": 212},
        {"attention_bias": True},
        {"mlp_bias": True},
    ]
    shapes = {shape_class(replace(CONFIG, **other)) for other in others} | {shape_class(CONFIG)}
    assert len(shapes) == len(others) + 1
    assert len(kernels_digest()) == 16
    assert kernels_digest() == kernels_digest()


@pytest.mark.usefixtures("_gpu")
def test_kept_before_shipped_before_own() -> None:
    shipped = ShippedTiles("sm_90", "bfloat16", KEY.shape, {"o": {"BLOCK_N": 8}}, "bench/results/a.json")
    arguments = (CONFIG, torch.bfloat16, CUDA)
    chosen = choose_tiles(*arguments, shipped=())
    assert (chosen.tiles, chosen.source, chosen.where) == ({}, "default", "")
    assert chosen.sources() == dict.fromkeys(SPACE, "default")
    chosen = choose_tiles(*arguments, shipped=[shipped])
    assert (chosen.tiles, chosen.where) == (shipped.tiles, "bench/results/a.json")
    assert chosen.sources() == dict.fromkeys(SPACE, "default") | {"o": "shipped"}
    path = keep_tiles(TileKey.of(*arguments), TILES, {})
    chosen = choose_tiles(*arguments, shipped=[shipped])
    assert (chosen.tiles, chosen.source, chosen.where) == (TILES, "kept", str(path))
    assert choose_tiles(*arguments, shipped=[shipped], kept=False).source == "shipped"
    assert choose_tiles(CONFIG, torch.float16, CUDA, shipped=[shipped]).source == "default"
    assert choose_tiles(CONFIG, torch.bfloat16, torch.device("cpu"), shipped=[shipped]).tiles == {}


def test_the_name_of_a_gpu_before_its_generation() -> None:
    entries = [
        ShippedTiles(gpu, "bfloat16", KEY.shape, {}, "") for gpu in ("sm_90", "NVIDIA H200", "NVIDIA H100", "sm_100")
    ]
    assert find_shipped(KEY, entries) is entries[1]
    assert find_shipped(replace(KEY, gpu="NVIDIA GH200"), entries) is entries[0]
    assert find_shipped(replace(KEY, gpu="NVIDIA GH200", capability="8.0"), entries) is None
    assert find_shipped(replace(KEY, shape="another"), entries) is None


def test_shipped_entries_are_usable_and_say_what_measured_them() -> None:
    for entry in SHIPPED:
        assert not list(faults(entry.tiles, SMS)), entry
        assert entry.shape in {shape_class(config) for config in SHAPES.values()}, entry
        assert (Path(__file__).parents[2] / entry.measured).is_file(), entry
    assert len({(entry.gpu, entry.dtype, entry.shape) for entry in SHIPPED}) == len(SHIPPED)


def test_tiles_reach_the_launches_of_their_kernel_alone() -> None:
    decoder = random_decoder(CONFIG, torch.float32, 64, torch.device("cpu"))
    tiles = {"qkv": {"BLOCK_N": 4}, "head": {"num_warps": 2}, "down": {"BLOCK_N": 8}}
    program = with_tiles(decoder.program, tiles)
    assert [launch.tile for launch in program.decode if launch.use == "qkv"] == [{"BLOCK_N": 4}] * 2
    assert [launch.tile for launch in program.decode if launch.use == "down"] == [{"BLOCK_N": 8}] * 2
    assert not [launch for launch in program.decode if launch.tile and launch.use not in tiles]
    # The head is in prefill too; the qkv there is another kernel.
    assert [launch.use for launch in program.prefill if launch.tile] == ["head"]
    assert not [launch for launch in program.prefill_logits if launch.tile]
    # A kernel is made ready in the tile in which it is launched.
    made = {launch.use: launch.tile for launch, _ in distinct_launches(program, False) if launch.tile}
    assert made == tiles
    decoder.close()


def test_a_launch_passes_its_tile_on() -> None:
    decoder = random_decoder(CONFIG, torch.float32, 64, torch.device("cpu"))
    asked: list[dict[str, Any]] = []

    def kernel(*_: object, **options: Any) -> None:
        asked.append(options)

    launch = next(one for one in decoder.program.decode if one.use == "o")
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    for tile in ({}, {"BLOCK_N": 2}):
        replace(launch, kernel=kernel, args=(on_gpu,), tile=tile).run(pdl=True)
    assert asked == [{"pdl": True}, {"pdl": True, "tile": {"BLOCK_N": 2}}]
    decoder.close()


@pytest.mark.parametrize("tune", ["auto", "off", True, False])
def test_a_load_on_a_cpu_has_no_tiles(tmp_path: Path, tune: Any) -> None:
    with tiny_engine(tmp_path / "model", load={"tune": tune}) as engine:
        assert (engine.load_stats.tiles, engine.load_stats.tiles_from, engine.load_stats.tune_s) == ({}, "", 0.0)
        assert engine.tune() is None
        assert len(engine.generate([3, 4], 2).token_ids) > 0


@pytest.mark.parametrize("tune", ["on", None, 1.5, "True"])
def test_tune_is_checked_before_anything_is_read(tune: Any) -> None:
    with pytest.raises(mg.ConfigError, match="tune: expected 'auto', True, False or 'off', got"):
        mg.load("no/model", tune=tune)
    with pytest.raises(mg.ConfigError):
        check_tune(tune)
