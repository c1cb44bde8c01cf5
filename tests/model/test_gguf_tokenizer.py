"""Byte-level BPE tokenizers in GGUF metadata, against transformers, the models' own pipelines and llama.cpp's rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from monograph.errors import CheckpointError, ConfigError
from monograph.model.gguf_tokenizer import GGUFTokenizerParts, tokenizer_parts
from monograph.model.tokenizer import Tokenizer as ModelTokenizer
from tests import smollm2
from tests.model.tiny_gguf import finish, write_tokenizer

DATA = Path(__file__).parents[1] / "data"
ALICE = (DATA / "alice.txt").read_text()
LLAMA3_PUBLISHED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

TEXTS = [
    "",
    " ",
    "Hello, world!",
    " leading space",
    "  two leading spaces and two trailing  ",
    "I'm sure they've said we'll, he'd, it's, DON'T and I'M",
    "x = [i**2 for i in range(10)]\n\tif x:\r\n        return {'a': 1.5e-3}  # done",
    "0 1 12 123 1234 12345 3.14159 1,000,000 v2.0rc1 0x1F 2nd",
    "naïve café Ångström ß ẞ İi",
    "e\u0301 o\u0308 combining, a\u0301\u0323 twice",
    "漢字とかな交じり文。日本語 中文字符 한국어 텍스트",
    "مرحبا بالعالم שלום עולם",
    "🙂 👩‍👩‍👧‍👦 🇫🇷 ✌🏽 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "a\nb\n\nc\n\n\nd\r\n\r\ne\n ",
    "tab\tand\u00a0no-break\u2003em\u200bzero\u3000wide",
    "         many          spaces\n      and\n\n   lines   ",
    "....!!!???---===<<<>>>^^^~~~|||$$$+++",
    "http://example.com/a_b-c?d=e&f=%20#g user@example.org",
    "CamelCase snake_case SCREAMING_CASE kebab-case",
    "the the the the the",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|> more <|im_end|>text <|im_start",
    "<s>[INST] not special here [/INST]</s>",
]  # fmt: skip

NUMERALS = "x² ²³ ½ ٣٤٥ Ⅷ १२३ ①② ４２"


@pytest.fixture(scope="module")
def smollm() -> GGUFTokenizerParts:
    return tokenizer_parts(smollm2.path())


def ids(parts: GGUFTokenizerParts, text: str, add_special_tokens: bool = False) -> list[int]:
    encoded: list[int] = parts.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return encoded


def as_model_tokenizer(parts: GGUFTokenizerParts) -> ModelTokenizer:
    return ModelTokenizer.from_parts(
        parts.tokenizer,
        bos_token=parts.bos_token,
        eos_token=parts.eos_token,
        unk_token=parts.unk_token,
        pad_token=parts.pad_token,
        eos_token_ids=parts.eos_token_ids,
        chat_template=parts.chat_template,
    )


def test_smollm2_facts(smollm: GGUFTokenizerParts) -> None:
    assert smollm.bos_token == "<|im_start|>"
    assert smollm.eos_token == "<|im_end|>"
    assert smollm.unk_token == "<|endoftext|>"
    assert smollm.pad_token == "<|im_end|>"
    assert smollm.bos_token_id == 1
    assert smollm.eos_token_ids == (2,)
    assert not smollm.add_bos_token
    assert not smollm.add_eos_token
    assert smollm.tokenizer.get_vocab_size() == 49152


def test_smollm2_chat_prompts_are_the_golden_ones(smollm: GGUFTokenizerParts) -> None:
    tokenizer = as_model_tokenizer(smollm)
    goldens = json.loads((DATA / "smollm2_greedy.json").read_text())
    assert len(goldens) == 8
    for golden in goldens:
        messages = [{"role": "user", "content": golden["prompt"]}]
        assert tokenizer.apply_chat_template(messages) == golden["prompt_ids"]
        assert tokenizer.decode(golden["greedy_ids"]) == golden["greedy_text"]


def test_smollm2_equals_transformers(smollm: GGUFTokenizerParts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The library's reader slices a memory map half a million times: four times as fast over a plain array.
    monkeypatch.setattr("numpy.memmap", lambda path, **_: np.fromfile(path, dtype=np.uint8))
    from transformers import AutoTokenizer

    path = smollm2.path()
    oracle: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert len(oracle) == smollm.tokenizer.get_vocab_size()
    for text in [*TEXTS, ALICE]:
        encoded = ids(smollm, text)
        assert encoded == oracle(text)["input_ids"], text
        for skip in (True, False):
            decoded = smollm.tokenizer.decode(encoded, skip_special_tokens=skip)
            assert decoded == oracle.decode(encoded, skip_special_tokens=skip)


def test_smollm2_equals_the_models_own_pipeline(smollm: GGUFTokenizerParts) -> None:
    """Digits one by one, then GPT-2's words: also where transformers' reading of GGUF files joins them."""
    own = Tokenizer.from_str(smollm.tokenizer.to_str())
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, NUMERALS, ALICE]:
        assert ids(smollm, text) == own.encode(text).ids, text


def test_smollm2_round_trips(smollm: GGUFTokenizerParts) -> None:
    for text in [*TEXTS, NUMERALS, ALICE]:
        assert smollm.tokenizer.decode(ids(smollm, text), skip_special_tokens=False) == text


def test_a_byte_without_a_token_is_left_out_not_turned_into_a_control_token(smollm: GGUFTokenizerParts) -> None:
    """SmolLM2 has no tokens for the bytes 04 and F3: no text may conjure up <|endoftext|> with them."""
    assert ids(smollm, "a\x04b") == [smollm.tokenizer.token_to_id("a"), smollm.tokenizer.token_to_id("b")]
    assert smollm.tokenizer.token_to_id("<|endoftext|>") not in ids(smollm, "a\U000f0000b")


# The cuts in llama.cpp's terms: patterns applied in turn, each to the matches of the last and to what is between them.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CUTS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "gpt-2": [GPT2_WORDS],
    "smollm": [r"\p{N}", GPT2_WORDS],
    "llama-bpe": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}


def cut(text: str, patterns: list[str]) -> list[str]:
    pieces = [text]
    for pattern in patterns:
        finer = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(pattern, piece):
                finer += [piece[end : match.start()], match.group()]
                end = match.end()
            finer.append(piece[end:])
        pieces = [piece for piece in finer if piece]
    return pieces


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A byte-level BPE with Llama 3's cut, trained on English, code and a few scripts."""
    tokenizer = Tokenizer(BPE())
    words = pre_tokenizers.Split(Regex(LLAMA3_PUBLISHED), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([ALICE[:60_000], *TEXTS * 3, "1234 567 89 2024 " * 20], trainer)
    return tokenizer


def bpe_file(path: Path, trained: Tokenizer, pre: str | None, extra: dict[str, int], **metadata: Any) -> Path:
    """Write a trained BPE with more tokens of given types after its own."""
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__) + list(extra)
    types = [NORMAL] * len(model["vocab"]) + list(extra.values())
    merges = [" ".join(merge) for merge in model["merges"]]
    if pre is not None:
        metadata["pre"] = pre
    return write_tokenizer(path, "gpt2", tokens, types, merges=merges, **metadata)


