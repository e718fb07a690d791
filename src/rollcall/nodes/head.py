"""Asks a head for its identity and its nodes. All information comes from the head itself, never from a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollcall.base.errors import ClusterError
from rollcall.base.redact import redact_end
from rollcall.base.words import visible
from rollcall.nodes.address import is_loopback, is_wildcard, join_address, listens, split_address
from rollcall.nodes.state import read_token, tls_dir, tls_env
from rollcall.nodes.tls import write_certificates

LABEL = "rollcall."  # prefix of every label below
CONNECT_S = 3.0
ASK_S = 15.0  # for a query to a head that accepts connections; importing Ray takes most of this time


class HeadUnreachable(ClusterError):
    """The head's address did not answer in time."""


class HeadRefuses(ClusterError):
    """A head answered but did not accept the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A node as its head describes it."""

    rank: int | None  # `None` if `rollcall node` did not start it
    host: str
    address: str
    slots: int
    accelerator: str
    memory_gib: float  # for Ray's heap and its object store
    alive: bool
    is_head: bool
    cluster: str | None
    cluster_id: str | None
    num_nodes: int | None
    node_id: str  # Ray's id
    started_ms: int
    temp_dir: str
    ports: dict[str, int]
    mark: str | None = None  # identifies one start of the node
    ended_ms: int = 0  # when its head declared it dead

    @classmethod
    def of(cls, row: dict[str, Any]) -> NodeInfo:
        labels, resources = row["labels"], row["resources"]
        rank, num_nodes = labels.get(LABEL + "rank"), labels.get(LABEL + "num-nodes")
        return cls(
            rank=None if rank is None else int(rank),
            host=visible(row["host"]),
            address=visible(row["address"]),
            slots=round(resources.get("GPU", 0)),
            accelerator=labels.get(LABEL + "accelerator", "gpu"),
            memory_gib=round((resources.get("memory", 0) + resources.get("object_store_memory", 0)) / 2**30, 1),
            alive=row["alive"],
            is_head=row["is_head"],
            cluster=labels.get(LABEL + "cluster"),
            cluster_id=labels.get(LABEL + "cluster-id"),
            num_nodes=None if num_nodes is None else int(num_nodes),
            node_id=row["node_id"],
            mark=labels.get(LABEL + "mark"),
            started_ms=row["started_ms"],
            ended_ms=row["ended_ms"],
            temp_dir=row["temp_dir"],
            ports={name: port for name, port in row["ports"].items() if port > 0},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    """What a head reports about its cluster."""

    nodes: tuple[NodeInfo, ...]  # living and dead nodes, by rank
    dashboard: str | None  # HOST:PORT, as the head binds it
    is_open: bool = False  # whether it answers callers without a token
    versions: Mapping[str, str] = field(default_factory=dict)  # the head's Ray and Python
    holder: str | None = None  # mark of the node with the claimed rank; `None` if the claimer is not listed

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
    address: str,
    *,
    token: str | None,
    tls: bool = False,
    timeout_s: float = ASK_S,
    claim: tuple[int, str] | None = None,
) -> HeadAnswer:
    """Ask a head for its nodes. ``claim`` contains a rank and the mark of the node that claims it.

    Without ``token``, the first request is sent without a token; if the head refuses it, a second request uses the token from Ray's
    variables.
    """
    if not listens(address, timeout_s=min(CONNECT_S, timeout_s)):
        raise HeadUnreachable(f"no answer at the head's address {address}")
    script = Path(__file__).parents[1] / "process" / "ray" / "gcs.py"
    # -P: do not import anything from the script's own folder.
    command = [sys.executable, "-P", str(script), address, *(map(str, claim) if claim else ())]
    kept = () if token else ("RAY_AUTH_", "RAY_USE_TLS", "RAY_TLS_")
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "ROLLCALL_")) or name.startswith(kept)
    }
    with TemporaryDirectory(prefix="rollcall-ask-") as folder:
        if tls and token:
            write_certificates(Path(folder), token=token, addresses=())
            env |= tls_env(Path(folder))
        try:
            done = subprocess.run(
                command, input=token or "", env=env, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise HeadUnreachable(
                f"the head at {address} did not answer within {timeout_s:.0f} s; check that this is the port of Ray's head (usually "
                "6379), and that either both sides use TLS or neither does"
            ) from None
    if done.returncode:
        last = visible(redact_end(done.stderr.strip(), 10_000) or "no message").splitlines()[-1]
        raise HeadUnreachable(
            f"the program at {address} does not answer like a Ray head ({last}); check that this is the head's address, as "
            "`ray start --head` or `rollcall node` printed it"
        )
    found = json.loads(done.stdout)
    if found.get("refused"):
        raise HeadRefuses(_refusal(address, ours=token is not None, tried=found["refused"]))
    try:
        nodes = sorted(
            map(NodeInfo.of, found["nodes"]), key=lambda node: (node.rank is None, node.rank, node.started_ms)
        )
    except ValueError as error:  # one of Rollcall's labels on a node has an invalid value
        raise HeadUnreachable(
            f"the nodes of the Ray cluster at {address} have `rollcall.` labels that Rollcall did not set: {error}"
        ) from None
    return HeadAnswer(
        nodes=tuple(nodes),
        dashboard=found["dashboard"],
        is_open=found["open"],
        versions={what: visible(str(version)) for what, version in found["versions"].items()},
        holder=found.get("holder"),
    )


def _refusal(address: str, *, ours: bool, tried: str) -> str:
    if ours:
        return f"the head at {address} does not accept the token; it belongs to an earlier start of the cluster, or to another user"
    if tried == "none":
        return (
            f"the Ray cluster at {address} requires a token, but this shell has none: set RAY_AUTH_TOKEN to the token, or "
            "RAY_AUTH_TOKEN_PATH to a file that contains it"
        )
    return f"the Ray cluster at {address} does not accept the token of this shell ({tried}); ask the person who started it for its token"


def dashboard_url(bound: str | None, *, node_ip: str | None, head_address: str) -> str | None:
    """Return the dashboard URL for a node with this address, or `None` if the node cannot reach it."""
    if not bound:
        return None
    host, port = split_address(bound)
    head_ip = split_address(head_address)[0]
    if is_loopback(host):
        return f"http://{join_address(host, port)}" if node_ip == head_ip else None
    return f"http://{join_address(head_ip if is_wildcard(host) else host, port)}"


def ask_own_head(cluster: str, *, head_address: str, timeout_s: float = ASK_S) -> HeadAnswer:
    """Ask the head with the token that this node stores for the cluster."""
    try:
        return ask_head(head_address, tls=tls_dir(cluster).is_dir(), token=read_token(cluster), timeout_s=timeout_s)
    except HeadUnreachable as error:
        raise HeadUnreachable(f"{error}: rank 0 of cluster {cluster!r} is down, or cut off from this node") from None
