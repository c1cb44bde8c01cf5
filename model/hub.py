"""From the name of a model to its files: a folder, a GGUF file, or a repository on the Hugging Face Hub.

From the Hub only what the manifest names is fetched: config.json, generation_config.json, the tokenizer's files, the
chat template, and the safetensors weights (one file, or an index and exactly the shards it names). Everything comes
from the one commit that config.json came from. Endpoint, cache folder, token and offline mode are those of the
`huggingface_hub` library: HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from monograph.errors import CheckpointError, ConfigError, HubError
from monograph.model.manifest import (
    INDEX_FILE,
    SINGLE_FILE,
    WeightManifest,
    other_weights,
    read_index,
    read_manifest,
)

if TYPE_CHECKING:
    from monograph.model.hub_download import Repository

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
CHAT_TEMPLATE_FILE = "chat_template.jinja"

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True)
class ModelFiles:
    """Where the files of one model are on this machine.

    Attributes:
        root: The folder that holds them (of a GGUF file: its folder).
        config: config.json; None for a GGUF file, which carries its configuration.
        generation_config: generation_config.json, None if there is none.
        tokenizer: The tokenizer's files that exist, chat template included, by file name.
        weights: The safetensors files; None for a GGUF file, and until `fetch_weights`.
        gguf: The GGUF file, None for a model in safetensors form.
        repo_id: The repository on the Hub, None for local files.
        commit: The commit that the files belong to, None for local files.
    """

    root: Path
    config: Path | None
    generation_config: Path | None
    tokenizer: dict[str, Path]
    weights: WeightManifest | None = None
    gguf: Path | None = None
    repo_id: str | None = None
    commit: str | None = None


def resolve(
    model: str | Path,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    with_weights: bool = True,
) -> ModelFiles:
    """Find the files of a model, fetching from the Hub what this machine lacks.

    Args:
        model: A folder, a .gguf file, "org/name" on the Hub, or "org/name:file.gguf" for one GGUF file of a repository.
            What exists on this machine wins over the Hub.
        revision: Branch, tag or commit on the Hub; the default is its main branch.
        token: Access token; the default is the one that is logged in or set as HF_TOKEN.
        local_files_only: Use what is in the cache and never the network.
        with_weights: False leaves the safetensors weights to `fetch_weights`, so that a plan can be made first.

    Raises:
        HubError: The Hub did not supply the files; the message names the case and the way out.
        CheckpointError: Files are absent, or are none of a model that can be read.
    """
    if not isinstance(model, str | Path):
        raise ConfigError(f"model: expected a repository's name, a folder or a .gguf file, got {model!r}")
    path = Path(model).expanduser()
    if path.is_dir():
        files = _local_folder(path)
    elif path.exists():
        return _local_gguf(path)
    elif isinstance(model, Path) or _looks_like_path(model):
        raise CheckpointError(f"{model}: no such file or folder")
    else:
        files = _hub_repository(model, revision, token, local_files_only)
    if not with_weights or files.gguf is not None:
        return files
    return fetch_weights(files, token, local_files_only)


def fetch_weights(files: ModelFiles, token: str | None = None, local_files_only: bool = False) -> ModelFiles:
    """Return `files` with the safetensors weights found, or fetched from the commit of the other files.

    Raises:
        HubError: The Hub did not supply them.
        CheckpointError: There are none, the index is damaged, or files that it names are absent.
    """
    if files.weights is not None or files.gguf is not None:
        return files
    if files.repo_id is None:
        return replace(files, weights=read_manifest(files.root))
    assert files.commit is not None
    repository = _repository(files.repo_id, files.commit, token, local_files_only)
    single = repository.fetch_if_there(SINGLE_FILE)
    if single is not None:
        return replace(files, weights=WeightManifest((single,)))
    index = repository.fetch_if_there(INDEX_FILE)
    if index is None:
        raise repository.absent(f"{SINGLE_FILE} or {INDEX_FILE}", other_weights(repository.file_names()))
    names = read_index(index)
    paths = {name: repository.fetch(name) for name in dict.fromkeys(names.values())}
    weight_map = {tensor: paths[name] for tensor, name in names.items()}
    return replace(files, weights=WeightManifest(tuple(paths.values()), weight_map))


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith(("/", "./", "../", "~", ".\\", "..\\"))
        or model in ("", ".", "..")
        or "\\" in model
        or (model.endswith(".gguf") and ":" not in model)
        or model.split(":")[0].count("/") > 1
    )


def _local_folder(folder: Path) -> ModelFiles:
    config = folder / CONFIG_FILE
    if not config.is_file():
        gguf = sorted(path.name for path in folder.glob("*.gguf"))
        if gguf:
            raise CheckpointError(
                f"{folder}: expected {CONFIG_FILE}, got GGUF files; name the one to load: "
                f"{', '.join(str(folder / name) for name in gguf)}"
            )
        raise CheckpointError(f"{folder}: expected a model's folder with {CONFIG_FILE}, got none")
    generation = folder / GENERATION_CONFIG_FILE
    tokenizer = {name: folder / name for name in (*TOKENIZER_FILES, CHAT_TEMPLATE_FILE) if (folder / name).is_file()}
    return ModelFiles(folder, config, generation if generation.is_file() else None, tokenizer)


def _local_gguf(path: Path) -> ModelFiles:
    if path.suffix.lower() != ".gguf" and not _starts_as_gguf(path):
        if path.suffix in (".bin", ".pth", ".pt", ".ckpt"):
            raise CheckpointError(
                f"{path}: pickle files are never opened, for they can run code; use safetensors or GGUF"
            )
        raise CheckpointError(
            f"{path}: expected a model's folder or a .gguf file; name the folder that holds the model"
        )
    return ModelFiles(path.parent, None, None, {}, gguf=path)


def _starts_as_gguf(path: Path) -> bool:
    # Caches keep GGUF files under names without a suffix.
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as fault:
        raise CheckpointError(f"{path}: cannot be read: {fault.strerror or fault}") from fault


def _hub_repository(model: str, revision: str | None, token: str | None, local_files_only: bool) -> ModelFiles:
    repo_id, _, gguf_name = model.partition(":")
    if not _REPO_ID.fullmatch(repo_id) or ".." in repo_id or "--" in repo_id:
        raise HubError(f"{model!r}: expected a folder, a .gguf file or a repository like org/name, got neither")
    if revision is not None and (not revision or ".." in revision.split("/") or revision.startswith("/")):
        raise ConfigError(f"revision: expected a branch, tag or commit, got {revision!r}")
    repository = _repository(repo_id, revision, token, local_files_only)
    if gguf_name:
        if not gguf_name.endswith(".gguf") or gguf_name.startswith("/") or ".." in gguf_name.split("/"):
            raise HubError(f"{model}: expected org/name:file.gguf, got the file {gguf_name!r}")
        path = repository.fetch(gguf_name)
        commit = path.parents[gguf_name.count("/")].name
        return ModelFiles(path.parent, None, None, {}, gguf=path, repo_id=repo_id, commit=commit)
    config = repository.fetch_if_there(CONFIG_FILE)
    if config is None:
        raise repository.absent(CONFIG_FILE, _gguf_way_out(repository))
    commit = config.parent.name
    pinned = _repository(repo_id, commit, token, local_files_only)
    found = {
        name: pinned.fetch_if_there(name) for name in (GENERATION_CONFIG_FILE, *TOKENIZER_FILES, CHAT_TEMPLATE_FILE)
    }
    generation = found.pop(GENERATION_CONFIG_FILE)
    tokenizer = {name: path for name, path in found.items() if path is not None}
    return ModelFiles(config.parent, config, generation, tokenizer, repo_id=repo_id, commit=commit)


def _repository(repo_id: str, revision: str | None, token: str | None, local_files_only: bool) -> Repository:
    # Imported only for what is not a file here: the Hub's library and its HTTP client take 0.1 s.
    from monograph.model.hub_download import Repository

    return Repository(repo_id, revision, token, local_files_only)


def _gguf_way_out(repository: Repository) -> str:
    names = sorted(name for name in repository.file_names() if name.endswith(".gguf"))
    if not names:
        return ""
    return f"; it has GGUF files, name the one to load: {', '.join(f'{repository.repo_id}:{name}' for name in names)}"
