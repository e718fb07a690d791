"""A node's lifecycle in a cluster: find or start the cluster, start Ray, record its processes, and stop exactly those.

Rank 0 starts the head, then publishes it. Every other rank waits for the published head, asks it for its identity, and joins.
`ray start` runs in its own session and returns; Ray's processes keep running, and `processes.py` finds them again.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rollcall.base.atomic import write_atomic
from rollcall.base.errors import ClusterError
from rollcall.base.wait import say
from rollcall.nodes.address import join_address, listens
from rollcall.nodes.head import CONNECT_S, HeadRefuses, HeadUnreachable, NodeInfo, ask_head, ask_own_head, dashboard_url
from rollcall.nodes.processes import GCS, RAYLET, command_names, find_processes, stop_processes
from rollcall.nodes.ray_start import (
    NodeRequest,
    RayletEnded,
    Start,
    choose_temp_dir,
    find_slots,
    own_temp_dir,
    plan_head,
    plan_worker,
    ray_start,
)
from rollcall.nodes.rendezvous import Found, Head, Rendezvous, look, poll, wait_at
from rollcall.nodes.state import (
    TOKEN,
    NodeRecord,
    check_token,
    forget,
    read_record,
    sole_owner,
    state_dir,
    tls_dir,
    token_path,
    write_record,
)
from rollcall.nodes.tls import write_certificates

TAKEN_S = 15.0  # a head notices a killed node within 5 s; only then is the node's rank free


def require_meeting(request: NodeRequest) -> None:
    if (request.rendezvous is None) == (request.head_address is None):
        raise ClusterError(
            "the nodes need a way to find each other: give --rendezvous DIR (a shared folder) or --head-address HOST:PORT"
        )


def start_node(request: NodeRequest) -> tuple[NodeRecord, bool]:
    """Add this node to the cluster. Return the node's record, and whether the node was already part of the cluster."""
    require_meeting(request)
    slots, accelerator = find_slots(request.slots)
    known = partial(
        NodeRecord,
        cluster=request.cluster,
        rank=request.rank,
        slots=slots,
        accelerator=accelerator,
        temp_dir=str(choose_temp_dir(request)),
        rendezvous=None if request.rendezvous is None else str(request.rendezvous.absolute()),
    )
    if running := _running(request):
        return running, True
    given = os.environ.get(TOKEN, "").strip() or None
    if given is not None:
        check_token(given)
    if request.head_address is not None and given is None:
        raise ClusterError(
            f"--head-address needs a token from the environment: set {TOKEN} to the same long random string on every "
            "node, such as the output of `openssl rand -hex 32`"
        )
    if request.rank == 0 and request.rendezvous is not None:
        Rendezvous(request.rendezvous, request.cluster).prepare()
    found = None if request.rank == 0 else _find(request, token=given)
    with sole_owner(request.cluster):
        if running := _running(request):  # another command has started it, or the head answers again
            return running, True
        _stop(request.cluster)

        def plan() -> Start:
            if found is None:
                _refuse_second_head(request, token=given)
                return plan_head(request, known=known, token=given)
            return plan_worker(request, _wait_for_rank(request, found), known=known)

        try:
            return _launch(request, plan()), False
        except RayletEnded as error:
            say(f"{str(error).splitlines()[-1].strip()}\nRay's raylet ended while Ray was starting; trying once more")
            return _launch(request, plan()), False


def stop_node(cluster: str, *, keep_logs: bool = False) -> int:
    """Stop this cluster's processes on this node and remove its files. Return the number of processes stopped.

    ``keep_logs`` keeps Ray's folder until the next start or stop.
    """
    with sole_owner(cluster):
        record = read_record(cluster)
        count = _stop(cluster)
        if keep_logs:
            return count
        if record is not None:  # in a folder that the user chose, there may be other files
            shutil.rmtree(Path(record.temp_dir, "session_latest").resolve(), ignore_errors=True)
        shutil.rmtree(own_temp_dir(cluster), ignore_errors=True)
        (state_dir(cluster) / "start.log").unlink(missing_ok=True)
        return count


