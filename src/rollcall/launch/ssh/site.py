"""The hosts of an ssh launch: how they are reached, and the scripts that run Rollcall's commands there.

A record keeps it, so that `down` and the other verbs need no run file. Where nodes run in containers, the script that a host gets
begins with one line that hands the rest to a shell inside.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from rollcall.config.launch import SshSection
from rollcall.launch.container import container_of
from rollcall.launch.errors import LaunchError
from rollcall.launch.record import LaunchRecord
from rollcall.launch.rendered import exports, shell_path
from rollcall.launch.ssh.hosts import hosts_of
from rollcall.launch.ssh.shell import Login, Outcome, Tell, prefixed, run_on_all
from rollcall.launch.target import LaunchRequest
from rollcall.nodes.state import CLUSTER
from rollcall.wait import on_stdout

FACT = "site"
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    cluster: str
    hosts: tuple[str, ...]  # by rank
    login: Login
    activate: Path | None = None
    variables: dict[str, str] = field(default_factory=dict)
    inside: tuple[str, ...] = ()  # the shell in a node's container; empty: nodes run without one
    container: str | None = None  # a line of shell that ends the container with all in it; None: there is none to end

    @classmethod
    def of_request(cls, request: LaunchRequest) -> Site:
        section = request.section(SshSection)
        key = None if section.key is None else request.cwd / section.key.expanduser()
        container = container_of(request.launch, request.cluster, name=request.container_name)
        end = None
        if container is not None and (words := container.stop()) is not None:
            seen = shlex.join([container.section.runtime, "container", "inspect", container.name])
            end = f"{shlex.join(words)} || ! {seen} >/dev/null 2>&1"  # one that is gone already is fine
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
        if FACT not in record.facts:
            raise LaunchError(
                f"{record.name!r} has started nothing yet; run the same `rollcall launch` again"
                if record.target == "ssh"
                else f"{record.name!r} was launched with {record.target}, not with ssh, so its hosts are not known here"
            )
        return TypeAdapter(cls).validate_python({**record.facts[FACT], "hosts": hosts_of(record)})

    def kept_in(self, record: LaunchRecord) -> LaunchRecord:
        values = TypeAdapter(type(self)).dump_python(self, mode="json", exclude={"hosts"})
        return record.knowing(**{FACT: values})

    @property
    def head(self) -> str:
        return self.hosts[0]

    def script(self, *lines: str) -> str:
        """Lines of shell in the environment of the nodes. They run once all of them have arrived; stdin may stay open."""
        return "\n".join([*("main() {", *self._environment(), *lines, "}", "main; exit"), ""])

    def send(
        self,
        scripts: Mapping[str, str],
        *,
        timeout_s: float = math.inf,
        tell: Tell | None = None,
        together: bool = False,
    ) -> list[Outcome]:
        """Each host's script to that host, all at once."""
        entry = f"exec {shlex.join(self.inside)}\n" if self.inside else ""
        whole = {host: entry + script for host, script in scripts.items()}
        return run_on_all(self.login, whole, timeout_s=timeout_s, tell=tell, together=together)

    def _environment(self) -> list[str]:
        lines = []
        if self.activate is not None:
            path, shown = shell_path(self.activate), shlex.quote(str(self.activate))
            missing = f"printf 'the activate script %s does not exist here, or cannot be read\\n' {shown} >&2"
            lines += [f"[ -r {path} ] || {{ {missing}; exit 1; }}", f". {path} || exit 1"]
        where = "in its environment" if self.activate else "on the PATH of a shell that is not a login shell"
        lines += exports({**self.variables, CLUSTER: self.cluster})
        lines.append(
            f"command -v rollcall >/dev/null || {{ echo 'rollcall was not found {where}; set launch.ssh.activate' >&2; exit 1; }}"
        )
        return lines


def run_there(record: LaunchRecord, *, where: str, command: Sequence[str]) -> list[str]:
    """A command of the user, on all hosts or one; prints what comes and returns what went wrong. A single word is a line of shell."""
    site = Site.of_record(record)
    if where != ALL and where not in site.hosts:
        known = ", ".join(site.hosts)
        raise LaunchError(f"{where!r} is not a host of launch {record.name!r}; use all, or one of {known}")
    hosts = site.hosts if where == ALL else (where,)
    line = command[0] if len(command) == 1 else shlex.join(command)
    script = site.script(
        # The line ends when stdin ends: on Ctrl-C here. What it leaves in the background stays when it ends by itself.
        "( cat >/dev/null; kill -TERM 0 ) <&0 >/dev/null 2>&1 & watch=$!",
        f"( {line}\n) </dev/null; status=$?",
        "disown $watch; kill $watch; return $status",
    )
    outcomes = site.send(dict.fromkeys(hosts, script), tell=prefixed(hosts, write=on_stdout))
    return [
        f"{each.host}: failed with status {each.status}" if each.was_reached else each.problem
        for each in outcomes
        if not each.is_good
    ]
