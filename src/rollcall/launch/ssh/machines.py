"""The hosts of an ssh launch: which machines it gets, how ssh reaches them, and the scripts that run Rollcall's commands on them.

The launch's record keeps all of this, so `down` and the other subcommands need no run file, and no other launch from this machine
uses these hosts. If nodes run in containers, a host's script begins with a line that passes the rest to a shell in the container.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollcall.base.wait import on_stdout
from rollcall.base.words import counted
from rollcall.config.launch import SshSection
from rollcall.launch.record import LaunchError, LaunchRecord, all_records, find_record, launches, read_lines
from rollcall.launch.rendered import exports, shell_path
from rollcall.launch.ssh.shell import Login, Outcome, prefixed, run_on_all
from rollcall.launch.target import LaunchRequest
from rollcall.nodes.state import CLUSTER

HOSTS, SITE = "hosts", "site"  # keys of a record's facts: the hosts by rank, and the other fields of the site


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    cluster: str
    hosts: tuple[str, ...]  # by rank
    login: Login
    activate: Path | None = None
    variables: dict[str, str] = field(default_factory=dict)
    inside: tuple[str, ...] = ()  # the command for a shell in a node's container; empty without containers
    container: str | None = None  # the shell line that removes the container and everything in it, if there is one

    @classmethod
    def of_request(cls, request: LaunchRequest) -> Site:
        section = request.section(SshSection)
        container = request.container()
        end = None
        if container is not None and (words := container.stop()) is not None:
            seen = shlex.join([container.section.runtime, "container", "inspect", container.name])
            end = f"{shlex.join(words)} || ! {seen} >/dev/null 2>&1"  # a container that is already gone is fine
        key = None if section.key is None else request.cwd / section.key.expanduser()
        return cls(
            cluster=request.name,
            hosts=request.hosts,
            login=Login(user=section.user, port=section.port, key=key),
            activate=section.activate,
            variables={**request.node_env, **section.env},
            inside=tuple(container.shell()) if container else (),
            container=end,
        )

    @classmethod
    def of_record(cls, record: LaunchRecord) -> Site:
        if SITE not in record.facts:
            raise LaunchError(
                f"{record.name!r} has not started anything yet; run the same `rollcall launch` command again"
                if record.target == "ssh"
                else f"{record.name!r} was launched with {record.target}, not with ssh, so its hosts are unknown"
            )
        return TypeAdapter(cls).validate_python({**record.facts[SITE], "hosts": record.facts[HOSTS]})

    def claim(self, record: LaunchRecord) -> LaunchRecord:
        """Add these hosts to the record and save it, unless another launch has taken one of them in the meantime."""
        # Several users may share a launches folder.
        with (launches() / f".hosts-{os.getuid()}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _refuse_used(self.hosts, _used_by_others(record.name))
            rest = TypeAdapter(type(self)).dump_python(self, mode="json", exclude={"hosts"})
            return record.knowing(**{HOSTS: list(self.hosts), SITE: rest}).save()

    def script(self, *lines: str) -> str:
        """Return a script that runs shell lines in the nodes' environment. It starts once all lines have arrived; stdin may stay open."""
        environment = []
        if self.activate is not None:
            path, shown = shell_path(self.activate), shlex.quote(str(self.activate))
            missing = f"printf 'the activate script %s does not exist on this host, or cannot be read\\n' {shown} >&2"
            environment += [f"[ -r {path} ] || {{ {missing}; exit 1; }}", f". {path} || exit 1"]
        where = "in its environment" if self.activate else "on the PATH of a non-login shell"
        missing = f"{{ echo 'rollcall was not found {where}; set launch.ssh.activate' >&2; exit 1; }}"
        environment += [
            *exports({**self.variables, CLUSTER: self.cluster}),
            f"command -v rollcall >/dev/null || {missing}",
        ]
        return "\n".join(["main() {", *environment, *lines, "}", "main; exit", ""])

    def send(self, scripts: Mapping[str, str], **how: Any) -> list[Outcome]:
        """Run the hosts' scripts on all hosts at once. The options are those of ``run_on_all``."""
        entry = f"exec {shlex.join(self.inside)}\n" if self.inside else ""
        return run_on_all(self.login, {host: entry + script for host, script in scripts.items()}, **how)

    def outside(self) -> Site:
        """Return a site whose scripts run on the hosts, outside their containers, to create and remove the containers."""
        return replace(self, inside=())

    def do(self, scripts: Mapping[str, str], *, to: str, timeout_s: float | None = None) -> None:
        """Run scripts that must succeed on every host. If one fails, stop the others and raise."""
        outcomes = self.send(scripts, timeout_s=timeout_s, tell=prefixed(self.hosts), together=True)
        if problems := [each.problem for each in outcomes if not each.is_good and not each.was_let_go]:
            raise LaunchError("\n  ".join([f"could not {to} on {counted(len(problems), 'host')}:", *problems]))


