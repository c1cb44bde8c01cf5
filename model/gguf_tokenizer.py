"""A tokenizer from the metadata of a GGUF file.

Two kinds: byte-level BPE with merges ("gpt2"), whose way of cutting text into words is known by a name (`pre`); and
SentencePiece BPE ("llama"), whose merges follow from the scores of its pieces. Both become a pipeline of the tokenizers
library. Kinds and names that are not listed here are refused: a wrong cut gives other ids and a worse model, silently.

Names and patterns follow llama.cpp, which defines them; where its pattern is a rewrite of the model's own, the model's
own is used.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from monograph.errors import CheckpointError, ConfigError
from monograph.model.gguf_file import GGUFFile
from monograph.model.gguf_token_ids import CONTROL_TOKEN, eos_token_ids, special_token_id

_UNKNOWN_TOKEN, _USER_DEFINED_TOKEN, _BYTE_TOKEN = 2, 4, 6  # of tokenizer.ggml.token_type
_NORMAL_TOKEN = 1
_SPACE = "▁"
_MAX_TOKEN_LENGTH = 1024  # characters; every way to cut a piece in two is looked at

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the name of the cut: patterns applied one after the other, each to the pieces that those before it left.
_WORD_PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "llama-bpe": (_LLAMA3_WORDS,),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


@dataclass(frozen=True)
class GGUFTokenizerParts:
    """A tokenizer and what goes with it.

    Attributes:
        tokenizer: Text to ids and back. Its post-processor adds BOS and EOS as the two flags say.
        bos_token: Text of the token that begins a text, or None; likewise `eos_token`, `unk_token`, `pad_token`.
        bos_token_id: Its id.
        eos_token_ids: Every id that ends an answer, that of `eos_token` first.
        add_bos_token: Whether a plain text is begun with BOS.
        add_eos_token: Whether a plain text is ended with EOS.
        chat_template: The Jinja template; several by name if the file has several; None if it has none.
    """

    tokenizer: Tokenizer
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos_token: bool
    add_eos_token: bool
    chat_template: str | dict[str, str] | None


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: np.ndarray  # [num_tokens]

    def of_type(self, *types: int) -> list[str]:
        return [self.tokens[i] for i in np.flatnonzero(np.isin(self.types, types))]


def tokenizer_parts(file: str | os.PathLike[str] | GGUFFile) -> GGUFTokenizerParts:
    """Build the tokenizer that a GGUF file describes.

    Args:
        file: The path of the file, or the open file (left open).

    Raises:
        CheckpointError: The file is damaged, or vocabulary and merges do not fit together.
        ConfigError: There is no tokenizer in the file, or one of a kind that is not supported.
    """
    if not isinstance(file, GGUFFile):
        with GGUFFile(file) as opened:
            return tokenizer_parts(opened)
    model = file.text("tokenizer.ggml.model", "")
    if model not in ("gpt2", "llama"):
        found = (
            f"tokenizer.ggml.model {model!r} is not supported (gpt2 and llama are)" if model else "holds no tokenizer"
        )
        raise ConfigError(f"{file.path}: {found}")
    vocabulary = _vocabulary(file)
    if model == "gpt2":
        cut = _cut_name(file)
        tokenizer = _byte_level_bpe(file, vocabulary, cut)
        adds_bos = cut == "llama-bpe"
    else:
        tokenizer = _sentencepiece_bpe(file, vocabulary)
        adds_bos = True
    _add_special_tokens(tokenizer, vocabulary)
    bos, eos = special_token_id(file, "bos"), special_token_id(file, "eos")
    adds_bos = file.flag("tokenizer.ggml.add_bos_token", adds_bos and bos is not None)
    adds_eos = file.flag("tokenizer.ggml.add_eos_token", False)
    _frame(tokenizer, file, _named(vocabulary, bos), _named(vocabulary, eos), adds_bos, adds_eos)
    return GGUFTokenizerParts(
        tokenizer=tokenizer,
        bos_token=_named(vocabulary, bos),
        eos_token=_named(vocabulary, eos),
        unk_token=_named(vocabulary, special_token_id(file, "unknown")),
        pad_token=_named(vocabulary, special_token_id(file, "padding")),
        bos_token_id=bos,
        eos_token_ids=eos_token_ids(file),
        add_bos_token=adds_bos,
        add_eos_token=adds_eos,
        chat_template=_chat_template(file),
    )


def _vocabulary(file: GGUFFile) -> _Vocabulary:
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(file.texts("tokenizer.ggml.tokens"))]
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens names a token twice")
    if max(map(len, tokens), default=0) > _MAX_TOKEN_LENGTH:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens has a token of over {_MAX_TOKEN_LENGTH:,} characters"
        )
    types = file.numbers("tokenizer.ggml.token_type", np.full(len(tokens), _NORMAL_TOKEN))
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens):,} tokens, but {len(types):,} in tokenizer.ggml.token_type")
    return _Vocabulary(tokens, types)


def _cut_name(file: GGUFFile) -> str:
    """Return the name under which the way of cutting text into words is known."""
    if "tokenizer.ggml.pre" not in file.metadata:
        warnings.warn(
            f"{file.path}: the metadata does not say how text is cut into words (tokenizer.ggml.pre), so the default "
            "cut is used; answers may be worse than the model's best. A newer conversion of the model says it",
            stacklevel=3,
        )
    name = file.text("tokenizer.ggml.pre", "default")
    name = _ALIASES.get(name, name)
    if name not in _WORD_PATTERNS:
        supported = ", ".join([*_WORD_PATTERNS, *_ALIASES])
        raise ConfigError(f"{file.path}: tokenizer.ggml.pre {name!r} is not supported ({supported} are)")
    return name


def _byte_level_bpe(file: GGUFFile, vocabulary: _Vocabulary, cut: str) -> Tokenizer:
    """Build the BPE over bytes spelled as printable characters, as GPT-2 and Llama 3 have it.

    A byte without a token of its own is left out, as the models' own pipelines do.
    """
    merges = []
    known = set(vocabulary.tokens)
    for merge in file.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not known.issuperset((left, right, left + right)):  # the library would panic, which is no Exception
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.merges has {merge!r:.80}, expected two tokens that make a third"
            )
        merges.append((left, right))
    # Llama 3 takes a word that is a token as it is, even where merges would not lead there.
    tokenizer = _bpe(file, vocabulary, merges, ignore_merges=cut == "llama-bpe")
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _WORD_PATTERNS[cut]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(file: GGUFFile, vocabulary: _Vocabulary) -> Tokenizer:
    """Build the BPE over characters with spaces as ▁, unknown characters as bytes, as Llama 1 and 2 have it."""
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        value = file.metadata.get(key)
        if value is not None and np.any(value):
            raise ConfigError(f"{file.path}: {key} is not supported for tokenizer.ggml.model 'llama'")
    has_bytes = bool(vocabulary.of_type(_BYTE_TOKEN))
    unknown = special_token_id(file, "unknown")
    tokenizer = _bpe(
        file,
        vocabulary,
        _merges_by_score(file, vocabulary),
        unk_token=_named(vocabulary, unknown),
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    adds_space = file.flag("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(file: GGUFFile, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, best piece first: the order in which SentencePiece joins them."""
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{file.path}: {len(vocabulary.tokens):,} tokens, but {len(scores):,} scores")
    apart = set(vocabulary.of_type(_UNKNOWN_TOKEN, CONTROL_TOKEN, _USER_DEFINED_TOKEN, _BYTE_TOKEN))
    score_of = {t: s for t, s in zip(vocabulary.tokens, scores.tolist(), strict=True) if t not in apart}
    merges = []
    for piece in sorted(score_of, key=lambda token: -score_of[token]):
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(left, right) for left, right in splits if left in score_of and right in score_of]
        merges += sorted(pairs, key=lambda pair: (-score_of[pair[0]], -score_of[pair[1]]))
    return merges


