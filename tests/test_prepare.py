"""What a node does before a run: shell commands, each named when it fails, and models fetched from a hub."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from rollcall.base.errors import ClusterError
from rollcall.base.process_table import Process
from rollcall.base.wait import in_silence, speaking
from rollcall.config import load_config
from rollcall.launch.jobs import prepare
from rollcall.launch.jobs.prepare import prepare_node, prepare_once
from rollcall.model import fetch
from rollcall.model.hub import HubError, hub_options

FILES = {"config.json": b'{"model_type": "qwen2"}', "model.safetensors": b"w" * 1000, "pytorch_model.bin": b"b" * 5000}
COMMIT = "0" * 40


def heard(config_of: dict[str, object], *, once: bool) -> list[str]:
    said: list[str] = []
    with speaking(said.append):
        prepare_node(load_config({"prepare": config_of}), once=once)
    return said


def test_commands_run_in_their_order_by_a_shell_and_those_of_one_node_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = {"each_node": ["x='a b'; echo \"$x\" >> log", "echo loud"], "once": ["echo once >> log"]}
    said = heard({**commands}, once=False)
    assert Path("log").read_text() == "a b\n"
    assert "loud\n" in capfd.readouterr().out, "their output is streamed"
    assert "prepare.each_node: echo loud" in said
    heard({**commands}, once=True)
    assert Path("log").read_text() == "a b\na b\nonce\n"
    prepare_once(load_config({"prepare": {**commands}}))
    assert Path("log").read_text().endswith("once\nonce\n")


@pytest.mark.parametrize(
    ("command", "how"), [("exit 3", "ended with status 3"), ("kill -9 $$", "was killed by signal 9")]
)
def test_a_command_that_fails_is_named_and_nothing_comes_after_it(tmp_path: Path, command: str, how: str) -> None:
    after = tmp_path / "after"
    with pytest.raises(ClusterError) as caught:
        heard({"each_node": ["true", command, f"touch {after}"]}, once=False)
    assert f"prepare.each_node[1] {how}: {command}" in str(caught.value)
    assert not after.exists()


def test_a_command_that_does_not_end_is_ended_with_all_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "END_S", 0.2)
    command = f"trap '' TERM; sh -c 'echo $$ > {tmp_path}/pid; sleep 600; true'; true"
    with pytest.raises(ClusterError, match=r"prepare.once\[1\] did not finish within prepare.timeout_s=1: trap"):
        heard({"once": ["true", command], "timeout_s": 1.0}, once=True)
    give_up = time.monotonic() + 60
    while Process.of(int((tmp_path / "pid").read_text())) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert Process.of(int((tmp_path / "pid").read_text())) is None


def test_a_directory_and_a_built_in_model_need_no_fetching(tmp_path: Path) -> None:
    said: list[str] = []
    with speaking(said.append):
        assert fetch.fetch_model(str(tmp_path)) == tmp_path
        assert fetch.fetch_model("builtin:arithmetic").is_dir()
    assert [text.partition(";")[2] for text in said] == [" nothing to fetch"] * 2
    with pytest.raises(HubError, match="is not a directory on this machine"):
        fetch.fetch_model(str(tmp_path / "none"))


def test_models_of_rewards_are_fetched_too_unless_the_run_file_says_no(tmp_path: Path) -> None:
    run = {"reward": [{"type": "exact"}, {"type": "model", "path": str(tmp_path)}]}
    said: list[str] = []
    with speaking(said.append):
        prepare_node(load_config(run), once=False)
        prepare_node(load_config({**run, "prepare": {"fetch_model": False}}), once=False)
    assert [text.partition("=")[0] for text in said] == ["model.path", "reward.1.path"]


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as its client asks for a model of three files. A model named `slow` never comes to its end."""

    def log_message(self, format: str, *args: object) -> None:
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "/missing" in self.path:
            self._answer(b"{}", code=404, headers={"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in self.path:
            rows = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": _digest(name)} for name in FILES]
            self._answer(json.dumps(rows).encode())
        elif self.path.startswith("/api/"):
            body = {"id": "someone/some", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            self._answer(json.dumps(body).encode())
        elif (name := self.path.rpartition("/")[2]) in FILES:
            if "/slow" in self.path and self.command == "GET":
                threading.Event().wait(60)
            self._answer(FILES[name], headers={"ETag": f'"{_digest(name)}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(b"", code=404, headers={"X-Error-Code": "EntryNotFound"})

    def _answer(self, body: bytes, *, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(name: str) -> str:
    return hashlib.sha1(FILES[name]).hexdigest()


@contextmanager
def a_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")  # for the process that downloads
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    hub_options.cache_clear()
    try:
        yield
    finally:
        hub_options.cache_clear()
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_hub_name_is_fetched_without_copies_in_other_formats_and_then_found_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with speaking(in_silence), a_hub(monkeypatch, tmp_path):
        folder = fetch.fetch_model("someone/some")
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        with pytest.raises(HubError, match=r"model.path=someone/missing does not exist on the hub, or is private"):
            fetch.fetch_model("someone/missing")
        hub_options.cache_clear()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(folder / "config.json"))
        assert fetch.fetch_model("someone/some") == folder


def test_a_download_that_stands_still_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "STANDSTILL_S", 0.5)
    monkeypatch.setattr(fetch, "LOOK_EVERY_S", 0.1)
    with a_hub(monkeypatch, tmp_path), pytest.raises(HubError, match="has made no progress for 0.5 s"):
        fetch.fetch_model("someone/slow")
