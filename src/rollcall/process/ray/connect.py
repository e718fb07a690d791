"""Connects a driver to its cluster (``nodes/cluster.py``), through the raylet of its own node.

``init_ray`` is for scripts: it can also start Ray on this machine, or work without Ray. A connected controller writes the list of
processes that are waiting in a debugger to the head's store, for nodes that do not see the run directory. Anyone who can read the
store can run code on every node anyway. Ray reads environment variables when it is imported, so the functions import it only after
``connect`` has set them.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rollcall.base.errors import ClusterError
from rollcall.base.stop import is_heeding, kept
from rollcall.base.wait import warn
from rollcall.nodes.address import is_loopback, resolve, split_address
from rollcall.nodes.cluster import (
    MODE,
    Cluster,
    OurCluster,
    PlainRay,
    find_cluster,
    is_in_a_job,
    is_same_address,
    say_once,
    wished_cluster,
)
from rollcall.nodes.head import HeadUnreachable
from rollcall.nodes.state import note_driver
from rollcall.process.debug.board import BOARD, Waiting, dump_board, parse_board
from rollcall.process.debug.here import serve
from rollcall.process.groups.cluster import use_by_default
from rollcall.process.ray.loopback import keep_loopback
from rollcall.process.ray.members import RANK_LABEL, forget_members

NAMESPACE = "rollcall-debugger"  # in the head's store
BACKEND = "ROLLCALL_BACKEND"  # with `local`, a script that was written for Ray runs in one process
# A frame such as `/lib/libc.so.6(+0x27744) [0xffffb4ae7744]`, and the lines above the frames.
_LEFT_OUT = re.compile(
    r"\(\S*\+0x[0-9a-f]+\) \[0x[0-9a-f]+\]|\*\*\* StackTrace|\*\*\* SIG\w+ received|@ +0x[0-9a-f]+|has been marked dead because"
)


def init_ray(*, num_gpus: int | None = None, backend: Literal["ray", "local"] | None = None) -> None:
    """Connect to the selected cluster, or start Ray on this node. Virtual clusters are then created on it.

    Inside a job, Ray names the cluster; otherwise ``ROLLCALL_CLUSTER`` or ``RAY_ADDRESS`` does, or the record of ``rollcall node``. An
    existing connection is kept. ``num_gpus`` is the number of (logical) slots if this starts Ray; None means one slot per
    accelerator. ``backend="local"``, or ``ROLLCALL_BACKEND=local``, does not use Ray at all: the workers live in this process.
    """
    name = backend or os.environ.get(BACKEND) or "ray"
    if name not in ("ray", "local"):
        raise ValueError(f"{BACKEND}={name!r} is not a backend; use ray or local")
    if name == "local":
        from rollcall.process.groups.inprocess import InProcessBackend

        use_by_default(InProcessBackend())
        return
    import ray

    from rollcall.process.ray.reserve import RayBackend

    cluster = None if ray.is_initialized() else wished_cluster()
    use_by_default(RayBackend(cluster))
    if cluster is not None:
        connect(cluster)
    elif not ray.is_initialized():
        # Without an explicit address, Ray would join any Ray that runs on this machine.
        ray.init(address="local", num_gpus=num_gpus, include_dashboard=False, logging_level=logging.WARNING)


def connect(cluster: Cluster | None = None, *, ray_address: str | None = None, log_to_driver: bool = True) -> Cluster:
    """Make this process a driver of the cluster. The default is the selected cluster; ``ray_address`` comes from the run file.

    An existing connection is kept if it is to that cluster or if no cluster is named.
    """
    # Ray's handler prints a stack and aborts on SIGTERM; Python's and ours do not.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    import ray

    if ray.is_initialized():
        address = ray.get_runtime_context().gcs_address
        # If no cluster is named, the script has connected itself.
        cluster = cluster or wished_cluster(ray_address=ray_address) or PlainRay(address)
        if not is_same_address(address, cluster.head_address):
            raise ClusterError(
                f"this process is connected to the Ray cluster at {address}, not to {cluster.title} at {cluster.head_address}; "
                "call ray.shutdown() first"
            )
        return cluster
    cluster = cluster or find_cluster(ray_address=ray_address)
    if is_in_a_job() and isinstance(cluster, PlainRay):
        node_ip, temp_dir, is_open = None, None, os.environ.get(MODE, "disabled") == "disabled"
    else:
        # Ask first: Ray itself retries a dead head for minutes, then kills the process.
        answer = cluster.ask(timeout_s=60.0)
        if answer.head is None:
            raise HeadUnreachable(f"the head of {cluster.title} is not up yet, or has just ended; try again")
        own = cluster.own_node(answer)  # if the host has several raylets, use this node's own
        node_ip, temp_dir, is_open = own.address, own.temp_dir, answer.is_open
        _use_environment(cluster.environment(answer))
    if is_open:
        say_once(
            f"note: {cluster.title} has no token, so anyone who reaches its ports can run code on its nodes; to use a token, set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before `ray start` on each node"
        )
    _join(cluster, node_ip=node_ip, temp_dir=temp_dir, log_to_driver=log_to_driver)
    if is_heeding() and isinstance(cluster, OurCluster):
        note_driver(cluster.name)
    return cluster


@contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """Make this process a driver of the cluster while the block runs."""
    connect(cluster, log_to_driver=False)
    try:
        yield
    finally:
        disconnect()


def disconnect() -> None:
    """Close this process's connection, which also stops the actors that it started."""
    import ray

    forget_members()
    ray.shutdown()


