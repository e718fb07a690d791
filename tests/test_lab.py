"""Hosts on one machine behave as hosts, fail as hosts, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import CommandTimeout, Lab, LabError, needs_lab
from lab.lab import PREFIX, lab_namespaces, sweep

pytestmark = [needs_lab, pytest.mark.chaos, pytest.mark.slow]

WAIT_S = 600.0

LISTEN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], 5000), family=family)
print("listening", flush=True)
peer = server.accept()[0]
while data := peer.recv(100):
    peer.sendall(data)
"""
TALK = """
import socket, sys
talk = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))
def echo(word):
    talk.sendall(word)
    return talk.recv(100)
print(echo(b"hello").decode(), flush=True)
for line in open(sys.argv[3]):  # a FIFO: waits for the test
    try:
        print("heard", echo(b"again").decode(), flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(hosts=2, shared=tmp_path / "shared") as lab:
        yield lab


def wait_until(happened: Callable[[], object], *, what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < give_up, f"waited {WAIT_S:g} s for {what}"
        time.sleep(0.02)


def conversation(lab: Lab, *, to: str, patience_s: float = 20.0) -> Callable[[], str]:
    """node1 talks with node0, and says one thing more when the function is called: what it heard, or the error."""
    server, client = lab.hosts
    listener = server.start(["python", "-c", LISTEN, to])
    wait_until(lambda: "listening" in listener.output, what="the listener")
    fifo = lab.shared / "more"
    os.mkfifo(fifo)
    talker = client.start(["python", "-c", TALK, to, str(patience_s), str(fifo)])
    wait_until(lambda: talker.output == "hello\n", what="the first word")

    def more() -> str:
        fifo.write_text("\n")
        assert talker.wait(timeout_s=WAIT_S) == 0, talker.output
        return talker.output.splitlines()[-1]

    return more


def test_each_host_has_its_own_name_addresses_processes_and_folders(lab: Lab) -> None:
    seen = lab.shared / "seen"
    for host in lab.hosts:
        assert host.run(["hostname"]).stdout == f"{host.name}\n"
        for folder in ("/tmp", "/run", "/dev/shm", str(host.home)):
            assert not Path(folder, f"from-{host.name}").exists()
            host.run(["sh", "-c", f"ls {folder} >> {seen}; touch {folder}/from-{host.name}"])
        addresses = host.run(["ip", "-brief", "address"]).stdout
        assert all(f"{ip}/" in addresses for ip in (host.ip, host.ip6, host.ip_eth1, host.ip6_eth1))
        assert host.processes() == []
    assert "from-node" not in seen.read_text()


def test_hosts_know_each_other_by_name_and_nobody_else(lab: Lab) -> None:
    look_up = "import socket; print(socket.gethostbyname('node1'), socket.gethostbyaddr('10.77.0.2')[0])"
    assert lab.hosts[0].run(["python", "-c", look_up]).stdout == "10.77.0.2 node1\n"
    lost = lab.hosts[0].run(["python", "-c", "import socket; socket.gethostbyname('example.org')"])
    assert "Name or service not known" in lost.stderr


def test_the_checkout_and_its_python_are_on_every_host(lab: Lab) -> None:
    where = lab.hosts[1].run(["python", "-c", "import sys, rollcall; print(sys.prefix, rollcall.__file__)"])
    assert where.returncode == 0, where.stderr
    assert where.stdout.split() == [sys.prefix, str(Path(__file__).parents[1] / "src/rollcall/__init__.py")]


def test_the_shared_folder_is_one_and_can_be_made_unwritable_for_one_host(lab: Lab) -> None:
    first, second = lab.hosts
    first.run(["sh", "-c", f"echo from node0 > {first.shared}/note"])
    assert second.run(["cat", f"{second.shared}/note"]).stdout == "from node0\n"
    assert first.run(["mount", "-o", "remount,bind,ro", str(first.shared)]).returncode == 0
    assert first.run(["touch", f"{first.shared}/note"]).returncode != 0
    assert second.run(["touch", f"{second.shared}/note"]).returncode == 0


def test_a_hosts_files_can_be_read_from_outside(lab: Lab) -> None:
    lab.hosts[1].run(["sh", "-c", "echo mine > /tmp/note"])
    assert (lab.hosts[1].root / "tmp/note").read_text() == "mine\n"
    assert not (lab.hosts[0].root / "tmp/note").exists()


def test_a_command_gets_the_environment_it_is_given_and_not_the_tests(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    printed = lab.hosts[0].run(["env"], env={"GREETING": "hello"}).stdout
    assert "GREETING=hello\n" in printed and "RANK=7" not in printed


def test_a_command_returns_its_status_and_both_streams(lab: Lab) -> None:
    result = lab.hosts[0].run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.returncode, result.stdout, result.stderr) == (3, "out\n", "err\n")


def test_the_streams_of_a_background_command_do_not_write_over_each_other(lab: Lab) -> None:
    command = lab.hosts[0].start(["sh", "-c", "echo one; echo two >&2; echo three; echo four >&2"])
    command.wait(timeout_s=30)
    assert command.output == "one\ntwo\nthree\nfour\n"


def test_a_daemon_does_not_keep_the_command_that_left_it(lab: Lab) -> None:
    host = lab.hosts[0]
    assert host.run(["sh", "-c", "setsid sleep 1000 & echo left"], timeout_s=WAIT_S).stdout == "left\n"
    assert len(host.processes()) == 1


def test_a_command_past_its_timeout_is_killed_with_its_children_and_shows_what_it_printed(lab: Lab) -> None:
    host = lab.hosts[0]
    other = host.start(["sleep", "999"])
    wait_until(lambda: [process.name for process in host.processes()] == ["sleep"], what="the other command")
    with pytest.raises(CommandTimeout, match="(?s)node0: sh .* did not end in 0.5 s .*so far\nand an error"):
        # A child, a child in a session of its own, and an orphan.
        host.run(
            ["sh", "-c", "sleep 1000 & setsid sleep 1001 & (sleep 1002 &) ; echo so far; echo and an error >&2; wait"],
            timeout_s=0.5,
        )
    assert [process.cmdline for process in host.processes()] == ["sleep 999"]
    other.kill()
    assert host.processes() == [] and other.returncode == -signal.SIGKILL


def test_orphans_are_reaped(lab: Lab) -> None:
    host = lab.hosts[0]
    host.run(["sh", "-c", "(true & true &) ; exit 0"])
    states = ["sh", "-c", "cat /proc/[0-9]*/stat"]
    wait_until(lambda: " Z " not in host.run(states).stdout, what="the orphans to be reaped")


@pytest.mark.parametrize("family", ["ip", "ip6", "ip_eth1"])
def test_a_killed_host_resets_its_peers(lab: Lab, family: str) -> None:
    more = conversation(lab, to=getattr(lab.hosts[0], family))
    lab.hosts[0].kill()
    assert more() in ("heard ", "ConnectionResetError", "BrokenPipeError")  # the end of the stream, or a reset
    refused = lab.hosts[1].run(
        ["python", "-c", f"import socket; socket.create_connection(('{lab.hosts[0].ip}', 5000))"]
    )
    assert "ConnectionRefusedError" in refused.stderr


def test_a_cut_host_is_silent_and_a_healed_one_goes_on(lab: Lab) -> None:
    more = conversation(lab, to=lab.hosts[0].ip)
    lab.hosts[0].cut()
    assert lab.hosts[0].processes(), "what runs on it goes on"
    call = f"import socket; socket.create_connection(('{lab.hosts[0].ip}', 5001), timeout=0.5)"
    assert "ConnectionRefusedError" not in lab.hosts[1].run(["python", "-c", call]).stderr
    lab.hosts[0].heal()
    assert more() == "heard again"


def test_a_host_without_power_tells_nobody(lab: Lab) -> None:
    more = conversation(lab, to=lab.hosts[0].ip, patience_s=0.5)
    lab.hosts[0].power_off()
    assert more() == "TimeoutError"
    assert lab.hosts[0].processes() == [] and not lab.hosts[0].is_up


@pytest.mark.parametrize("how", ["kill", "power_off", "cut"])
def test_a_restarted_host_is_empty_and_connected(lab: Lab, how: str) -> None:
    host = lab.hosts[0]
    host.start(["sleep", "1000"])
    host.run(["touch", "/tmp/old"])
    getattr(host, how)()
    host.restart()
    assert host.processes() == [] and host.run(["ls", "/tmp/old"]).returncode != 0
    assert conversation(lab, to=host.ip)() == "heard again"


def test_a_host_that_is_down_says_so(lab: Lab) -> None:
    lab.hosts[0].kill()
    with pytest.raises(LabError, match="node0 is down"):
        lab.hosts[0].run(["true"])


def lab_processes(name: str) -> list[str]:
    """Command lines of what belongs to a lab, by its name in them or in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if name.encode() in b"".join(texts):
            found.append(texts[0].replace(b"\0", b" ").decode())
    return found


