"""A small Hugging Face Hub on 127.0.0.1: enough of its protocol for downloads and for the ways they are refused."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote, urlsplit

Access = Literal["open", "gated", "private", "disabled"]
_RESOLVE = re.compile(r"/(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_LFS = (".safetensors", ".gguf", ".bin", ".pth")


@dataclass
class HubRepo:
    """A repository: files at commits, branches that name commits, and who may read it.

    Attributes:
        access: "gated" and "private" ask for `token`.
        status: An HTTP status that is answered to every request, None to serve.
    """

    files: dict[str, bytes]
    access: Access = "open"
    token: str = "hf_right"
    status: int | None = None
    commit: str = "a" * 40
    branches: dict[str, str] = field(default_factory=dict)
    older: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files by commit

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = {"main": self.commit, **self.branches}.get(revision, revision)
        if commit == self.commit:
            return commit, self.files
        return (commit, self.older[commit]) if commit in self.older else None


@dataclass(frozen=True)
class Request:
    """A request that was received."""

    method: str
    host: str
    path: str
    token: str | None


class HubServer:
    """The server's state: change `repos` at any time, read `requests` afterwards."""

    def __init__(self, repos: Mapping[str, HubRepo], port: int) -> None:
        self.repos = dict(repos)
        self.requests: list[Request] = []
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def fetched(self) -> list[str]:
        """Return the names of the files whose content was sent, in order."""
        paths = [request.path for request in self.requests if request.method == "GET"]
        return [path.rsplit("/", 1)[1] for path in paths if not path.startswith("/api/")]


@contextmanager
def hub_server(repos: Mapping[str, HubRepo]) -> Iterator[HubServer]:
    """Serve repositories from a thread until the block ends."""
    httpd = _Server(repos)
    thread = threading.Thread(target=lambda: httpd.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield httpd.hub
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


class _Server(ThreadingHTTPServer):
    def __init__(self, repos: Mapping[str, HubRepo]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = HubServer(repos, self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        assert isinstance(self.server, _Server)
        return self.server.hub

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        host = (self.headers.get("Host") or "").split(":")[0]
        self.hub.requests.append(Request(self.command, host, path, token))
        if found := _RESOLVE.fullmatch(path):
            self._resolve(found["repo"], found["revision"], found["file"], token)
        elif found := _TREE.fullmatch(path):
            self._tree(found["repo"], found["revision"], token)
        elif path.startswith("/cdn/"):
            self._content(path)
        else:
            self._answer(404)

    def _resolve(self, repo_id: str, revision: str, file: str, token: str | None) -> None:
        repo = self._readable(repo_id, token)
        if repo is None:
            return
        found = repo.at(revision)
        if found is None:
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
            return
        commit, files = found
        headers = {"X-Repo-Commit": commit}
        if file not in files:
            self._answer(404, {**headers, "X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(files[file]).hexdigest()
        if file.endswith(_LFS):  # as the Hub does: another host has the content
            location = f"http://localhost:{self.hub.port}/cdn/{repo_id}/{commit}/{file}"
            linked = {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(files[file])), "Location": location}
            self._answer(302, {**headers, **linked})
        else:
            self._answer(200, {**headers, "ETag": f'"{etag}"'}, files[file])

    def _tree(self, repo_id: str, revision: str, token: str | None) -> None:
        repo = self._readable(repo_id, token)
        if repo is None:
            return
        found = repo.at(revision)
        if found is None:
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
            return
        entries = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in found[1].items()]
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())

    def _content(self, path: str) -> None:
        owner, name, commit, file = path.removeprefix("/cdn/").split("/", 3)
        found = self.hub.repos[f"{owner}/{name}"].at(commit)
        assert found is not None
        self._answer(200, {}, found[1][file])

    def _readable(self, repo_id: str, token: str | None) -> HubRepo | None:
        repo = self.hub.repos.get(repo_id)
        if repo is not None and repo.status is not None:
            self._answer(repo.status)
        elif token is not None and token not in ("hf_right", "hf_other"):
            self._answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repo is None or (repo.access == "private" and token != repo.token):
            self._answer(401 if token is None else 404, {"X-Error-Code": "RepoNotFound"})
        elif repo.access == "gated" and token != repo.token:
            self._answer(401 if token is None else 403, {"X-Error-Code": "GatedRepo"})
        elif repo.access == "disabled":
            self._answer(403, {"X-Error-Message": "Access to this resource is disabled."})
        else:
            return repo
        return None

    def _answer(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if status == 200 and wanted:
            status, body = 206, body[int(wanted[1]) :]
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
