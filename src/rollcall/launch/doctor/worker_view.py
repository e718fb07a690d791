"""Reports the environment variables that each node's workers see, by running a task on each node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollcall.base.errors import ClusterError
from rollcall.base.redact import REDACTED, hides
from rollcall.base.wait import Wait
from rollcall.config import ClusterSection
from rollcall.nodes.cluster import Cluster
from rollcall.nodes.declared import NODE_OWN, UNDECLARED, Variable, declared, for_ray, seen_here
from rollcall.process.ray.connect import connected
from rollcall.process.ray.each_node import answers_of, run_on
from rollcall.process.ray.members import ranked_nodes

ORDER = (UNDECLARED, "the node's own", "rollcall", "Ray")
ANSWER_S = 90.0  # a node has to start a new process to answer


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenVariable:
    """One variable on one node; secrets are redacted."""

    name: str
    value: str | None  # None if the variable is not set there
    source: str  # where the variable is declared, else one of ORDER
    wanted: str | None  # the declared value if the worker sees a different one, else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    rank: int
    address: str
    variables: tuple[SeenVariable, ...]


def view_workers(cluster: Cluster, section: ClusterSection | None, *, submitted: Mapping[str, str]) -> list[NodeView]:
    """Return a view for every node of the cluster, by rank. If ranks do not answer in time, raise an error that names them."""
    with connected(cluster):
        nodes = {node.rank: node for node in ranked_nodes()}
        wanted = {rank: declared(section, submitted=submitted, node_rank=rank) for rank in nodes}
        calls = {}
        for rank, variables in wanted.items():
            env = for_ray({name: each.value for name, each in variables.items()})
            calls[rank] = run_on(nodes[rank].node_id, seen_here, env=env)
        answers, failures = answers_of(calls, wait=Wait(ANSWER_S), to="report its workers' variables")
    if failures:
        why = "; ".join(f"node {rank}: {reason}" for rank, reason in sorted(failures.items()))
        raise ClusterError(f"{why}; see `rollcall status`")
    return [
        NodeView(rank=rank, address=nodes[rank].address, variables=_compare(variables, answers[rank]))
        for rank, variables in wanted.items()
    ]


def _compare(variables: Mapping[str, Variable], found: Mapping[str, tuple[str, str]]) -> tuple[SeenVariable, ...]:
    """Return the declared variables in their order, then the node's own paths, then all other variables by source."""
    rows = []
    for name, variable in variables.items():
        value, _ = found.get(name, (None, ""))
        wanted = REDACTED if hides(name, variable.value) else variable.value
        wanted = wanted if wanted != value else None
        rows.append(SeenVariable(name=name, value=value, source=variable.source, wanted=wanted))
    others = found.keys() - variables.keys() - set(NODE_OWN)
    for name in (*NODE_OWN, *sorted(others, key=lambda name: (ORDER.index(found[name][1]), name))):
        value, source = found.get(name, (None, "the node's own"))
        rows.append(SeenVariable(name=name, value=value, source=source, wanted=None))
    return tuple(rows)
