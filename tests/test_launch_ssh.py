"""`rollcall launch ssh` with a stand-in for ssh (fake_ssh.py) and for the head's dashboard: what is asked, sent, kept and undone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from fake_ssh import make_hosts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_path import own_path

from rollcall.base.errors import ClusterError
from rollcall.base.stop import heed
from rollcall.base.version import __version__
from rollcall.config import load_config
from rollcall.launch import launch as verbs
from rollcall.launch.launch import get_target, make_request
from rollcall.launch.record import LaunchError, LaunchRecord, find_record, get_record, named_record
from rollcall.launch.ssh import shell as remote_shell
from rollcall.launch.ssh.machines import run_there
from rollcall.launch.ssh.tunnel import open_page, open_tunnel
from rollcall.launch.target import LaunchRequest
from rollcall.nodes.address import free_ports, listens
from rollcall.process.ray.job_client import HttpClient, Unreachable
from rollcall.view.page_process import OPEN, Keys, PageRecord

HOSTS = ["a", "b"]
TARGET = get_target("ssh")


class FakeDashboard(BaseHTTPRequestHandler):
    """The job API of a head that runs what it is given, for ever."""

    def do_GET(self) -> None:  # noqa: N802
        server: Any = self.server
        server.tokens.add(self.headers["Authorization"])
        name = self.path.rstrip("/").removeprefix("/api/jobs").strip("/")
        if not name:
            return self._send(200, list(server.rows.values()))
        if name.endswith("/logs"):
            return self._send(200, {"logs": "step 1\n"})
        return self._send(200, server.rows[name]) if name in server.rows else self._send(404, {})

    def do_PUT(self) -> None:  # noqa: N802
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, {})

    def do_POST(self) -> None:  # noqa: N802
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.endswith("/stop"):
            server.rows[self.path.split("/")[-2]]["status"] = "STOPPED"
            return self._send(200, {"stopped": True})
        job = json.loads(body)
        id = job["submission_id"]
        server.rows[id] = {**job, "type": "SUBMISSION", "status": "RUNNING", "start_time": 1, "message": ""}
        return self._send(200, {"job_id": id, "submission_id": id})

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture
def dashboard() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), FakeDashboard)
    server.rows, server.tokens = {}, set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dashboard: Any) -> Path:
    monkeypatch.setenv("ROLLCALL_LAUNCHES", str(tmp_path / "launches"))
    monkeypatch.setattr(remote_shell, "LET_GO_S", 20.0)
    for module in (
        "launch.ssh.target",
        "launch.jobs.submit",
    ):  # compressing all of Rollcall is most of the work of a launch
        monkeypatch.setattr(f"rollcall.{module}.build_package", lambda *args, **options: b"code")
    found = make_hosts(
        tmp_path / "fake", ["a", "b", "c", "d"], version=__version__, dashboard=dashboard.server_address[1]
    )
    monkeypatch.setenv("PATH", own_path(found.parent))
    return found


def request_on(
    folder: Path, *, name: str = "one", hosts: Any = None, steps: int = 300, **section: Any
) -> LaunchRequest:
    raw = {
        "run": {"name": name, "dir": f"/shared/{name}"},
        "cluster": {"num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu"},
        "launch": {"ssh": {"hosts": hosts or HOSTS, **section}},
        "trainer": {"steps": steps},
    }
    return make_request(load_config(raw), target="ssh", name=name, cwd=folder)


def start(request: LaunchRequest) -> LaunchRecord:
    return verbs.start(TARGET, request, TARGET.render(request))


def calls(hosts: Path, name: str) -> list[str]:
    """The commands of `rollcall` that a host has run: their first words."""
    path = hosts / name / "calls"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_all_hosts_are_asked_prepared_and_started_and_the_run_is_submitted(
    hosts: Path, tmp_path: Path, dashboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record = start(request_on(tmp_path))
    assert calls(hosts, "a") == ["here", "prepare", "node", "check", "doctor"]
    assert calls(hosts, "b") == ["here", "prepare", "node"]
    prepare_a, prepare_b = ((hosts / name / "calls").read_text().splitlines()[1] for name in HOSTS)
    assert "--once" in prepare_a and "--once" not in prepare_b
    assert list(dashboard.rows) == [record.id]
    token = (record.folder / "token").read_text()
    assert (hosts / "b/token-of-node").read_text() == token and dashboard.tokens == {f"Bearer {token}"}
    assert not any(token in path.read_text() for path in record.folder.iterdir() if path.name != "token")
    err = capsys.readouterr().err
    assert "b | Ray started" in err and token not in err
    assert TARGET.status(record) == f"1 of 2 nodes alive; {record.id} is RUNNING"
    TARGET.logs(record)
    assert capsys.readouterr().out == "step 1\n"


def test_a_tunnel_that_breaks_is_opened_again(hosts: Path, tmp_path: Path) -> None:
    record = start(request_on(tmp_path))
    with closing(open_tunnel(record)) as tunnel:
        client = HttpClient(tunnel.url, token="any", token_source="here", connect=tunnel.connect)
        assert [job.submission_id for job in client.call("list_jobs")] == [record.id]
        tunnel.close()
        assert len(client.call("list_jobs")) == 1
        tunnel.close()
        (hosts / "a/unreachable").write_text("No route to host")
        with pytest.raises(Unreachable, match="a: ssh cannot open a tunnel to its port .*\n    No route to host"):
            client.call("list_jobs")


def test_a_tunnel_leads_to_the_page_of_the_run(
    hosts: Path, tmp_path: Path, dashboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dashboard stands in for the page's server."""
    record = start(request_on(tmp_path)).having(run_dir=str(tmp_path / "it's a run"))
    assert open_page(record) is None  # it serves none
    page = PageRecord(host="a", port=dashboard.server_address[1], secret="known-to-the-owner")
    Path(record.run_dir).mkdir()
    page.write(Path(record.run_dir))
    capsys.readouterr()
    tunnel = open_page(record)
    assert tunnel is not None
    with closing(tunnel):
        said = capsys.readouterr()
        key = said.out.strip().removeprefix(f"{tunnel.url}{OPEN}")
        assert Keys(page.secret).use(key) and page.secret not in said.out + said.err
        with urllib.request.urlopen(f"{tunnel.url}/api/jobs/", timeout=60) as answer:
            assert answer.status == 200


