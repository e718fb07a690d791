"""A driver's connection to the cluster of this node, with the cluster's token and through the node's own raylet.

``init_ray`` is for scripts: it can also start a Ray for this machine alone, or work without Ray.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any, Literal

from rollcall.errors import ClusterError
from rollcall.groups.cluster import use_by_default
from rollcall.nodes.address import is_loopback, split_address
from rollcall.nodes.head import ask_own_head
from rollcall.nodes.state import (
    CLUSTER,
    DEFAULT_CLUSTER,
    NodeRecord,
    auth_env,
    current_cluster,
    note_driver,
    read_record,
    require_record,
)
from rollcall.on_ray.loopback import keep_loopback
from rollcall.stop import is_heeding, kept

IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for the drivers of submitted jobs, together with RAY_ADDRESS


BACKEND = "ROLLCALL_BACKEND"  # `local` runs a script written for Ray in one process


def init_ray(*, num_gpus: int | None = None, backend: Literal["ray", "local"] | None = None) -> None:
    """Connect to the cluster this node belongs to, or start a Ray of this node alone; virtual clusters are then made there.

    Inside a job, Ray says which cluster; else the record of ``rollcall node`` does; a connection that exists is kept.
    ``num_gpus`` is the number of (logical) slots of a Ray that is started here; None counts the accelerators.
    ``backend="local"``, or ``ROLLCALL_BACKEND=local``, uses no Ray at all: the workers live in this process.
    """
    name = backend or os.environ.get(BACKEND) or "ray"
    if name not in ("ray", "local"):
        raise ValueError(f"{BACKEND}={name!r} is not a backend; use ray or local")
    if name == "local":
        from rollcall.groups.inprocess import InProcessBackend

        use_by_default(InProcessBackend())
        return
    import ray

    from rollcall.on_ray.reserve import RayBackend

    use_by_default(RayBackend())
    if ray.is_initialized():
        return
    # A cluster that is named but not here is an error, which connect() words.
    if IN_A_JOB in os.environ or CLUSTER in os.environ or read_record(DEFAULT_CLUSTER) is not None:
        connect()
        return
    # By name: without one, Ray joins whatever else runs on this machine.
    ray.init(address="local", num_gpus=num_gpus, include_dashboard=False, logging_level=logging.WARNING)


def connect(cluster: str | None = None, *, timeout_s: float = 60.0, log_to_driver: bool = True) -> NodeRecord | None:
    """Make this process a driver of the cluster: ``cluster``, else ``$ROLLCALL_CLUSTER``, else the default one.

    Inside a submitted job, the address and token that Ray has set are used, and the result is None. An existing connection
    is kept. A `RAY_ADDRESS` outside a job is not ours and is ignored.
    """
    # Ray's handler prints a stack and aborts on SIGTERM; Python's and ours do not.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    import ray

    if os.environ.get("RAY_ADDRESS") and IN_A_JOB in os.environ:
        if not ray.is_initialized():
            if is_loopback(split_address(os.environ["RAY_ADDRESS"])[0]):
                keep_loopback()
            with kept():
                ray.init(log_to_driver=log_to_driver, logging_level=logging.WARNING)
        return None
    record = require_record(current_cluster(cluster))
    if ray.is_initialized():
        _same_cluster(record)
        return record
    # Asked first: Ray itself retries a dead head for minutes, then ends the process.
    answer = ask_own_head(record.cluster, head_address=record.head_address, timeout_s=timeout_s)
    if answer.cluster_id != record.cluster_id:
        raise ClusterError(
            f"the head at {record.head_address} was started again since this node joined; run `rollcall node` here again"
        )
    _use_token(record.cluster)
    if is_loopback(record.node_ip):
        keep_loopback()
    try:
        with kept():
            ray.init(
                address=record.head_address,
                _node_ip_address=record.node_ip,
                _temp_dir=record.temp_dir,  # of several raylets on one host, this node's own
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
            )
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(
            f"cannot join cluster {record.cluster!r} as a driver: its head at {record.head_address} answers, but Ray on this "
            f"node ({record.node_ip}, rank {record.rank}) does not: {error}; run `rollcall node` here again"
        ) from error
    if is_heeding():
        note_driver(record.cluster)
    return record


def disconnect() -> None:
    """End this process's connection, and with it the actors that it started."""
    import ray

    ray.shutdown()


def _use_token(cluster: str) -> None:
    """Ray reads mode and token once per process; one that spoke with another cluster must read them again."""
    raylet: Any = importlib.import_module("ray._raylet")
    os.environ.pop("RAY_AUTH_TOKEN", None)  # would win over the file
    os.environ.update(auth_env(cluster))
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _same_cluster(record: NodeRecord) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    if address != record.head_address:
        raise ClusterError(
            f"this process is connected to the Ray at {address}, not to cluster {record.cluster!r} at {record.head_address}; "
            "call ray.shutdown() first"
        )
