"""Runs `ray start`: builds its arguments and environment, and reports its output when it fails.

`ray start` runs in its own session and returns; Ray's processes keep running.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rollcall.base.errors import ClusterError
from rollcall.base.wait import Wait, say
from rollcall.base.words import size
from rollcall.nodes.address import (
    free_ports,
    is_free,
    is_loopback,
    is_own,
    is_wildcard,
    join_address,
    own_address,
    resolve,
    split_address,
)
from rollcall.nodes.declared import hint, missed, nodes_own
from rollcall.nodes.head import LABEL
from rollcall.nodes.processes import MARK, RAYLET, command_names, find_processes
from rollcall.nodes.rendezvous import Found
from rollcall.nodes.state import TOKEN, Accelerator, NodeRecord, auth_env, state_dir, tls_env

COUNT_S = 120.0  # for counting the GPUs; importing Ray on a busy node takes most of this time
LEAST_BYTES = 64_000_000  # of free disk space
# The maximum length of the path of Ray's folder, in bytes: a Unix socket path has at most 107 bytes, and Ray appends this text to the
# folder. Linux process ids have at most as many digits as the one in this text.
SOCKET_ROOM = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1")
# Lines in Ray's logs that contain the reason why a node did not start.
ERROR = re.compile(r"^\[[-0-9:, ]+ [CEF] \d|Check failed|Timed out waiting for file|GCS cannot find the node")
TUNED = {
    # The server of the dashboard's own metrics would listen on every interface. Without a valid port, it does not start (2.60 logs that).
    "DASHBOARD_METRIC_PORT": "-1",
    # A dead node is noticed within 3 to 5 s instead of 12 s (killed) or 63 s (power loss). A network cut of 1.5 s has no effect.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_register_timeout_seconds": "300",  # importing torch from a busy shared folder may take longer than Ray's 60 s
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "false",  # Ray would serve metrics to anyone, on every interface of every node
}
CHOSEN_PORTS = (
    *("node-manager", "object-manager", "runtime-env-agent", "metrics-export"),
    *("dashboard-agent-listen", "dashboard-agent-grpc", "min-worker", "max-worker"),
)
# These would make Ray use a different cluster, or contain the token itself instead of its file name.
UNWANTED = (
    *("RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_GCS_SERVER_PORT", "RAY_AUTH_TOKEN", "RAY_TMPDIR"),
    *(TOKEN, *tls_env(Path())),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """The options of `rollcall node`."""

    cluster: str
    rank: int
    num_nodes: int | None  # default: the head's
    rendezvous: Path | None = None
    head_address: str | None = None  # HOST:PORT
    node_ip: str | None = None
    interface: str | None = None
    slots: int | None = None  # default: the number of GPUs found
    temp_dir: Path | None = None  # default: in the cluster's folder
    dashboard_host: str = "127.0.0.1"
    object_store_gib: float | None = None  # default: Ray's choice, a third of the memory
    tls: bool = False  # encrypt Ray's traffic; default: as the published head does
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The input of one `ray start`: this node's record, as far as it is known before Ray starts, and the secrets."""

    record: NodeRecord
    token: str
    publish_token: bool
    tls: bool
    mark: str = field(default_factory=lambda: secrets.token_hex(8))  # identifies this start in the head's list


class RayletEnded(ClusterError):
    """Ray's raylet exited. It does so if its helpers do not start in time, for example on a busy machine or a slow disk."""


def find_slots(asked: int | None) -> tuple[int, Accelerator]:
    """Return the number of slots that this node offers, and their kind."""
    num_gpus = _count_gpus()
    if asked is None:
        if num_gpus == 0:
            raise ClusterError("no GPU was found on this node; to use logical slots on the CPU, give --slots N")
        return num_gpus, "gpu"
    if num_gpus and asked > num_gpus:
        raise ClusterError(
            f"--slots is {asked}, but this node has {num_gpus} GPUs; give at most {num_gpus}, or hide the GPUs to get logical slots "
            'on the CPU (CUDA_VISIBLE_DEVICES="")'
        )
    return asked, "gpu" if num_gpus else "cpu"


