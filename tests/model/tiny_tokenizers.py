"""Small tokenizers, built in the test that needs them: the two kinds that Llama models have, and folders of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ("<s>", "</s>", "<|user|>", "<|end|>")
PLAIN_ADDED = ("<tool>", "«naïve x»")

# GPT-2's alphabet, written out by its own rule: the printable bytes keep their code point.
_KEPT = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
SYMBOL = {b: chr(b) for b in _KEPT} | {
    b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in set(_KEPT))
}


def byte_level(merges: tuple[tuple[str, str], ...] = (), *, adds_bos: bool = False) -> Backend:
    """A byte-level BPE: id b is byte b, then the merged tokens, then SPECIAL and PLAIN_ADDED."""
    vocab = {SYMBOL[b]: b for b in range(256)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, adds_bos)


def sentencepiece(*, adds_bos: bool = False, decoder: Any = None) -> Backend:
    """A BPE as converted from SentencePiece: blanks are U+2581, unknown characters fall back to byte tokens."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": 1 + b for b in range(256)}
    for token in ("▁", "▁▁", *"abcdefghijklmnopqrstuvwxyz.,!?'", "é", "漢", "\ufffd", " ", "▁a", "▁the"):
        vocab[token] = len(vocab)
    for token in ("th", "the"):
        vocab[token] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(backend, adds_bos)


def _finished(backend: Backend, adds_bos: bool) -> Backend:
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens(list(PLAIN_ADDED))
    if adds_bos:
        bos = backend.token_to_id("<s>")
        assert bos is not None
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
        )
    return backend


def save(folder: Path, backend: Backend, config: dict[str, Any] | None = None, **texts: str) -> Path:
    """Write a checkpoint folder's tokenizer files; a keyword such as chat_template__jinja names one more file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in texts.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
