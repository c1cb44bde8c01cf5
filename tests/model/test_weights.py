"""From a checkpoint into slots: the right rows, the right values, and never two tensors at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from monograph.errors import CheckpointError
from monograph.model import weights
from monograph.model.checkpoint import EMBED, LM_HEAD, layer_name
from monograph.model.config import ModelConfig
from monograph.model.manifest import read_manifest
from monograph.model.rope import rope_table
from monograph.model.safetensors_source import SafetensorsSource
from monograph.model.weights import load_weights, placements
from tests.checkpoints import WeightSlots, fused_parameters, tiny_config, write_checkpoint

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide heads": {"head_dim": 32},
    "three heads": {"hidden_size": 56, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32},
    "derived head size": {"head_dim": None},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "attention biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "odd sizes": {"vocab_size": 97, "hidden_size": 63, "intermediate_size": 65, "head_dim": 6, "num_hidden_layers": 3},
}


class WatchedSource(SafetensorsSource):
    """Notes how many of the tensors that it has handed out are alive whenever the next is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(read_manifest(folder))
        self._handed_out: list[weakref.ref[torch.Tensor]] = []
        self.alive_at_read: list[int] = []
        self.order: list[str] = []

    def read(self, name: str) -> torch.Tensor:
        self.alive_at_read.append(self.alive())
        self.order.append(name)
        tensor = super().read(name)
        self._handed_out.append(weakref.ref(tensor))
        return tensor

    def alive(self) -> int:
        return sum(each() is not None for each in self._handed_out)


def load(folder: Path, dtype: torch.dtype = torch.float32, **arguments: Any) -> tuple[WeightSlots, ModelConfig]:
    config = ModelConfig.from_folder(folder)
    slots = WeightSlots(config, dtype)
    load_weights(WatchedSource(folder), config, slots, **arguments)
    assert slots.gaps_intact()
    return slots, config