def test_down_stops_the_run_first_and_then_the_nodes(hosts: Path, tmp_path: Path, dashboard: Any) -> None:
    job = start(request_on(tmp_path)).id
    verbs.stop("one")
    assert dashboard.rows[job]["status"] == "STOPPED"
    assert [calls(hosts, name)[-1] for name in HOSTS] == ["down", "down"]
    assert find_record("one") is None and not (tmp_path / "launches/one").exists()


def test_every_host_that_cannot_be_used_is_named_before_anything_is_started(hosts: Path, tmp_path: Path) -> None:
    (hosts / "a/unreachable").write_text("ssh: connect to host a port 22: No route to host")
    (hosts / "b/fails-here").write_text("No module named 'torch'")
    (hosts / "c/version").write_text("0.0.1")
    (hosts / "d/rank").write_text("3")
    raw = {"num_nodes": 4, "num_gpus_per_node": 2, "accelerator": "cpu"}
    run = {"name": "one", "dir": "/shared/one"}
    config = load_config({"run": run, "cluster": raw, "launch": {"ssh": {"hosts": ["a", "b", "c", "d"]}}})
    request = make_request(config, target="ssh", name="one", cwd=tmp_path)
    with pytest.raises(LaunchError) as caught:
        start(request)
    text = str(caught.value)
    assert "a: ssh cannot reach it\n    ssh: connect to host a port 22: No route to host" in text
    assert "b: failed with status 1\n    No module named 'torch'" in text
    assert f"c has rollcall 0.0.1, but this machine has rollcall {__version__}; install the same version" in text
    assert "d already runs a cluster named 'one', which this launch did not start" in text
    assert find_record("one") is None
    assert "node" not in calls(hosts, "d")


def test_hosts_with_different_versions_are_named_before_ray_starts(hosts: Path, tmp_path: Path) -> None:
    (hosts / "b/python").write_text("3.11.9")
    with pytest.raises(LaunchError) as caught:
        start(request_on(tmp_path))
    assert str(caught.value) == (
        "1 problem with the hosts, so nothing was started:\n"
        "  b has Python 3.11.9, but a has Python 3.11.7; install the same version"
    )
    assert [calls(hosts, name) for name in HOSTS] == [["here"], ["here"]]


