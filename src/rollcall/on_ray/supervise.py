"""The watch over a crew on Ray: a small process on each node looks at the workers there, and a thread here asks it.

The thread asks all nodes at once, every ``LOOK_EVERY_S``, and lets ``Watch`` judge. The stacks of a stopped or stuck worker
go to stderr under its name. The thread tells ``on_loss`` every loss, with the reason by rank; then it kills the stopped or
stuck worker.

If the process on a node is asked nothing for ``ALONE_S``, the node is cut off or the controller is gone. The process then
ends the workers there, because no one else can.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from rollcall.debug.board import BOARD, DebugSeat
from rollcall.groups.backend import WorkerSpec
from rollcall.groups.host import GROUP_MARK, end_group
from rollcall.groups.logs import LogTail
from rollcall.groups.pulse import JOIN_S, Reader, Seen
from rollcall.groups.reachable import UnreadableError, as_text, read_threads
from rollcall.groups.sightings import Lookout, Sightings
from rollcall.groups.watch import ANSWER_S, LOOK_EVERY_S, Loss, Watch
from rollcall.on_ray.each_node import pinned
from rollcall.on_ray.members import suspect
from rollcall.wait import warn

STACKS_S = 10.0
ALONE_S = 60.0
ENDED_S = 10.0  # for killed workers to be gone


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """What a node answers at a look."""

    workers: Mapping[int, Seen]  # by rank
    now_s: float  # its monotonic time
    logs: Mapping[int, tuple[str, bytes]]  # where each worker prints to, and what is new there


class Eyes:
    """On each node: looks at the workers there."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._asked_s: float | None = None
        self._readers: dict[int, Reader] = {}  # by process; of one that has ended too, for its last calls
        self._tails: dict[int, LogTail] = {}

    def look(self, pids: Mapping[int, int]) -> NodeLook:
        if self._asked_s is None:
            threading.Thread(target=self._end_when_alone, name="waits for questions", daemon=True).start()
        self._asked_s = time.monotonic()
        for pid in set(pids.values()) - self._readers.keys():
            self._readers[pid], self._tails[pid] = Reader(pid), LogTail(pid)
        return self._answer(pids)

    def look_once(self, pids: Mapping[int, int]) -> NodeLook:
        """The last look at these workers, which may be lost."""
        return self._answer({rank: pid for rank, pid in pids.items() if pid in self._readers})

    def _answer(self, pids: Mapping[int, int]) -> NodeLook:
        now_s = time.monotonic()
        return NodeLook(
            workers={rank: self._readers[pid].look() for rank, pid in pids.items()},
            now_s=now_s,
            logs={rank: (self._tails[pid].path, self._tails[pid].read()) for rank, pid in pids.items()},
        )

    def _end_when_alone(self) -> None:
        while self._asked_s is None or time.monotonic() - self._asked_s < ALONE_S:
            time.sleep(1.0)
        end_group(self._mark, timeout_s=ENDED_S)
        os._exit(1)

    def stacks(self, pid: int) -> str:
        """The stacks of all threads of a stuck worker, or why they cannot be read."""
        try:
            return as_text(read_threads(pid, timeout_s=ANSWER_S))
        except UnreadableError as error:
            return f"they cannot be read: {error}"

    def end(self, pid: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)


