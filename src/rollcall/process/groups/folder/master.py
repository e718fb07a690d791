"""The master's side of worker groups on nodes that share only a folder: watches the workers, sends calls and receives answers.
``worker.py`` is the workers' side; ``messages.py`` describes the files.

A call is a file in its worker's inbox, and its answer is a file in ``answers``. Both are labelled with master, worker and epoch: a
worker answers only calls that are meant for it, from this master, for its current group. The worker of node 0 is a child process
of the master, and gets its calls in the same way.

One thread, the postman, receives answers and watches the workers. A worker is dead when its counter stops changing, when it has
exited, when a different process has taken its place, or when a call takes longer than ``CALL_S``; its open calls then fail. Who
waits for whom: ``reserve`` waits for a worker on every node, ``settle`` and ``answered`` wait for answers.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from rollcall.base.errors import ClusterError, NoRoomError
from rollcall.base.stop import Stopped
from rollcall.base.wait import Wait
from rollcall.process.groups.backend import Ask, Call, Carrier, Member, NodeSeats, Reservation, WorkerSpec
from rollcall.process.groups.folder import messages
from rollcall.process.groups.folder.messages import BEAT_S, SILENT_S, Messages, Peer, Presence, Rhythm, State
from rollcall.process.groups.host import GROUP_MARK, RemoteFailureError, end_group
from rollcall.process.groups.pulse import RecordedCall, Seen

APPEAR_S = 600.0  # until every worker has appeared; a user starts them by hand
CALL_S = 3600.0  # the deadline of a call


class NodeWorker:
    """The worker process of one node; a replacement process gets a new object."""

    def __init__(self, rank: int, *, facts: Mapping[str, Any]) -> None:
        self.rank = rank
        self.incarnation: str = facts["incarnation"]
        self.host: str = facts["host"]
        self.death = ""  # why it is dead; empty: it is alive
        self.on_death: Callable[[str], None] = lambda why: None
        self.number = 0  # number of its last call in this epoch
        self.calls: dict[int, Call] = {}  # open calls by number; the worker handles them one after the other
        self.since_s = 0.0  # when it began the first open call, or finished its last call; monotonic clock
        self.done, self.num_done = list[RecordedCall](), 0  # finished calls that were not reported yet; number of all

    def end_call(self, number: int) -> Call:
        """Record that a call was answered, and that the worker is now working on the next call."""
        call, began_s, self.since_s = self.calls.pop(number), self.since_s, time.monotonic()
        if call.link:
            self.done.append(RecordedCall(call.link, began_s, self.since_s))
            self.num_done += 1
        return call


class FolderBackend:
    """The master of a shared folder, used in a ``with`` block. At the end of the block, it tells the workers how the run ended."""

    def __init__(self, folder: Path, *, num_nodes: int, run: str, options: Mapping[str, str] | None = None) -> None:
        self.folder = messages.own_folder(folder)
        self.num_nodes = num_nodes
        self.changed = threading.Condition()
        self._epoch = 0
        self._messages = Messages(self.folder)
        facts = {**messages.about_this_process(), "state": State.RUNNING, "why": "", "run": run, "dismissed": []}
        facts |= {"options": {"--num-nodes": str(num_nodes), **(options or {})}, "folder": str(self.folder), "epoch": 0}
        self._presence = Presence(self._messages.master, facts)
        self._peers = {rank: Peer(self._messages.node(rank)) for rank in range(num_nodes)}
        self._workers: dict[int, NodeWorker] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._rhythm = Rhythm()
        self._ended = threading.Event()
        self._postman = threading.Thread(target=self._carry, name="postman", daemon=True)
        self._trouble: Exception | None = None

    def __enter__(self) -> Self:
        self._messages.root.mkdir(mode=0o700, exist_ok=True)
        messages.refuse_second(self._messages.master, who="a master")
        self._messages.answers.mkdir(mode=0o700, exist_ok=True)
        for folder in (self._messages.answers, self._messages.master):
            messages.sweep(folder)
        self._presence.begin()
        self._postman.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        why = "" if error is None else (str(error).splitlines() or [type(error).__name__])[0]
        why = "Ctrl-C" if isinstance(error, KeyboardInterrupt) and not isinstance(error, Stopped) else why
        self._ended.set()
        self.end_child()
        self._presence.end(state=State.ENDED if error is None else State.BROKE_OFF, why=why)

    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation:
        """Wait until every node has a worker. This ignores ``timeout_s`` and waits longer, because a user starts the workers by hand."""
        workers = self.await_workers(sorted(ask.node_ranks or range(len(ask.slots_per_node))), timeout_s=APPEAR_S)
        # No devices: a process uses the accelerators that are visible on its node.
        nodes = [NodeSeats(node_rank=one.rank, node_id=one.host, address="", bundles=(0,)) for one in workers]
        return Reservation(nodes=nodes, carrier=lambda recipe: Mail(self))  # the workers stay for the next group

    def await_workers(self, ranks: Sequence[int], *, timeout_s: float) -> list[NodeWorker]:
        """Wait until each rank has a living worker."""
        with self.changed:
            if self._child is not None and (status := self._child.poll()) is not None:
                self._bury(0, f"its process ended with status {status}")
                self._child = None
        wait = Wait(timeout_s, every_s=5)
        while missing := [rank for rank in ranks if not self._welcome(rank)]:
            self.check()
            if 0 in missing:
                self._start_child()
            listed = ", ".join(map(str, missing))
            what = f"waiting for worker {listed} (of {self.num_nodes} nodes) to appear in {self.folder}"
            if not wait.again(what, after_s=0.1):
                raise NoRoomError(
                    f"worker {listed} did not appear in {self.folder} within {timeout_s:g} s; on each of these nodes, run `rollcall train "
                    f"RUN.yaml --worker R --num-nodes {self.num_nodes} --log-path {self.folder}`, and then run this command again"
                )
        return [self._workers[rank] for rank in ranks]

    def _start_child(self) -> None:
        """Start worker 0, unless it is already running."""
        with self.changed:
            if self._child is None:
                # The child is killed when its standard input closes, so it ends with this process. Ctrl-C must reach only this one.
                module = "rollcall.process.groups.folder.worker"
                command = [sys.executable, "-m", module, str(self.folder), "0", str(self.num_nodes)]
                self._child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def _welcome(self, rank: int) -> bool:
        """Return whether this rank has a living worker. A new worker takes the place of a dead worker."""
        with self.changed:
            known, peer = self._workers.get(rank), self._peers[rank]
            if known is not None and not known.death:
                return True
            facts = peer.facts
            is_new = known is None or known.incarnation != peer.incarnation
            if not (is_new and peer.is_alive and facts.get("state") == State.HERE):
                return False
            ours = messages.about_this_process()
            for what in ("rollcall", "python"):
                if str(facts[what]).rpartition(".")[0] != str(ours[what]).rpartition(".")[0]:
                    raise ClusterError(
                        f"worker {rank} on {facts['host']} has {what} {facts[what]}, but the master has {ours[what]}; install the "
                        "same version on every node"
                    )
            self._workers[rank] = NodeWorker(rank, facts=facts)
            return True

    def facts_of(self, worker: NodeWorker) -> Mapping[str, Any]:
        """Return the facts that this worker last wrote about itself."""
        peer = self._peers[worker.rank]
        return peer.facts if peer.incarnation == worker.incarnation else {}

    def end_child(self) -> None:
        if self._child is None:
            return
        child, self._child = self._child, None
        child.kill()
        child.wait(timeout=30)
        with self.changed:
            self._bury(0, "it was ended")

    def begin_epoch(self) -> None:
        """Begin a new group. The workers then abandon all work for earlier groups."""
        with self.changed:
            self._epoch += 1
            for worker in self._workers.values():
                worker.number = 0
                self._fail_calls(worker, "its group was shut down")
        self._presence.say(epoch=self._epoch)

    def post(self, worker: NodeWorker, call: Call, data: bytes) -> None:
        """Put a call into the worker's inbox."""
        with self.changed:
            if worker.death:
                worker.on_death(worker.death)
                call.finish(error=ClusterError(worker.death))
                return
            worker.number += 1
            if not worker.calls:
                worker.since_s = time.monotonic()
            worker.calls[worker.number] = call
            name = messages.message_name(self._label(worker), worker.number)
            messages.put(self._messages.inbox(worker.rank) / name, data)
            self._rhythm.note(happened=True)

    def _label(self, worker: NodeWorker) -> str:
        return messages.label_of(master=self._presence.incarnation, worker=worker.incarnation, epoch=self._epoch)

    def _carry(self) -> None:
        """The postman's loop: receive answers and watch the workers until the end."""
        looked = 0.0
        while not self._ended.wait(self._rhythm.wait_s):
            try:
                found = self._take_answers()
                if time.monotonic() - looked > BEAT_S / 2:
                    for peer in self._peers.values():
                        peer.look()
                    with self.changed:
                        for rank, worker in self._workers.items():
                            if not worker.death and (why := self._cause_of_death(rank, worker)):
                                self._bury(rank, why)
                    looked = time.monotonic()
                self._rhythm.note(happened=found)
            except Exception as error:  # callers that are waiting for answers must be told that none will come
                with self.changed:
                    self._trouble = error
                    self.changed.notify_all()
                return

    def check(self) -> None:
        if self._trouble is not None:
            raise ClusterError(f"the messages in {self.folder} cannot be read: {self._trouble}") from self._trouble

    def _take_answers(self) -> bool:
        answers, found = self._messages.answers, False
        for name in messages.names(answers):
            if (data := messages.read(answers / name)) is None:
                continue
            label, number = messages.read_name(name)
            with self.changed:
                asked = [worker for worker in self._workers.values() if label == self._label(worker)]
                for answered in [worker.end_call(number) for worker in asked if number in worker.calls]:
                    outcome: RemoteFailureError | tuple[Any] = pickle.loads(data)
                    if isinstance(outcome, RemoteFailureError):
                        answered.finish(error=outcome)
                    else:
                        answered.finish(outcome[0])
                    found = True
                    self.changed.notify_all()
            messages.remove(answers / name)  # also if the answer belongs to an earlier conversation
        return found

    def _cause_of_death(self, rank: int, worker: NodeWorker) -> str:
        """Return why the worker is dead, or an empty string if it is alive."""
        peer = self._peers[rank]
        if rank == 0 and self._child is not None and (status := self._child.poll()) is not None:
            return f"its process ended with status {status}"
        if peer.incarnation != worker.incarnation:
            return f"another process took its place on {peer.facts.get('host')}"
        if peer.facts.get("state") == State.LEFT:
            return f"it left ({peer.facts.get('why')})"
        if peer.beat.silent_s > SILENT_S:
            return f"its counter in {self._messages.node(rank)} has not moved for {peer.beat.silent_s:.0f} s"
        if worker.calls and (busy_s := time.monotonic() - worker.since_s) > CALL_S:
            return f"it has not answered a call for {busy_s:.0f} s"
        return ""

    def _bury(self, rank: int, why: str) -> None:
        if (worker := self._workers.get(rank)) is None or worker.death:
            return
        worker.death = why
        if rank == 0 and self._child is not None:
            self._child.kill()  # if it hangs, it would keep its successor from starting
            self._child.wait(timeout=30)
            self._child = None  # so that ``await_workers`` starts a new process
        worker.on_death(why)
        self._fail_calls(worker, why)
        # If the worker was only suspended and is still alive, it must rejoin as a new worker.
        self._presence.say(dismissed=[worker.incarnation for worker in self._workers.values() if worker.death])

    def _fail_calls(self, worker: NodeWorker, why: str) -> None:
        for call in worker.calls.values():
            call.finish(error=ClusterError(why))
        worker.calls.clear()
        self.changed.notify_all()


