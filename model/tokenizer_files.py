"""A tokenizer's files: which there are in a folder, what they say, and which file wins where two disagree.

The rules are those of PreTrainedTokenizerFast in transformers 5.17 for a folder that holds a tokenizer.json. That file
is the whole pipeline, so ``add_bos_token`` and ``add_eos_token`` of tokenizer_config.json, which its post-processor has
answered, have no say. tokenizer_config.json names the special tokens; special_tokens_map.json and added_tokens.json are
read only where it has no ``added_tokens_decoder``. Chat templates in files of their own win over those inside.

``tokenizer_class`` has no say either. AutoTokenizer lets some classes rebuild the pipeline from the vocabulary alone,
against the file beside it: GPT2Tokenizer drops a cut between digits, LlamaTokenizer the blank after a special token.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monograph.errors import CheckpointError
from monograph.model.chat_template import MAX_TEMPLATE_NBYTES
from monograph.model.json_file import read_json_object

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_CONVERTIBLE = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """Where the files of one tokenizer are. Only tokenizer.json is needed.

    Attributes:
        tokenizer: tokenizer.json.
        config: tokenizer_config.json.
        special_tokens_map: special_tokens_map.json.
        added_tokens: added_tokens.json.
        chat_template: chat_template.jinja, the default template.
        more_chat_templates: Other templates by name.
    """

    tokenizer: Path
    config: Path | None = None
    special_tokens_map: Path | None = None
    added_tokens: Path | None = None
    chat_template: Path | None = None
    more_chat_templates: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def in_folder(cls, folder: Path) -> TokenizerFiles:
        """Find the files of a checkpoint folder by their names.

        Raises:
            CheckpointError: There is no such folder, or no tokenizer.json in it.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a checkpoint folder, found {_kind(folder)}")
        tokenizer = folder / "tokenizer.json"
        if not tokenizer.is_file():
            raise CheckpointError(_no_tokenizer(folder))

        def there(name: str) -> Path | None:
            path = folder / name
            return path if path.is_file() else None

        return cls(
            tokenizer=tokenizer,
            config=there("tokenizer_config.json"),
            special_tokens_map=there("special_tokens_map.json"),
            added_tokens=there("added_tokens.json"),
            chat_template=there("chat_template.jinja"),
            more_chat_templates={
                path.name.removesuffix(".jinja"): path
                for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
            },
        )


@dataclass
class TokenizerParts:
    """What the files come to.

    Attributes:
        backend: The pipeline of the tokenizers library, special tokens registered, truncation and padding off.
        special_tokens: Content of each special token by its name ("bos_token", ...), as templates see them.
        chat_template: One template, several by name, or None.
        cleans_up: Whether decoded text has its spaces before punctuation removed.
    """

    backend: Backend
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None
    cleans_up: bool


def read_tokenizer_files(files: TokenizerFiles) -> TokenizerParts:
    """Read the files into a pipeline and what goes with it.

    Raises:
        CheckpointError: A file cannot be read or does not say what it should; the message names it.
    """
    backend = _read_backend(files.tokenizer)
    config = dict(read_json_object(files.config, CheckpointError)) if files.config else {}
    source = files.config or files.tokenizer
    if "added_tokens_decoder" in config:
        listed = _listed_tokens(config["added_tokens_decoder"], source)
    else:
        if files.special_tokens_map:
            config |= _special_marked(read_json_object(files.special_tokens_map, CheckpointError))
        listed = backend.get_added_tokens_decoder()
        if files.added_tokens:
            listed = _legacy_added_tokens(files.added_tokens, config) | listed
    named, extra = _special_tokens(config, source)
    if backend.padding is not None:
        named.setdefault("pad_token", backend.padding["pad_token"])
    known = {token.content: token for token in (*backend.get_added_tokens_decoder().values(), *listed.values())}
    named = {name: known.get(str(token), token) for name, token in named.items()}
    register_tokens(backend, named.values(), extra=extra, listed=listed)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return TokenizerParts(
        backend=backend,
        special_tokens={name: str(token) for name, token in named.items()},
        chat_template=_chat_templates(files, config, source),
        cleans_up=_cleans_up(backend, config),
    )


def register_tokens(
    backend: Backend,
    named: Iterable[str | AddedToken],
    *,
    extra: Iterable[str | AddedToken] = (),
    listed: Mapping[int, AddedToken] | None = None,
) -> None:
    """Make the pipeline know every special token: never split on the way in, left out on the way out.

    Args:
        backend: The pipeline; changed in place. A token without an id gets the next free one.
        named: Special tokens that have a role.
        extra: Special tokens without one.
        listed: Added tokens by id, whose flags win over the pipeline's; the pipeline's own where there is no such list.
    """
    from tokenizers import AddedToken

    present = backend.get_added_tokens_decoder()
    adding = [token for _, token in sorted((present if listed is None else listed).items())]
    contents = {token.content for token in (*present.values(), *adding)}
    roles = {str(token) for token in named}
    for token in adding:
        token.special = token.special or token.content in roles
    for value in (*named, *extra):
        if str(value) in contents or not str(value):
            continue
        token = AddedToken(value, special=True) if isinstance(value, str) else value
        token.special = token.special or token.content in roles
        adding.append(token)
    if adding:
        backend.add_tokens(adding)