def test_a_missing_activate_script_is_named(hosts: Path, tmp_path: Path) -> None:
    script = "~/it's mine/activate"
    place = hosts / "a/it's mine"
    place.mkdir()
    (place / "activate").write_text("export ACTIVATED=yes\n")
    with pytest.raises(
        LaunchError, match="b: failed with status 1\n    the activate script ~/it's mine/activate does not"
    ):
        start(request_on(tmp_path, activate=script))


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("Host key verification failed.", "run `ssh HOST` by hand to see its key"),
        ("me@b: Permission denied (publickey).", "launch.ssh.key, or ssh-agent"),
    ],
)
def test_what_ssh_refuses_comes_with_advice(hosts: Path, tmp_path: Path, said: str, advice: str) -> None:
    (hosts / "b/unreachable").write_text(said)
    with pytest.raises(LaunchError, match=advice):
        start(request_on(tmp_path))


def test_a_connection_that_a_busy_server_drops_is_made_again(
    hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_shell, "DROPPED_S", 0.2)
    said = "kex_exchange_identification: Connection closed by remote host\nConnection reset by 10.0.0.2 port 22"
    (hosts / "b/drops").write_text(said)
    assert start(request_on(tmp_path)).state == "started"
    assert calls(hosts, "b") == ["here", "prepare", "node"]
    (hosts / "b/drops").write_text("\n".join([said] * 10))
    with pytest.raises(LaunchError, match="b: ssh cannot reach it\n    "):
        start(request_on(tmp_path))


