"""Watches a gang on Ray: a small process on each node watches the node's workers, and a thread of the controller queries it.

The thread queries all nodes at once, every ``LOOK_EVERY_S``, and ``Watch`` decides which workers are lost. The stacks of a suspended
or stuck worker go to stderr under its name. The thread reports every loss and its reason to the gang; then it kills the suspended or
stuck worker.

If the process on a node receives no query for ``ALONE_S``, the node is cut off or the controller is gone. The process then
kills the workers on its node, because no other process can.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from rollcall.base.wait import warn
from rollcall.process.debug.board import BOARD
from rollcall.process.groups.backend import Carrier, Member
from rollcall.process.groups.host import GROUP_MARK, end_group
from rollcall.process.groups.pulse import JOIN_S, LogTail, Reader, Seen
from rollcall.process.groups.reachable import UnreadableError, as_text, read_threads
from rollcall.process.groups.sightings import ANSWER_S, LOOK_EVERY_S, Loss, Watch
from rollcall.process.ray.each_node import pinned
from rollcall.process.ray.members import suspect

ALONE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """A node's reply to a status query."""

    workers: Mapping[int, Seen]  # by rank
    now_s: float  # its monotonic time
    logs: Mapping[int, tuple[str, bytes]]  # each worker's output file, and its new content