def namespaces() -> set[tuple[str, int]]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/*"):
        try:
            found.add((path.name, path.stat().st_ino))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def test_down_leaves_nothing(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    lab = Lab(hosts=2, shared=tmp_path / "shared")
    for host in lab.hosts:
        host.start(["sleep", "1000"])
    spaces = lab_namespaces(lab.hosts)
    assert spaces <= namespaces()
    assert lab_processes(lab.name) != []
    lab.down()
    lab.down()
    assert lab_processes(lab.name) == [] and not lab.folder.exists()
    assert not spaces & namespaces()
    assert Path("/proc/self/mounts").read_text() == mounts
    assert "node0" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


HOLD = """
import json, sys, time
from pathlib import Path
from lab import Lab
from lab.lab import lab_namespaces
lab = Lab(hosts=2, shared=Path(sys.argv[1]))
for host in lab.hosts:
    host.run(["sh", "-c", "setsid sleep 1000 &"])
print(json.dumps({"name": lab.name, "folder": str(lab.folder), "spaces": sorted(lab_namespaces(lab.hosts))}), flush=True)
time.sleep(1000)
"""


def hold_a_lab(shared: Path) -> tuple[subprocess.Popen[str], dict]:
    """Another process with a lab of two hosts, and what it says of it."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", HOLD, str(shared)]
    owner = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    line = owner.stdout.readline()
    owner.stdout.close()
    assert line, f"the owner ended with {owner.wait()}"
    return owner, json.loads(line)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lab_ends_with_the_process_that_made_it(tmp_path: Path, how: signal.Signals) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    owner, held = hold_a_lab(tmp_path / "shared")
    spaces = {(name, inode) for name, inode in held["spaces"]}
    assert spaces <= namespaces() and lab_processes(held["name"])
    owner.send_signal(how)
    owner.wait()
    wait_until(lambda: not lab_processes(held["name"]), what="the lab's processes to end")
    wait_until(lambda: not spaces & namespaces(), what="the lab's namespaces to end")
    wait_until(lambda: not Path(held["folder"]).exists(), what="the lab's folder to be removed")
    assert Path("/proc/self/mounts").read_text() == mounts


def test_a_new_lab_sweeps_those_whose_owner_and_watch_are_gone(tmp_path: Path) -> None:
    owner, held = hold_a_lab(tmp_path / "shared")
    rack = json.loads(Path(held["folder"], "rack.json").read_text())["pid"]
    os.kill(rack, signal.SIGSTOP)  # a watch that does not watch
    owner.kill()
    owner.wait()
    with Lab(hosts=1, shared=tmp_path / "shared") as lab:
        wait_until(lambda: not lab_processes(held["name"]), what="the lab's processes to end")
        assert not Path(held["folder"]).exists()
        sweep()
        assert lab.hosts[0].run(["hostname"]).stdout == "node0\n", "a lab with an owner stays"


def test_the_sweep_kills_no_stranger_whose_number_a_rack_once_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder = tmp_path / f"{PREFIX}{gone.pid}-abcdef-x"
    folder.mkdir()
    stranger = subprocess.Popen(["sleep", "1000"])
    (folder / "rack.json").write_text(json.dumps({"pid": stranger.pid, "net": 1}))
    sweep()
    assert stranger.poll() is None and not folder.exists()
    stranger.kill()
    stranger.wait()
