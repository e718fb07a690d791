"""The public names for worker groups. Importing this module imports neither torch nor Ray."""

from rollcall.base.errors import ClusterError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rollcall.process.groups.backend import Seat
from rollcall.process.groups.cluster import RayVirtualCluster, VirtualCluster
from rollcall.process.groups.dispatch import NamedSharding
from rollcall.process.groups.group import (
    MultiWorkerFuture,
    RayWorkerBuilder,
    RayWorkerGroup,
    Worker,
    WorkerBuilder,
    WorkerGroup,
)
from rollcall.process.ray.connect import init_ray
