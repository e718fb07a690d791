"""What the workers of each node see of their environment: a task on each node tells, pinned there by the node's resource."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollcall.config import ClusterSection
from rollcall.errors import ClusterError
from rollcall.nodes.state import NodeRecord
from rollcall.on_ray.connect import connect
from rollcall.redact import REDACTED, hides
from rollcall.worker_env.declared import NODE_OWN, Variable, declared, for_ray, seen_here
from rollcall.worker_env.node_shell import UNDECLARED

ORDER = (UNDECLARED, "the node's own", "rollcall", "Ray")
ANSWER_S = 90.0  # a node starts a fresh process to answer
NODE_RESOURCE = "rollcall_node_"  # and the rank: every node has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One variable on one node; secrets are redacted."""

    name: str
    value: str | None  # None: not set there
    source: str  # where it is declared; else one of ORDER
    wanted: str | None  # the declared value if the worker sees another one, else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    rank: int
    address: str
    variables: tuple[Seen, ...]


def view_workers(
    record: NodeRecord, section: ClusterSection | None, *, submitted: Mapping[str, str], timeout_s: float = ANSWER_S
) -> list[NodeView]:
    """Every node that is there, by rank. Fails with the ranks that have not answered in time."""
    connect(record.cluster, log_to_driver=False)
    import ray

    try:
        return _view(ray, section, submitted=submitted, timeout_s=timeout_s)
    finally:
        ray.shutdown()


def _view(
    ray: Any, section: ClusterSection | None, *, submitted: Mapping[str, str], timeout_s: float
) -> list[NodeView]:
    addresses = {
        int(resource.removeprefix(NODE_RESOURCE)): node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"]
        for resource in node["Resources"]
        if resource.startswith(NODE_RESOURCE)
    }
    wanted = {rank: declared(section, submitted=submitted, node_rank=rank) for rank in sorted(addresses)}
    look = ray.remote(seen_here)
    answers = {
        rank: look.options(
            num_cpus=0,
            resources={f"{NODE_RESOURCE}{rank}": 0.001},
            runtime_env={"env_vars": for_ray({name: variable.value for name, variable in variables.items()})},
            max_retries=0,
        ).remote()
        for rank, variables in wanted.items()
    }
    _, late = ray.wait(list(answers.values()), num_returns=len(answers), timeout=timeout_s)
    if late:
        missing = ", ".join(str(rank) for rank, answer in answers.items() if answer in late)
        raise ClusterError(f"no answer from node {missing} within {timeout_s:.0f} s; see `rollcall status`")
    return [
        NodeView(rank=rank, address=addresses[rank], variables=_compare(variables, ray.get(answers[rank])))
        for rank, variables in wanted.items()
    ]


def _compare(variables: Mapping[str, Variable], found: Mapping[str, tuple[str, str]]) -> tuple[Seen, ...]:
    """What is declared in its order, then the rest by where it comes from; of the node's own, its paths first."""
    rows = []
    for name, variable in variables.items():
        value, _ = found.get(name, (None, ""))
        wanted = REDACTED if hides(name, variable.value) else variable.value
        rows.append(Seen(name=name, value=value, source=variable.source, wanted=wanted if wanted != value else None))
    for name in NODE_OWN:
        value, source = found.get(name, (None, "the node's own"))
        rows.append(Seen(name=name, value=value, source=source, wanted=None))
    others = {name: seen for name, seen in found.items() if name not in variables and name not in NODE_OWN}
    for name, (value, source) in sorted(others.items(), key=lambda item: (ORDER.index(item[1][1]), item[0])):
        rows.append(Seen(name=name, value=value, source=source, wanted=None))
    return tuple(rows)
