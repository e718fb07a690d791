"""Jobs: what travels, which paths are meant, how the head is spoken to, and whole jobs on one real node."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from one_node import WAIT_S, OneNode, rollcall, start_arguments
from sleeping import set_sleep
from typer.testing import CliRunner

from rollcall.base import redact
from rollcall.base.errors import ClusterError
from rollcall.base.lease import hold
from rollcall.base.wait import speaking
from rollcall.cli.main import app
from rollcall.config import Config, parse_config
from rollcall.launch.jobs import package as package_module
from rollcall.launch.jobs import submit as module
from rollcall.launch.jobs.package import Shared, build_package, mount_of, resolve_paths
from rollcall.launch.jobs.submit import Jobs, reach, refuse_busy
from rollcall.model.files import MODEL_DIR
from rollcall.nodes.declared import seal
from rollcall.nodes.rendezvous import Head, Rendezvous
from rollcall.nodes.state import STATE_DIR, TOKEN, NodeRecord, token_path, write_record
from rollcall.process.ray import job_client
from rollcall.process.ray.each_node import NoAnswerError
from rollcall.process.ray.job_client import HttpClient, RelayClient, Unreachable

ROOT = Path(__file__).parents[1]
SECRET = "wandb-5e77a9-not-for-you"


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_remembered", set())


def config(**sections: Any) -> Config:
    return parse_config({"run": {"name": "one", "dir": "/shared/runs/one"}, **sections})


def with_reward(path: str) -> Config:
    return config(reward=[{"type": "function", "path": path}])


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def contents(run: Config, folder: Path) -> dict[str, bytes]:
    built = build_package(run, run_file="run: {}\n", folder=folder)
    with zipfile.ZipFile(io.BytesIO(built)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def record(**fields: Any) -> NodeRecord:
    values: dict[str, Any] = dict(
        cluster="default", cluster_id="id", rank=0, num_nodes=1, node_ip="10.0.0.1", slots=1, accelerator="cpu",
        head_address="10.0.0.1:6379", dashboard_url="http://10.0.0.1:8265", temp_dir="/tmp/x", rendezvous=None, processes=(),
    )  # fmt: skip
    return NodeRecord(**{**values, **fields})


def publish(folder: Path, *, dashboard: str) -> None:
    head = Head(
        cluster="default", cluster_id="id", address="10.0.0.1:6379", host="node0", dashboard=dashboard,
        started_at="now",
    )  # fmt: skip
    Rendezvous(folder, "default").publish(head, token="the-published-token")


# What travels


def test_the_package_is_this_rollcall_and_the_run_file(tmp_path: Path) -> None:
    found = contents(config(), tmp_path)
    assert found["run.yaml"] == b"run: {}\n"
    assert found["rollcall/run/training.py"] == (ROOT / "src/rollcall/run/training.py").read_bytes()
    assert "rollcall/config/default.yaml" in found
    assert (
        found["rollcall/model/embedded/arithmetic/model.safetensors"] == (MODEL_DIR / "model.safetensors").read_bytes()
    )
    outside = [name for name in found if not name.startswith("rollcall/")]
    assert outside == ["run.yaml"] and not any("__pycache__" in name for name in found)


def test_the_embedded_model_stays_behind_where_the_run_has_another(tmp_path: Path) -> None:
    assert not any(name.endswith(".safetensors") for name in contents(config(model={"path": "/models/x"}), tmp_path))


def test_a_rewards_module_travels_with_those_it_imports_and_nothing_else(tmp_path: Path) -> None:
    code = {
        "my_reward.py": "import json\nimport numpy\nfrom my_pack.inner import score\n",
        "my_pack/__init__.py": "",
        "my_pack/inner.py": "from . import words\nimport lone\ndef score(*_): return 1.0\n",
        "my_pack/words.py": "",
        "lone.py": "",
    }
    others = ("my_pack/weights.safetensors", "my_pack/rows.jsonl", "my_pack/.git/config", "my_pack/__pycache__/x.pyc")
    write(tmp_path, {**code, **dict.fromkeys((*others, "unrelated.py"), "not needed")})
    found = contents(with_reward("my_reward:score"), tmp_path)
    outside = {name for name in found if not name.startswith("rollcall/")}
    assert outside == {"run.yaml", *code}


@pytest.mark.slow
def test_the_environments_modules_travel_too(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(("games.py", "mazes.py", "my_tools.py"), ""))
    environment = {"path": {"game": "games:Game", "maze": "mazes:Maze"}, "tools": ["my_tools:search"]}
    found = contents(config(environment={"type": "class", **environment}), tmp_path)
    assert {name for name in found if not name.startswith("rollcall/")} == {
        "run.yaml", "games.py", "mazes.py", "my_tools.py"
    }  # fmt: skip
    elsewhere = config(environment={"type": "step", "path": "games_of_another_python:Game", "python": "/x/bin/python"})
    assert "run.yaml" in contents(elsewhere, tmp_path)
    with pytest.raises(ClusterError, match=r"environment\.path=no_such:Game: there is no module 'no_such' in"):
        contents(config(environment={"type": "step", "path": "no_such:Game"}), tmp_path)


def test_an_installed_rewards_module_stays_where_it_is(tmp_path: Path) -> None:
    found = contents(with_reward("yaml:safe_load"), tmp_path)
    assert not any(name.startswith("yaml") for name in found)


def test_a_rewards_module_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"reward\.0\.path=no_such:f: there is no module 'no_such' in"):
        contents(with_reward("no_such:f"), tmp_path)


def test_too_much_is_refused_with_the_biggest_files_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"my_pack/__init__.py": ""})
    for size in (1, 2, 3):
        (tmp_path / f"my_pack/table{size}.txt").write_bytes(b"x" * size * 2**20)
    monkeypatch.setattr(package_module, "MAX_BYTES", 5 * 2**20)
    with pytest.raises(ClusterError, match=r"the limit is 5.24 MB") as refused:
        contents(config(reward=[{"type": "function", "path": "my_pack:score"}], model={"path": "/models/x"}), tmp_path)
    named = [line.split()[-1] for line in str(refused.value).splitlines() if line.startswith("  ")]
    assert named[:3] == [str(tmp_path / f"my_pack/table{size}.txt") for size in (3, 2, 1)]


def test_the_same_code_is_the_same_package(tmp_path: Path) -> None:
    one, same = (build_package(config(), run_file="a", folder=tmp_path) for _ in range(2))
    other = build_package(config(), run_file="b", folder=tmp_path)
    assert one == same != other


# Which paths are meant

ALONE = Shared(num_nodes=1, folder=None)


def test_relative_paths_are_refused_where_the_nodes_do_not_see_the_folder(tmp_path: Path) -> None:
    run = config(run={"dir": "runs/one"}, data={"train": "data/train.jsonl", "val": None})
    for seen in (None, Shared(num_nodes=2, folder=None), Shared(num_nodes=2, folder="/proc")):
        with pytest.raises(
            ClusterError, match=r"run\.dir=runs/one, data\.train=data/train\.jsonl: relative paths start at"
        ):
            resolve_paths(run, folder=tmp_path, shared=seen)


@pytest.mark.parametrize("place", ["alone", "shared"])
def test_relative_paths_become_absolute_where_the_nodes_see_the_folder(tmp_path: Path, place: str) -> None:
    seen = ALONE if place == "alone" else Shared(num_nodes=2, folder=str(tmp_path / "meet"))
    (tmp_path / "model").mkdir()
    (tmp_path / "adapter").mkdir()
    model = {"path": "model", "lora": {"path": "adapter"}}
    run = config(run={"dir": "runs/one"}, data={"train": "train.jsonl", "val": "val.jsonl"}, model=model)
    resolved = resolve_paths(run, folder=tmp_path, shared=seen)
    assert resolved.run.dir == tmp_path / "runs/one" and resolved.model.path == str(tmp_path / "model")
    assert resolved.model.lora is not None and resolved.model.lora.path == str(tmp_path / "adapter")
    assert (resolved.data.train, resolved.data.val) == (str(tmp_path / "train.jsonl"), str(tmp_path / "val.jsonl"))


def test_absolute_paths_hub_names_and_built_in_tasks_stay(tmp_path: Path) -> None:
    data = {"train": "hub:org/sums", "val": "hub:/share/sums"}
    run = config(model={"path": "org/model"}, reward=[{"type": "model", "path": "org/judge"}], data=data)
    assert resolve_paths(run, folder=tmp_path, shared=None) == run


def test_a_folder_laid_out_as_a_hub_dataset_is_a_path_too(tmp_path: Path) -> None:
    run = config(run={"dir": str(tmp_path / "run")}, data={"train": "hub:./sums", "val": None})
    assert resolve_paths(run, folder=tmp_path, shared=ALONE).data.train == f"hub:{tmp_path / 'sums'}"


def test_a_mount_is_told_from_the_one_around_it(tmp_path: Path) -> None:
    assert mount_of(Path("/proc/self")) == Path("/proc") != mount_of(tmp_path)


# How the head is spoken to


class FakeHead(BaseHTTPRequestHandler):
    """Answers as Ray's dashboard does, from the server's ``rows`` and ``stopped``."""

    def do_GET(self) -> None:  # noqa: N802
        server: Any = self.server
        if self.headers.get("Authorization") != server.wants:
            return self._send(403, "Forbidden")
        if self.path.startswith("/api/packages/"):
            return self._send(404, "no such package")
        path = self.path.rstrip("/").removeprefix("/api/jobs").strip("/")
        if not path:
            return self._send(200, list(server.rows.values()))
        if path.endswith("/logs"):
            return self._send(200, {"logs": server.logs})
        row = server.rows.get(path)
        return self._send(404, "no such job") if row is None else self._send(200, row)

    def do_POST(self) -> None:  # noqa: N802
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/api/jobs/":
            job = json.loads(body)
            id = job.pop("submission_id")
            server.rows[id] = row(id, **job)
            return self._send(200, {"job_id": id, "submission_id": id})
        server.stops += 1
        if server.stops > 1:  # the first comes before the job's supervisor is there
            server.rows[self.path.split("/")[-2]]["status"] = "STOPPED"
        return self._send(200, {"stopped": server.stops > 1})

    def do_PUT(self) -> None:  # noqa: N802
        server: Any = self.server
        server.packages.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(200, {})

    def _send(self, status: int, body: Any) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return None


def row(job_id: str, *, status: str = "RUNNING", started: int = 1, **fields: Any) -> dict[str, Any]:
    values = {
        "type": "SUBMISSION",
        "submission_id": job_id,
        "status": status,
        "start_time": started,
        "message": "Ray's word",
        "entrypoint": "x",
    }
    return {**values, "metadata": {}, "runtime_env": {}, **fields}


@pytest.fixture
def head() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), FakeHead)
    server.rows, server.logs, server.stops, server.wants, server.packages = {}, "", 0, "Bearer right", []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def jobs_of(head: Any, token: str | None = "right") -> Jobs:
    return Jobs(HttpClient(head.url, token=token, token_source="somewhere"), token=token)


def test_the_newest_job_that_rollcall_submitted_is_the_latest(head: Any) -> None:
    head.rows = {row["submission_id"]: row for row in (
        row("rollcall-a", started=1), row("rollcall-b", started=2), row("raysubmit_c", started=3),
        {"type": "DRIVER", "submission_id": None, "status": "RUNNING", "start_time": 4, "entrypoint": ""},
    )}  # fmt: skip
    jobs = jobs_of(head)
    assert [job.id for job in jobs.jobs()] == ["raysubmit_c", "rollcall-b", "rollcall-a"]
    assert jobs.find().id == "rollcall-b"


def test_an_unknown_job_is_refused_with_those_that_are_known(head: Any) -> None:
    with pytest.raises(ClusterError, match="has no jobs yet"):
        jobs_of(head).find()
    head.rows = {"rollcall-a": row("rollcall-a")}
    with pytest.raises(ClusterError, match=r"has no job 'rollcall-x'; its jobs are:\n  rollcall-a  RUNNING"):
        jobs_of(head).find("rollcall-x")


@pytest.mark.parametrize(
    ("ended", "says", "status"),
    [
        ({"status": "SUCCEEDED"}, "rollcall-a succeeded", 0),
        ({"status": "STOPPED"}, "rollcall-a was stopped", 1),
        ({"status": "FAILED", "driver_exit_code": 7}, "error: rollcall-a failed (status 7)", 7),
        ({"status": "FAILED"}, "error: rollcall-a is FAILED: Ray's word", 1),
    ],
)
def test_who_follows_a_job_hears_how_it_ended(
    head: Any, monkeypatch: pytest.MonkeyPatch, ended: Any, says: str, status: int
) -> None:
    monkeypatch.setenv(TOKEN, "right")
    head.rows = {"rollcall-a": row("rollcall-a", **ended)}
    done = CliRunner().invoke(app, ["job", "logs", "--follow", "rollcall-a", "--address", head.url])
    assert done.exit_code == status and done.stderr.splitlines()[-1] == says


def test_a_wrong_token_is_refused_and_not_shown(head: Any) -> None:
    with pytest.raises(ClusterError, match="refuses the token from somewhere") as refused:
        jobs_of(head, token="wrong-token").jobs()
    assert "wrong-token" not in str(refused.value)


def test_a_head_that_wants_no_token_is_asked_without_and_one_that_does_says_which(head: Any) -> None:
    with pytest.raises(ClusterError, match="requires a token, but none is set: set ROLLCALL_TOKEN"):
        jobs_of(head, token=None).jobs()
    head.wants, head.rows = None, {"rollcall-a": row("rollcall-a", status="SUCCEEDED")}
    jobs = jobs_of(head, token=None)
    assert [job.id for job in jobs.jobs()] == ["rollcall-a"] and jobs.logs("rollcall-a") == ""


def test_the_address_of_a_dashboard_in_rays_own_variable_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TOKEN, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "http://192.0.2.7:8265")
    found = reach(None, address=None, rendezvous=None)
    assert (found.where, found._token) == ("http://192.0.2.7:8265", None)
    monkeypatch.setenv(TOKEN, "of-our-own-cluster")
    assert reach(None, address=None, rendezvous=None)._token is None, "not for a Ray of others"
    assert reach(None, address="http://192.0.2.7:8265", rendezvous=None)._token == "of-our-own-cluster"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "that-rays-own")
    assert reach(None, address=None, rendezvous=None)._token == "that-rays-own"


def answering(raw: bytes) -> tuple[str, list[bytes]]:
    """The address of a server that says this to everyone, and what it has heard."""
    server, heard = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                heard.append(connection.recv(65536))
                connection.sendall(raw)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{server.getsockname()[1]}", heard


@pytest.mark.parametrize("text", ["rubbish", '{"a": [1]}', "[3]", '[{"type": "SUBMISSION"}]', "null", "3"])
def test_what_is_no_dashboard_is_named_whatever_it_answers(text: str) -> None:
    url, _ = answering(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
    jobs = Jobs(HttpClient(url, token=None, token_source=""), token=None)
    for ask in (jobs.jobs, lambda: jobs.job("a"), lambda: jobs.logs("a")):
        with pytest.raises(ClusterError, match="does not answer like a cluster's dashboard"):
            ask()


def test_an_error_of_a_head_does_not_control_the_terminal() -> None:
    url, _ = answering(
        b"HTTP/1.1 500 no\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 10\r\n\r\n\x1b[2J  evil"
    )
    with pytest.raises(ClusterError, match="evil") as caught:
        Jobs(HttpClient(url, token=None, token_source=""), token=None).jobs()
    assert str(caught.value).isprintable()


def test_a_proxy_of_the_shell_does_not_get_the_token_of_a_tunnel(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, heard = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    head.rows = {"rollcall-a": row("rollcall-a")}
    assert [job.id for job in jobs_of(head).jobs()] == ["rollcall-a"] and not heard


def test_a_head_that_is_not_there_is_named(head: Any) -> None:
    with pytest.raises(Unreachable, match=r"no answer from the cluster's head at http://127\.0\.0\.1:1 .*refused"):
        HttpClient("http://127.0.0.1:1", token="right", token_source="somewhere").call("list_jobs")


def test_a_head_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unreachable, match=r"no answer from the cluster's head at .* after \d+ s \(timed out\)"):
            HttpClient(url, token=None, token_source="").call("list_jobs")


def test_rays_own_variables_do_not_change_the_address(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head.rows = {"rollcall-a": row("rollcall-a")}
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert [job.id for job in jobs_of(head).jobs()] == ["rollcall-a"]


def test_a_password_in_netrc_does_not_replace_the_token(
    head: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("default login me password other\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    assert jobs_of(head).jobs() == []


@pytest.mark.slow  # it packs all of Rollcall
def test_the_code_and_the_job_reach_the_head(head: Any, tmp_path: Path) -> None:
    job = jobs_of(head).submit(config(run={"name": "one", "dir": str(tmp_path / "run")}), folder=tmp_path, environ={})
    ((path, data),) = head.packages
    assert path.startswith("/api/packages/gcs/_ray_pkg_") and zipfile.is_zipfile(io.BytesIO(data))
    sent = head.rows[job.id]
    assert sent["runtime_env"]["working_dir"] == path.removeprefix("/api/packages/").replace("/", "://")
    assert sent["entrypoint"] == module.ENTRYPOINT and sent["metadata"]["run_dir"] == str(tmp_path / "run")
    assert sent["runtime_env"]["env_vars"][module.STOP_WAIT] and job.status == "RUNNING"


def test_a_job_that_does_not_start_is_named_with_what_it_waits_for(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_S", 1.0)
    head.rows = {"rollcall-a": row("rollcall-a", status="PENDING")}
    with pytest.raises(ClusterError, match=r"rollcall-a has not started within 1 s\. Ray says: Ray's word"):
        jobs_of(head).follow("rollcall-a")


def test_without_an_id_a_job_that_runs_goes_before_a_newer_one_that_is_over(head: Any) -> None:
    head.rows = {
        "rollcall-a": row("rollcall-a", status="RUNNING", started=1),
        "rollcall-b": row("rollcall-b", status="FAILED", started=2),
    }
    assert jobs_of(head).find().id == "rollcall-a"
    head.rows["rollcall-a"]["status"] = "STOPPED"
    assert jobs_of(head).find().id == "rollcall-b"


def test_a_run_directory_that_is_in_use_is_refused_before_anything_is_sent(head: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    head.rows = {"rollcall-a": row("rollcall-a", metadata={"run_dir": str(run_dir)})}
    with pytest.raises(ClusterError, match=r"belongs to job rollcall-a, which is RUNNING; .*job stop rollcall-a"):
        refuse_busy(run_dir, jobs_of(head).jobs())
    head.rows["rollcall-a"]["status"] = "SUCCEEDED"
    refuse_busy(run_dir, jobs_of(head).jobs())
    with hold(run_dir), pytest.raises(ClusterError, match=f"another process is training in run.dir={run_dir}"):
        refuse_busy(run_dir, [])
    refuse_busy(run_dir, [])


def test_stopping_asks_until_someone_is_there_to_stop(head: Any) -> None:
    head.rows = {"rollcall-a": row("rollcall-a", status="PENDING")}
    assert jobs_of(head).stop("rollcall-a").status == "STOPPED"
    assert head.stops == 2
    assert jobs_of(head).stop("rollcall-a").status == "STOPPED" and head.stops == 2


def test_a_log_is_shown_without_the_secrets_that_came_sealed_with_its_job(head: Any) -> None:
    sealed = {"ROLLCALL_SEALED": seal({"A_KEY": SECRET}, "right")}
    head.rows = {"rollcall-a": row("rollcall-a", runtime_env={"env_vars": sealed})}
    head.logs = f"the key is {SECRET}\n"
    assert jobs_of(head).logs("rollcall-a") == "the key is <redacted>\n"


def test_following_goes_on_where_it_was_when_the_connection_breaks(monkeypatch: pytest.MonkeyPatch, head: Any) -> None:
    head.rows = {"rollcall-a": row("rollcall-a")}
    head.logs = "one\ntwo\nthree\nfour\n"
    told: list[str] = []
    skips: list[int] = []

    def tail(_: HttpClient, __: str, *, skip: int, take: Any) -> str:
        skips.append(skip)
        if len(skips) == 1:
            take("one\ntw")
            return "the cable was pulled"
        take("o\nthree\n")
        head.rows["rollcall-a"]["status"] = "SUCCEEDED"
        return ""

    monkeypatch.setattr(HttpClient, "tail", tail)
    set_sleep(monkeypatch, module, lambda _: None)
    written = io.StringIO()
    with speaking(told.append):
        job = jobs_of(head).follow("rollcall-a", out=written)
    assert (job.status, written.getvalue()) == ("SUCCEEDED", head.logs)
    assert skips == [0, 6] and "the cable was pulled" in told[0]


def test_a_connection_that_stays_lost_is_told_once(monkeypatch: pytest.MonkeyPatch, head: Any) -> None:
    head.rows = {"rollcall-a": row("rollcall-a")}
    tails = iter(["cut", "cut", "cut", ""])

    def tail(_: HttpClient, __: str, *, skip: int, take: Any) -> str:
        lost = next(tails)
        head.rows["rollcall-a"]["status"] = "RUNNING" if lost else "SUCCEEDED"
        return lost

    monkeypatch.setattr(HttpClient, "tail", tail)
    set_sleep(monkeypatch, module, lambda _: None)
    told: list[str] = []
    with speaking(told.append):
        jobs_of(head).follow("rollcall-a", out=io.StringIO())
    assert len(told) == 1


def test_a_follower_whose_own_node_has_ended_says_so_and_ends() -> None:
    def gone(*args: Any) -> Any:
        raise NoAnswerError("the actor is unavailable")

    client: Any = RelayClient.__new__(RelayClient)
    client._head_address, client.where, client._relay = "192.0.2.1:6379", "here", MagicMock(call=gone)
    with pytest.raises(ClusterError, match="Ray on this node has ended") as ended:
        client.tail("rollcall-a", skip=0, take=print)
    assert not isinstance(ended.value, Unreachable)


def test_a_head_that_is_cut_off_is_said_to_be_so_for_as_long_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives up a call earlier than it was allowed to take."""
    now = iter([100.0, 120.0])

    def gone(*args: Any) -> Any:
        raise NoAnswerError("the actor is unavailable")

    client: Any = RelayClient.__new__(RelayClient)
    client._head_address, client.where, client._relay = "192.0.2.1:6379", "here", MagicMock(call=gone)
    monkeypatch.setattr(job_client, "raylets_here", lambda: {"id": "192.0.2.1:6379"})
    monkeypatch.setattr(job_client, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert client.tail("rollcall-a", skip=0, take=print) == (
        "the head node of here has not answered in 20 s: the actor is unavailable"
    )


@pytest.fixture
def quiet_head() -> Iterator[str]:
    """Sends a log with a silence in it, and like Ray's own server answers no ping meanwhile."""
    from aiohttp import web

    async def tail(request: web.Request) -> web.WebSocketResponse:
        stream = web.WebSocketResponse(autoping=False)
        await stream.prepare(request)
        await stream.send_str("one\n")
        await asyncio.sleep(1.0)
        await stream.send_str("two\n")
        await stream.close()
        return stream

    async def describe(_: web.Request) -> web.Response:
        return web.json_response(row("rollcall-a"))

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/api/jobs/rollcall-a", describe), web.get("/api/jobs/rollcall-a/logs/tail", tail)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        up.set()
        await asyncio.get_running_loop().run_in_executor(None, over.wait)
        await runner.cleanup()

    listener = socket.create_server(("127.0.0.1", 0))
    up, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(30)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    over.set()
    thread.join()


def test_a_job_that_prints_nothing_for_a_while_is_not_lost(monkeypatch: pytest.MonkeyPatch, quiet_head: str) -> None:
    monkeypatch.setattr(job_client, "ANSWER_S", 0.2)
    written: list[str] = []
    client = HttpClient(quiet_head, token="right", token_source="somewhere")
    assert (client.tail("rollcall-a", skip=2, take=written.append), "".join(written)) == ("", "e\ntwo\n")
    assert not logging.getLogger("ray.dashboard.modules.job.sdk").isEnabledFor(logging.INFO), (
        "Ray tells of the log's end"
    )


def test_a_head_that_goes_away_while_a_job_is_quiet_is_noticed(
    monkeypatch: pytest.MonkeyPatch, quiet_head: str
) -> None:
    def call(*_: Any, **__: Any) -> Any:
        raise Unreachable("no answer from the head")

    monkeypatch.setattr(job_client, "ANSWER_S", 0.2)
    monkeypatch.setattr(HttpClient, "call", call)
    client = HttpClient(quiet_head, token="right", token_source="somewhere")
    assert client.tail("rollcall-a", skip=0, take=lambda _: None) == "no answer from the head"


def test_without_a_cluster_the_message_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(
        ClusterError, match="not a node of a cluster named 'default'; on another machine, use --address"
    ):
        reach(None, address=None, rendezvous=None)
    with pytest.raises(ClusterError, match="no head of cluster 'default' is published"):
        reach(None, address=None, rendezvous=tmp_path)


def test_a_node_needs_neither_address_nor_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))
    write_record(record())
    token_path("default").write_text("the-nodes-token")
    found = reach(None, address=None, rendezvous=None)
    assert (found.where, found.shared) == ("http://10.0.0.1:8265", ALONE)