def run_there(record: LaunchRecord, *, where: str, command: Sequence[str]) -> list[str]:
    """Run the user's command on one host or on all of them, print its output and return the problems. A command with only one
    word is run as a line of shell."""
    site = Site.of_record(record)
    if where not in ("all", *site.hosts):
        known = ", ".join(site.hosts)
        raise LaunchError(f"{where!r} is not a host of launch {record.name!r}; use all, or one of {known}")
    hosts = site.hosts if where == "all" else (where,)
    line = command[0] if len(command) == 1 else shlex.join(command)
    script = site.script(
        # After Ctrl-C on this machine, stdin closes, and the user's command is killed. If the command exits by itself, its background
        # processes keep running.
        "( cat >/dev/null; kill -TERM 0 ) <&0 >/dev/null 2>&1 & watch=$!",
        f"( {line}\n) </dev/null; status=$?",
        "disown $watch; kill $watch; return $status",
    )
    return [
        f"{each.host}: failed with status {each.status}" if each.was_reached else each.problem
        for each in site.send(dict.fromkeys(hosts, script), tell=prefixed(hosts, write=on_stdout))
        if not each.is_good
    ]


# Which machines a launch gets: the listed hosts, or the first hosts in a file that no other launch from this machine uses


def choose_hosts(given: list[str] | Path, *, count: int, name: str, cwd: Path) -> tuple[str, ...]:
    """Return one host for each node, by rank. An existing launch keeps its hosts."""
    record = find_record(name)
    before = () if record is None else tuple(record.facts.get(HOSTS, ()))
    used = _used_by_others(name)
    if isinstance(given, list):
        chosen = checked_hosts(given)
        if len(chosen) != count:
            raise LaunchError(
                f"launch.ssh.hosts lists {counted(len(chosen), 'host')}, but cluster.num_nodes={count}; list one host for each node"
            )
        _refuse_used(chosen, used)
    elif len(before) == count:
        return before
    else:
        lines = read_lines(cwd / given.expanduser(), key="launch.ssh.hosts")
        # One host per line; a ``#`` begins a comment.
        listed = checked_hosts([host for line in lines if (host := line.partition("#")[0].strip())])
        free = tuple(host for host in listed if host not in used)
        if len(free) < count:
            others = "".join(f"\n  {host} is used by launch {used[host]!r}" for host in listed if host in used)
            raise LaunchError(
                f"launch.ssh.hosts={given} has {counted(len(free), 'free host')}, but cluster.num_nodes={count}; add hosts, or "
                f"end a launch with `rollcall launch down NAME`{others}"
            )
        chosen = free[:count]
    if before and before != chosen:
        raise LaunchError(
            f"{name!r} was launched on {', '.join(before)}, not on {', '.join(chosen)}; end it with `rollcall launch down "
            f"{name}` first, or choose another --name"
        )
    return chosen


def _used_by_others(name: str) -> dict[str, str]:
    """Return the hosts that other launches use, each with its launch."""
    return {host: other.name for other in all_records() if other.name != name for host in other.facts.get(HOSTS, ())}


def _refuse_used(hosts: Sequence[str], used: Mapping[str, str]) -> None:
    taken = [f"{host} (launch {used[host]!r})" for host in hosts if host in used]
    if taken:
        raise LaunchError(
            f"already in use: {', '.join(taken)}; choose other hosts, or end that launch with `rollcall launch down NAME`"
        )


def checked_hosts(hosts: Sequence[str], *, key: str = "launch.ssh.hosts") -> tuple[str, ...]:
    for number, host in enumerate(hosts):
        if host in hosts[:number]:
            raise LaunchError(f"{key} lists {host} twice; each node needs its own host")
    return tuple(hosts)