class Supervisor:
    def __init__(self, mark: str, *, on_loss: Callable[[Mapping[int, str]], None]) -> None:
        self._mark = mark
        self._on_loss = on_loss
        self._watch = Watch()
        self._lookout = Lookout()
        self._eyes: dict[str, Any] = {}  # by node
        self._asked: dict[str, tuple[Any, float]] = {}  # the open question to each node, and when it was asked
        self._seats: dict[int, tuple[WorkerSpec, int]] = {}  # worker and process id, by rank
        self._silent_nodes: set[str] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, nodes: Collection[str]) -> None:
        for node_id in sorted(nodes):
            self._open(node_id)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def add(self, spec: WorkerSpec, *, pid: int) -> None:
        """Watch this worker from now on, in place of the one that had its rank."""
        with self._lock:
            if spec.node.node_id not in self._eyes:
                self._open(spec.node.node_id)
            self._watch.forgive(spec.rank)
            self._seats[spec.rank] = (spec, pid)
        self._lookout.regain(spec.rank, f"process {pid} on node {spec.node.node_rank}")

    def remove(self, rank: int) -> None:
        """The worker of this rank is known to be lost. Its node is asked once more what it did."""
        with self._lock:
            seat = self._seats.pop(rank, None)
        if seat is not None:
            self._look_last({rank: seat})
            self._post(*seat, stop=None)

    @property
    def answering(self) -> set[int]:
        """Ranks on nodes that answered the last look."""
        with self._lock:
            return {rank for rank, (spec, _) in self._seats.items() if spec.node.node_id not in self._silent_nodes}

    def lose(self, losses: Mapping[int, str]) -> None:
        """For those who ask what the workers do."""
        for rank, why in losses.items():
            self._lookout.lose(rank, why)

    def sightings(self, pids: Sequence[int], *, last: bool) -> Sightings:
        if last:
            with self._lock:
                seats = dict(self._seats)
            self._look_last(seats)
        with self._lock:
            silent = {rank for rank, (spec, _) in self._seats.items() if spec.node.node_id in self._silent_nodes}
        return self._lookout.take(pids, silent=silent)

    def _look_last(self, seats: Mapping[int, tuple[WorkerSpec, int]]) -> None:
        """Ask the nodes of these workers, if they answer, what those did until now."""
        time.sleep(2 * JOIN_S)  # a call that has just ended may be followed by one like it
        by_node: dict[str, dict[int, int]] = {}
        with self._lock:
            for rank, (spec, pid) in seats.items():
                if spec.node.node_id not in self._silent_nodes:
                    by_node.setdefault(spec.node.node_id, {})[rank] = pid
        asked_s = time.time()
        calls = {node_id: self._eyes[node_id].look_once.remote(pids) for node_id, pids in by_node.items()}
        ready = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)[0] if calls else []
        for node_id, call in calls.items():
            if call in ready:
                with suppress(RayError):  # the node may be gone with them
                    self._keep(node_id, ray.get(call), ranks=set(by_node[node_id]), asked_s=asked_s)

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * LOOK_EVERY_S)
        for spec, pid in list(self._seats.values()):
            self._post(spec, pid, stop=None)
        for eyes in self._eyes.values():
            ray.kill(eyes)

    def _open(self, node_id: str) -> None:
        self._eyes[node_id] = (
            ray.remote(Eyes)
            .options(
                **pinned(node_id),
                max_restarts=-1,  # it may be killed for memory as well; a node is lost when nothing answers there
                runtime_env={"env_vars": {GROUP_MARK: self._mark}},
            )
            .remote(self._mark)
        )

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            with self._lock:
                seats = dict(self._seats)
            try:
                losses = self._look(seats)
                for loss in losses:
                    if loss.still_runs:
                        self._tell_stacks(*seats[loss.rank], why=loss.why)
            except RayError as error:
                warn(f"the workers cannot be watched: {error}")
                continue
            self._suspect({seats[loss.rank][0].node.node_id for loss in losses})
            with self._lock:  # one that is being replaced meanwhile is not lost
                current = {loss.rank: loss.why for loss in losses if self._seats.get(loss.rank) is seats[loss.rank]}
                if current and not self._ended.is_set():
                    self._on_loss(current)
            for loss in losses:  # not before its loss is known by its true reason
                if loss.still_runs:
                    spec, pid = seats[loss.rank]
                    self._eyes[spec.node.node_id].end.remote(pid)

    def _suspect(self, nodes: Collection[str]) -> None:
        """Of the nodes with losses, those that do not answer are left out of the plan."""
        with self._lock:
            silent = self._silent_nodes.intersection(nodes)
        for node_id in silent:
            suspect(node_id)

    def _look(self, seats: Mapping[int, tuple[WorkerSpec, int]]) -> list[Loss]:
        by_node: dict[str, dict[int, int]] = {}
        for rank, (spec, pid) in seats.items():
            by_node.setdefault(spec.node.node_id, {})[rank] = pid
        for node_id, pids in by_node.items():
            if node_id not in self._asked:
                self._asked[node_id] = self._eyes[node_id].look.remote(pids), time.time()
        looks = self._answers(list(by_node))
        gone = {node["NodeID"] for node in ray.nodes() if not node["Alive"]} & set(by_node)
        with self._lock:
            self._silent_nodes = {node_id for node_id in by_node if node_id in gone or looks.get(node_id) is None}
        specs = {rank: spec for rank, (spec, _) in seats.items()}
        workers = {
            rank: seen
            for answer in looks.values()
            if answer is not None
            for rank, seen in answer.workers.items()
            if rank in specs
        }
        for rank, seen in workers.items():
            self._post(*seats[rank], stop=seen.stop if seen.is_alive else None)
        is_held = BOARD.is_held or any(seen.stop is not None for seen in workers.values())
        return self._watch.judge(
            {node_id: answer and answer.workers for node_id, answer in looks.items()},
            seats={node: list(pids) for node, pids in by_node.items()},
            gone=gone,
            kinds={rank: spec.kind for rank, spec in specs.items()},
            is_held=is_held,
        )

    def _post(self, spec: WorkerSpec, pid: int, *, stop: Mapping[str, Any] | None) -> None:
        """Tell the board where a debugger holds this worker. Ray's own debugger does not say where."""
        (rank,) = re.findall(r"\w+ rank (\d+)", spec.title)[:1] or [spec.rank]
        seat = DebugSeat(role=spec.kind, rank=int(rank), node=spec.node.node_rank, title=spec.where)
        BOARD.post(f"{self._mark} {pid}", seat, stop or None)

    def _answers(self, nodes: list[str]) -> dict[str, NodeLook | None]:
        """The answers within the time of a look; the other questions stay open until the next look."""
        asked = [self._asked[node_id][0] for node_id in nodes]
        ready: list[Any] = []
        if asked:
            started = time.monotonic()
            ready, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
            # Early answers do not shorten the turn of those that are silent: silence is counted in turns.
            if len(ready) < len(asked):
                self._ended.wait(max(ANSWER_S - (time.monotonic() - started), 0))
        found: dict[str, NodeLook | None] = {}
        for node_id in nodes:
            if self._asked[node_id][0] not in ready:
                continue
            call, asked_s = self._asked.pop(node_id)
            try:
                answer: NodeLook = ray.get(call)
            except RayError:
                found[node_id] = None
                continue
            found[node_id] = answer
            self._note(node_id, answer, asked_s=asked_s)
        return found

    def _note(self, node_id: str, answer: NodeLook, *, asked_s: float) -> None:
        with self._lock:  # a process that has taken a rank meanwhile is not what was looked at
            ours = {rank for rank, (spec, _) in self._seats.items() if spec.node.node_id == node_id}
        self._keep(node_id, answer, ranks=ours, asked_s=asked_s)

    def _keep(self, node_id: str, answer: NodeLook, *, ranks: Collection[int], asked_s: float) -> None:
        seen = {rank: one for rank, one in answer.workers.items() if rank in ranks}
        self._lookout.note(node_id, seen, there_s=answer.now_s, asked_s=asked_s, answered_s=time.time())
        for rank, (path, added) in answer.logs.items():
            if rank in ranks:
                self._lookout.note_log(rank, path, added)

    def _tell_stacks(self, spec: WorkerSpec, pid: int, *, why: str) -> None:
        try:
            stacks = ray.get(self._eyes[spec.node.node_id].stacks.remote(pid), timeout=STACKS_S)
        except RayError as error:
            stacks = f"they cannot be read: {error}"
        warn(f"{spec.where}: {why}; the stacks of its threads:\n{stacks}")
