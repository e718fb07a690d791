"""Rollcall's own clusters on lab hosts: `rollcall` on a host, a bring-up, and what is left of one.

Ray nodes start two at a time: on a machine of two cores more of them pass their own deadlines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lab.lab import Host, Lab
from rollcall.nodes.rendezvous import Head, Rendezvous

AT_ONCE = 2
NODE_S = 240.0  # for one `rollcall node`, with everything else that runs here
SLOTS = 8
ENV = {"RAY_raylet_start_wait_time_s": "120", "RAY_USAGE_STATS_ENABLED": "0"}

Results = dict[int, subprocess.CompletedProcess[str]]


@dataclass(kw_only=True)
class LabCluster:
    """Four hosts that are one cluster of 32 slots, and a fifth that is not part of it.

    For tests that leave it as it is; hosts and rendezvous may serve a second cluster of another name beside it.
    """

    lab: Lab
    hosts: list[Host]  # by rank
    outsider: Host
    rendezvous: Path
    joined: Results = field(default_factory=dict)  # what `rollcall node` printed, by rank

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def token(self) -> str:
        return (self.rendezvous / "default/token").read_text().strip()


def rollcall(
    host: Host, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollcall", *arguments]
    return host.run(command, env={**ENV, **(env or {})}, timeout_s=timeout_s)


def bring_up(
    hosts: Mapping[int, Host], *options: str, num_nodes: int | None = None, env: Mapping[str, str] | None = None
) -> Results:
    """`rollcall node` on hosts by rank, started in the mapping's order; each has to end well."""
    results: Results = {}
    waiting = list(hosts.items())
    while waiting:
        batch, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        started = {
            rank: host.start(
                [
                    sys.executable, "-m", "rollcall", "node", "--rank", str(rank),
                    "--num-nodes", str(num_nodes or len(hosts)), *options,
                ],
                env={**ENV, **(env or {})},
            )
            for rank, host in batch
        }  # fmt: skip
        for rank, command in started.items():
            status = command.wait(timeout_s=NODE_S)
            results[rank] = subprocess.CompletedProcess(command.arguments, status, command.output, "")
            assert status == 0, f"{command} ended with {status}:\n{command.output}"
    return results


def publish_stale(rendezvous: Path, *, address: str, token: str, cluster: str = "default") -> None:
    """What a cluster that lost its power leaves in the shared folder: a head that is no more, at that address."""
    head = Head(
        cluster=cluster, cluster_id="0123456789abcdef", address=address, host="node0", dashboard=None,
        started_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    Rendezvous(rendezvous, cluster).publish(head, token=token)


def own_files(host: Host) -> list[Path]:
    """What lies in the host's own folders, from outside: temporary folders and home, without what the lab puts there."""
    kept = {Path(place) for place in host.lab.kept}
    ways = {parent for place in kept for parent in place.parents}
    found: list[Path] = []
    for folder in host.own_folders:
        for here, folders, files in os.walk(host.root / folder.relative_to("/")):
            inside = _inside(host, Path(here))
            folders[:] = [name for name in folders if inside / name not in kept]
            found += [Path(here, name) for name in (*folders, *files) if inside / name not in ways]
    return sorted(found)


def leftovers(hosts: Sequence[Host]) -> dict[str, list[str]]:
    """By host, what a cluster has left there: processes, files in the host's own folders, sockets that listen.

    Not counted: empty folders that later commands look into, and what Ray's dashboard leaves of `multiprocessing` when it
    is told to end (2.60).
    """
    found: dict[str, list[str]] = {}
    for host in hosts:
        left = [f"process {process.pid}: {process.cmdline}" for process in host.processes()]
        left += [str(path) for path in map(partial(_inside, host), own_files(host)) if not _TOLERATED.match(str(path))]
        listening = host.run([sys.executable, "-c", _LISTENING]).stdout.split()
        found[host.name] = left + [f"socket {address}" for address in listening]
    return {name: left for name, left in found.items() if left}


def _inside(host: Host, path: Path) -> Path:
    return Path("/", path.relative_to(host.root))


_TOLERATED = re.compile(r"/tmp/rollcall-0(/[^/]+)?$|/tmp/pymp-")
_LISTENING = """
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").readlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            print(fields[1])
"""
