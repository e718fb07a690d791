"""Worker groups under the names that users call; each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcall.base.errors import ClusterError, WorkerDiedError, WorkerError, WorkerTimeoutError
    from rollcall.process.groups.backend import Seat
    from rollcall.process.groups.cluster import RayVirtualCluster, VirtualCluster
    from rollcall.process.groups.group import (
        MultiWorkerFuture,
        RayWorkerBuilder,
        RayWorkerGroup,
        Worker,
        WorkerBuilder,
        WorkerGroup,
    )
    from rollcall.process.groups.sharding import NamedSharding
    from rollcall.process.ray.connect import init_ray

_NAMES = {
    "base.errors": ("ClusterError", "WorkerDiedError", "WorkerError", "WorkerTimeoutError"),
    "process.groups.backend": ("Seat",),
    "process.groups.cluster": ("RayVirtualCluster", "VirtualCluster"),
    "process.groups.group": (
        "MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup", "Worker", "WorkerBuilder", "WorkerGroup",
    ),
    "process.groups.sharding": ("NamedSharding",),
    "process.ray.connect": ("init_ray",),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rollcall.{_HOME[name]}"), name)