@pytest.mark.parametrize("name", [*CUTS, "llama3", "llama-v3"])
def test_words_are_cut_as_llama_cpp_cuts_them(tmp_path: Path, trained: Tokenizer, name: str) -> None:
    parts = tokenizer_parts(bpe_file(tmp_path / "t.gguf", trained, name, {}))
    patterns = CUTS[{"llama3": "llama-bpe", "llama-v3": "llama-bpe"}.get(name, name)]
    pre_tokenizer: Any = parts.tokenizer.pre_tokenizer
    byte_level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in [*TEXTS, NUMERALS, ALICE]:
        words = [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
        assert words == [byte_level.pre_tokenize_str(word)[0][0] for word in cut(text, patterns)], text


def test_llama_3_equals_the_models_own_pipeline(tmp_path: Path, trained: Tokenizer) -> None:
    """The pipeline that Llama 3's tokenizer.json describes, against ours from the metadata of its conversion."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    # A token that merges do not lead to, as Llama 3 has: taken whole where it is a word of its own.
    size = trained.get_vocab_size()
    own_json = json.loads(trained.to_str())
    own_json["model"]["vocab"]["ĠBandersnatch"] = size
    own_json["model"]["ignore_merges"] = True
    own = Tokenizer.from_str(json.dumps(own_json))
    own.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    own.decoder = decoders.ByteLevel()
    own.post_processor = processors.TemplateProcessing(
        single=[special[0], "$A"], special_tokens=[(special[0], own.token_to_id(special[0]))]
    )
    extra = {"ĠBandersnatch": NORMAL, **dict.fromkeys(special, CONTROL)}
    file = bpe_file(tmp_path / "t.gguf", trained, "llama-bpe", extra, bos_token_id=size + 1, eos_token_id=size + 2)
    parts = tokenizer_parts(file)
    assert parts.add_bos_token
    assert parts.bos_token == "<|begin_of_text|>"
    assert parts.eos_token_ids == (size + 2, size + 5)
    header = "<|start_header_id|>user<|end_header_id|>\n\nThe Bandersnatch fumes!<|eot_id|>"
    for text in [*TEXTS, NUMERALS, header, ALICE]:
        for add_special_tokens in (True, False):
            encoded = ids(parts, text, add_special_tokens)
            assert encoded == own.encode(text, add_special_tokens=add_special_tokens).ids, text
            assert parts.tokenizer.decode(encoded) == own.decode(encoded)
    assert size in ids(parts, "the Bandersnatch")


def test_types_of_tokens(tmp_path: Path, trained: Tokenizer) -> None:
    """Control tokens match whole and are hidden; user-defined ones match whole and show; unused ones never match."""
    size = trained.get_vocab_size()
    extra = {"<|ctl|>": CONTROL, "<tool>": USER_DEFINED, "a b": USER_DEFINED, "[PAD7]": UNUSED}
    parts = tokenizer_parts(bpe_file(tmp_path / "t.gguf", trained, "gpt-2", extra))
    text = "x<|ctl|><tool> a b[PAD7]"
    encoded = ids(parts, text)
    assert [token for token in encoded if token >= size] == [size, size + 1, size + 2]
    assert parts.tokenizer.decode(encoded) == "x<tool> a b[PAD7]"
    assert parts.tokenizer.decode(encoded, skip_special_tokens=False) == text
    assert not parts.add_bos_token
    assert parts.bos_token is parts.eos_token is parts.unk_token is parts.pad_token is None
    assert parts.eos_token_ids == ()


@pytest.mark.parametrize(
    ("template", "opens_with_bos"),
    [("{{ bos_token }}{{ messages[0]['content'] }}", True), ("{{ messages[0]['content'] }}", False)],
)
def test_b25_exactly_one_bos(tmp_path: Path, trained: Tokenizer, template: str, opens_with_bos: bool) -> None:
    """Raw text gets the BOS that the metadata promises; a chat gets what its template writes, and no second one."""
    size = trained.get_vocab_size()
    file = bpe_file(
        tmp_path / "t.gguf", trained, "llama-bpe", {"<bos>": CONTROL}, bos_token_id=size, add_bos_token=True
    )
    parts = replace(tokenizer_parts(file), chat_template=template)
    tokenizer = as_model_tokenizer(parts)
    words = tokenizer.encode("some words", add_special_tokens=False)
    assert size not in words
    assert tokenizer.encode("some words") == [size, *words]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "some words"}])
    assert chat == ([size, *words] if opens_with_bos else words)
    with pytest.warns(UserWarning, match="<bos>"):
        assert tokenizer.encode("<bos>some words") == [size, size, *words]


@pytest.mark.parametrize(("add_bos", "add_eos"), [(False, False), (True, False), (False, True), (True, True)])
def test_b25_the_flags_of_the_metadata_decide(tmp_path: Path, trained: Tokenizer, add_bos: bool, add_eos: bool) -> None:
    size = trained.get_vocab_size()
    extra = {"<bos>": CONTROL, "<eos>": CONTROL}
    metadata = {"bos_token_id": size, "eos_token_id": size + 1, "add_bos_token": add_bos, "add_eos_token": add_eos}
    for pre in ("llama-bpe", "gpt-2"):
        parts = tokenizer_parts(bpe_file(tmp_path / f"{pre}.gguf", trained, pre, extra, **metadata))
        assert (parts.add_bos_token, parts.add_eos_token) == (add_bos, add_eos)
        for text in ("words", ""):
            assert ids(parts, text, True) == [size] * add_bos + ids(parts, text) + [size + 1] * add_eos


def test_b27_templates_by_name(tmp_path: Path, trained: Tokenizer) -> None:
    """One template is a string, several are found by name; the tokenizer picks the one for tools by itself."""

    def templates(**named: str) -> str | dict[str, str] | None:
        file = tmp_path / "t.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_merges(["a b"])
        if named:
            writer.add_chat_template([{"name": name, "template": text} for name, text in named.items()])
        finish(writer)
        return tokenizer_parts(file).chat_template

    assert templates() is None
    assert templates(default="{{ 1 }}") == "{{ 1 }}"
    both = templates(default="plain", tool_use="with tools")
    assert both == {"default": "plain", "tool_use": "with tools"}
    assert templates(rag="documents") == {"rag": "documents"}


def test_a_file_that_does_not_say_how_to_cut_warns(tmp_path: Path, trained: Tokenizer) -> None:
    with pytest.warns(UserWarning, match=r"t\.gguf.*tokenizer\.ggml\.pre"):
        silent = tokenizer_parts(bpe_file(tmp_path / "t.gguf", trained, None, {}))
    said = tokenizer_parts(bpe_file(tmp_path / "d.gguf", trained, "default", {}))
    assert all(ids(silent, text) == ids(said, text) for text in TEXTS)


def test_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"

    def raises(kind: type[Exception], says: str, *args: Any, **metadata: Any) -> None:
        with pytest.raises(kind, match=rf"t\.gguf.*{says}"):
            tokenizer_parts(write_tokenizer(file, *args, **metadata))

    raises(ConfigError, "holds no tokenizer", "", ["a"])
    for model in ("bert", "t5", "rwkv", "no_vocab"):
        raises(ConfigError, f"tokenizer.ggml.model '{model}'", model, ["a"])
    for pre in ("qwen2", "tekken", "deepseek-llm", "llama4"):
        raises(ConfigError, f"tokenizer.ggml.pre '{pre}'", "gpt2", ["a", "b", "ab"], merges=["a b"], pre=pre)
    raises(ConfigError, r"no tokenizer\.ggml\.tokens", "gpt2", [], merges=["a b"], pre="gpt-2")
    raises(ConfigError, r"no tokenizer\.ggml\.merges", "gpt2", ["a"], pre="gpt-2")
    raises(ConfigError, "add_bos_token", "gpt2", ["a", "b", "ab"], merges=["a b"], pre="gpt-2", add_bos_token=True)
    raises(ConfigError, "bos_token_id is 7", "gpt2", ["a", "b", "ab"], merges=["a b"], pre="gpt-2", bos_token_id=7)
    raises(CheckpointError, "names a token twice", "gpt2", ["a", "a"], merges=["a a"], pre="gpt-2")
    raises(CheckpointError, "2 tokens, but 1 in", "gpt2", ["a", "b"], [1], merges=["a b"], pre="gpt-2")
    raises(CheckpointError, "'a ', expected two tokens", "gpt2", ["a", "b"], merges=["a "], pre="gpt-2")
    raises(CheckpointError, "'a c', expected two tokens", "gpt2", ["a", "b", "ac"], merges=["a c"], pre="gpt-2")
    raises(CheckpointError, "'ab', expected two tokens", "gpt2", ["a", "b"], merges=["ab"], pre="gpt-2")
    raises(
        CheckpointError, "'a b', expected two tokens that make a third", "gpt2", ["a", "b"], merges=["a b"], pre="gpt-2"
    )
    raises(CheckpointError, "1,024 characters", "gpt2", ["a" * 1025], merges=["a a"], pre="gpt-2")
