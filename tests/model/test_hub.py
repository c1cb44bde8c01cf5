"""Finding a model's files: local folders and files, and a Hub that answers, refuses or is out of reach."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from monograph.errors import CheckpointError, ConfigError, HubError, MonographError
from monograph.model.hub import fetch_weights, resolve
from monograph.model.safetensors_source import SafetensorsSource
from tests.checkpoints import write_checkpoint
from tests.hub_server import HubRepo, HubServer, hub_server

TOKENIZER = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{ }", "chat_template.jinja": b"{{ messages }}"}
NEVER = {
    "pytorch_model.bin": b"junk",
    "original/x.pth": b"junk",
    "consolidated.safetensors": b"junk",
    "README.md": b"x",
}


def repository_files(folder: Path, shards: int = 1) -> dict[str, bytes]:
    write_checkpoint(folder, shards=shards, generation_config={"do_sample": True})
    return {path.name: path.read_bytes() for path in folder.iterdir()} | TOKENIZER | NEVER


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with an open single-file model, with nothing cached yet and nobody logged in."""
    with hub_server({"org/single": HubRepo(repository_files(tmp_path / "made"))}) as server:
        point_library_at(server.url, tmp_path / "home", monkeypatch)
        yield server


def point_library_at(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what the library reads from the environment when it is first imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between retries


def refusal(model: str, **arguments: object) -> str:
    with pytest.raises(HubError) as caught:
        resolve(model, **arguments)  # type: ignore[arg-type]
    return str(caught.value)


# Local


def test_local_folder(tmp_path: Path) -> None:
    files = repository_files(tmp_path)
    for name in TOKENIZER:
        (tmp_path / name).write_bytes(files[name])
    found = resolve(str(tmp_path))
    assert (found.root, found.config) == (tmp_path, tmp_path / "config.json")
    assert found.generation_config == tmp_path / "generation_config.json"
    assert found.tokenizer == {name: tmp_path / name for name in TOKENIZER}
    assert found.weights is not None
    assert found.weights.files == (tmp_path / "model.safetensors",)
    assert (found.gguf, found.repo_id, found.commit) == (None, None, None)
    assert resolve(tmp_path, with_weights=False).weights is None


def test_local_folder_wins_over_a_repository_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").root == Path("org/name")


def test_local_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF....")
    (tmp_path / "sha256-0123").write_bytes(b"GGUF....")
    assert resolve(str(tmp_path / "m.gguf")).gguf == tmp_path / "m.gguf"
    assert resolve(str(tmp_path / "sha256-0123")).gguf == tmp_path / "sha256-0123"
    found = resolve(tmp_path / "m.gguf", with_weights=False)
    assert fetch_weights(found) is found


@pytest.mark.parametrize(
    "model", ["./nowhere", "/nowhere/at/all", "~/nowhere", "nowhere.gguf", "a/b/c", "..", "", "a\\b"]
)
def test_absent_path_is_not_asked_of_the_hub(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"no such file or folder|expected a model's folder"):
        resolve(model)


def test_local_folder_without_config_names_its_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "a.Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=rf"name the one to load: {tmp_path}/a\.Q4\.gguf"):
        resolve(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, and pickle files are never opened"):
        resolve(tmp_path)
    with pytest.raises(CheckpointError, match="pickle files are never opened"):
        resolve(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="name the folder"):
        resolve(tmp_path / "config.json")


# From the Hub


def test_single_file_model(hub: HubServer) -> None:
    found = resolve("org/single")
    assert found.repo_id == "org/single"
    assert found.commit == "a" * 40
    assert sorted(hub.fetched()) == sorted(
        ["config.json", "generation_config.json", "model.safetensors", *TOKENIZER]
    )  # and nothing else
    assert found.config is not None
    assert found.config.read_bytes() == hub.repos["org/single"].files["config.json"]
    assert set(found.tokenizer) == set(TOKENIZER)
    assert found.weights is not None
    source = SafetensorsSource(found.weights)
    assert source.shape("lm_head.weight") == (96, 64)
    source.close()


def test_weights_can_wait(hub: HubServer) -> None:
    found = resolve("org/single", with_weights=False)
    assert found.weights is None
    assert "model.safetensors" not in hub.fetched()
    weights = fetch_weights(found).weights
    assert weights is not None
    assert weights.files[0].parent == found.root


def test_warm_cache_costs_one_request(hub: HubServer) -> None:
    first = resolve("org/single")
    hub.requests.clear()
    assert resolve("org/single") == first
    assert [(request.method, request.path) for request in hub.requests] == [
        ("HEAD", "/org/single/resolve/main/config.json")
    ]
    hub.requests.clear()
    assert resolve("org/single", revision="a" * 40) == first
    assert resolve("org/single", local_files_only=True) == first
    assert hub.requests == []


def test_all_files_come_from_one_commit(hub: HubServer) -> None:
    repo = hub.repos["org/single"]
    repo.older["b" * 40] = {**repo.files, "generation_config.json": b'{"top_k": 7}'}
    repo.branches["v1"] = "b" * 40
    found = resolve("org/single", revision="v1", with_weights=False)
    assert found.commit == "b" * 40
    repo.branches["v1"] = "a" * 40  # the branch moves on between plan and download
    found = fetch_weights(found)
    assert found.weights is not None
    assert {found.root, found.weights.files[0].parent} == {found.root}
    assert "b" * 40 in str(found.generation_config)


def test_content_host_is_not_shown_the_token(hub: HubServer) -> None:
    hub.repos["org/single"].access = "private"
    resolve("org/single", token="hf_right")
    assert {request.token for request in hub.requests if request.host == "127.0.0.1"} == {"hf_right"}
    assert {request.token for request in hub.requests if request.host == "localhost"} == {None}


def test_files_do_not_remember_the_token(hub: HubServer) -> None:
    hub.repos["org/single"].access = "private"
    assert "hf_right" not in repr(resolve("org/single", token="hf_right"))


def test_token_of_the_environment(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/single"].access = "private"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert resolve("org/single").weights is not None


def test_gguf_repository(hub: HubServer) -> None:
    hub.repos["org/quantised"] = HubRepo({"m.Q4_0.gguf": b"GGUF4", "deep/m.Q8_0.gguf": b"GGUF8", "README.md": b"x"})
    with pytest.raises(CheckpointError, match=r"org/quantised:deep/m\.Q8_0\.gguf, org/quantised:m\.Q4_0\.gguf"):
        resolve("org/quantised")
    found = resolve("org/quantised:deep/m.Q8_0.gguf")
    assert found.gguf is not None
    assert found.gguf.read_bytes() == b"GGUF8"
    assert (found.config, found.weights, found.commit) == (None, None, "a" * 40)
    with pytest.raises(CheckpointError, match=r"expected other\.gguf, got no such file"):
        resolve("org/quantised:other.gguf")
    assert "expected org/name:file.gguf" in refusal("org/quantised:../m.gguf")


def test_b07_from_the_hub_only_what_the_index_names(hub: HubServer, tmp_path: Path) -> None:
    files = repository_files(tmp_path / "sharded", shards=3)
    del files["model-00003-of-00003.safetensors"]
    files["model-00009-of-00009.safetensors"] = b"junk"
    hub.repos["org/sharded"] = HubRepo(files)
    with pytest.raises(CheckpointError, match=r"expected model-00003-of-00003\.safetensors, got no such file"):
        resolve("org/sharded")
    files.update(repository_files(tmp_path / "sharded", shards=3))
    hub.requests.clear()
    found = resolve("org/sharded")
    assert hub.fetched() == ["model-00003-of-00003.safetensors"]  # the others are cached
    assert found.weights is not None
    assert [path.name for path in found.weights.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    source = SafetensorsSource(found.weights)
    assert len(source.names()) == 21
    assert source.read("model.norm.weight").dtype == torch.float32
    source.close()


def test_b07_from_the_hub_single_file_wins_over_index(hub: HubServer, tmp_path: Path) -> None:
    files = repository_files(tmp_path / "both", shards=2) | {"model.safetensors": b"whole"}
    hub.repos["org/both"] = HubRepo(files)
    found = resolve("org/both")
    assert found.weights is not None
    assert [path.read_bytes() for path in found.weights.files] == [b"whole"]
    assert not any("-of-" in name for name in hub.fetched())


@pytest.mark.parametrize(
    "name", ["../../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "w.bin", "..", 7]
)
def test_index_cannot_lead_out_of_the_repository(name: object, hub: HubServer) -> None:
    index = json.dumps({"weight_map": {"lm_head.weight": name}}).encode()
    hub.repos["org/evil"] = HubRepo({"config.json": b"{}", "model.safetensors.index.json": index})
    with pytest.raises(
        CheckpointError, match=r"weight_map: lm_head\.weight: expected the name of a \.safetensors file"
    ):
        resolve("org/evil")
    assert hub.fetched() == ["config.json", "model.safetensors.index.json"]


def test_repository_of_pickles_is_refused(hub: HubServer) -> None:
    hub.repos["org/old"] = HubRepo({"config.json": b"{}", "pytorch_model.bin": b"junk"})
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, and pickle files are never opened"):
        resolve("org/old")
    assert hub.fetched() == ["config.json"]


# Refusals


def test_gated(hub: HubServer) -> None:
    hub.repos["org/single"].access = "gated"
    for token in (None, "hf_other"):
        message = refusal("org/single", token=token)
        assert f"access is gated; accept its terms at {hub.url}/org/single" in message
        assert "HF_TOKEN" in message
        assert "hf_other" not in message
    assert resolve("org/single", token="hf_right").weights is not None


def test_missing_or_private(hub: HubServer) -> None:
    hub.repos["org/single"].access = "private"
    for model in ("org/single", "org/none", "none"):
        assert "no such repository, or a private one" in refusal(model)
    assert "no such repository, or a private one" in refusal("org/single", token="hf_other")


def test_wrong_token_is_named_but_not_shown(hub: HubServer) -> None:
    message = refusal("org/single", token="hf_wrong_1234")
    assert "does not accept the token" in message
    assert "hf_wrong_1234" not in message


def test_token_that_cannot_be_sent_is_not_shown(hub: HubServer) -> None:
    with pytest.raises(HubError) as caught:
        resolve("org/single", token="hf_wrong_1234\n5678")
    assert "hf_wrong_1234" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_wrong_revision(hub: HubServer) -> None:
    assert f"no revision 'v9'; see its branches and tags at {hub.url}/org/single" in refusal(
        "org/single", revision="v9"
    )
    with pytest.raises(ConfigError, match="revision: expected a branch"):
        resolve("org/single", revision="../main")


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_other_statuses(status: int, hub: HubServer) -> None:
    hub.repos["org/single"].status = status
    expected = {403: "may not read", 429: "too many requests"}.get(status, f"HTTP status {status}; try again later")
    assert expected in refusal("org/single")


def test_disabled(hub: HubServer) -> None:
    hub.repos["org/single"].access = "disabled"
    assert "is disabled" in refusal("org/single")


def test_no_connection(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        point_library_at(f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path / "home", monkeypatch)
        message = refusal("org/single")
    assert "could not be fetched" in message
    assert "check the network" in message


def test_cached_model_survives_a_hub_that_is_down(hub: HubServer) -> None:
    first = resolve("org/single")
    hub.repos["org/single"].status = 503
    assert resolve("org/single") == first


def test_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "config.json is not in the cache" in refusal("org/single", local_files_only=True)
    resolve("org/single", with_weights=False)
    message = refusal("org/single", local_files_only=True)
    assert "model.safetensors or model.safetensors.index.json is not in the cache" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert refusal("org/single") == message
    assert resolve("org/single", with_weights=False).config is not None
    assert hub.requests == []


@pytest.mark.parametrize("model", ["org/na me", "org/name:", "-x", "org/..", "a--b", "org/name:file.bin"])
def test_not_a_name(model: str, hub: HubServer) -> None:
    with pytest.raises(MonographError):
        resolve(model)


def test_environment_of_the_library(tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE, in processes of their own."""
    code = "import sys; from monograph.model.hub import resolve; print(resolve(sys.argv[1]).weights.files[0])"
    repo = HubRepo(repository_files(tmp_path / "made"), access="private")
    with hub_server({"org/single": repo}) as server:
        environment = {
            **os.environ,
            "PYTHONPATH": "src",
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_right",
        }
        command = [sys.executable, "-c", code, "org/single"]
        online = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert online.returncode == 0, online.stderr
        assert Path(online.stdout.strip()).is_relative_to(tmp_path / "home" / "hub")
        count = len(server.requests)
        environment["HF_HUB_OFFLINE"] = "1"
        offline = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert offline.stdout == online.stdout
        assert len(server.requests) == count
