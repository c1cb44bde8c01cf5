"""The way of weights to a GPU: the same values in the same rows as on a CPU, in pieces, by threads that end.

Without a GPU the same code runs with the CPU as its device: pieces, threads, conversions and faults are those of a GPU,
pinned memory and streams are not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from monograph.errors import CheckpointError
from monograph.model import upload as upload_module
from monograph.model import weights
from monograph.model.checkpoint import EMBED, LM_HEAD, Source, layer_name
from monograph.model.config import ModelConfig
from monograph.model.gguf_source import GGUFSource
from monograph.model.manifest import read_manifest
from monograph.model.rope import rope_table
from monograph.model.safetensors_source import SafetensorsSource
from monograph.model.upload import Progress, Transfer, upload
from tests.checkpoints import WeightSlots, fused_parameters, tiny_config, write_checkpoint
from tests.model.test_weights import VARIANTS, assert_slots_hold
from tests.model.tiny_gguf import Shape, random_weights, write_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiny tensors are cut into many pieces, the last of them shorter, and buffers are used over and over."""
    monkeypatch.setattr(upload_module, "BUFFER_NBYTES", 1500)
    monkeypatch.setattr(upload_module, "MAX_THREADS", 3)


@pytest.fixture(autouse=True)
def _threads_end() -> Any:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def open_folder(folder: Path) -> tuple[SafetensorsSource, ModelConfig]:
    return SafetensorsSource(read_manifest(folder)), ModelConfig.from_folder(folder)


def load(
    source: Source, config: ModelConfig, dtype: torch.dtype, device: str, progress: Progress | None = None
) -> WeightSlots:
    slots = WeightSlots(config, dtype, device=device)
    weights._load_to_gpu(source, config, slots, progress)
    assert slots.gaps_intact()
    return slots


