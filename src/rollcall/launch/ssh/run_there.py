"""Commands of the user on the hosts of an ssh launch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rollcall.launch.errors import LaunchError
from rollcall.launch.record import LaunchRecord
from rollcall.launch.ssh.shell import prefixed
from rollcall.launch.ssh.site import Site
from rollcall.wait import on_stdout

ALL = "all"


def run_there(record: LaunchRecord, *, where: str, command: Sequence[str]) -> list[str]:
    """On all hosts, or one; prints what comes and returns what went wrong. A single word is a line of shell."""
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