def _bpe(file: GGUFFile, vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: object) -> Tokenizer:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        return Tokenizer(BPE(ids, merges, **options))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file.path}: the tokenizers library refuses the vocabulary: {error}") from error


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Make control tokens (left out of decoded text) and user-defined tokens (kept) match whole, before all else."""
    special = vocabulary.of_type(CONTROL_TOKEN, _UNKNOWN_TOKEN)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    visible = vocabulary.of_type(_USER_DEFINED_TOKEN)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in visible])


def _frame(
    tokenizer: Tokenizer, file: GGUFFile, bos: str | None, eos: str | None, adds_bos: bool, adds_eos: bool
) -> None:
    """Set what is put around a text."""
    for name, token, adds in (("bos", bos, adds_bos), ("eos", eos, adds_eos)):
        if adds and token is None:
            raise ConfigError(f"{file.path}: tokenizer.ggml.add_{name}_token is true, but no {name} token is given")
    before = [bos] if adds_bos and bos is not None else []
    after = [eos] if adds_eos and eos is not None else []
    if before or after:
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _named(vocabulary: _Vocabulary, token_id: int | None) -> str | None:
    return None if token_id is None else vocabulary.tokens[token_id]


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """Return the one template, or all by name where the file has more than the default one."""
    key = "tokenizer.chat_template"
    names = [name.removeprefix(f"{key}.") for name in file.metadata if name.startswith(f"{key}.")]
    templates = {name: file.text(f"{key}.{name}") for name in names}
    if key not in file.metadata:
        return templates or None
    return {"default": file.text(key), **templates} if templates else file.text(key)