def is_running(record: NodeRecord) -> bool:
    """Return whether the raylet is running on this node and, on rank 0, also the head."""
    needed = {RAYLET, GCS} if record.rank == 0 else {RAYLET}
    return needed <= command_names(record.processes)


def _find(request: NodeRequest, *, token: str | None) -> Found:
    """Wait for the head that this node should join, and refuse options that contradict the head's settings."""
    if request.head_address is not None:
        assert token is not None
        found = wait_at(request.head_address, token=token, tls=request.tls, timeout_s=request.timeout_s)
    else:
        assert request.rendezvous is not None
        rendezvous = Rendezvous(request.rendezvous, request.cluster)
        found = poll(partial(look, rendezvous, token=token), timeout_s=request.timeout_s)
    head = found.answer.head
    assert head is not None
    if head.cluster != request.cluster:
        raise ClusterError(
            f"the head at {found.address} belongs to cluster {head.cluster!r}, not {request.cluster!r}; give --cluster {head.cluster}"
        )
    if request.tls and not found.tls:
        raise ClusterError(
            f"this node uses --tls, but rank 0 at {found.address} was started without it; start rank 0 with --tls first"
        )
    if request.num_nodes not in (None, head.num_nodes):
        raise ClusterError(
            f"--num-nodes is {request.num_nodes}, but rank 0 at {found.address} was started with --num-nodes {head.num_nodes}"
        )
    if head.num_nodes is not None and request.rank >= head.num_nodes:
        raise ClusterError(
            f"rank {request.rank} is too high: this cluster has {head.num_nodes} nodes, and ranks start at 0"
        )
    return found


def _wait_for_rank(request: NodeRequest, found: Found) -> Found:
    """Refuse a rank that belongs to a different node. The head still lists a dead node for some seconds, so wait until the node is no
    longer listed, unless it accepts connections."""
    give_up = time.monotonic() + TAKEN_S
    answer = ask_head(found.address, token=found.token, tls=found.tls)
    while holder := next((node for node in answer.alive if node.rank == request.rank), None):
        port = holder.ports.get("node_manager")
        is_there = port is not None and listens(join_address(holder.address, port), timeout_s=CONNECT_S)
        if is_there or time.monotonic() > give_up:
            raise ClusterError(_taken(holder))
        say(
            f"rank {request.rank} belongs to {holder.host} ({holder.address}); waiting to see whether that node is alive"
        )
        time.sleep(3.0)
        answer = ask_head(found.address, token=found.token, tls=found.tls)
    return replace(found, answer=answer)


def _taken(holder: NodeInfo) -> str:
    return (
        f"rank {holder.rank} is taken by {holder.host} ({holder.address}), which is alive; give this node "
        f"({socket.gethostname()}) another --rank, or run `rollcall down` on {holder.host} first"
    )


def _running(request: NodeRequest) -> NodeRecord | None:
    """Return this node's record if it is part of the cluster now. A record from an earlier start does not count."""
    record = read_record(request.cluster)
    if record is None or not is_running(record):
        return None
    if record.rank != request.rank:
        raise ClusterError(
            f"this node is rank {record.rank} of cluster {request.cluster!r}, not rank {request.rank}; "
            f"run `rollcall down --cluster {request.cluster}` first"
        )
    try:
        answer = ask_own_head(request.cluster, head_address=record.head_address)
        if any((node.rank, node.address) == (record.rank, record.node_ip) for node in answer.alive):
            if answer.cluster_id == record.cluster_id:
                return record
        # This happens after a network cut, for example. Ray on this node exits as soon as it notices the cut.
        why = f"the head at {record.head_address} considers this node dead, or was replaced by a different head"
    except (HeadUnreachable, HeadRefuses) as error:
        why = str(error)
    say(f"this node runs Ray, but {why}; starting Ray again")
    return None


