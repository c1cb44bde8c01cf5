"""Tiny engines: a synthetic checkpoint with a tokenizer of single characters, loaded as a user would load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

import monograph as mg
from tests.checkpoints import tiny_config, write_checkpoint

SPECIAL = ["<unk>", "<s>", "</s>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int = 96, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write a tokenizer whose ids are <unk>, <s>, </s> and then the characters from "!" on; no BOS is added."""
    characters = [" ", *(chr(33 + i) for i in range(vocab_size - len(SPECIAL) - 1))]
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate([*SPECIAL, *characters])}, merges=[], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if chat_template is not None:
        facts["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def write_model(folder: Path, config: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Write a whole tiny model; options as for `write_checkpoint`."""
    config = tiny_config() if config is None else config
    write_checkpoint(folder, config, **options)
    write_tokenizer(folder, config["vocab_size"])
    return folder


def tiny_engine(
    folder: Path, config: Mapping[str, Any] | None = None, load: Mapping[str, Any] | None = None, **options: Any
) -> mg.Engine:
    """Write a tiny model and load it on the CPU; `load` holds arguments of `monograph.load`."""
    return mg.load(str(write_model(folder, config, **options)), **{"device": "cpu", **(load or {})})
