"""The tokenizer's own behaviour: ids, special tokens, ranges, files, and what is said about bad ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Backend

from monograph.errors import CheckpointError, PromptError
from monograph.model.tokenizer import Tokenizer
from monograph.model.tokenizer_files import TokenizerFiles
from tests.model.tiny_tokenizers import byte_level, save, sentencepiece

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoint", byte_level(adds_bos=True), NAMES)


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def test_text_survives_a_round_trip(tokenizer: Tokenizer) -> None:
    text = "naïve 漢字 🙂\n\t x"
    ids = tokenizer.encode(text)
    assert ids == [256, *text.encode()]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]


def test_what_a_tokenizer_tells(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer) == 262
    assert tokenizer.bos_token_id == 256
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.special_tokens == NAMES
    assert tokenizer.chat_template is None
    assert tokenizer.token_to_id("<tool>") == 260
    assert tokenizer.id_to_token(260) == "<tool>"
    assert tokenizer.token_to_id("nothing") is None
    assert tokenizer.id_to_token(262) is tokenizer.id_to_token(-1) is tokenizer.id_to_token(2**40) is None
    assert repr(tokenizer) == "Tokenizer(262 tokens, {'bos_token': '<s>', 'eos_token': '</s>'})"


def test_a_path_to_tokenizer_json_means_its_folder(folder: Path) -> None:
    assert Tokenizer.from_folder(folder / "tokenizer.json").special_tokens == NAMES


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=9, pad_token="<|end|>", pad_id=259)
    tokenizer = Tokenizer.from_folder(save(tmp_path, backend))
    assert tokenizer.encode("abcdefgh") == list(b"abcdefgh")
    assert tokenizer.encode("ab") == list(b"ab")
    assert tokenizer.special_tokens == {"pad_token": "<|end|>"}


@pytest.mark.parametrize("bad", [262, 99_999, -1, 2**40])
def test_an_id_out_of_range_is_named(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(PromptError, match=rf"ids\[2\]: {bad} is not a token id; the vocabulary has 262 tokens"):
        tokenizer.decode([1, 2, bad])


@pytest.mark.parametrize("bad", [["a"], [1.5], 3, None])
def test_what_is_not_a_list_of_ids_is_refused(tokenizer: Tokenizer, bad: Any) -> None:
    with pytest.raises(PromptError, match="ids: expected a list of token ids"):
        tokenizer.decode(bad)


def test_a_vocabulary_with_gaps_has_ids_beyond_its_size() -> None:
    tokenizer = Tokenizer.from_parts(Backend(models.BPE(vocab={"a": 0, "b": 1000}, merges=[])))
    assert tokenizer.vocab_size == 2
    assert tokenizer.encode("ab") == [0, 1000]
    assert tokenizer.decode([1000]) == "b"
    with pytest.raises(PromptError, match="999 is not a token id"):
        tokenizer.decode([999])


def test_an_added_token_that_gets_another_id_than_its_file_says_gives_a_warning(tmp_path: Path) -> None:
    described = json.loads(byte_level().to_str())
    described["added_tokens"][-1]["id"] = 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.warns(
        UserWarning, match="'«naïve x»' has id 1000 in the file, but the tokenizers library gives it 261"
    ):
        assert Tokenizer.from_folder(tmp_path).encode("«naïve x»") == [261]


def test_text_that_is_no_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match="text: expected a string, got bytes"):
        tokenizer.encode(b"abc")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="half of a surrogate pair"):
        tokenizer.encode("a\ud83d")


def test_special_tokens_are_found_in_every_spelling(tmp_path: Path) -> None:
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False},
        "eos_token": {"content": "<|end|>"},
        "unk_token": None,
        "image_token": "<|image|>",
        "additional_special_tokens": ["<|new|>", {"content": "<|newer|>", "rstrip": True, "special": True}],
    }
    tokenizer = Tokenizer.from_folder(save(tmp_path, byte_level(), config))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>", "image_token": "<|image|>"}
    assert tokenizer.eos_token_ids == (259,)
    assert tokenizer.vocab_size == 265
    assert tokenizer.encode("<|image|><|new|><|newer|>  a") == [262, 263, 264, 97]
    assert tokenizer.decode([262, 263, 264, 97]) == "a"


def test_from_parts_takes_ids_or_texts_and_adds_what_it_is_told() -> None:
    parts: dict[str, Any] = {"bos_token": 256, "eos_token": "</s>", "eos_token_ids": [259, 257]}
    tokenizer = Tokenizer.from_parts(byte_level(), **parts)
    assert tokenizer.encode("a") == [97]
    assert tokenizer.special_tokens == NAMES
    assert tokenizer.eos_token_ids == (257, 259)
    assert Tokenizer.from_parts(byte_level(), **parts, add_bos_token=True).encode("a") == [256, 97]
    assert Tokenizer.from_parts(byte_level(), **parts, add_eos_token=True).encode("a") == [97, 257]
    both = Tokenizer.from_parts(byte_level(), **parts, add_bos_token=True, add_eos_token=True)
    assert both.encode("a") == [256, 97, 257]
    assert both.encode("a", add_special_tokens=False) == [97]
    assert Tokenizer.from_parts(byte_level(adds_bos=True), **parts, add_bos_token=False).encode("a") == [97]
    assert Tokenizer.from_parts(byte_level(), eos_token="</s>", add_bos_token=True).encode("a") == [97]
    with pytest.raises(CheckpointError, match="bos_token: id 999 is not in the vocabulary of 262 tokens"):
        Tokenizer.from_parts(byte_level(), bos_token=999)


def test_from_parts_makes_named_tokens_special() -> None:
    backend = sentencepiece()
    assert backend.encode("a<0x41>").ids[-1] != backend.token_to_id("<0x41>")
    tokenizer = Tokenizer.from_parts(backend, eos_token="<0x41>")
    assert tokenizer.encode("a<0x41>")[-1] == tokenizer.eos_token_ids[0]
    assert tokenizer.decode(tokenizer.encode("a<0x41>")) == "a"


def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, the one tokenizer format read"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(CheckpointError, match=r"there is tokenizer\.model, which transformers converts: AutoTokenizer"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="expected a checkpoint folder, found nothing"):
        Tokenizer.from_folder(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="expected a checkpoint folder, found a file"):
        Tokenizer.from_folder(tmp_path / "tokenizer.model")


PANICS = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "pipeline not JSON": ("tokenizer.json", b"{", "cannot read it"),
    "pipeline empty": ("tokenizer.json", b"", "cannot read it"),
    "pipeline of no model": ("tokenizer.json", b'{"version": "1.0"}', "cannot read it"),
    "pipeline not UTF-8": ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
    "pipeline that panics": ("tokenizer.json", json.dumps({"normalizer": PANICS, "model": {}}).encode(), "cannot read"),
    "config not JSON": ("tokenizer_config.json", b"{'bos_token': 1}", "not JSON"),
    "config a list": ("tokenizer_config.json", b"[]", "expected a JSON object, got .*list"),
    "token a number": ("tokenizer_config.json", b'{"bos_token": 1}', "bos_token: expected a string or an object"),
    "token without text": ("tokenizer_config.json", b'{"eos_token": {"lstrip": true}}', "eos_token: expected a string"),
    "token list a string": ("tokenizer_config.json", b'{"extra_special_tokens": "<x>"}', "extra_special_tokens"),
    "ids not numbers": ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": "<x>"}}', "added_tokens_decoder"),
    "template a number": ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template: expected a string or a"),
    "template unnamed": ("tokenizer_config.json", b'{"chat_template": [{"template": "x"}]}', "chat_template"),
    "template not UTF-8": ("chat_template.jinja", b"\xff", "not UTF-8"),
    "template too large": ("chat_template.jinja", b" " * (2**20 + 1), "1,048,577 bytes; the limit is 1,048,576"),
    "map not JSON": ("special_tokens_map.json", b"nothing", "not JSON"),
    "added tokens without ids": ("added_tokens.json", b'{"<x>": "y"}', "from token text to token id"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named_with_the_reason(tmp_path: Path, case: str) -> None:
    name, content, reason = BAD_FILES[case]
    save(tmp_path, byte_level())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_files_may_lie_anywhere(tmp_path: Path) -> None:
    one, two = save(tmp_path / "one", byte_level()), save(tmp_path / "two", byte_level(), {"bos_token": "<s>"})
    (two / "template").write_text("{{ bos_token }}hello", encoding="utf-8")
    files = TokenizerFiles(one / "tokenizer.json", config=two / "tokenizer_config.json", chat_template=two / "template")
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == [256, *b"hello"]


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    files = TokenizerFiles(tmp_path / "tokenizer.json", chat_template=tmp_path / "gone.jinja")
    with pytest.raises(CheckpointError, match=r"gone\.jinja: No such file"):
        Tokenizer.from_files(files)


def test_legacy_files_are_read(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), special_tokens_map__json='{"eos_token": {"content": "<|stop|>", "special": false}}')
    (tmp_path / "added_tokens.json").write_text('{"<|extra|>": 300, "<|stop|>": 301}', encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<|extra|><|stop|>") == [262, 263]
    assert tokenizer.eos_token_ids == (263,)
    assert tokenizer.decode([262, 263]) == "<|extra|>"


def test_split_special_tokens_takes_them_apart(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path, byte_level(), {"split_special_tokens": True}))
    assert tokenizer.encode("</s>") == list(b"</s>")


def test_clean_up_is_for_vocabularies_other_than_bpe(tmp_path: Path) -> None:
    wanted = {"clean_up_tokenization_spaces": True}
    forced = wanted | {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    ids = list(b"a . b 's")
    assert Tokenizer.from_folder(save(tmp_path, byte_level(), wanted)).decode(ids) == "a . b 's"
    assert Tokenizer.from_folder(save(tmp_path, byte_level(), forced)).decode(ids) == "a. b's"


def test_flags_of_the_config_win_over_those_of_the_pipeline(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<x>", special=False)])
    listed = {"262": {"content": "<x>", "special": True, "lstrip": True, "normalized": False}}
    tokenizer = Tokenizer.from_folder(save(tmp_path, backend, {"added_tokens_decoder": listed}))
    assert tokenizer.encode("a  <x>") == [97, 262]
    assert tokenizer.decode([97, 262]) == "a"


def test_b25_a_double_bos_made_by_hand_gives_a_warning(tokenizer: Tokenizer) -> None:
    with pytest.warns(UserWarning, match="begins with '<s>', which the tokenizer adds by itself") as caught:
        assert tokenizer.encode("<s>hi") == [256, 256, *b"hi"]
    assert caught[0].filename == __file__
    assert tokenizer.encode("<s>hi", add_special_tokens=False) == [256, *b"hi"]  # a warning here would be an error
    assert tokenizer.encode("hi<s>") == [256, *b"hi", 256]


def test_the_pipelines_own_double_bos_is_reported_too(tmp_path: Path) -> None:
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 256)])
    with pytest.warns(UserWarning, match="sees it twice"):
        Tokenizer.from_folder(save(tmp_path, backend, NAMES)).encode("hi")


def test_importing_the_text_side_is_cheap() -> None:
    code = (
        "import sys; import monograph.model.tokenizer, monograph.model.text_stream; "
        "print([m for m in ('tokenizers', 'jinja2', 'transformers', 'torch') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == "[]"