def assert_slots_hold(slots: WeightSlots, expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert slots.views.keys() == {*expected, "rope_table"}
    for name, tensor in expected.items():
        assert torch.equal(slots.view(name), tensor.to(dtype)), name


@contextmanager
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Convert a few rows at a time, so that tiny tensors span several blocks with a remainder."""
    with monkeypatch.context() as patched:
        patched.setattr(weights, "_BLOCK_ELEMENTS", 5 * 64)
        yield


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_b02_b03_every_parameter_reaches_its_rows(variant: str, shards: int, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, tiny_config(**VARIANTS[variant]), shards=shards)
    slots, config = load(tmp_path)
    assert_slots_hold(slots, fused_parameters(config, written), torch.float32)
    assert torch.equal(slots.view("rope_table"), rope_table(config, 8))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_conversion_rounds_to_nearest(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_checkpoint(tmp_path, dtype=stored)
    with small_blocks(monkeypatch):
        slots, config = load(tmp_path, dtype)
    assert_slots_hold(slots, fused_parameters(config, written), dtype)
    assert slots.view("rope_table").dtype == torch.float32
    assert torch.equal(slots.view("rope_table"), rope_table(config, 8))


@pytest.mark.parametrize(
    ("stored", "dtype", "value", "fits"),
    [
        (torch.bfloat16, torch.float16, 7e4, False),
        (torch.float32, torch.float16, -65520.0, False),
        (torch.float32, torch.float16, 65519.0, True),  # rounds to 65504
        (torch.float32, torch.bfloat16, 3.4e38, False),
        (torch.float32, torch.bfloat16, 3.38e38, True),
        (torch.float64, torch.float32, 1e39, False),
        (torch.float32, torch.float16, float("inf"), True),  # stored as infinite: kept, for the logits to tell
        (torch.float32, torch.float16, float("nan"), True),
    ],
)
def test_b09_weight_that_does_not_fit_is_named(
    stored: torch.dtype, dtype: torch.dtype, value: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = layer_name(1, "mlp.down_proj")
    tensors = write_checkpoint(tmp_path, dtype=stored)
    tensors[name][63, 127] = value
    write_checkpoint(tmp_path, tensors=tensors)
    with small_blocks(monkeypatch):
        if fits:
            loaded = load(tmp_path, dtype)[0].view("layers.1.down")[63, 127]
            torch.testing.assert_close(loaded, torch.tensor(value).to(dtype), equal_nan=True, rtol=0, atol=0)
        else:
            expected = rf"{name}: a weight of magnitude .* does not fit {str(dtype)[6:]} .* load the model in"
            with pytest.raises(CheckpointError, match=expected):
                load(tmp_path, dtype)


# B06: where the head comes from.


def test_b06_only_the_head_is_used_for_both(tmp_path: Path) -> None:
    head = torch.randn(96, 64)
    write_checkpoint(tmp_path, tiny_config(tie_word_embeddings=True), omit=[EMBED], extra={LM_HEAD: head})
    slots, _ = load(tmp_path)
    assert torch.equal(slots.view("embed"), head)
    assert "lm_head" not in slots.views


def test_b06_both_and_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tie_word_embeddings=True)
    embed = write_checkpoint(tmp_path, config)[EMBED]
    write_checkpoint(tmp_path, config, extra={LM_HEAD: embed.clone()})
    for dtype in (torch.float32, torch.bfloat16):
        with small_blocks(monkeypatch):
            slots, _ = load(tmp_path, dtype)
        assert torch.equal(slots.view("embed"), embed.to(dtype))


def test_b06_both_and_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tie_word_embeddings=True)
    head = write_checkpoint(tmp_path, config)[EMBED].clone()
    head[95, 63] += 0.5
    write_checkpoint(tmp_path, config, extra={LM_HEAD: head})
    with small_blocks(monkeypatch), pytest.raises(CheckpointError, match=r"lm_head\.weight: expected the same values"):
        load(tmp_path)


# B20: what is alive while loading.


@pytest.mark.parametrize("variant", ["plain", "biases", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b20_one_tensor_at_a_time(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, tiny_config(**VARIANTS[variant]), shards=2)
    source, config = WatchedSource(tmp_path), ModelConfig.from_folder(tmp_path)
    load_weights(source, config, WeightSlots(config, dtype))
    assert set(source.alive_at_read) == {0}
    assert source.alive() == 0
    assert sorted(source.order) == sorted(written)  # each read once
    assert source.order == [place.tensor for place in placements(config)]


def test_b20_tied_head_is_compared_without_a_second_copy(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    embed = write_checkpoint(tmp_path, config)[EMBED]
    write_checkpoint(tmp_path, config, extra={LM_HEAD: embed.clone()})
    source, facts = WatchedSource(tmp_path), ModelConfig.from_folder(tmp_path)
    load_weights(source, facts, WeightSlots(facts, torch.bfloat16))
    assert set(source.alive_at_read) == {0}
    assert source.alive() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_b20_peak_of_device_memory(stored: torch.dtype, tmp_path: Path) -> None:
    facts = tiny_config(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8
    )
    written = write_checkpoint(tmp_path, facts, dtype=stored)
    expected = fused_parameters(ModelConfig.from_dict(facts), written)
    largest = max(tensor.nbytes for tensor in written.values())
    del written
    config = ModelConfig.from_folder(tmp_path)
    slots = WeightSlots(config, torch.bfloat16, max_seq_len=131072, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    load_weights(SafetensorsSource(read_manifest(tmp_path)), config, slots)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= largest
    assert torch.cuda.memory_allocated() == before
    assert slots.gaps_intact()
    for name, tensor in expected.items():
        assert torch.equal(slots.view(name).cpu(), tensor.to(torch.bfloat16)), name


# Behaviour around


def test_incomplete_checkpoint_writes_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, omit=["model.norm.weight"])
    config = ModelConfig.from_folder(tmp_path)
    slots = WeightSlots(config, torch.float32)
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.norm\.weight"):
        load_weights(WatchedSource(tmp_path), config, slots)
    assert all(view.isnan().all() for view in slots.views.values())


def test_progress(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(attention_bias=True))
    steps: list[tuple[int, int]] = []
    slots, config = load(tmp_path, torch.bfloat16, progress=lambda done, total: steps.append((done, total)))
    total = sum(view.nbytes for name, view in slots.views.items() if name != "rope_table")
    assert {total for _, total in steps} == {total}
    assert steps[-1][0] == total
    assert len(steps) == len(list(placements(config)))
    assert all(earlier[0] < later[0] for earlier, later in pairwise(steps))


def test_loading_again_replaces_in_place(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", seed=1)
    written = write_checkpoint(tmp_path / "b", seed=2)
    slots, config = load(tmp_path / "a")
    addresses = {name: view.data_ptr() for name, view in slots.views.items()}
    load_weights(WatchedSource(tmp_path / "b"), config, slots)
    assert_slots_hold(slots, fused_parameters(config, written), torch.float32)
    assert {name: view.data_ptr() for name, view in slots.views.items()} == addresses
