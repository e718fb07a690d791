"""The only place that knows Ray. What users call is named here and imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcall.groups.backend import Seat
    from rollcall.groups.cluster import RayVirtualCluster, VirtualCluster, init_ray
    from rollcall.groups.failures import WorkerDiedError, WorkerError, WorkerTimeoutError
    from rollcall.groups.group import (
        MultiWorkerFuture,
        RayWorkerBuilder,
        RayWorkerGroup,
        Worker,
        WorkerBuilder,
        WorkerGroup,
    )
    from rollcall.groups.sharding import NamedSharding
    from rollcall.nodes.state import ClusterError

_HOME = {
    "Seat": "backend",
    "WorkerDiedError": "failures",
    "WorkerError": "failures",
    "WorkerTimeoutError": "failures",
    "NamedSharding": "sharding",
    "ClusterError": "state",
    "RayVirtualCluster": "virtual",
    "VirtualCluster": "virtual",
    "init_ray": "virtual",
    "MultiWorkerFuture": "workers",
    "RayWorkerBuilder": "workers",
    "RayWorkerGroup": "workers",
    "Worker": "workers",
    "WorkerBuilder": "workers",
    "WorkerGroup": "workers",
}

__all__ = [
    "ClusterError",
    "MultiWorkerFuture",
    "NamedSharding",
    "RayVirtualCluster",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "Seat",
    "VirtualCluster",
    "Worker",
    "WorkerBuilder",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "WorkerTimeoutError",
    "init_ray",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