def _join(cluster: Cluster, *, node_ip: str | None, temp_dir: str | None, log_to_driver: bool) -> None:
    import ray

    hide_stacks()
    if is_loopback(resolve(node_ip or split_address(cluster.head_address)[0])):
        keep_loopback()
    try:
        with kept():
            ray.init(
                address=cluster.head_address,
                _node_ip_address=node_ip,
                _temp_dir=temp_dir,
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
            )
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(
            f"cannot join {cluster.title} as a driver: its head answers, but Ray on this node ({node_ip}) does not: {error}; run "
            f"`{cluster.leave_command}` on this node, and then start the node again"
        ) from error
    # If this process stops at a breakpoint, terminals on all nodes of the cluster can attach to it.
    own = ray.get_runtime_context().get_node_id()
    labels = next((node["Labels"] for node in ray.nodes() if node["NodeID"] == own), {})
    serve(host=ray.util.get_node_ip_address(), node=int(labels.get(RANK_LABEL, 0)))
    BOARD.publish = _publish


def _use_environment(variables: Mapping[str, str | None]) -> None:
    """Set the variables and make Ray read them again. Otherwise Ray would use the mode and token that it read first, perhaps those of a
    different cluster."""
    raylet: Any = importlib.import_module("ray._raylet")
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def hide_stacks() -> None:
    """Hide Ray's output about raylets in this driver: the run itself names the lost node and reports how it continues.

    A raylet that exits prints a C++ stack of 20 lines, and Ray (2.60) shows it to every driver, as well as a message about the lost node.
    """
    from ray._private import worker

    show = worker.print_worker_logs
    if getattr(show, "__module__", "") == __name__:
        return

    def show_without_stacks(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [line for line in data["lines"] if not _LEFT_OUT.search(line)]}
        show(data, *args, **kwargs)

    worker.print_worker_logs = show_without_stacks


def _publish(waiting: Sequence[Waiting]) -> None:
    """Write this process's entry in the head's store, or remove it if no process is waiting."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

    if not ray.is_initialized():
        return
    key = f"{socket.gethostname()}/{os.getpid()}"
    try:
        if waiting:
            _internal_kv_put(key, dump_board(waiting), overwrite=True, namespace=NAMESPACE)
        else:
            _internal_kv_del(key, namespace=NAMESPACE)
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds of errors for a dead head; the run directory has the list too
        warn(f"`rollcall debug` cannot find this run through its cluster: {error}")


def read_waiting() -> list[Waiting]:
    """Return the processes that are waiting in a debugger, from all runs on this process's cluster."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    found: list[Waiting] = []
    for key in _internal_kv_list("", namespace=NAMESPACE):
        if (text := _internal_kv_get(key, namespace=NAMESPACE)) is not None:
            found += parse_board(text.decode())
    return found
