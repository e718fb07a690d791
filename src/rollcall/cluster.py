"""Worker groups under the names that users call; each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcall.errors import ClusterError, WorkerDiedError, WorkerError, WorkerTimeoutError
    from rollcall.groups.backend import Seat
    from rollcall.groups.cluster import RayVirtualCluster, VirtualCluster
    from rollcall.groups.group import (
        MultiWorkerFuture,
        RayWorkerBuilder,
        RayWorkerGroup,
        Worker,
        WorkerBuilder,
        WorkerGroup,
    )
    from rollcall.groups.sharding import NamedSharding
    from rollcall.on_ray.connect import init_ray

_HOME = {
    "Seat": "groups.backend",
    "WorkerDiedError": "errors",
    "WorkerError": "errors",
    "WorkerTimeoutError": "errors",
    "NamedSharding": "groups.sharding",
    "ClusterError": "errors",
    "RayVirtualCluster": "groups.cluster",
    "VirtualCluster": "groups.cluster",
    "init_ray": "on_ray.connect",
    "MultiWorkerFuture": "groups.group",
    "RayWorkerBuilder": "groups.group",
    "RayWorkerGroup": "groups.group",
    "Worker": "groups.group",
    "WorkerBuilder": "groups.group",
    "WorkerGroup": "groups.group",
}
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rollcall.{_HOME[name]}"), name)