def on_cpu(slots: WeightSlots) -> WeightSlots:
    slots.views = {name: view.cpu() for name, view in slots.views.items()}
    return slots


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_b02_b03_every_parameter_reaches_its_rows(variant: str, device: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, tiny_config(**VARIANTS[variant]), shards=3)
    source, config = open_folder(tmp_path)
    slots = on_cpu(load(source, config, torch.float32, device))
    assert_slots_hold(slots, fused_parameters(config, written), torch.float32)
    assert torch.equal(slots.view("rope_table"), rope_table(config, 8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stored", [torch.float64, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_conversion_rounds_to_nearest(stored: torch.dtype, dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, dtype=stored)
    source, config = open_folder(tmp_path)
    assert_slots_hold(on_cpu(load(source, config, dtype, device)), fused_parameters(config, written), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_1], ids=["F16", "Q4_1"])
def test_gguf_with_rows_in_another_order(kind: Kind, device: str, tmp_path: Path) -> None:
    shape = Shape(attention_bias=True)
    with GGUFSource(write_model(tmp_path / "m.gguf", random_weights(shape), shape, kind)) as source:
        expected = fused_parameters(source.config, {name: source.read(name) for name in source.names()})
        slots = on_cpu(load(source, source.config, torch.bfloat16, device))
    assert_slots_hold(slots, expected, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("stored", "dtype", "value", "fits"),
    [
        (torch.bfloat16, torch.float16, 7e4, False),
        (torch.float32, torch.float16, 65519.0, True),  # rounds to 65504
        (torch.float32, torch.bfloat16, 3.4e38, False),
        (torch.float32, torch.float16, float("inf"), True),  # stored as infinite: kept, for the logits to tell
        (torch.float32, torch.float16, float("nan"), True),
    ],
)
def test_b09_weight_that_does_not_fit_is_named(
    stored: torch.dtype, dtype: torch.dtype, value: float, fits: bool, device: str, tmp_path: Path
) -> None:
    name = layer_name(1, "mlp.down_proj")
    tensors = write_checkpoint(tmp_path, dtype=stored)
    tensors[name][63, 127] = value
    write_checkpoint(tmp_path, tensors=tensors)
    source, config = open_folder(tmp_path)
    if fits:
        loaded = load(source, config, dtype, device).view("layers.1.down")[63, 127].cpu()
        torch.testing.assert_close(loaded, torch.tensor(value).to(dtype), equal_nan=True, rtol=0, atol=0)
    else:
        expected = rf"{name}: a weight of magnitude .* does not fit {str(dtype)[6:]} .* load the model in"
        with pytest.raises(CheckpointError, match=expected):
            load(source, config, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b06_a_tied_head_is_compared(dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    tied = tiny_config(tie_word_embeddings=True)
    embed = write_checkpoint(tmp_path, tied)[EMBED]
    for differs in (False, True):
        head = embed.clone()
        head[95, 63] += 0.5 * differs
        write_checkpoint(tmp_path, tied, extra={LM_HEAD: head})
        source, config = open_folder(tmp_path)
        if differs:
            with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected the same values"):
                load(source, config, dtype, device)
        else:
            assert torch.equal(load(source, config, dtype, device).view("embed").cpu(), embed.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_b06_the_head_alone_is_the_embedding(device: str, tmp_path: Path) -> None:
    head = torch.randn(96, 64)
    write_checkpoint(tmp_path, tiny_config(tie_word_embeddings=True), omit=[EMBED], extra={LM_HEAD: head})
    source, config = open_folder(tmp_path)
    assert torch.equal(load(source, config, torch.float32, device).view("embed").cpu(), head)


class Watched(SafetensorsSource):
    """Notes the memory that it is given to fill, and does something of the test's before each read."""

    def __init__(self, folder: Path, before: Callable[[int], None] = lambda count: None) -> None:
        super().__init__(read_manifest(folder))
        self.memories: dict[int, int] = {}
        self.count = 0
        self._before, self._lock = before, threading.Lock()

    def read_rows(self, name: str, first: int, out: torch.Tensor) -> None:
        with self._lock:
            self.count += 1
            storage = out.untyped_storage()
            self.memories[storage.data_ptr()] = storage.nbytes()
        self._before(self.count)
        super().read_rows(name, first, out)


@pytest.mark.parametrize("device", DEVICES)
def test_b20_host_memory_is_the_buffers(device: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path)
    source, config = Watched(tmp_path), ModelConfig.from_folder(tmp_path)
    load(source, config, torch.bfloat16, device)
    assert source.count > 100
    assert len(source.memories) <= 3 + upload_module.SPARE_BUFFERS
    assert sum(source.memories.values()) <= (3 + upload_module.SPARE_BUFFERS) * 1500
    assert sum(source.memories.values()) < sum(tensor.nbytes for tensor in written.values()) / 10


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_that_fails_midway_ends_the_upload(device: str, tmp_path: Path) -> None:
    """Its error comes out, little more is read, and loading again works."""
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()

    def cut_short(count: int) -> None:
        if count == 20:
            file.write_bytes(content[:-100])

    source, config = Watched(tmp_path, cut_short), ModelConfig.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: file has changed since the model was opened"):
        load(source, config, torch.float32, device)
    assert source.count < 40
    file.write_bytes(content)
    again, config = open_folder(tmp_path)
    load(again, config, torch.float32, device)


@pytest.mark.parametrize("device", DEVICES)
def test_an_interrupted_upload_leaves_nothing_behind(device: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    source, config = Watched(tmp_path), ModelConfig.from_folder(tmp_path)

    def interrupt(done: int, total: int) -> None:
        if done > total / 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(source, config, torch.float32, device, interrupt)
    count = source.count
    slots = on_cpu(load(source, config, torch.float32, device))
    assert source.count - count > 100
    assert torch.equal(slots.view("final_norm"), source.read("model.norm.weight"))


@pytest.mark.parametrize("device", DEVICES)
def test_in_inference_mode(device: str, tmp_path: Path) -> None:
    """Which is a property of the caller's thread: what is made in it, the others must be able to write."""
    written = write_checkpoint(tmp_path)
    source, config = open_folder(tmp_path)
    slots = WeightSlots(config, torch.float16, device=device)
    with torch.inference_mode():
        weights._load_to_gpu(source, config, slots, None)
    assert_slots_hold(on_cpu(slots), fused_parameters(config, written), torch.float16)


def test_progress(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    source, config = open_folder(tmp_path)
    steps: list[tuple[int, int]] = []
    slots = load(source, config, torch.bfloat16, "cpu", lambda done, total: steps.append((done, total)))
    total = sum(view.nbytes for name, view in slots.views.items() if name != "rope_table")
    assert {total for _, total in steps} == {total}
    assert steps[-1][0] == total
    assert all(earlier[0] < later[0] for earlier, later in pairwise(steps))


def test_a_row_longer_than_a_buffer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(upload_module, "BUFFER_NBYTES", 7)
    written = write_checkpoint(tmp_path, tiny_config(num_hidden_layers=1))
    source, _ = open_folder(tmp_path)
    place = torch.empty(96, 64)
    assert upload(source, [Transfer(EMBED, place)]) == []
    assert torch.equal(place, written[EMBED])