def _no_tokenizer(folder: Path) -> str:
    found = [name for name in _CONVERTIBLE if (folder / name).is_file()]
    if not found:
        return f"{folder}: no tokenizer.json, the one tokenizer format read from a folder (a GGUF file holds its own)"
    return (
        f"{folder}: no tokenizer.json, the one tokenizer format read from a folder; there is {' and '.join(found)}, "
        f"which transformers converts: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def _read_backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    text = _read_text(path)
    try:
        backend = Backend.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and its panics are not even an Exception
        raise CheckpointError(f"{path}: the tokenizers library cannot read it: {error}") from error
    _check_added_ids(backend, text, path)
    return backend


def _check_added_ids(backend: Backend, text: str, path: Path) -> None:
    """Say so where the library gives an added token another id than the file: it numbers them without gaps."""
    listed = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
    for token in json.JSONDecoder().raw_decode(text, listed.end())[0] if listed else ():
        token_id = backend.token_to_id(token["content"])
        if token_id != token["id"]:
            warnings.warn(
                f"{path}: added token {token['content']!r} has id {token['id']} in the file, but the tokenizers "
                f"library gives it {token_id} (in transformers too): the model may have been trained with the other",
                UserWarning,
                stacklevel=2,
            )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _read_template(path: Path) -> str:
    if path.is_file() and path.stat().st_size > MAX_TEMPLATE_NBYTES:
        raise CheckpointError(
            f"{path}: a chat template of {path.stat().st_size:,} bytes; the limit is {MAX_TEMPLATE_NBYTES:,}"
        )
    return _read_text(path)


def _kind(path: Path) -> str:
    return "a file" if path.exists() else "nothing"


def _token(value: Any, name: str, source: Path) -> str | AddedToken:
    """A token as the files spell it: its text, or an object with its text and how it is matched."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise CheckpointError(f"{source}: {name}: expected a string or an object with a content, got {value!r}")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(value["content"], **{flag: bool(value[flag]) for flag in flags if flag in value})


def _listed_tokens(value: Any, source: Path) -> dict[int, AddedToken]:
    from tokenizers import AddedToken

    if not isinstance(value, dict) or not all(str(key).isdecimal() for key in value):
        raise CheckpointError(f"{source}: added_tokens_decoder: expected an object whose keys are token ids")
    listed = {int(key): _token(token, f"added_tokens_decoder[{key}]", source) for key, token in value.items()}
    return {key: AddedToken(token) if isinstance(token, str) else token for key, token in listed.items()}


def _special_marked(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of special_tokens_map.json; what it lists is special, whatever the flag in it says."""
    return {key: value | {"special": True} if isinstance(value, dict) else value for key, value in tokens.items()}


def _legacy_added_tokens(source: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    from tokenizers import AddedToken

    tokens = read_json_object(source, CheckpointError)
    if not all(isinstance(key, int) and not isinstance(key, bool) for key in tokens.values()):
        raise CheckpointError(f"{source}: expected an object from token text to token id")
    named, extra = _special_tokens(config, source)
    special = {str(token) for token in (*named.values(), *extra)}
    return {
        key: AddedToken(text, normalized=text not in special, special=text in special) for text, key in tokens.items()
    }


def _special_tokens(config: dict[str, Any], source: Path) -> tuple[dict[str, str | AddedToken], list[str | AddedToken]]:
    """Special tokens that have a name, and those that have none."""
    named = {name: _token(config[name], name, source) for name in NAMED_TOKENS if config.get(name) is not None}
    for name, value in config.items():
        if name.endswith("_token") and name not in NAMED_TOKENS and isinstance(value, str | dict):
            named[name] = _token(value, name, source)
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or []
    if isinstance(extra, dict):
        named |= {name: _token(value, f"extra_special_tokens.{name}", source) for name, value in extra.items()}
        return named, []
    if not isinstance(extra, list):
        raise CheckpointError(f"{source}: extra_special_tokens: expected a list or an object, got {extra!r}")
    return named, [_token(value, f"extra_special_tokens[{i}]", source) for i, value in enumerate(extra)]


def _chat_templates(files: TokenizerFiles, config: dict[str, Any], source: Path) -> str | dict[str, str] | None:
    in_files = {"default": _read_template(files.chat_template)} if files.chat_template else {}
    in_files |= {name: _read_template(path) for name, path in files.more_chat_templates.items()}
    if in_files:
        return in_files["default"] if set(in_files) == {"default"} else in_files
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(value, dict) or not all(isinstance(part, str) for entry in value.items() for part in entry):
        raise CheckpointError(f"{source}: chat_template: expected a string or a list of {{name, template}} objects")
    return value


def _cleans_up(backend: Backend, config: dict[str, Any]) -> bool:
    """Cleaning was meant for WordPiece; on BPE it eats spaces that belong, so there it takes a second, blunter flag."""
    if not config.get("clean_up_tokenization_spaces", False):
        return False
    forced = bool(config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
    return forced or type(backend.model).__name__ != "BPE"