def own_temp_dir(cluster: str) -> Path:
    """Return Ray's folder: in the cluster's folder, or next to it if that path is too long for sockets. No cluster can have the
    same folder, because cluster names contain no dots."""
    folder = state_dir(cluster)
    short = folder.parent / f".ray-{hashlib.sha256(cluster.encode()).hexdigest()[:8]}"
    return folder / "ray" if len(os.fsencode(folder / "ray")) <= SOCKET_ROOM else short


def choose_temp_dir(request: NodeRequest) -> Path:
    folder = (request.temp_dir or own_temp_dir(request.cluster)).absolute()
    if len(os.fsencode(folder)) > SOCKET_ROOM:
        raise ClusterError(
            f"{folder} has {len(os.fsencode(folder))} characters, but the limit is {SOCKET_ROOM}, because Ray puts sockets in it; "
            "give a shorter --temp-dir"
        )
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if (free := shutil.disk_usage(there).free) < LEAST_BYTES:
        # Ray would exit without a message, because a full disk leaves no space for one.
        raise ClusterError(
            f"the disk of {folder} has {size(free)} of free space, but Ray needs at least {size(LEAST_BYTES)} for its logs "
            "and sockets; free some space, or give a --temp-dir on another disk"
        )
    return folder


def plan_head(request: NodeRequest, *, known: partial[NodeRecord], token: str | None) -> Start:
    """Prepare the start of the head. ``known`` is this node's record without the fields that depend on its place in the cluster."""
    assert request.num_nodes is not None
    host, port = split_address(request.head_address) if request.head_address else (None, None)
    node_ip = _head_ip(host, request)
    if port is not None and not is_free(port):
        raise ClusterError(
            f"port {port} of --head-address {request.head_address} is in use on this node; choose another"
        )
    gcs, client, dashboard = free_ports(3)
    ports = {"gcs": port or gcs, "client": client, "dashboard": dashboard}
    record = known(
        cluster_id=secrets.token_hex(8),
        num_nodes=request.num_nodes,
        node_ip=node_ip,
        head_address=join_address(node_ip, ports["gcs"]),
        ports=ports,
    )
    return Start(record=record, token=token or secrets.token_hex(32), publish_token=token is None, tls=request.tls)


def plan_worker(request: NodeRequest, found: Found, *, known: partial[NodeRecord]) -> Start:
    head = found.answer.head
    assert head is not None and head.cluster_id is not None
    host, port = split_address(found.address)
    record = known(
        cluster_id=head.cluster_id,
        num_nodes=head.num_nodes or request.num_nodes or 0,
        head_address=join_address(resolve(host), port),
        node_ip=own_address(toward=host, node_ip=request.node_ip, interface=request.interface),
    )
    return Start(record=record, token=found.token, publish_token=False, tls=found.tls)