class Eyes:
    """Looks at the workers on one node, in a process on that node."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._asked_s: float | None = None
        self._readers: dict[int, Reader] = {}  # by process id; kept after a process exits, for its last calls
        self._tails: dict[int, LogTail] = {}

    def look(self, pids: Mapping[int, int]) -> NodeLook:
        if self._asked_s is None:
            threading.Thread(target=self._end_when_alone, name="waits for questions", daemon=True).start()
        self._asked_s = time.monotonic()
        for pid in set(pids.values()) - self._readers.keys():
            self._readers[pid], self._tails[pid] = Reader(pid), LogTail(pid)
        return NodeLook(
            now_s=time.monotonic(),
            workers={rank: self._readers[pid].look() for rank, pid in pids.items()},
            logs={rank: (self._tails[pid].path, self._tails[pid].read()) for rank, pid in pids.items()},
        )

    def _end_when_alone(self) -> None:
        while self._asked_s is None or time.monotonic() - self._asked_s < ALONE_S:
            time.sleep(1.0)
        end_group(self._mark, timeout_s=10.0)  # for killed workers to exit
        os._exit(1)

    def stacks(self, pid: int) -> str:
        """Return the stacks of all threads of a stuck worker, or why they cannot be read."""
        try:
            return as_text(read_threads(pid, timeout_s=ANSWER_S))
        except UnreadableError as error:
            return f"they cannot be read: {error}"

    def end(self, pid: int) -> None:
        with suppress(ProcessLookupError):  # already exited
            os.kill(pid, signal.SIGKILL)


class Supervisor:
    def __init__(self, mark: str, carrier: Carrier) -> None:
        self._mark = mark
        self._carrier = carrier
        self._watch = Watch()
        self._eyes: dict[str, Any] = {}  # by node
        # The pending query to each node, the time when it was sent, and the processes that it covers, by rank.
        self._asked: dict[str, tuple[Any, float, Mapping[int, int]]] = {}
        self._seats: dict[int, Member] = {}  # by rank
        self._silent_nodes: set[str] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open(self, node_id: str) -> None:
        """Start the process that looks at the workers of this node."""
        with self._lock:
            if node_id not in self._eyes:
                self._eyes[node_id] = (
                    ray.remote(Eyes)
                    .options(
                        **pinned(node_id),
                        max_restarts=-1,  # this process may be killed too when memory runs out; without it, its node counts as lost
                        runtime_env={"env_vars": {GROUP_MARK: self._mark}},
                    )
                    .remote(self._mark)
                )

    def add(self, member: Member) -> None:
        """Watch this worker from now on instead of the previous worker with its rank."""
        self.open(member.spec.node.node_id)
        with self._lock:
            self._watch.forgive(member.spec.rank)
            self._seats[member.spec.rank] = member

    def remove(self, member: Member) -> None:
        """Stop watching a lost worker, and query its node once more for the worker's last calls."""
        with self._lock:
            known = self._seats.pop(member.spec.rank, None)
        if known is not None:
            self._look_last([member])
            self._post(member, stop=None)

    def look(self, *, last: bool) -> set[int]:
        """Return the ranks on nodes that do not answer."""
        if last:
            self._look_last(list(self._seats.values()))
        with self._lock:
            return {rank for rank, one in self._seats.items() if one.spec.node.node_id in self._silent_nodes}

    def _look_last(self, members: Sequence[Member]) -> None:
        """Ask the nodes for the calls that these workers have run so far. Nodes that do not answer are left out."""
        time.sleep(2 * JOIN_S)  # a call that has just ended may be followed by another call of the same method
        with self._lock:
            by_node = _pids_by_node(one for one in members if one.spec.node.node_id not in self._silent_nodes)
        asked_s = time.time()
        calls = {node_id: self._eyes[node_id].look.remote(pids) for node_id, pids in by_node.items()}
        ready = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)[0] if calls else []
        for node_id, call in calls.items():
            if call in ready:
                with suppress(RayError):  # the node may be gone too
                    self._keep(node_id, ray.get(call), asked_s=asked_s)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=2 * LOOK_EVERY_S)
        for member in list(self._seats.values()):
            self._post(member, stop=None)
        for eyes in self._eyes.values():
            ray.kill(eyes)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            with self._lock:
                seats = dict(self._seats)
            try:
                losses = self._look(seats)
                for loss in losses:
                    if loss.still_runs:
                        self._tell_stacks(seats[loss.rank], why=loss.why)
            except RayError as error:
                warn(f"cannot monitor the workers: {error}")
                continue
            for node_id in self._silent_nodes & {seats[loss.rank].spec.node.node_id for loss in losses}:
                suspect(node_id)  # no run is placed on it until it answers again
            with self._lock:  # a worker that was replaced in the meantime is not lost
                current = {
                    seats[loss.rank]: loss.why for loss in losses if self._seats.get(loss.rank) is seats[loss.rank]
                }
                if current and not self._ended.is_set():
                    self._carrier.lose(current)
            for loss in losses:  # kill workers only now: the gang must know the real reason for the loss first
                if loss.still_runs:
                    member = seats[loss.rank]
                    self._eyes[member.spec.node.node_id].end.remote(member.pid)

    def _look(self, seats: Mapping[int, Member]) -> list[Loss]:
        by_node = _pids_by_node(seats.values())
        for node_id, pids in by_node.items():
            if node_id not in self._asked:
                self._asked[node_id] = self._eyes[node_id].look.remote(pids), time.time(), pids
        looks = self._answers(list(by_node))
        gone = {node["NodeID"] for node in ray.nodes() if not node["Alive"]} & set(by_node)
        with self._lock:
            self._silent_nodes = {node_id for node_id in by_node if node_id in gone or looks.get(node_id) is None}
        is_held = BOARD.is_held
        for answer in looks.values():
            for rank, seen in answer.workers.items() if answer is not None else ():
                self._post(seats[rank], stop=seen.stop if seen.is_alive else None)
                is_held = is_held or seen.stop is not None
        return self._watch.judge(
            {node_id: answer and answer.workers for node_id, answer in looks.items()},
            seats={node: list(pids) for node, pids in by_node.items()},
            gone=gone,
            kinds={rank: member.spec.kind for rank, member in seats.items()},
            is_held=is_held,
        )

    def _post(self, member: Member, *, stop: Mapping[str, Any] | None) -> None:
        """Tell the board where this worker has stopped in a debugger. Ray's own debugger does not report where."""
        spec = member.spec
        (rank,) = re.findall(r"\w+ rank (\d+)", spec.title)[:1] or [spec.rank]
        key, node = f"{self._mark} {member.pid}", spec.node.node_rank
        BOARD.post(key, stop or None, role=spec.kind, rank=int(rank), node=node, who=spec.where)

    def _answers(self, nodes: list[str]) -> dict[str, NodeLook | None]:
        """Return the answers that arrive in time; the other queries stay pending until the next round."""
        asked = [self._asked[node_id][0] for node_id in nodes]
        ready: list[Any] = []
        if asked:
            started = time.monotonic()
            ready, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
            # Early answers must not shorten the round of a silent node, because silence is counted in rounds.
            if len(ready) < len(asked):
                self._ended.wait(max(ANSWER_S - (time.monotonic() - started), 0))
        found: dict[str, NodeLook | None] = {}
        for node_id in nodes:
            if self._asked[node_id][0] not in ready:
                continue
            call, asked_s, pids = self._asked.pop(node_id)
            try:
                answer: NodeLook = ray.get(call)
            except RayError:
                found[node_id] = None
                continue
            with self._lock:  # ignore processes that were removed or replaced in the meantime, and their successors
                current = {rank for rank, pid in pids.items() if rank in self._seats and self._seats[rank].pid == pid}
            workers = {rank: seen for rank, seen in answer.workers.items() if rank in current}
            logs = {rank: log for rank, log in answer.logs.items() if rank in current}
            found[node_id] = answer = replace(answer, workers=workers, logs=logs)
            self._keep(node_id, answer, asked_s=asked_s)
        return found

    def _keep(self, node_id: str, answer: NodeLook, *, asked_s: float) -> None:
        lookout = self._carrier.lookout
        lookout.note(node_id, answer.workers, there_s=answer.now_s, asked_s=asked_s, answered_s=time.time())
        for rank, (path, added) in answer.logs.items():
            lookout.note_log(rank, path, added)

    def _tell_stacks(self, member: Member, *, why: str) -> None:
        try:
            stacks = ray.get(self._eyes[member.spec.node.node_id].stacks.remote(member.pid), timeout=10)
        except RayError as error:
            stacks = f"they cannot be read: {error}"
        warn(f"{member.spec.where}: {why}; its thread stacks:\n{stacks}")


def _pids_by_node(members: Iterable[Member]) -> dict[str, dict[int, int]]:
    """Map each node to its process ids by rank."""
    found: dict[str, dict[int, int]] = {}
    for member in members:
        found.setdefault(member.spec.node.node_id, {})[member.spec.rank] = member.pid
    return found
