"""SentencePiece tokenizers in GGUF metadata, against the sentencepiece library that trained them."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from monograph.errors import CheckpointError, ConfigError
from monograph.model.gguf_tokenizer import GGUFTokenizerParts, tokenizer_parts
from tests.model.tiny_gguf import write_tokenizer

ALICE = (Path(__file__).parents[1] / "data" / "alice.txt").read_text()
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

TEXTS = [
    "",
    " ",
    "   ",
    "Hello, world!",
    " leading space",
    "   three leading, three trailing   ",
    "def f(x):\n    return x ** 2  # twice\n\n\tdone",
    "12345 3.14 1,000 ²³ ½ ٣٤٥ Ⅷ",
    "naïve café e\u0301 o\u0308",
    "漢字かな交じり文 한국어 中文",
    "🙂 👩‍👩‍👧‍👦 🇫🇷 ✌🏽",
    "a\nb\n\nc\r\n\td\u00a0e\u2003f\u200bg\u3000h",
    "▁ is▁the▁▁mark",
    "the cat and the hat, the the  the",
    "\ufffd \U000f0000 \x01\x7f",
]


def train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """Train a small BPE as Llama 1 and 2 were: identity normalisation, digits apart, bytes for what is unknown."""
    lines = [line for line in ALICE[:100_000].splitlines() if line]
    lines += [text for text in TEXTS if text.strip()] * 10
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "vocab_size": 900,
        "model_type": "bpe",
        "character_coverage": 0.999,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **{**settings, **options}
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def convert(
    path: Path, trained: sentencepiece.SentencePieceProcessor, shown: tuple[str, ...] = (), **metadata: Any
) -> Path:
    """Write a trained model as converters do; `shown` are its user-defined pieces."""
    size = trained.vocab_size()
    pieces = [trained.id_to_piece(i) for i in range(size)]
    types = [NORMAL] * size
    for i, piece in enumerate(pieces):
        if trained.is_unknown(i):
            types[i] = UNKNOWN
        elif trained.is_control(i):
            types[i] = CONTROL
        elif trained.is_unused(i):
            types[i] = UNUSED
        elif trained.is_byte(i):
            types[i] = BYTE
        elif piece in shown:
            types[i] = USER_DEFINED
    scores = [trained.get_score(i) for i in range(size)]
    return write_tokenizer(path, "llama", pieces, types, scores=scores, **metadata)


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    return train()


@pytest.fixture(scope="module")
def parts(
    trained: sentencepiece.SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory
) -> GGUFTokenizerParts:
    return tokenizer_parts(convert(tmp_path_factory.mktemp("spm") / "t.gguf", trained))


def ids(parts: GGUFTokenizerParts, text: str, add_special_tokens: bool = False) -> list[int]:
    encoded: list[int] = parts.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return encoded


def random_texts(num_texts: int) -> list[str]:
    """Texts over few letters, where merges compete, and over all kinds of characters."""
    rng = random.Random(0)
    alphabets = ["aab ", "eehht  ", [*"aeiou thns.,'\n\t0123é漢🙂▁", "  ", "the ", " of", "ing"]]
    return ["".join(rng.choices(rng.choice(alphabets), k=rng.randint(1, 60))) for _ in range(num_texts)]


def test_equals_sentencepiece(trained: sentencepiece.SentencePieceProcessor, parts: GGUFTokenizerParts) -> None:
    for text in [*TEXTS, *ALICE.splitlines()[:600], ALICE[:20_000], *random_texts(2_000)]:
        expected = trained.encode(text)
        assert ids(parts, text) == expected, text
        assert parts.tokenizer.decode(expected) == trained.decode(expected) == text.replace("▁", " ")


def test_facts_and_bos(trained: sentencepiece.SentencePieceProcessor, parts: GGUFTokenizerParts) -> None:
    """Without a word of the metadata, ids and flags are those of every SentencePiece model of this kind."""
    assert (parts.unk_token, parts.bos_token, parts.eos_token, parts.pad_token) == ("<unk>", "<s>", "</s>", None)
    assert parts.bos_token_id == 1
    assert parts.eos_token_ids == (2,)
    assert parts.add_bos_token
    assert not parts.add_eos_token
    for text in TEXTS:
        assert ids(parts, text, True) == trained.encode(text, add_bos=True)


def test_streaming_pieces_of_a_character(
    trained: sentencepiece.SentencePieceProcessor, parts: GGUFTokenizerParts
) -> None:
    encoded = ids(parts, "🙂")
    assert len(encoded) == 5  # the space that is put in front, and four bytes
    assert parts.tokenizer.decode(encoded[:-1]) == "\ufffd" * 3
    assert parts.tokenizer.decode(encoded) == "🙂"


def test_without_the_space_in_front(tmp_path: Path) -> None:
    trained = train(add_dummy_prefix=False)
    parts = tokenizer_parts(convert(tmp_path / "t.gguf", trained, add_space_prefix=False))
    for text in [*TEXTS, *random_texts(200)]:
        assert ids(parts, text) == trained.encode(text), text
        assert parts.tokenizer.decode(ids(parts, text)) == text.replace("▁", " ")


def test_without_bytes_the_unknown_token_stands_for_them(tmp_path: Path) -> None:
    trained = train(byte_fallback=False)
    parts = tokenizer_parts(convert(tmp_path / "t.gguf", trained))
    for text in [*TEXTS, *random_texts(200), "\U000f0000\U000f0001 x \U000f0002"]:
        assert ids(parts, text) == trained.encode(text), text
    assert 0 in ids(parts, "\U000f0000")


def test_user_defined_pieces_match_whole(tmp_path: Path) -> None:
    shown = ("<tool>", "hatter")
    trained = train(user_defined_symbols=list(shown))
    parts = tokenizer_parts(convert(tmp_path / "t.gguf", trained, shown))
    for text in [*TEXTS, "mad hatter", "a <tool>", "a <tool><tool>hatter<tool>"]:
        assert ids(parts, text) == trained.encode(text), text
        assert parts.tokenizer.decode(ids(parts, text)) == text.replace("▁", " ")
    assert ids(parts, "a <tool>")[-1] == trained.piece_to_id("<tool>")
    assert ids(parts, "mad hatter")[-1] == trained.piece_to_id("hatter")


def test_special_tokens_inside_a_text(trained: sentencepiece.SentencePieceProcessor, parts: GGUFTokenizerParts) -> None:
    """As for llama.cpp, each stretch of text after a special token is encoded like a text of its own."""
    encoded = ids(parts, "<s>[INST] hi [/INST] hello</s><s>again")
    expected = [1, *trained.encode("[INST] hi [/INST] hello"), 2, 1, *trained.encode("again")]
    assert encoded == expected
    assert parts.tokenizer.decode(encoded, skip_special_tokens=True).startswith("[INST] hi [/INST] hello")


def test_equals_transformers(
    tmp_path: Path, trained: sentencepiece.SentencePieceProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    from transformers import AutoTokenizer

    file = convert(tmp_path / "t.gguf", trained, bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    oracle: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    parts = tokenizer_parts(file)
    for text in [*TEXTS, "<s>[INST] hi [/INST] hello</s><s>again"]:
        assert ids(parts, text) == oracle(text, add_special_tokens=False)["input_ids"], text


def test_end_of_sequence_and_padding_from_the_metadata(
    tmp_path: Path, trained: sentencepiece.SentencePieceProcessor
) -> None:
    file = convert(tmp_path / "t.gguf", trained, add_bos_token=False, add_eos_token=True, padding_token_id=0)
    parts = tokenizer_parts(file)
    assert parts.pad_token == "<unk>"
    for text in TEXTS:
        assert ids(parts, text, True) == trained.encode(text, add_eos=True)


def test_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"
    tokens, types = ["<unk>", "<s>", "</s>", "▁", "a"], [2, 3, 3, 1, 1]
    with pytest.raises(ConfigError, match=r"t\.gguf.*no tokenizer\.ggml\.scores"):
        tokenizer_parts(write_tokenizer(file, "llama", tokens, types))
    with pytest.raises(CheckpointError, match="5 tokens, but 4 scores"):
        tokenizer_parts(write_tokenizer(file, "llama", tokens, types, scores=[0.0] * 4))
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.remove_extra_whitespaces"):
        tokenizer_parts(write_tokenizer(file, "llama", tokens, types, scores=[0.0] * 5, remove_extra_whitespaces=True))