def test_a_node_that_does_not_start_takes_all_of_it_down(
    hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other host waits for it, and is let go."""
    (hosts / "a/waits-node").touch()
    (hosts / "b/fails-node").write_text("Ray did not start: no space left on device")
    with pytest.raises(
        LaunchError, match="could not start a node on 1 host:\n  b: failed with status 1\n    Ray did not start"
    ):
        start(request_on(tmp_path))
    last = [(hosts / name / "calls").read_text().splitlines()[-1] for name in HOSTS]
    assert last == ["down --cluster one --keep-logs"] * 2
    assert "a | let go" in capsys.readouterr().err
    assert find_record("one") is None


def test_what_cannot_be_taken_down_stays_in_the_record(hosts: Path, tmp_path: Path) -> None:
    start(request_on(tmp_path))
    (hosts / "b/unreachable").write_text("No route to host")
    with pytest.raises(
        LaunchError, match="not everything that was started could be stopped:\n  b: ssh cannot reach it"
    ):
        verbs.stop("one")
    record = get_record("one")
    assert record.facts["up"] == ["b"] and record.state == "stopping"
    (hosts / "b/unreachable").unlink()
    verbs.stop("one")
    assert find_record("one") is None and calls(hosts, "a").count("down") == 1


@contextmanager
def pressing(number: signal.Signals, *, when: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C (SIGINT), or another signal, ends the block as soon as it is so."""

    def press() -> None:
        while not when():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=press, daemon=True)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        yield
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_ctrl_c_while_nodes_start_takes_them_down(
    number: signal.Signals, hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (hosts / "b/waits-node").touch()
    with pressing(number, when=lambda: "waiting in node" in capsys.readouterr().err), heed():
        start(request_on(tmp_path))
    assert [calls(hosts, name)[-1] for name in HOSTS] == ["down", "down"]
    assert find_record("one") is None


def test_a_head_without_a_dashboard_is_refused(hosts: Path, tmp_path: Path) -> None:
    program = hosts / "a/bin/rollcall"
    program.write_text(program.read_text().replace('\\"http://127.0.0.1:$(cat ~/../dashboard)\\"', "null"))
    with pytest.raises(
        LaunchError, match="a: Ray's dashboard does not listen on the loopback, so no run can be submitted"
    ):
        start(request_on(tmp_path))
    assert find_record("one") is None


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the launcher runs after it."""


def kill_at_write(when: int, monkeypatch: pytest.MonkeyPatch, request: LaunchRequest) -> None:
    """Start it, killed right after one of the writes of its record."""
    left = when
    save = LaunchRecord.save

    def saved_and_killed(record: LaunchRecord) -> LaunchRecord:
        nonlocal left
        left -= 1
        record = save(record)
        if left == 0:
            raise Killed
        return record

    with monkeypatch.context() as patch:
        patch.setattr(LaunchRecord, "save", saved_and_killed)
        patch.setattr("rollcall.launch.ssh.target._undo", lambda record, *, has_failed: None)
        patch.setattr("rollcall.launch.launch.forget", lambda record: None)
        try:
            start(request)
        except Killed:
            pass


@pytest.mark.parametrize("when", [*(pytest.param(when, marks=pytest.mark.slow) for when in (2, 3)), 4, 5])
def test_a_launch_that_is_killed_anywhere_is_finished_by_the_next(
    when: int, hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dashboard: Any
) -> None:
    kill_at_write(when, monkeypatch, request_on(tmp_path))
    record = start(request_on(tmp_path))
    assert record.state == "started" and list(dashboard.rows) == [record.id]
    assert start(request_on(tmp_path)).state == "started" and len(dashboard.rows) == 1
    verbs.stop("one")
    assert not list(hosts.glob("*/rank"))


@pytest.mark.parametrize("when", [*(pytest.param(when, marks=pytest.mark.slow) for when in (1, 2)), 3, 4, 5])
def test_a_launch_that_is_killed_anywhere_is_cleaned_up_by_down(
    when: int, hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at_write(when, monkeypatch, request_on(tmp_path))
    record = get_record("one")
    for look in (TARGET.logs, TARGET.follow):
        with pytest.raises(LaunchError, match="run the same `rollcall launch` command again"):
            look(record)
    verbs.stop("one")
    assert not list(hosts.glob("*/rank")) and find_record("one") is None


def test_nodes_and_a_run_that_go_on_are_not_taken_for_what_the_run_file_says_now(
    hosts: Path, tmp_path: Path, dashboard: Any
) -> None:
    record = start(request_on(tmp_path))
    longer = request_on(tmp_path, steps=7)
    with pytest.raises(LaunchError, match=r"with a different run\.yaml: "):
        start(longer)
    with pytest.raises(LaunchError, match=r"with a different node-0\.sh and node-1\.sh: "):
        start(request_on(tmp_path, env={"MINE": "x"}))
    dashboard.rows[record.id]["status"] = "SUCCEEDED"
    assert start(longer).state == "started" and len(dashboard.rows) == 2, "the nodes are the same"


def test_a_launch_of_the_same_name_whose_run_is_over_gets_another_job(
    hosts: Path, tmp_path: Path, dashboard: Any
) -> None:
    first = start(request_on(tmp_path)).id
    dashboard.rows[first]["status"] = "SUCCEEDED"
    again = start(request_on(tmp_path))
    assert again.id != first and len(dashboard.rows) == 2


def test_two_launches_from_one_file_have_hosts_of_their_own(hosts: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("a\nb\nc\nd\n")
    first = start(request_on(tmp_path, name="one", hosts="hosts.txt"))
    second = start(request_on(tmp_path, name="two", hosts="hosts.txt"))
    assert first.facts["hosts"] == ["a", "b"] and second.facts["hosts"] == ["c", "d"]
    with pytest.raises(LaunchError, match="a is used by launch 'one'"):
        request_on(tmp_path, name="three", hosts="hosts.txt")
    with pytest.raises(LaunchError, match="name one of them"):
        named_record(None, target="ssh")
    verbs.stop("one")
    assert named_record(None, target="ssh").name == "two" and (hosts / "c/rank").exists()


def test_paths_that_the_hosts_do_not_see_are_refused_before_any_connection(hosts: Path, tmp_path: Path) -> None:
    raw = {"run": {"dir": "runs/x"}, "cluster": {"num_nodes": 2}, "launch": {"ssh": {"hosts": HOSTS}}}
    with pytest.raises(ClusterError, match="run.dir=runs/x"):
        make_request(load_config(raw), target="ssh", name="one", cwd=tmp_path)
    assert calls(hosts, "a") == [] and find_record("one") is None


def test_a_command_runs_on_all_hosts_or_one(hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = start(request_on(tmp_path, env={"MINE": "x"}))
    capsys.readouterr()
    assert run_there(record, where="all", command=["printf", "%s-%s\\n", "a b", "$HOME"]) == []
    assert sorted(capsys.readouterr().out.splitlines()) == ["a | a b-$HOME", "b | a b-$HOME"]
    assert run_there(record, where="b", command=["echo $MINE $ROLLCALL_CLUSTER | tr a-z A-Z; exit 3"]) == [
        "b: failed with status 3"
    ]
    assert capsys.readouterr().out == "b | X ONE\n"
    assert run_there(record, where="a", command=["(sleep 0.3; touch ~/later) >/dev/null 2>&1 & echo first"]) == []
    while not (hosts / "a/later").exists():
        time.sleep(0.05)  # what a command leaves behind goes on
    with pytest.raises(LaunchError, match="'c' is not a host of launch 'one'; use all, or one of a, b"):
        run_there(record, where="c", command=["true"])


def test_a_helper_of_ssh_that_outlives_it_is_not_waited_for(hosts: Path, tmp_path: Path) -> None:
    """Such as a ProxyCommand that became a daemon: it holds ssh's output open."""
    script = "setsid sleep 60 & echo $! > ~/helper; sleep 60\n"
    (outcome,) = remote_shell.run_on_all(remote_shell.Login(), {"a": script}, timeout_s=2.0)
    helper = psutil.Process(int((hosts / "a/helper").read_text()))
    assert outcome.status is None and helper.status() == psutil.STATUS_SLEEPING
    helper.kill()


def test_ctrl_c_ends_a_command_on_the_hosts(hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = start(request_on(tmp_path))
    with pressing(signal.SIGINT, when=lambda: "a | 1" in capsys.readouterr().out):
        run_there(record, where="a", command=["echo $$ > ~/shell; trap 'touch ~/told' TERM; echo 1; sleep 600 & wait"])
    while not (hosts / "a/told").exists():
        time.sleep(0.05)


SSHD = "/usr/sbin/sshd"
SSHD_CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
MaxStartups 1
SetEnv HOME={home} PATH={home}/bin
"""


@pytest.fixture
def real_sshd(hosts: Path, tmp_path: Path) -> Iterator[Path]:
    """A real sshd for each of the hosts a and b, on loopback, and the real ssh with a configuration that knows them by name."""
    if shutil.which(SSHD) is None or os.geteuid() != 0:
        pytest.skip("needs root and sshd (apt install openssh-server)")
    separation = Path("/run/sshd")  # sshd wants it; its service makes it
    had_it = separation.exists()
    separation.mkdir(mode=0o755, exist_ok=True)
    for name in ("host_key", "key"):
        subprocess.run(["/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    known, servers = " ".join((tmp_path / "host_key.pub").read_text().split()[:2]), []
    config = f"IdentityFile {tmp_path}/key\nUserKnownHostsFile {tmp_path}/known\n"
    for name, port in zip(HOSTS, free_ports(2), strict=True):
        (tmp_path / name).write_text(SSHD_CONFIG.format(port=port, folder=tmp_path, home=hosts / name))
        servers.append(subprocess.Popen([SSHD, "-D", "-f", str(tmp_path / name)]))
        config += f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n"
        with (tmp_path / "known").open("a") as file:
            file.write(f"[127.0.0.1]:{port} {known}\n")
        while not listens(f"127.0.0.1:{port}", timeout_s=1.0):
            assert servers[-1].poll() is None
            time.sleep(0.02)
    (tmp_path / "config").write_text(config)
    (hosts.parent / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
    yield hosts
    for server in servers:
        server.terminate()
        server.wait()
    if not had_it:
        separation.rmdir()


@pytest.mark.slow
def test_a_real_sshd_does_the_same(
    real_sshd: Path, tmp_path: Path, dashboard: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record = start(request_on(tmp_path, env={"MINE": "it's a $HOME"}))
    assert (real_sshd / "b/mine").read_text() == "it's a $HOME"
    assert list(dashboard.rows) == [record.id]
    capsys.readouterr()
    assert run_there(record, where="all", command=["echo $MINE; exit 3"]) == [
        f"{host}: failed with status 3" for host in HOSTS
    ]
    assert sorted(capsys.readouterr().out.splitlines()) == [f"{host} | it's a $HOME" for host in HOSTS]
    verbs.stop("one")
    assert not list(real_sshd.glob("*/rank")) and find_record("one") is None
    (real_sshd / "a/waits-node").touch()
    (real_sshd / "b/fails-node").write_text("no space left on device")
    with pytest.raises(LaunchError, match="b: failed with status 1\n    no space left on device"):
        start(request_on(tmp_path))
    assert "a | let go" in capsys.readouterr().err and calls(real_sshd, "a")[-1] == "down"
    (tmp_path / "known").write_text("")
    with pytest.raises(
        LaunchError, match="2 problems.*\n  a: ssh cannot reach it\n.*(\n.*)*run `ssh HOST` by hand to see its key"
    ):
        start(request_on(tmp_path))


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=WORDS,
    folder=st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=20),
)
def test_any_value_survives_the_scripts(tmp_path: Path, hosts: Path, value: str, folder: str) -> None:
    """Of a variable, and of a path, through the bash that a host runs."""
    place = tmp_path / "places" / f"x{folder}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "activate").write_text("ACTIVATED=yes\n")
    interface = "i" + "".join(filter(str.isprintable, value))
    request = request_on(
        tmp_path, env={"MINE": value}, activate=str(place / "activate"), temp_dir=str(place), interface=interface
    )
    script = TARGET.render(request).files["node-1.sh"]
    home = hosts / "a"
    (home / "bin/rollcall").write_text('#!/bin/sh\nprintf "%s\\0" "$MINE" "$@"\n')
    environment = {"HOME": str(home), "PATH": f"{home}/bin"}
    ended = subprocess.run(
        ["bash", "-s"], input=f"head=10.0.0.1:7000\n{script}".encode(), env=environment, capture_output=True, check=True
    )
    mine, *words = ended.stdout.decode().split("\0")[:-1]
    assert mine == value
    assert words[words.index("--temp-dir") + 1] == str(place)
    assert words[words.index("--interface") + 1] == interface
    assert words[words.index("--head-address") + 1] == "10.0.0.1:7000"
    shutil.rmtree(place)


def test_what_a_dry_run_shows_is_what_is_sent(hosts: Path, tmp_path: Path) -> None:
    rendered = TARGET.render(request_on(tmp_path))
    assert {command.stdin for command in rendered.commands} <= rendered.files.keys()
    assert all(command.words[0] == "ssh" and "BatchMode=yes" in command.words for command in rendered.commands)
    assert "--tied" in rendered.files["node-0.sh"]
    assert yaml.safe_load(rendered.files["run.yaml"])["run"]["name"] == "one"


DOCKER = r"""#!/bin/bash
printf '%s\n' "$*" >> ~/docker
case "$1 $2" in
"image inspect") exit 1 ;;
"run "*) touch ~/container ;;
"container inspect") [ -e ~/container ] && echo true ;;
"rm "*) rm -f ~/container ~/rank ;;
"exec --interactive") [ -e ~/container ] && shift 3 && exec "$@" ;;
esac
"""


def in_containers(folder: Path, **container: Any) -> LaunchRequest:
    raw = {
        "run": {"name": "one", "dir": "/shared/one"},
        "cluster": {"num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu"},
        "launch": {"container": {"image": "our/image", **container}, "ssh": {"hosts": HOSTS, "env": {"MINE": "a b"}}},
    }
    return make_request(load_config(raw), target="ssh", name="one", cwd=folder)


def docker(hosts: Path, name: str) -> list[str]:
    return [line.split()[0] for line in (hosts / name / "docker").read_text().splitlines()]


@pytest.fixture
def with_docker(hosts: Path) -> Path:
    for name in HOSTS:
        (hosts / name / "bin/docker").write_text(DOCKER)
        (hosts / name / "bin/docker").chmod(0o755)
    return hosts


def test_nodes_run_in_containers_that_end_with_the_launch(with_docker: Path, tmp_path: Path) -> None:
    request = in_containers(tmp_path, build="/build")
    record = start(request)
    assert docker(with_docker, "b")[:4] == ["image", "build", "rm", "run"]
    token = (record.folder / "token").read_text()
    assert (with_docker / "b/token-of-node").read_text() == token and (with_docker / "b/mine").read_text() == "a b"
    assert token not in (with_docker / "b/docker").read_text()
    assert start(request).state == "started" and docker(with_docker, "b").count("run") == 1, "it is kept"
    verbs.stop("one")
    assert find_record("one") is None and not list(with_docker.glob("*/container"))


@pytest.mark.slow
def test_containers_get_their_scripts_through_a_real_sshd(real_sshd: Path, with_docker: Path, tmp_path: Path) -> None:
    assert start(in_containers(tmp_path)).state == "started"
    assert calls(with_docker, "b") == ["here", "prepare", "node"] and (with_docker / "b/mine").read_text() == "a b"
    verbs.stop("one")
    assert not list(with_docker.glob("*/container"))


def test_containers_go_when_a_host_cannot_be_used(with_docker: Path, tmp_path: Path) -> None:
    (with_docker / "b/fails-here").write_text("no torch in this image")
    with pytest.raises(LaunchError, match="b: failed with status 1\n    no torch in this image"):
        start(in_containers(tmp_path))
    assert not list(with_docker.glob("*/container")) and find_record("one") is None


def test_a_launcher_that_is_gone_gets_no_container(with_docker: Path, tmp_path: Path) -> None:
    """While the image was built. The script's stdin has ended."""
    script = TARGET.render(in_containers(tmp_path)).files["container.sh"]
    environment = {"HOME": str(with_docker / "a"), "PATH": f"{with_docker}/a/bin"}
    assert subprocess.run(["bash", "-s"], input=script.encode(), env=environment).returncode == 1
    assert "run" not in docker(with_docker, "a")
