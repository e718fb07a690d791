"""Which machines a launch gets: those that are listed, or the first of a file that no other launch from here uses.

A record keeps its hosts, so launches that start at the same moment cannot get the same machine: ``claim`` looks and writes under
one lock.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rollcall.launch.errors import LaunchError, reason
from rollcall.launch.record import LaunchRecord, all_records, find_record, launches
from rollcall.words import counted

HOSTS = "hosts"  # the fact of a record that lists them, by rank


def choose_hosts(given: list[str] | Path, *, count: int, name: str, cwd: Path) -> tuple[str, ...]:
    """By rank, one for each node. A launch that exists keeps those it has."""
    before = hosts_of(find_record(name))
    listed = checked_hosts(given if isinstance(given, list) else _read(cwd / given.expanduser()))
    used = _used_by_others(name)
    if isinstance(given, list):
        if len(listed) != count:
            raise LaunchError(
                f"launch.ssh.hosts lists {counted(len(listed), 'host')}, and cluster.num_nodes={count}; list one for each node"
            )
        _refuse_used(listed, used)
        chosen = tuple(listed)
    elif before and len(before) == count:
        return before
    else:
        free = [host for host in listed if host not in used]
        if len(free) < count:
            others = "".join(f"\n  {host} is used by launch {used[host]!r}" for host in listed if host in used)
            raise LaunchError(
                f"launch.ssh.hosts={given} has {counted(len(free), 'free host')}, and cluster.num_nodes={count}; add hosts, or "
                f"end a launch with `rollcall launch down NAME`{others}"
            )
        chosen = tuple(free[:count])
    if before and before != chosen:
        raise LaunchError(
            f"{name!r} was launched on {', '.join(before)}, not on {', '.join(chosen)}; end it with `rollcall launch down "
            f"{name}` first, or give another --name"
        )
    return chosen


def claim(record: LaunchRecord, hosts: Sequence[str]) -> LaunchRecord:
    """The record with these hosts, saved, unless another launch has taken one of them meanwhile."""
    # A folder of launches may have several users.
    with (launches() / f".hosts-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _refuse_used(hosts, _used_by_others(record.name))
        return record.knowing(**{HOSTS: list(hosts)}).save()


def hosts_of(record: LaunchRecord | None) -> tuple[str, ...]:
    return () if record is None else tuple(record.facts.get(HOSTS, ()))


def _used_by_others(name: str) -> dict[str, str]:
    """Hosts, each with the launch that has it."""
    return {host: other.name for other in all_records() if other.name != name for host in hosts_of(other)}


def _refuse_used(hosts: Sequence[str], used: dict[str, str]) -> None:
    taken = [f"{host} (launch {used[host]!r})" for host in hosts if host in used]
    if taken:
        raise LaunchError(
            f"in use already: {', '.join(taken)}; choose other hosts, or end that launch with `rollcall launch down NAME`"
        )


def _read(path: Path) -> list[str]:
    """One host in each line; what follows a ``#`` is a comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise LaunchError(f"launch.ssh.hosts={path} cannot be read: {reason(error)}") from None
    return [host for line in lines if (host := line.partition("#")[0].strip())]


def checked_hosts(hosts: Sequence[str], *, key: str = "launch.ssh.hosts") -> list[str]:
    seen: set[str] = set()
    for host in hosts:
        if not re.fullmatch(r"[^-\s]\S*", host):
            raise LaunchError(f"{key} has {host!r}, which ssh cannot reach; write a name or an address")
        if host in seen:
            raise LaunchError(f"{key} has {host} twice; each node needs a host of its own")
        seen.add(host)
    return list(hosts)
