"""Asking a head who it is and which nodes it has. Every answer comes from the head itself, never from a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollcall.errors import ClusterError
from rollcall.nodes.address import listens
from rollcall.nodes.state import read_token, tls_dir, tls_env
from rollcall.nodes.tls import write_certificates

LABEL = "rollcall."  # of every label below
CONNECT_S = 3.0
ASK_S = 15.0  # for a head that accepts connections; importing Ray is most of it

GIB = 2**30


class HeadUnreachable(ClusterError):
    """Nobody answers at the head's address, or not in time."""


class HeadRefuses(ClusterError):
    """A head answers and does not accept the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A node as its head knows it."""

    rank: int | None  # None: not started by `rollcall node`
    host: str
    address: str
    slots: int
    accelerator: str
    memory_gib: float  # what Ray may use of it: heap and object store
    alive: bool
    is_head: bool
    cluster: str | None
    cluster_id: str | None
    num_nodes: int | None
    node_id: str  # Ray's
    started_ms: int
    temp_dir: str
    ports: dict[str, int]
    mark: str | None = None  # its own, new with every start

    @classmethod
    def of(cls, row: dict[str, Any]) -> NodeInfo:
        labels, resources = row["labels"], row["resources"]
        rank, num_nodes = labels.get(LABEL + "rank"), labels.get(LABEL + "num-nodes")
        return cls(
            rank=None if rank is None else int(rank),
            host=row["host"],
            address=row["address"],
            slots=round(resources.get("GPU", 0)),
            accelerator=labels.get(LABEL + "accelerator", "gpu"),
            memory_gib=round((resources.get("memory", 0) + resources.get("object_store_memory", 0)) / GIB, 1),
            alive=row["alive"],
            is_head=row["is_head"],
            cluster=labels.get(LABEL + "cluster"),
            cluster_id=labels.get(LABEL + "cluster-id"),
            num_nodes=None if num_nodes is None else int(num_nodes),
            node_id=row["node_id"],
            mark=labels.get(LABEL + "mark"),
            started_ms=row["started_ms"],
            temp_dir=row["temp_dir"],
            ports={name: port for name, port in row["ports"].items() if port > 0},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a head said."""

    nodes: tuple[NodeInfo, ...]  # alive ones and those that died, by rank
    dashboard: str | None  # HOST:PORT, as the head binds it
    holder: str | None = (
        None  # the mark of the node that has the rank which was claimed; None: the claimer is not listed
    )

    @property
    def head(self) -> NodeInfo | None:
        return next((node for node in self.nodes if node.is_head and node.alive), None)

    @property
    def cluster_id(self) -> str | None:
        return self.head.cluster_id if self.head else None

    @property
    def alive(self) -> tuple[NodeInfo, ...]:
        return tuple(node for node in self.nodes if node.alive)


def ask_head(
    address: str, *, token: str, tls: bool = False, timeout_s: float = ASK_S, claim: tuple[int, str] | None = None
) -> Answer:
    """``claim``: a rank, and the mark of the node that is to have it."""
    if not listens(address, timeout_s=min(CONNECT_S, timeout_s)):
        raise HeadUnreachable(f"nobody answers at the head's address {address}")
    script = Path(__file__).parents[1] / "on_ray" / "gcs.py"
    # -P: nothing is imported from the script's own folder.
    command = [sys.executable, "-P", str(script), address, *(map(str, claim) if claim else ())]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ROLLCALL_"))}
    with TemporaryDirectory(prefix="rollcall-ask-") as folder:
        if tls:
            write_certificates(Path(folder), token=token, addresses=())
            env |= tls_env(Path(folder))
        try:
            done = subprocess.run(command, input=token, env=env, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            other = "without" if tls else "with"
            raise HeadUnreachable(
                f"the head at {address} does not answer within {timeout_s:.0f} s; was it started {other} --tls?"
            ) from None
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise HeadUnreachable(f"what listens at {address} does not answer as a Ray head does: {last}")
    found = json.loads(done.stdout)
    if found.get("refused"):
        raise HeadRefuses(
            f"the head at {address} does not accept the token; it belongs to an earlier start of the cluster, or to another user"
        )
    nodes = sorted(map(NodeInfo.of, found["nodes"]), key=lambda node: (node.rank is None, node.rank, node.started_ms))
    return Answer(nodes=tuple(nodes), dashboard=found["dashboard"], holder=found.get("holder"))


def ask_own_head(cluster: str, *, head_address: str, timeout_s: float = ASK_S) -> Answer:
    """With the token that this node keeps for the cluster."""
    try:
        tls = tls_dir(cluster).is_dir()
        return ask_head(head_address, token=read_token(cluster), tls=tls, timeout_s=timeout_s)
    except HeadUnreachable as error:
        raise HeadUnreachable(f"{error}: rank 0 of cluster {cluster!r} is down, or cut off from this node") from None
