"""The ids that begin and end a text, from a GGUF file's metadata."""

from __future__ import annotations

from monograph.errors import ConfigError
from monograph.model.gguf_file import GGUFFile

CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type

# Ends of turn that converters marked as control tokens before the metadata had a key for them.
_END_OF_TURN_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")
# SentencePiece's ids for <s> and </s>, which files of the model "llama" may leave out.
_SENTENCEPIECE_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}


def special_token_id(file: GGUFFile, role: str) -> int | None:
    """Return the id under `tokenizer.ggml.<role>_token_id`, or None if the model has no such token.

    Args:
        file: The open file.
        role: "bos", "eos", "eot", "eom", "unknown", "padding", ...

    Raises:
        ConfigError: The id is not one of the vocabulary.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    num_tokens = len(file.texts("tokenizer.ggml.tokens", []))
    if key in file.metadata:
        token_id = file.integer(key)
        if not 0 <= token_id < num_tokens:
            raise ConfigError(f"{file.path}: metadata {key} is {token_id}, expected an id below {num_tokens}")
        return token_id
    if file.text("tokenizer.ggml.model", "") == "llama":
        default = _SENTENCEPIECE_DEFAULTS.get(role, num_tokens)
        return default if default < num_tokens else None
    return None


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return every id that ends an answer: end of sequence, of turn and of message, each once, that of eos first.

    Files older than the keys for end of turn and of message name neither; their control tokens tell by their text.
    """
    ids = [special_token_id(file, role) for role in ("eos", "eot", "eom")]
    tokens = file.texts("tokenizer.ggml.tokens", [])
    types = file.metadata.get("tokenizer.ggml.token_type")
    for text in _END_OF_TURN_TEXTS if types is not None and len(file.numbers("tokenizer.ggml.token_type")) else ():
        if text in tokens:
            token_id = tokens.index(text)
            ids += [token_id] if file.numbers("tokenizer.ggml.token_type")[token_id] == CONTROL_TOKEN else []
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
