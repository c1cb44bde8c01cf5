"""generation_config.json, and the order of the three layers of settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from monograph.errors import ConfigError
from monograph.model.config import ModelConfig
from monograph.model.generation_config import GenerationDefaults, merged_eos_token_ids
from monograph.model.sampling import first_given
from tests.checkpoints import tiny_config

AUTHOR = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}


def test_fields_of_a_file(tmp_path: Path) -> None:
    published = {
        **AUTHOR,
        "_from_model_config": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
        "max_new_tokens": 64,
        "min_p": 0,
        "num_beams": 4,
        "repetition_penalty": 1.1,
        "some_key_of_tomorrow": {"x": 1},
        "stop_strings": ["User:"],
        "temperature": 0.6,
        "transformers_version": "4.45.0",
        "typical_p": 1.0,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    assert GenerationDefaults.from_folder(tmp_path) == GenerationDefaults(
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        min_p=0.0,
        repetition_penalty=1.1,
        max_new_tokens=64,
        bos_token_id=1,
        eos_token_ids=(2, 5),
        stop_strings=("User:",),
        not_followed=("num_beams",),
    )


def test_no_file(tmp_path: Path) -> None:
    assert GenerationDefaults.from_folder(tmp_path) == GenerationDefaults() == GenerationDefaults.from_file(None)
    assert str(GenerationDefaults()) == "nothing recommended"
    assert GenerationDefaults().sampling() == {"temperature": 0.0}


def test_sampling_that_the_author_recommends() -> None:
    assert GenerationDefaults.from_dict(AUTHOR).sampling() == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert GenerationDefaults.from_dict({"do_sample": True}).sampling() == {"temperature": 1.0}
    # Without do_sample the author generates greedily, whatever else the file says.
    assert GenerationDefaults.from_dict({**AUTHOR, "do_sample": False}).sampling()["temperature"] == 0.0
    assert GenerationDefaults.from_dict({"temperature": 0.6, "repetition_penalty": 1.3}).sampling() == {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
    }


@pytest.mark.parametrize(
    ("explicit", "expected"),
    [
        ({}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0}),
        ({"temperature": 0}, {"temperature": 0, "top_p": 0.9, "top_k": 20, "min_p": 0.0}),
        ({"top_p": 1.0}, {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "min_p": 0.0}),
        ({"top_k": 0}, {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0.0}),
    ],
)
def test_b04_explicit_then_file_then_built_in(explicit: dict[str, float], expected: dict[str, float]) -> None:
    file = GenerationDefaults.from_dict(AUTHOR).sampling()
    built_in = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    effective = {name: first_given(explicit.get(name), file.get(name), built_in[name]) for name in built_in}
    assert effective == expected


def test_b04_effective_values_are_printable() -> None:
    text = str(GenerationDefaults.from_dict({**AUTHOR, "eos_token_id": 2, "num_beams": 2}))
    for shown in ("do_sample=True", "temperature=0.6", "top_k=20", "eos_token_ids=(2,)", "not_followed=('num_beams',)"):
        assert shown in text


def test_first_given() -> None:
    assert first_given(None, 0, 5) == 0
    assert first_given(False, True) is False
    assert first_given(None, None) is None


@pytest.mark.parametrize(
    ("config_eos", "file_eos", "merged"),
    [(2, [5, 2, 7], (2, 5, 7)), ([2, 3], None, (2, 3)), (None, 5, (5,)), (None, None, ()), ([3, 2], [2], (3, 2))],
)
def test_every_eos_id_of_both_files_counts(config_eos: Any, file_eos: Any, merged: tuple[int, ...]) -> None:
    config = ModelConfig.from_dict(tiny_config(eos_token_id=config_eos))
    defaults = GenerationDefaults.from_dict({"eos_token_id": file_eos}, vocab_size=config.vocab_size)
    assert merged_eos_token_ids(config, defaults) == merged


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "0.6"),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("min_p", 2),
        ("top_k", -1),
        ("top_k", 2.5),
        ("repetition_penalty", 0),
        ("do_sample", 1),
        ("max_new_tokens", 0),
        ("eos_token_id", [96]),
        ("eos_token_id", "x"),
        ("stop_strings", [""]),
        ("stop_strings", 3),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ConfigError) as caught:
        GenerationDefaults.from_folder(tmp_path, vocab_size=96)
    assert str(caught.value).startswith(f"{tmp_path}/generation_config.json: {field}: expected")


@pytest.mark.parametrize("content", ["[]", "{", "nonsense"])
def test_hostile_files(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json: expected a JSON object"):
        GenerationDefaults.from_folder(tmp_path)
