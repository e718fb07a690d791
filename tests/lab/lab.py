"""The lab: hosts made of namespaces, on one machine, as root.

A host has its own network (two interfaces on two switches), name, processes, IPC, ``/tmp``, ``/run``, ``/dev/shm`` and
home, all empty at first; the virtual environment, the interpreter, the checkout and one shared folder are where they are
outside. The switches and all hosts live in a *rack*: a process whose PID, mount and network namespaces enclose the lab.

Nothing is left behind: names of namespaces and mounts exist in the rack alone, and the rack watches the process that
made the lab; when either ends, the kernel ends the rest. Only a folder of logs may remain if the rack itself is killed;
the next lab that starts removes it.

    rack    br0 10.77.0.254 ── eth0 of node0 10.77.0.1, of node1 10.77.0.2, ...     default route
            br1             ── eth1 of node0 10.78.0.1, of node1 10.78.0.2, ...     for tests of --interface
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

from lab.command import Command, LabError

PREFIX = "rollcall-lab-"
CHECKOUT = Path(__file__).resolve().parents[2]
START_S = 60.0  # no host takes a second, unless the machine is drowning
RUN_S = 120.0
_INSIDE = Path(__file__).with_name("inside.py")
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setsid", "env")


@functools.cache
def missing_for_lab() -> str | None:
    """Why there can be no lab here; None when there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the lab needs root on Linux"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"the lab needs {', '.join(absent)} (apt install iproute2 util-linux)"
    probe = "ip link add probe0 type bridge && ip link add probe1 type veth peer name probe2"
    command = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c", probe]
    tried = subprocess.run(command, capture_output=True, text=True)
    return None if tried.returncode == 0 else f"the lab needs namespaces, bridges and veth: {tried.stderr.strip()}"