def test_a_nodes_token_goes_to_its_own_cluster_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))
    monkeypatch.delenv(TOKEN, raising=False)
    write_record(record())
    token_path("default").write_text("the-nodes-token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    assert reach(None, address="http://10.0.0.1:8265", rendezvous=None)._token == "the-nodes-token"
    assert reach(None, address="http://10.9.9.9:8265", rendezvous=None)._token is None


def test_a_dashboard_on_the_heads_loopback_is_not_looked_for_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    publish(tmp_path / "meet", dashboard="127.0.0.1:8265")
    with pytest.raises(
        ClusterError, match=r"listens only on the loopback of its head \(node0\); run this command on a node"
    ):
        reach(None, address=None, rendezvous=tmp_path / "meet")


@pytest.mark.parametrize(
    "bound, url", [("0.0.0.0:8265", "http://10.0.0.1:8265"), ("10.0.0.7:8265", "http://10.0.0.7:8265")]
)
def test_a_rendezvous_folder_gives_address_and_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bound: str, url: str
) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    monkeypatch.delenv(TOKEN, raising=False)
    publish(tmp_path / "meet", dashboard=bound)
    found = reach(None, address=None, rendezvous=tmp_path / "meet")
    assert (found.where, found.shared) == (url, None)


@pytest.mark.parametrize("address", ["http://host:8265/path", "ftp://host", "two words"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ClusterError, match="is not the address of a dashboard"):
        reach(None, address=address, rendezvous=None)


# Whole jobs, on one real node


@pytest.fixture(scope="module")
def one_node() -> Iterator[OneNode]:
    # Not pytest's own folder: Ray's sockets leave little room for a path.
    with tempfile.TemporaryDirectory(prefix="rollcall-jobs-") as folder:
        node = OneNode(Path(folder))
        try:
            node.up()
            yield node
        finally:
            node.down()


SAYS_ITS_ENVIRONMENT = """
import os
import helper

def score(prompt, completion, answer, metadata):
    return helper.right(completion, answer)

print("reward sees", os.environ["MODE"], os.environ["NCCL_DEBUG"], len(os.environ["A_KEY"]), os.environ["A_KEY"], flush=True)
os.write(2, os.environ["B_TOKEN"].encode() + b"\\n")
"""


@pytest.mark.slow  # test_simulate.py trains on a node, test_job_driver.py runs the driver of a job
def test_a_job_submitted_from_elsewhere_trains_on_the_cluster_and_its_secrets_are_nowhere(one_node: OneNode) -> None:
    user = one_node.write_run(
        "secret",
        cluster={"env": {"MODE": "fast", "A_KEY": SECRET}, "env_pass": ["B_TOKEN", "NCCL_*"]},
        reward=[{"type": "function", "path": "my_reward:score", "env": ["MODE", "A_KEY", "B_TOKEN", "NCCL_DEBUG"]}],
    )
    (user / "my_reward.py").write_text(SAYS_ITS_ENVIRONMENT)
    (user / "helper.py").write_text("def right(completion, answer):\n    return float(completion == answer)\n")
    variables = {**one_node.elsewhere, "B_TOKEN": "the-other-secret", "NCCL_DEBUG": "WARN"}
    result = rollcall("submit", "run.yaml", *one_node.address, "trainer.steps=3", cwd=user, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"reward sees fast WARN {len(SECRET)} <redacted>" in result.stdout
    run_dir = one_node.folder / "runs/secret"
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3
    listed = rollcall("job", "list", *one_node.address, "--json", cwd=user, **one_node.elsewhere)
    (job,) = [job for job in json.loads(listed.stdout)["jobs"] if job["run"] == "secret"]
    assert job["status"] == "SUCCEEDED" and job["id"].startswith("rollcall-secret-") and job["run_dir"] == str(run_dir)
    assert job["id"] in ray_job_list(one_node)
    time.sleep(1)  # for Ray to flush its logs
    for secret in (SECRET, "the-other-secret"):
        assert secret not in result.stdout + result.stderr + listed.stdout
        assert files_with(secret, one_node.folder) == [user / "run.yaml"] * (secret == SECRET)
    assert {path.name for path in files_with(one_node.token, one_node.folder)} == {"token"}


@pytest.mark.slow
def test_a_failed_job_ends_the_command_with_its_status_and_its_words(one_node: OneNode) -> None:
    user = one_node.write_run("fails")
    result = rollcall("submit", "run.yaml", *one_node.address, "model.path=/no/such", cwd=user, **one_node.elsewhere)
    assert result.returncode == 1 and "model.path=/no/such is not a directory" in result.stdout
    assert "failed (status 1)" in result.stderr and "Traceback" not in result.stdout + result.stderr


@pytest.mark.slow
def test_a_job_goes_on_without_its_submitter_until_it_is_stopped(one_node: OneNode) -> None:
    """Ctrl-C ends the watching, not the job; on a node, relative paths and neither address nor token will do."""
    user = one_node.write_run("long", run={"name": "long", "dir": "runs/long"})
    command, env = start_arguments("submit", "run.yaml", "trainer.steps=1000000", **one_node.node)
    with subprocess.Popen(command, cwd=user, env=env, stderr=subprocess.PIPE, text=True) as submitter:
        wait_for(user / "runs/long/metrics.jsonl")
        submitter.send_signal(signal.SIGINT)
        _, said = submitter.communicate(timeout=WAIT_S)
    assert submitter.returncode == 130 and "is still running on the cluster" in said
    follow, env = start_arguments("job", "logs", "--follow", **one_node.node)
    with subprocess.Popen(
        follow, cwd=user, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as follower:
        assert follower.stdout is not None
        assert any("Running entrypoint" in line for line in iter(follower.stdout.readline, ""))
        status = rollcall("job", "status", "latest", "--json", cwd=user, **one_node.node)
        assert json.loads(status.stdout)["status"] == "RUNNING"
        stopped = rollcall("job", "stop", cwd=user, **one_node.node)
        assert stopped.returncode == 0 and "is STOPPED" in stopped.stdout
        rest, _ = follower.communicate(timeout=WAIT_S)
    assert follower.returncode == 1 and "stopped" in rest
    assert not [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"rollcall\0train" in read(path) and in_folder(path, one_node)
    ]


@pytest.mark.slow
def test_env_shows_what_a_worker_on_each_node_sees(one_node: OneNode) -> None:
    user = one_node.write_run(
        "env",
        cluster={"env": {"MODE": "fast"}, "env_pass": ["B_TOKEN", "NCCL_*"], "node_env": {0: {"ONLY_HERE": "yes"}}},
    )
    variables = {**one_node.node, "B_TOKEN": "the-other-secret", "NCCL_DEBUG": "WARN", "WANDB_PROJECT": "mine"}
    result = rollcall("env", "run.yaml", "--json", cwd=user, **variables)
    assert result.returncode == 0, result.stderr
    assert "WANDB_PROJECT" in result.stderr
    (node,) = json.loads(result.stdout)["nodes"]
    seen = {variable["name"]: (variable["value"], variable["source"]) for variable in node["variables"]}
    assert node["rank"] == 0
    assert not {"HF_TOKEN", "HF_HOME", "WANDB_PROJECT"} & set(seen)
    assert seen["HOME"][1] == "the node's own" and seen["ROLLCALL_NODE_DIR"][1] == "rollcall"
    assert seen["RAY_JOB_ID"][1] == "Ray"
    assert seen.pop("PATH") == (os.environ["PATH"], "the node's own")
    assert {name: seen[name] for name in ("MODE", "B_TOKEN", "NCCL_DEBUG", "ONLY_HERE")} == {
        "MODE": ("fast", "cluster.env"),
        "B_TOKEN": ("<redacted>", "cluster.env_pass"),
        "NCCL_DEBUG": ("WARN", "cluster.env_pass NCCL_*"),
        "ONLY_HERE": ("yes", "cluster.node_env.0"),
    }
    shown = rollcall("env", "run.yaml", cwd=user, **variables)
    assert "node 0 (" in shown.stdout and "cluster.node_env.0" in shown.stdout
    assert not files_with("the-other-secret", one_node.folder)


def ray_job_list(node: OneNode) -> str:
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": node.token}
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "list", *node.address]
    done = subprocess.run(command, env={**start_arguments()[1], **env}, capture_output=True, text=True, timeout=WAIT_S)
    return done.stdout + done.stderr


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.2)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def in_folder(cmdline: Path, node: OneNode) -> bool:
    return str(node.folder).encode() in read(cmdline.with_name("environ"))


def files_with(text: str, folder: Path) -> list[Path]:
    found = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.is_file() and not path.is_symlink() and text.encode() in read(path))


def test_a_cluster_that_cannot_run_jobs_says_so_before_anything_is_sent(tmp_path: Path) -> None:
    jobs = Jobs(MagicMock(spec=HttpClient, where="here"), token="t" * 32, refusal="it listens on loopback alone")
    with pytest.raises(ClusterError, match="loopback alone"):
        jobs.submit(parse_config({}), folder=tmp_path, environ={})
