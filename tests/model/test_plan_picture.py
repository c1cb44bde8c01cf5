"""The picture of a plan is valid XML, to scale, readable, and written whole or not at all."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from monograph.cli import main
from monograph.model import plan_picture as module
from monograph.model.config import ModelConfig
from monograph.model.plan import Plan, make_plan
from monograph.model.plan_picture import COLOURS, MARGIN, SPAN, WIDTH, kind_of, nbytes_by_kind, plan_picture
from monograph.model.whole_file import write_whole
from tests.checkpoints import tiny_config
from tests.engines import write_model

SVG = "{http://www.w3.org/2000/svg}"


def tiny_plan(max_seq_len: int = 200, layers: int = 3) -> Plan:
    config = ModelConfig.from_dict(tiny_config(num_hidden_layers=layers, max_position_embeddings=4096))
    return make_plan(config, torch.device("cpu"), torch.float32, max_seq_len)


def parts(document: str, group: str) -> list[ET.Element]:
    root = ET.fromstring(document)
    (found,) = [element for element in root.iter(f"{SVG}g") if element.get("id") == group]
    return list(found.iter(f"{SVG}rect"))


def texts(document: str) -> list[ET.Element]:
    return list(ET.fromstring(document).iter(f"{SVG}text"))


@pytest.mark.parametrize("max_seq_len", [16, 200, 4096])
def test_every_slot_is_drawn_to_scale(max_seq_len: int) -> None:
    plan = tiny_plan(max_seq_len)
    background, *boxes = parts(plan_picture(plan, "tiny"), "arena")
    assert (float(background.attrib["x"]), float(background.attrib["width"])) == (MARGIN, SPAN)
    assert len(boxes) == len(plan.layout.entries)
    for slot, box in zip(plan.layout.entries, boxes, strict=True):
        assert float(box.attrib["x"]) == pytest.approx(MARGIN + SPAN * slot.offset / plan.layout.nbytes, rel=1e-4)
        assert float(box.attrib["width"]) == pytest.approx(SPAN * slot.nbytes / plan.layout.nbytes, rel=1e-4)
        assert box.attrib["fill"] == COLOURS[kind_of(slot)]
        title = box.find(f"{SVG}title")
        assert title is not None
        assert title.text is not None
        assert title.text.startswith(f"{slot.name}: ")


def test_kinds_add_up_and_the_kv_cache_is_apart() -> None:
    plan = tiny_plan(4096)
    found = nbytes_by_kind(plan)
    assert list(found) == list(COLOURS)
    assert sum(found.values()) == plan.need_nbytes
    config = plan.config
    assert found["KV cache"] == 2 * config.num_layers * config.num_kv_heads * 4096 * config.head_dim * 4
    shown = [text.text for text in texts(plan_picture(plan, "tiny"))]
    for kind in COLOURS:
        assert kind in shown


def test_bars_of_families_have_one_scale() -> None:
    """Their lengths are their bytes; small ones share a row, so that no byte is left out."""
    plan = tiny_plan(4096)
    document = plan_picture(plan, "tiny")
    bars = {}
    for box in parts(document, "families"):
        middle = float(box.attrib["y"]) + 11
        label = next(t.text for t in texts(document) if float(t.attrib["y"]) == middle and t.attrib["x"] == "30")
        bars[label] = float(box.attrib["width"])
    caches = sum(slot.nbytes for slot in plan.layout.entries if slot.name.endswith(".k_cache"))
    embed = plan.layout["embed"].nbytes
    assert bars["layers.{i}.k_cache"] / bars["embed"] == pytest.approx(caches / embed, rel=1e-3)
    assert max(bars.values()) == pytest.approx(module._LONGEST)
    drawn = sum(bars.values()) / bars["embed"] * embed
    assert drawn == pytest.approx(sum(slot.nbytes for slot in plan.layout.entries), rel=1e-3)
    assert any(label is not None and label.startswith("state: ") for label in bars)


def test_labels_fit_on_the_page() -> None:
    """By a generous width of a letter, also with many layers and long numbers."""
    for plan in (tiny_plan(200), tiny_plan(4096, layers=40)):
        document = plan_picture(plan, "organisation/a-model-with-a-long-name-7B-Instruct")
        height = float(ET.fromstring(document).attrib["height"])
        for text in texts(document):
            assert text.text
            wide = len(text.text) * (10.5 if text.get("class") == "head" else 6.6)
            x = float(text.attrib["x"])
            left = {"start": x, "middle": x - wide / 2, "end": x - wide}[text.get("text-anchor", "start")]
            assert left >= 0, text.text
            assert left + wide <= WIDTH, text.text
            assert 0 < float(text.attrib["y"]) <= height


def test_names_cannot_break_the_document() -> None:
    document = plan_picture(tiny_plan(), "a<b>&\"c'\x00\x1b\ud800d")
    titles = [element.text for element in texts(document) if element.get("class") == "head"]
    assert titles == ["a<b>&\"c'\ufffd\ufffd\ufffdd"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model")
    picture = tmp_path / "map.svg"
    arguments = ["plan", str(model), "--device", "cpu", "--max-seq-len", "64"]
    assert main(arguments) == 0
    plain = capsys.readouterr()
    assert main([*arguments, "--svg", str(picture)]) == 0
    drawn = capsys.readouterr()
    assert plain.out.partition("\n\n")[2] == drawn.out.partition("\n\n")[2]  # what is free differs
    assert drawn.err == ""
    root = ET.fromstring(picture.read_text(encoding="utf-8"))
    assert root.tag == f"{SVG}svg"
    assert any(text.text == "model" for text in root.iter(f"{SVG}text"))
    assert main([*arguments, "--svg", str(tmp_path / "no" / "map.svg")]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"monograph: {tmp_path}/no/map.svg: the picture cannot be written: No such file or directory\n",
    )
    assert main([*arguments, "--svg", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "map.svg", tmp_path / "link.svg"
    link.symlink_to(path)
    write_whole(link, "old é")
    assert path.read_text(encoding="utf-8") == "old é"
    assert link.is_symlink()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "old é"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.svg", "map.svg"]
    write_whole("/dev/null", "x")
    assert not Path("/dev/null").is_file()