needs_lab = pytest.mark.skipif(missing_for_lab() is not None, reason=missing_for_lab() or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    name: str
    pid: int  # as the host counts
    cmdline: str


class Lab:
    """Hosts ``node0`` to ``nodeN-1`` and a folder that all of them share; as a context manager, down at its end."""

    def __init__(self, *, hosts: int, shared: Path, keep: Sequence[Path] = ()) -> None:
        """``keep``: more folders that a host has at the same place as this machine."""
        reason = missing_for_lab()
        if reason is not None:
            raise LabError(reason)
        sweep()
        shared.mkdir(parents=True, exist_ok=True)
        self.shared = shared.resolve()
        self._keep = keep
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:6]}-"))
        self.name = self.folder.name
        self.hosts = [Host(self, index=index) for index in range(hosts)]
        self._rack: _Pid1 | None = None
        try:
            self._up()
        except BaseException:
            self.down()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def down(self) -> None:
        """End all hosts and whatever runs in them; a second time does nothing."""
        if self._rack is not None:
            self._rack.kill()
            for host in self.hosts:
                host.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def rack(self) -> _Pid1:
        if self._rack is None:
            raise LabError(f"{self.name} is not up")
        return self._rack

    @property
    def kept(self) -> list[str]:
        """What a host has at the same place as this machine."""
        places = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), str(CHECKOUT), str(self.shared)}
        places |= set(map(str, self._keep))
        if vllm := os.environ.get("ROLLCALL_VLLM_PYTHON"):
            # Its environment, and the Python that it was made of.
            places |= {str(path.parents[1]) for path in (Path(vllm), Path(vllm).resolve())}
        return sorted(places)

    @property
    def etc(self) -> Path:
        """Files that every host has in its ``/etc``."""
        return self.folder / "etc"

    def ip(self, lines: Sequence[str], *, host: str | None = None) -> None:
        """Run lines of the `ip` command in the rack, or on one host's network."""
        self._wire(["ip", *(["-n", host] if host else [])], lines)

    def _wire(self, tool: Sequence[str], lines: Sequence[str]) -> None:
        enter = ["nsenter", "-t", str(self.rack.pid), "--mount", "--net", *tool]
        done = subprocess.run([*enter, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
        if done.returncode != 0:
            raise LabError(f"{self.name}: {tool[0]} failed: {done.stderr.strip()}\n" + "\n".join(lines))

    def _up(self) -> None:
        self.etc.mkdir()
        names = [f"{host.ip} {host.name}\n{host.ip6} {host.name}-v6" for host in self.hosts]
        (self.etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost ip6-localhost", *names, ""]))
        # A look-up of an unknown name asks nobody: each question to a name server that is not there costs 10 to 20 s.
        (self.etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (self.etc / "resolv.conf").write_text("")
        owner = os.pidfd_open(os.getpid())
        try:
            settings = {"keep": self.kept, "folder": str(self.folder), "owner_fd": owner}
            enter = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
            self._rack = _Pid1("rack", settings, enter=enter, log=self.folder / "rack.log", pass_fd=owner)
        finally:
            os.close(owner)
        (self.folder / "rack.json").write_text(json.dumps({"pid": self.rack.pid, "net": self.rack.net}))
        self.ip(
            [line for bridge in ("br0", "br1") for line in (f"link add {bridge} type bridge", f"link set {bridge} up")]
        )
        self.ip(["addr add 10.77.0.254/24 dev br0", "addr add fd00:77::fe/64 dev br0 nodad", "link set lo up"])
        for host in self.hosts:
            host.boot(wait=False)
        for host in self.hosts:
            host.wait_until_up()


class Host:
    """One host of a lab, running from the lab's start until it is killed or powered off."""

    def __init__(self, lab: Lab, *, index: int) -> None:
        self.lab = lab
        self.name = f"node{index}"
        self.ip, self.ip6 = f"10.77.0.{index + 1}", f"fd00:77::{index + 1:x}"  # on eth0
        self.ip_eth1, self.ip6_eth1 = f"10.78.0.{index + 1}", f"fd00:78::{index + 1:x}"
        self.shared = lab.shared
        self.home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # ssh takes it from there, whatever HOME says
        self.own_folders = [*map(Path, ("/tmp", "/var/tmp", "/run", "/dev/shm")), self.home]
        self._ports = (f"p{index}a", f"p{index}b")  # the switches' ends of eth0 and eth1
        self._init: _Pid1 | None = None
        self._numbers = itertools.count()
        self._commands: list[Command] = []

    def __repr__(self) -> str:
        return f"<{self.name} of {self.lab.name}>"

    def boot(self, *, wait: bool = True) -> None:
        lines = [f"netns add {self.name}"]
        for eth, port, bridge in zip(("eth0", "eth1"), self._ports, ("br0", "br1"), strict=True):
            lines.append(f"link add {port} type veth peer name {eth} netns {self.name}")
            lines.append(f"link set {port} master {bridge} up")
        self.lab.ip(lines)
        lines = [f"link set {name} up" for name in ("lo", "eth0", "eth1")]
        for eth, ip, ip6 in (("eth0", self.ip, self.ip6), ("eth1", self.ip_eth1, self.ip6_eth1)):
            # Without nodad an IPv6 address cannot be bound to for its first second or two.
            lines += [f"addr add {ip}/24 dev {eth}", f"addr add {ip6}/64 dev {eth} nodad"]
        lines += ["route add default via 10.77.0.254", "route add default via fd00:77::fe"]
        self.lab.ip(lines, host=self.name)
        settings = {
            "name": self.name,
            "hide": [str(folder) for folder in self.own_folders],
            "keep": self.lab.kept,
            "etc": str(self.lab.etc),
            "home": str(self.home),
        }
        enter = [
            "nsenter", "-t", str(self.lab.rack.pid), "--mount", "--net", "--pid", "ip", "netns", "exec", self.name,
            "unshare", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
        ]  # fmt: skip
        self._init = _Pid1("host", settings, enter=enter, log=self.lab.folder / f"{self.name}.log", wait=wait)

    def wait_until_up(self) -> None:
        self._running().wait_until_ready()

    @property
    def is_up(self) -> bool:
        return self._init is not None and self._init.is_alive()

    @property
    def root(self) -> Path:
        """The host's file system as seen from here: ``host.root / "tmp"`` is its ``/tmp``."""
        return Path(f"/proc/{self._running().pid}/root")

    def start(
        self, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Command:
        """Run a command in the background; its log holds stdout and stderr."""
        log = self._log()
        return self._start(arguments, env=env, cwd=cwd, logs=(log, log))

    def run(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = RUN_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Daemons that it leaves behind are not waited for."""
        log = self._log()
        command = self._start(arguments, env=env, cwd=cwd, logs=(log, log.with_suffix(".err")))
        status = command.wait(timeout_s=timeout_s)
        return subprocess.CompletedProcess(command.arguments, status, command.output, command.errors)

    def processes(self) -> list[HostProcess]:
        """What runs on the host, but for its PID 1; none when it is down."""
        return [process for process, _ in self._processes().values()]

    def seen_from_here(self) -> list[int]:
        """The same processes, by their numbers on this machine: for signals."""
        return list(self._processes())

    def kill(self) -> None:
        """SIGKILL its PID 1, and so all that runs on it; the network answers for it, so peers see resets."""
        if self._init is not None:
            self._init.kill()
            self._init = None
            for command in self._commands:
                command.reap()

    def cut(self) -> None:
        """Pull its cables."""
        self.lab.ip([f"link set {port} down" for port in self._ports])

    def heal(self) -> None:
        self.lab.ip([f"link set {port} up" for port in self._ports])

    def power_off(self) -> None:
        """Cut, then kill: nobody is told."""
        self.cut()
        self.kill()

    def restart(self) -> None:
        """Boot it again, running or not: connected, with nothing of what it had."""
        self.kill()
        # A new network too: what the old one still had to send must not reach anybody.
        self.lab.ip([*(f"link del {port}" for port in self._ports), f"netns del {self.name}"])
        self.boot()

    def _start(
        self, arguments: Sequence[str], *, env: Mapping[str, str] | None, cwd: Path | None, logs: tuple[Path, Path]
    ) -> Command:
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid")
        enter = ["nsenter", "-t", str(self._running().pid), *spaces, "setsid", "env", f"--chdir={cwd or self.home}"]
        command = Command(
            arguments,
            host=self.name,
            enter=enter,
            env={**self._environment(), **(env or {})},
            logs=logs,
            alive=lambda: {pid: parent for pid, (_, parent) in self._processes().items()},
        )
        self._commands = [*(other for other in self._commands if other.poll() is None), command]
        return command

    def _environment(self) -> dict[str, str]:
        """That of a fresh login, not of the test: a variable such as RANK or TMPDIR would reach every host."""
        passed = {
            name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE") if name in os.environ
        }
        path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {
            **passed,
            "PATH": path,
            "PYTHONPATH": str(CHECKOUT / "src"),  # this checkout's code, wherever the environment's own install points
            "HOME": str(self.home),
            "USER": "root",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        }

    def _log(self) -> Path:
        return self.lab.folder / f"{self.name}-{next(self._numbers)}.log"

    def _running(self) -> _Pid1:
        if self._init is None:
            raise LabError(f"{self.name} is down; restart() boots it")
        return self._init

    def _processes(self) -> dict[int, tuple[HostProcess, int]]:
        """By number as seen here: the process, and its parent's number as seen here."""
        found: dict[int, tuple[HostProcess, int]] = {}
        if self._init is None or not self._init.is_alive():
            return found
        for pid in _pids():
            if pid == self._init.pid or _inode(pid, "pid") != self._init.pids:
                continue
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                cmdline = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            fields = dict(re.findall(r"^(\w+):\s+(.*)$", status, re.MULTILINE))
            if not fields["State"].startswith(("Z", "X")):
                process = HostProcess(
                    name=fields["Name"], pid=int(fields["NSpid"].split()[-1]), cmdline=cmdline.strip()
                )
                found[pid] = (process, int(fields["PPid"]))
        return found


class _Pid1:
    """The first process of a rack or of a host, started through ``enter``, killed through a pidfd.

    It is held by a pidfd, and only after its network namespace has been compared: numbers come round again.
    """

    pid: int  # as seen here
    pids: int | None  # inode of its PID namespace
    net: int  # inode of its network namespace

    def __init__(
        self, role: str, settings: dict[str, object], *, enter: list[str], log: Path, pass_fd: int | None = None,
        wait: bool = True,
    ) -> None:  # fmt: skip
        self._log = log
        with log.open("ab") as errors:
            self._starter = subprocess.Popen(
                [*enter, sys.executable, "-I", "-S", str(_INSIDE), role, json.dumps(settings)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, cwd="/",
                pass_fds=() if pass_fd is None else (pass_fd,),
            )  # fmt: skip
        self._handle: int | None = None
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        if self._handle is not None:
            return
        pipe = self._starter.stdout
        assert pipe is not None
        heard = pipe.readline() if select.select([pipe], [], [], START_S)[0] else b""
        pipe.close()
        if not heard:
            self._starter.kill()
            self._starter.wait()
            raise LabError(f"{self._log.stem} did not start: {self._log.read_text().strip() or 'it said nothing'}")
        self.net = int(heard)
        for pid in _pids():
            handle = _open_if(pid, net=self.net)
            if handle is None:
                continue
            if re.search(r"^NSpid:.*\s1$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
                self.pid, self.pids, self._handle = pid, _inode(pid, "pid"), handle
                return
            os.close(handle)
        raise LabError(f"{self._log.stem} ended as it started: {self._log.read_text().strip()}")

    def is_alive(self) -> bool:
        return self._handle is not None and self._starter.poll() is None

    def kill(self) -> None:
        """Returns when it and all in its namespaces have ended."""
        if self._handle is None:
            self._starter.kill()  # not ready yet; what it started ends with it
        else:
            _signal(self._handle)
            os.close(self._handle)
            self._handle = None
        self._starter.wait()


def sweep() -> None:
    """Remove what is left of labs whose owner is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if not owner.isdigit() or Path(f"/proc/{owner}").exists():
            continue
        try:
            rack = json.loads((folder / "rack.json").read_text())
        except FileNotFoundError:
            rack = None
        handle = _open_if(rack["pid"], net=rack["net"]) if rack else None
        if handle is not None:
            _signal(handle)
            os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def _open_if(pid: int, *, net: int) -> int | None:
    """A pidfd of the process, if it is there and in that network namespace."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if _inode(pid, "net") == net:
        return handle
    os.close(handle)
    return None


def _signal(handle: int) -> None:
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return


def _inode(pid: int, space: str) -> int | None:
    """Which namespace a process is in; None when it has ended, or is not ours to look at."""
    try:
        return os.stat(f"/proc/{pid}/ns/{space}").st_ino
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def lab_namespaces(hosts: list[Host]) -> set[tuple[str, int]]:
    found = set()
    for host in hosts:
        listed = host.run(["stat", "-L", "-c", "%n %i", *(f"/proc/1/ns/{space}" for space in ("net", "pid", "mnt"))])
        found |= {(Path(name).name, int(inode)) for name, inode in map(str.split, listed.stdout.splitlines())}
    return found
