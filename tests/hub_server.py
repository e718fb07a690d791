"""A hub on the loopback of this machine: as much of its API as uploads need, in memory, with faults on request.

Repositories, branches, preupload, LFS batches and objects, commits, what a commit holds. Written from the requests that the
client makes; the client in the tests is the real one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub
import pytest

from rollcall.launch.finish import upload as module

TOKEN = "hf_" + "a1b2c3d4" * 4
CUT = 0  # instead of a status: the connection breaks while the answer is due


@dataclass
class Fault:
    method: str
    path: str  # a pattern somewhere in the request's path
    status: int
    message: str = "the server is tired"
    count: int = 1  # how often
    after: bool = False  # the request is done, and its answer is lost


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, str]] = field(default_factory=lambda: {"0" * 40: {}})  # id: {path: sha256}
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})


class Hub:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.ignored: set[str] = set()  # names that a .gitignore would hold back
        self.drops_half = False  # an object that was put is cut in half
        self.url = ""

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        found = self.repos[repo]
        commit = found.branches.get(revision, revision)
        return {path: self.objects[sha] for path, sha in found.commits[commit].items()}

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.count and fault.method == method and re.search(fault.path, path):
                    fault.count -= 1
                    return fault
        return None


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        length = self.headers.get("Content-Length")
        if length is not None:
            body = self.rfile.read(int(length))
        else:
            body = self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else b""
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.requests.append(f"{method} {path}")
        fault = self.hub.fault_for(method, path)
        if fault is not None and not fault.after:
            return self._fail(fault)
        if not path.startswith("/objects/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        with self.hub.lock:
            status, answer = self._route(method, path, body)
        return self._fail(fault) if fault is not None else self._answer(status, answer)

    def _fail(self, fault: Fault) -> None:
        if fault.status == CUT:
            self.close_connection = True
            self.connection.close()
        else:
            self._answer(fault.status, {"error": fault.message})

    def _chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:
            self.send_header("X-Error-Message", str(answer.get("error", "")))
        self.end_headers()
        self.wfile.write(data)

    def _route(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if (method, path) == ("POST", "/api/repos/create"):
            return self._create(json.loads(body))
        if (method, path) == ("POST", "/api/validate-yaml"):
            return 200, {"warnings": [], "errors": []}
        if match := re.fullmatch(r"/objects/([0-9a-f]{64})", path):
            self.hub.objects[match[1]] = body[: len(body) // 2] if self.hub.drops_half else body
            return 200, {}
        if match := re.fullmatch(r"/([\w-]+/[\w-]+)\.git/info/lfs/objects/batch", path):
            return self._batch(json.loads(body))
        match = re.fullmatch(r"/api/models/([\w-]+/[\w-]+)(?:/([\w-]+)/?(.*))?", path)
        if match is None or match[1] not in self.hub.repos:
            return 404, {"error": "Repository not found"}
        name, verb, rest = match[1], match[2], match[3]
        repo = self.hub.repos[name]
        if verb == "branch":
            if rest in repo.branches:
                return 409, {"error": "Reference already exists"}
            repo.branches[rest] = repo.branches["main"]
            return 200, {}
        if verb == "commit":
            return self._commit(name, repo, rest, body)
        commit = repo.branches.get(rest or "main", rest)
        if commit not in repo.commits:
            return 404, {"error": f"Invalid rev id: {rest}"}
        held = repo.commits[commit]
        if verb is None or verb == "revision":
            return 200, {"id": name, "private": repo.private, "sha": commit, "siblings": []}
        if verb == "tree":
            return 200, [self._file(path, sha) for path, sha in held.items()]
        if verb == "paths-info":
            wanted = urllib.parse.parse_qs(body.decode())["paths"]
            return 200, [self._file(path, held[path]) for path in wanted if path in held]
        if verb == "preupload":
            return self._preupload(json.loads(body), held)
        return 404, {"error": f"no such place: {method} {path}"}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}
        self.hub.repos[name] = Repo(private=wanted.get("visibility") == "private" or wanted.get("private") is True)
        return 200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name}

    def _preupload(self, wanted: dict[str, Any], held: dict[str, str]) -> tuple[int, Any]:
        return 200, {
            "files": [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith((".safetensors", "tokenizer.json")) else "regular",
                    "shouldIgnore": one["path"] in self.hub.ignored,
                    "oid": held.get(one["path"]) if one["path"].endswith(".safetensors") else None,
                }
                for one in wanted["files"]
            ]
        }

    def _batch(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        objects = []
        for one in wanted["objects"]:
            known = one["oid"] in self.hub.objects
            actions = {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}"}}
            objects.append({**one} if known else {**one, "actions": actions})
        return 200, {"transfer": "basic", "objects": objects}

    def _commit(self, name: str, repo: Repo, branch: str, body: bytes) -> tuple[int, Any]:
        if branch not in repo.branches:
            return 404, {"error": f"Invalid rev id: {branch}"}
        held = dict(repo.commits[repo.branches[branch]])
        for line in body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "file":
                content = base64.b64decode(value["content"])
                sha = hashlib.sha256(content).hexdigest()
                self.hub.objects[sha] = content
                held[value["path"]] = sha
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return 400, {"error": f"{value['path']} was not uploaded"}
                held[value["path"]] = value["oid"]
            elif key == "deletedFile":
                del held[value["path"]]
        commit = hashlib.sha1(f"{len(repo.commits)}{held}".encode()).hexdigest()
        repo.commits[commit] = held
        repo.branches[branch] = commit
        return 200, {"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit, "success": True}

    def _file(self, path: str, sha: str) -> dict[str, Any]:
        size = len(self.hub.objects[sha])
        return {"type": "file", "path": path, "size": size, "oid": sha[:40]}


REPO = "someone/a-model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(module, "WAITS_S", (0.0,) * 3)
        # Waits of the client itself.
        monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
        yield hub