class Mail(Carrier):
    """Delivers the calls of one group."""

    peer_s = SILENT_S + 2

    def __init__(self, post: FolderBackend) -> None:
        self._post, self.changed = post, post.changed
        self._mark = uuid.uuid4().hex
        post.begin_epoch()

    def launch(self, spec: WorkerSpec, *, lost: Member | None, wait: Wait) -> Member:
        """Use the worker that is waiting on the node, where a user has started it."""
        (worker,) = self._post.await_workers([spec.node.node_rank], timeout_s=wait.left_s)
        member = Member(replace(spec, node=replace(spec.node, node_id=worker.host)), link=worker)
        worker.on_death = lambda why: self.lose({member: why})
        return member

    def start_env(self, spec: WorkerSpec) -> Mapping[str, str]:
        return {**spec.env, GROUP_MARK: self._mark}

    def send(self, call: Call, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        data = pickle.dumps((method, tuple(args), dict(kwargs)), protocol=pickle.HIGHEST_PROTOCOL)
        call.link = args[0] if method == "call" else ""
        self._post.post(call.member.link, call, data)

    def settle(self, calls: Sequence[Call], *, timeout_s: float, through_failures: bool = False) -> None:
        self._post.check()
        super().settle(calls, timeout_s=timeout_s, through_failures=through_failures)

    def answered(self, calls: Sequence[Call], *, timeout_s: float) -> Collection[Call]:
        self._post.check()
        return super().answered(calls, timeout_s=timeout_s)

    def is_alive(self, member: Member) -> bool:
        return not member.link.death

    def look(self, members: Sequence[Member], *, last: bool) -> Collection[int]:
        """Report the calls to the lookout, as far as the master knows them."""
        for member in members:
            worker: NodeWorker = member.link
            facts = self._post.facts_of(worker)
            with self.changed:
                done, worker.done = worker.done, []
                seen = Seen(
                    is_alive=not member.death,
                    doing=next((call.link for call in worker.calls.values()), ""),
                    since_s=worker.since_s or None,
                    num_done=worker.num_done,
                    calls=tuple(done),
                    memory_bytes=facts.get("memory_bytes", 0),
                    device_bytes=facts.get("device_bytes", 0),
                )
            now_s, own = time.time(), {member.spec.rank: seen}
            self.lookout.note(worker.incarnation, own, there_s=time.monotonic(), asked_s=now_s, answered_s=now_s)
        return ()

    def stop(self, members: Sequence[Member], *, timeout_s: float) -> None:
        """Begin a new epoch, so that the workers abandon their work, and stop the worker process of node 0."""
        self._post.begin_epoch()
        self._post.end_child()
        end_group(self._mark, timeout_s=timeout_s)
