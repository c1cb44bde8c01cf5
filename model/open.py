"""A model before it is loaded: its configuration, its tokenizer and the source of its weights, whatever the format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from monograph.model.checkpoint import Source
from monograph.model.config import ModelConfig
from monograph.model.generation_config import GenerationDefaults
from monograph.model.hub import ModelFiles, fetch_weights, resolve
from monograph.model.manifest import INDEX_FILE, SINGLE_FILE
from monograph.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenModel:
    """What a model's files say, and how to get the rest out of them.

    Attributes:
        config: The model's configuration.
        defaults: The author's generation settings; nothing recommended where there are none.
        tokenizer: Builds the tokenizer; of a GGUF file, while its source is open.
        source: Opens the weights, fetching them from the Hub first if they are not here.
        is_local: Whether the weights are on this machine, so that opening them costs nothing.
    """

    config: ModelConfig
    defaults: GenerationDefaults
    tokenizer: Callable[[], Tokenizer]
    source: Callable[[], Source]
    is_local: bool


def open_model(
    model: str | Path, *, revision: str | None = None, token: str | None = None, local_files_only: bool = False
) -> OpenModel:
    """Read all of a model but its weights.

    Args:
        model: "org/name" on the Hub, "org/name:file.gguf", a folder or a .gguf file.
        revision: Branch, tag or commit on the Hub.
        token: Hub access token.
        local_files_only: Never ask the network.

    Raises:
        HubError: The Hub did not supply a file.
        ConfigError: A model of a kind that is not supported.
        CheckpointError: Files are missing or damaged.
    """
    files = resolve(model, revision, token, local_files_only, with_weights=False)
    if files.gguf is not None:
        return _open_gguf(files.gguf)
    return _open_folder(files, token, local_files_only)


def _open_folder(files: ModelFiles, token: str | None, local_files_only: bool) -> OpenModel:
    from monograph.model.safetensors_source import SafetensorsSource

    assert files.config is not None

    def source() -> Source:
        weights = fetch_weights(files, token, local_files_only).weights
        assert weights is not None
        return SafetensorsSource(weights)

    is_local = files.repo_id is None and any((files.root / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    config = ModelConfig.from_file(files.config)
    defaults = GenerationDefaults.from_file(files.generation_config, config.vocab_size)
    return OpenModel(config, defaults, lambda: Tokenizer.from_folder(files.root), source, is_local)


def _open_gguf(path: Path) -> OpenModel:
    # A GGUF file carries everything; its reader is imported only when there is one.
    from monograph.model.gguf_config import config_from_gguf
    from monograph.model.gguf_file import GGUFFile
    from monograph.model.gguf_source import GGUFSource
    from monograph.model.gguf_tokenizer import tokenizer_parts

    file = GGUFFile(path)

    def tokenizer() -> Tokenizer:
        parts = tokenizer_parts(file)
        return Tokenizer.from_parts(
            parts.tokenizer,
            bos_token=parts.bos_token,
            eos_token=parts.eos_token,
            unk_token=parts.unk_token,
            pad_token=parts.pad_token,
            eos_token_ids=parts.eos_token_ids,
            chat_template=parts.chat_template,
        )

    try:
        config = config_from_gguf(file)
    except BaseException:
        file.close()
        raise
    return OpenModel(config, GenerationDefaults(), tokenizer, lambda: GGUFSource(file), True)