def ray_start(request: NodeRequest, start: Start, *, log: Path, deadline: float) -> None:
    record = start.record
    labels = {
        "rank": record.rank,
        "cluster": record.cluster,
        "cluster-id": record.cluster_id,
        "num-nodes": record.num_nodes,
        "accelerator": record.accelerator,
        "mark": start.mark,
    }
    place = [f"--address={record.head_address}"]
    if record.rank == 0:
        place = [
            "--head",
            f"--port={record.ports['gcs']}",
            f"--ray-client-server-port={record.ports['client']}",
            "--include-dashboard=true",
            f"--dashboard-host={request.dashboard_host}",
            f"--dashboard-port={record.ports['dashboard']}",
            "--disable-usage-stats",
            "--no-monitor",  # the monitor would start nodes, which this cluster does not need, and listen on every interface
        ]
    launcher = "rollcall.process.ray.loopback" if is_loopback(record.node_ip) else "ray.scripts.scripts"
    cores = len(os.sched_getaffinity(0))
    command = [
        *(sys.executable, "-m", launcher, "start", *place),
        f"--node-ip-address={record.node_ip}",
        f"--num-gpus={record.slots}",
        # There may be more logical slots than cores, and Ray counts one CPU for each worker on a logical slot.
        f"--num-cpus={max(cores, record.slots) if record.accelerator == 'cpu' else cores}",
        f"--temp-dir={record.temp_dir}",
        "--labels=" + ",".join(f"{LABEL}{name}={value}" for name, value in labels.items()),
        # A user's process can request this resource to run on this node.
        f"--resources={json.dumps({f'rollcall_node_{record.rank}': 1000})}",
        # 0: the kernel chooses the port when Ray binds it, so no other program can take it first; _joined() reads the port.
        *(f"--{name}-port=0" for name in CHOSEN_PORTS),
    ]
    if request.object_store_gib is not None:
        command.append(f"--object-store-memory={int(request.object_store_gib * 2**30)}")
    kept = {name: value for name, value in nodes_own(os.environ).items() if name not in UNWANTED}
    if names := missed(os.environ):
        say(hint(names))
    # Job drivers use this interpreter, because a shell on this node may find a different one first.
    ours = {**auth_env(record.cluster), MARK: str(state_dir(record.cluster)), "ROLLCALL_PYTHON": sys.executable}
    if record.accelerator == "cpu":
        kept |= _logical_ids(record.slots)
    env = {**TUNED, **kept, **ours}
    wait, has_raylet = Wait(deadline - time.monotonic(), first_s=5, every_s=5), False
    with log.open("w") as output:
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    while child.poll() is None:
        # `ray start` itself would keep waiting for a dead raylet until its timeout.
        had_raylet, has_raylet = has_raylet, RAYLET in command_names(find_processes(state_dir(record.cluster)))
        if had_raylet and not has_raylet and child.poll() is None:
            raise RayletEnded(f"Ray's raylet on {record.node_ip} ended while Ray was starting; {_logs(record, log)}")
        if not wait.again(f"starting Ray on {record.node_ip}", after_s=0.3):
            raise ClusterError(f"`ray start` has not finished after {wait.waited_s:.0f} s; {_logs(record, log)}")
    if child.returncode:
        raise ClusterError(f"Ray did not start on {record.node_ip}; {_logs(record, log)}")


def _head_ip(host: str | None, request: NodeRequest) -> str:
    """Return the address where the head listens: the host in --head-address, which must be this node."""
    chosen = own_address(toward=None, node_ip=request.node_ip, interface=request.interface)
    if host is None or request.node_ip is not None or request.interface is not None or is_wildcard(host):
        return chosen
    address = resolve(host)
    if not is_own(address):
        raise ClusterError(
            f"--head-address {request.head_address} is {address}, which is not an address of this node, but rank 0 must "
            "run at that address; if other nodes reach this node through it, give --node-ip"
        )
    # Many systems map their own host name to a loopback address, which no other node can reach.
    return chosen if is_loopback(address) and host != address else address


def _logical_ids(count: int) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with ``count`` ids, which Ray counts as logical GPUs, if the user has set it. No GPU has these ids, so
    the GPUs that the user hides with this variable stay hidden."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(1000 + index) for index in range(count))}


def _count_gpus() -> int:
    """Count GPUs as Ray does, in a child process: importing Ray here would leave its threads in a long-lived process."""
    command = [sys.executable, "-m", "rollcall.process.ray.count_gpus"]
    try:
        found = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=COUNT_S
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"counting the GPUs of this node took longer than {COUNT_S:g} s; check whether `nvidia-smi` responds here"
        ) from None
    except subprocess.CalledProcessError as error:
        raise ClusterError(
            f"the GPUs of this node cannot be counted: {error.stderr.strip()}; reinstall Ray on this node"
        ) from None
    return int(found.stdout.split()[-1])


def _logs(record: NodeRecord, log: Path) -> str:
    """Return the paths of Ray's output and logs, with their errors and the end of the output."""
    folder = Path(record.temp_dir, "session_latest").resolve() / "logs"
    errors: list[str] = []
    for file in (log, folder / "raylet.out", folder / "raylet.err", folder / "gcs_server.out"):
        with suppress(FileNotFoundError):
            errors += [line for line in _lines(file) if ERROR.search(line)][-3:]
    shown = "\n".join(f"  {line}" for line in dict.fromkeys([*errors, *_lines(log)[-12:]]))
    return (
        f"its output is in {log}, and its logs are in {folder}. On a busy machine, the same command may succeed the second time. The "
        f"last errors and lines are:\n{shown}"
    )


def _lines(file: Path) -> list[str]:
    """Return the last lines of a log, without colours."""
    with file.open("rb") as opened:
        opened.seek(max(file.stat().st_size - 100_000, 0))
        text = opened.read().decode(errors="replace")
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines()