def _launch(request: NodeRequest, start: Start) -> NodeRecord:
    """Start Ray, check that the head lists this node, and write the record. If that fails, stop and remove everything again."""
    deadline = time.monotonic() + 180.0  # for starting Ray on this node, once the head is known
    folder, temp_dir = state_dir(request.cluster), Path(start.record.temp_dir)
    if request.temp_dir is None:
        shutil.rmtree(temp_dir, ignore_errors=True)  # sessions of earlier starts
    temp_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(token_path(request.cluster), start.token, private=True)
    if start.tls:
        write_certificates(tls_dir(request.cluster), token=start.token, addresses=[start.record.node_ip])
    try:
        ray_start(request, start, log=folder / "start.log", deadline=deadline)
        # Ray makes its folders accessible to everyone, and this one contains the sockets of the raylet and the object store.
        (temp_dir / "session_latest").resolve().chmod(0o700)
        record = _joined(start, deadline=deadline)
        write_record(record)
        if request.rank == 0 and request.rendezvous is not None:
            _refuse_second_head(request, token=start.token)  # a second head may have started in the meantime
            _publish(request, start, record, deadline=deadline)
    except BaseException:
        _stop(request.cluster)
        raise
    return record


def _joined(start: Start, *, deadline: float) -> NodeRecord:
    """Wait until the head lists this node under its rank. Raise if a different host has taken the rank in the meantime."""
    record = start.record
    while True:
        answer = ask_head(record.head_address, token=start.token, tls=start.tls, claim=(record.rank, start.mark))
        mine = next((node for node in answer.alive if node.mark == start.mark), None)
        if mine is not None and answer.holder is not None:
            break
        if time.monotonic() > deadline:
            raise ClusterError(f"the head at {record.head_address} does not list rank {record.rank} among its nodes")
        time.sleep(0.5)
    if answer.holder != start.mark:
        raise ClusterError(_taken(next(node for node in answer.alive if node.mark == answer.holder)))
    return replace(
        record,
        dashboard_url=dashboard_url(answer.dashboard, node_ip=record.node_ip, head_address=record.head_address),
        processes=tuple(find_processes(state_dir(record.cluster))),
        ports={**record.ports, **mine.ports},
    )


def _publish(request: NodeRequest, start: Start, record: NodeRecord, *, deadline: float) -> None:
    assert request.rendezvous is not None
    head = Head(
        cluster=record.cluster,
        cluster_id=record.cluster_id,
        address=record.head_address,
        host=socket.gethostname(),
        dashboard=join_address(request.dashboard_host, record.ports["dashboard"]),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tls=start.tls,
    )
    token = start.token if start.publish_token else None
    rendezvous = Rendezvous(request.rendezvous, request.cluster)
    while True:
        rendezvous.publish(head, token=token)
        time.sleep(1.0)  # long enough to see a second head that published itself at the same moment
        seen = rendezvous.read()
        if seen is not None and seen.cluster_id != head.cluster_id:
            raise ClusterError(
                f"rank 0 is taken by {seen.host} ({seen.address}), which published itself in {rendezvous.folder} at the same "
                f"moment; give this node ({head.host}) another --rank, or run `rollcall down` on {seen.host} first"
            )
        if seen is not None and rendezvous.read_token() == token:
            return
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the files that this node writes to {rendezvous.folder} do not appear there, so no other node could find the head; "
                "check that folder, or use --head-address"
            )


def _refuse_second_head(request: NodeRequest, *, token: str | None) -> None:
    """Raise if the published head is alive, that is, if it answers with its own id."""
    if request.rendezvous is None:
        return
    rendezvous = Rendezvous(request.rendezvous, request.cluster)
    for held in {token, None}:
        found = look(rendezvous, token=held)
        if isinstance(found, Found) and found.answer.head is not None:
            raise ClusterError(_taken(found.answer.head))


def _stop(cluster: str) -> int:
    record = read_record(cluster)
    count = stop_processes(state_dir(cluster), recorded=record.processes if record else ())
    if record is not None and record.rank == 0 and record.rendezvous is not None:
        Rendezvous(Path(record.rendezvous), cluster).withdraw(record.cluster_id)
    forget(cluster)
    return count
