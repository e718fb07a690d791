"""The hosts of an ssh launch: how they are reached, and the scripts that run Rollcall's commands there.

A record keeps it, so that `down` and the other verbs need no run file. Where nodes run in containers, the script that a host gets
begins with one line that hands the rest to a shell inside.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollcall.config.launch import SshSection
from rollcall.launch.container import Container, container_of
from rollcall.launch.errors import LaunchError
from rollcall.launch.record import LaunchRecord
from rollcall.launch.rendered import exports, shell_path
from rollcall.launch.ssh.hosts import hosts_of
from rollcall.launch.ssh.shell import Login, Outcome, Tell, prefixed, run_on_all
from rollcall.launch.target import LaunchRequest
from rollcall.nodes.state import CLUSTER
from rollcall.wait import on_stdout

FACT = "ssh"
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    cluster: str
    hosts: tuple[str, ...]  # by rank
    user: str | None = None
    port: int | None = None
    key: str | None = None
    activate: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    inside: tuple[str, ...] = ()  # the shell in a node's container; empty: nodes run without one
    container: str | None = None  # a line of shell that ends the container with all in it; None: there is none to end

    @classmethod
    def of_request(cls, request: LaunchRequest) -> Site:
        section = request.section(SshSection)
        container = container_of(request.launch, request.cluster, name=request.container_name)
        return cls(
            cluster=request.name,
            hosts=request.hosts,
            user=section.user,
            port=section.port,
            key=None if section.key is None else str(request.cwd / section.key.expanduser()),
            activate=None if section.activate is None else str(section.activate),
            variables={**request.node_env, **section.env},
            inside=tuple(container.enter(["bash", "-s"], interactive=True)) if container else (),
            container=_end_of(container),
        )

    @classmethod
    def of_record(cls, record: LaunchRecord) -> Site:
        if FACT not in record.facts:
            raise LaunchError(
                f"{record.name!r} has started nothing yet; run the same `rollcall launch` again"
                if record.target == "ssh"
                else f"{record.name!r} was launched with {record.target}, not with ssh, so its hosts are not known here"
            )
        try:
            kept = TypeAdapter(dict[str, Any]).validate_json(record.facts[FACT])
            return TypeAdapter(cls).validate_python({**kept, "hosts": hosts_of(record)})
        except ValueError:
            raise LaunchError(f"the record of {record.name!r} does not say how its hosts are reached") from None

    def kept_in(self, record: LaunchRecord) -> LaunchRecord:
        values = {name: value for name, value in asdict(self).items() if name != "hosts"}
        return replace(record, facts={**record.facts, FACT: json.dumps(values)})

    @property
    def head(self) -> str:
        return self.hosts[0]

    @property
    def login(self) -> Login:
        return Login(user=self.user, port=self.port, key=None if self.key is None else Path(self.key))

    def script(self, *lines: str) -> str:
        """Lines of shell in the environment of the nodes. They run once all of them have arrived; stdin may stay open."""
        return "\n".join([*("main() {", *self._environment(), *lines, "}", "main; exit"), ""])

    def send(
        self, scripts: Mapping[str, str], *, before: str = "", timeout_s: float = math.inf, tell: Tell | None = None,
        together: bool = False,
    ) -> list[Outcome]:  # fmt: skip
        """Each host's script to that host, all at once. ``before``: lines that set what is in no file."""
        entry = f"exec {shlex.join(self.inside)}\n" if self.inside else ""
        whole = {host: entry + before + script for host, script in scripts.items()}
        return run_on_all(self.login, whole, timeout_s=timeout_s, tell=tell, together=together)

    def run(self, *words: str, hosts: Sequence[str], timeout_s: float, tell: Tell | None = None) -> list[Outcome]:
        """One command on some of the hosts at once."""
        script = self.script(f"exec {shlex.join(words)} </dev/null")
        return self.send(dict.fromkeys(hosts, script), timeout_s=timeout_s, tell=tell)

    def _environment(self) -> list[str]:
        lines = []
        if self.activate is not None:
            path, shown = shell_path(Path(self.activate)), shlex.quote(self.activate)
            missing = f"printf 'the activate script %s does not exist here, or cannot be read\\n' {shown} >&2"
            lines += [f"[ -r {path} ] || {{ {missing}; exit 1; }}", f". {path} || exit 1"]
        where = "in its environment" if self.activate else "on the PATH of a shell that is not a login shell"
        lines += exports({**self.variables, CLUSTER: self.cluster})
        lines.append(
            f"command -v rollcall >/dev/null || {{ echo 'rollcall was not found {where}; set launch.ssh.activate' >&2; exit 1; }}"
        )
        return lines


def _end_of(container: Container | None) -> str | None:
    words = container.stop() if container else None
    if container is None or words is None:
        return None
    seen = shlex.join([container.section.runtime, "container", "inspect", container.name])
    return f"{shlex.join(words)} || ! {seen} >/dev/null 2>&1"  # one that is gone already is fine


def run_there(record: LaunchRecord, *, where: str, command: Sequence[str]) -> list[str]:
    """A command of the user, on all hosts or one; prints what comes and returns what went wrong. A single word is a line of shell."""
    site = Site.of_record(record)
    if where != ALL and where not in site.hosts:
        known = ", ".join(site.hosts)
        raise LaunchError(f"{where!r} is not a host of launch {record.name!r}; use all, or one of {known}")
    hosts = site.hosts if where == ALL else (where,)
    line = command[0] if len(command) == 1 else shlex.join(command)
    scripts = dict.fromkeys(hosts, site.script(*_tied(line)))
    outcomes = site.send(scripts, tell=prefixed(hosts, write=on_stdout))
    return [
        f"{each.host}: failed with status {each.status}" if each.was_reached else each.problem
        for each in outcomes
        if not each.is_good
    ]


def _tied(line: str) -> list[str]:
    """The line, ended when stdin ends: on Ctrl-C here. What it leaves in the background stays when it ends by itself."""
    return [
        "( cat >/dev/null; kill -TERM 0 ) <&0 >/dev/null 2>&1 & watch=$!",
        f"( {line}\n) </dev/null; status=$?",
        "disown $watch; kill $watch; return $status",
    ]
