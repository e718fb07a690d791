"""Slots and workers on nodes that share a folder and nothing else; the master's side. The workers' is in
``folder_worker``, what lies where in ``folder_layout``.

A call is a file in its worker's inbox, its answer a file in ``answers``. The label of both is master, worker and epoch: a
worker answers what is meant for it, by this master, for its current group. Node 0 runs its worker in a child process of
the master, which is reached the same way.

Who waits for whom: ``reserve`` for a worker on every node; ``launch`` for every worker to be made; ``gather`` for answers.
One thread, the postman, takes answers and watches the workers: one whose counter stands still, who said goodbye, or who
was started anew is dead, and so are the calls it had.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcall.errors import ClusterError, NoRoomError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rollcall.groups.backend import Ask, NodeSeats, Recipe, WorkerSpec, whom
from rollcall.groups.dispatch import Drop
from rollcall.groups.failures import RemoteFailureError
from rollcall.groups.folder.layout import (
    ANSWERS,
    BROKE_OFF,
    ENDED,
    HERE,
    INBOX,
    LEFT,
    MASTER,
    MESSAGES,
    RUNNING,
    about_this_process,
    label_of,
    node_folder,
    refuse_second,
)
from rollcall.groups.folder.mailbox import (
    BEAT_S,
    SILENT_S,
    Peer,
    Presence,
    Rhythm,
    message_name,
    names,
    own_folder,
    put,
    read,
    read_name,
    remove,
    sweep,
)
from rollcall.groups.host import MARK, end_group
from rollcall.stop import Stopped
from rollcall.wait import Wait

APPEAR_S = 600.0  # until every worker is there; a person starts them
OUTSTANDING = 8  # call files in one inbox
STUMBLE_S = 0.5  # the dead before those that stumbled over their death


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """A call on its way, and its outcome."""

    spec: WorkerSpec
    number: int
    data: bytes | None  # None: it is in the inbox
    done: bool = False
    value: Any = None
    error: Exception | None = None


class Member:
    """The worker of one node, as long as it is the same process."""

    def __init__(self, rank: int, *, facts: Mapping[str, Any]) -> None:
        self.rank = rank
        self.incarnation: str = facts["incarnation"]
        self.host: str = facts["host"]
        self.pid: int = facts["pid"]
        self.death: str | None = None
        self.number = 0
        self.calls: dict[int, Call] = {}  # in the inbox, by number
        self.waiting: deque[Call] = deque()  # not there yet


class FolderBackend:
    """The master of a folder, from ``with`` to its end, at which it tells the workers how the run ended."""

    def __init__(
        self,
        folder: Path,
        *,
        num_nodes: int,
        run: str,
        appear_s: float = APPEAR_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self.folder = own_folder(folder)
        self.num_nodes = num_nodes
        self.epoch = 0
        self.changed = threading.Condition()
        self.messages = self.folder / MESSAGES
        self._appear_s = appear_s
        self._silent_s = silent_s
        self._presence = Presence(
            self.messages / MASTER,
            {**about_this_process(), "state": RUNNING, "why": "", "run": run, "num_nodes": num_nodes, "epoch": 0}
            | {"folder": str(self.folder), "dismissed": []},
        )
        self._peers = {rank: Peer(node_folder(self.messages, rank)) for rank in range(num_nodes)}
        self._members: dict[int, Member] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._rhythm = Rhythm()
        self._ended = threading.Event()
        self._postman = threading.Thread(target=self._carry, name="postman", daemon=True)
        self._trouble: Exception | None = None

    def __enter__(self) -> FolderBackend:
        self.messages.mkdir(mode=0o700, exist_ok=True)
        refuse_second(self.messages / MASTER, who="a master")
        answers = self.messages / ANSWERS
        answers.mkdir(mode=0o700, exist_ok=True)
        for folder in (answers, self.messages / MASTER):
            sweep(folder)
        self._presence.begin()
        self._postman.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        why = "" if error is None else (str(error).splitlines() or [type(error).__name__])[0]
        why = "Ctrl-C" if isinstance(error, KeyboardInterrupt) and not isinstance(error, Stopped) else why
        self._ended.set()
        self.end_child()
        self._presence.end(state=ENDED if error is None else BROKE_OFF, why=why)

    def reserve(self, ask: Ask, *, timeout_s: float) -> FolderReservation:
        """Wait until every node has a worker. The deadline is our own: a person starts them by hand."""
        wanted = ask.node_ranks or tuple(range(len(ask.slots_per_node)))
        if max(ask.slots_per_node) > 1 or max(wanted) >= self.num_nodes:
            raise ClusterError(
                f"slots {list(ask.slots_per_node)} were asked for, and each of the {self.num_nodes} nodes of {self.folder} has one"
            )
        return FolderReservation(self, self.await_workers(sorted(wanted), timeout_s=self._appear_s))

    def await_workers(self, ranks: Sequence[int], *, timeout_s: float) -> list[Member]:
        """A living worker of each rank."""
        if 0 in ranks:
            self.start_child()
        deadline, progress = time.monotonic() + timeout_s, Wait(every_s=5)
        while missing := [rank for rank in ranks if not self._welcome(rank)]:
            self.check()
            listed = ", ".join(map(str, missing))
            if time.monotonic() >= deadline:
                raise NoRoomError(
                    f"no worker {listed} in {self.folder} after {timeout_s:g} s; on each of those nodes run `rollcall train "
                    f"RUN.yaml --worker R --num-nodes {self.num_nodes} --log-path {self.folder}`, then this command again"
                )
            progress.tell(f"waiting for worker {listed} of {self.num_nodes} nodes to appear in {self.folder}")
            time.sleep(0.1)
        return [self._members[rank] for rank in ranks]

    def _welcome(self, rank: int) -> bool:
        """Whether there is a living worker of this rank; a new one takes the place of a dead one."""
        with self.changed:
            known = self._members.get(rank)
            if known is not None and known.death is None:
                return True
            peer = self._peers[rank]
            facts = peer.facts
            if not peer.is_alive or facts.get("state") != HERE:
                return False
            if known is not None and known.incarnation == peer.incarnation:
                return False
            ours = about_this_process()
            for what in ("rollcall", "python"):
                if str(facts[what]).rpartition(".")[0] != str(ours[what]).rpartition(".")[0]:
                    raise ClusterError(
                        f"worker {rank} on {facts['host']} has {what} {facts[what]}, and the master has {ours[what]}; install the "
                        "same on every node"
                    )
            self._members[rank] = Member(rank, facts=facts)
            return True

    def member(self, rank: int) -> Member:
        return self._members[rank]

    def start_child(self) -> None:
        """Node 0's worker; it ends with this process, whose end of the pipe it watches."""
        if self._child is not None and self._child.poll() is None:
            return
        self._child = subprocess.Popen(
            [sys.executable, "-m", "rollcall.groups.folder.worker", str(self.folder), "0", str(self.num_nodes)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the master
        )

    def end_child(self) -> None:
        if self._child is None:
            return
        child, self._child = self._child, None
        child.kill()
        child.wait(timeout=30)
        with self.changed:
            self._bury(0, "it was ended")

    def begin_epoch(self) -> int:
        """Whatever workers do for an older group, they drop."""
        self.epoch += 1
        self._presence.say(epoch=self.epoch)
        return self.epoch

    def post(self, member: Member, call: Call) -> None:
        """Into the inbox, or behind what is there."""
        with self.changed:
            if member.death is not None:
                call.error, call.done = self._dead(call, member.death), True
                return
            member.waiting.append(call)
            self._rhythm.hurry()
            self._fill(member)

    def _fill(self, member: Member) -> None:
        inbox = node_folder(self.messages, member.rank) / INBOX
        while member.waiting and len(member.calls) < OUTSTANDING:
            call = member.waiting.popleft()
            assert call.data is not None
            member.calls[call.number] = call
            label = label_of(master=self._presence.incarnation, worker=member.incarnation, epoch=self.epoch)
            data, call.data = call.data, None
            put(inbox / message_name(label, call.number), data)

    def _carry(self) -> None:
        """The postman."""
        looked = 0.0
        while not self._ended.wait(self._rhythm.wait_s):
            try:
                found = self._take_answers()
                if time.monotonic() - looked > BEAT_S / 2:
                    self._look_at_workers()
                    looked = time.monotonic()
                self._rhythm.hurry() if found else self._rhythm.slow_down()
            except Exception as error:  # whoever waits for an answer must know that none will come
                with self.changed:
                    self._trouble = error
                    self.changed.notify_all()
                return

    def check(self) -> None:
        if self._trouble is not None:
            raise ClusterError(f"messages in {self.folder} cannot be read: {self._trouble}") from self._trouble

    def _take_answers(self) -> bool:
        answers, found = self.messages / ANSWERS, False
        for name in names(answers):
            data = read(answers / name)
            if data is None:
                continue
            call = self._call_of(name)
            if call is None:
                remove(answers / name)  # of another time
                continue
            outcome: RemoteFailureError | tuple[Any] = pickle.loads(data)
            remove(answers / name)
            found = True
            with self.changed:
                call.done = True
                if isinstance(outcome, RemoteFailureError):
                    call.error = outcome
                else:
                    (call.value,) = outcome
                self._fill(self._members[call.spec.node.node_rank])
                self.changed.notify_all()
        return found

    def _call_of(self, name: str) -> Call | None:
        """The call that this file answers."""
        parsed = read_name(name)
        if parsed is None:
            return None
        label, number = parsed
        with self.changed:
            for member in self._members.values():
                own = label_of(master=self._presence.incarnation, worker=member.incarnation, epoch=self.epoch)
                if label == own and member.death is None:
                    return member.calls.pop(number, None)
        return None

    def _look_at_workers(self) -> None:
        for peer in self._peers.values():
            peer.look()
        with self.changed:
            for rank, member in self._members.items():
                if member.death is None and (why := self._cause_of_death(rank, member)):
                    self._bury(rank, why)

    def _cause_of_death(self, rank: int, member: Member) -> str | None:
        peer = self._peers[rank]
        if rank == 0 and self._child is not None and (status := self._child.poll()) is not None:
            return f"its process ended with status {status}"
        if peer.incarnation != member.incarnation:
            return f"another process took its place, on {peer.facts.get('host')}"
        if peer.facts.get("state") == LEFT:
            return f"it said goodbye ({peer.facts.get('why')})"
        if peer.silent_s > self._silent_s:
            return f"its counter in {node_folder(self.messages, rank)} has stood still for {peer.silent_s:.0f} s"
        return None

    def _bury(self, rank: int, why: str) -> None:
        member = self._members.get(rank)
        if member is None or member.death is not None:
            return
        member.death = why
        self.fail_calls(member, why)
        # If it lives after all (it was stopped for a while, say), it must come back as a new one.
        self._presence.say(dismissed=[member.incarnation for member in self._members.values() if member.death])

    def fail_calls(self, member: Member, why: str) -> None:
        for call in (*member.calls.values(), *member.waiting):
            call.error, call.done = self._dead(call, why), True
        member.calls.clear()
        member.waiting.clear()
        self.changed.notify_all()

    def _dead(self, call: Call, why: str) -> WorkerDiedError:
        spec = call.spec
        return WorkerDiedError(
            f"{spec.where} is dead: {why}", role=spec.role, ranks=[spec.rank], node_ranks=[spec.node.node_rank]
        )


class FolderReservation:
    def __init__(self, backend: FolderBackend, members: Sequence[Member]) -> None:
        self._backend = backend
        self.nodes: Sequence[NodeSeats] = [
            NodeSeats(
                node_rank=member.rank,
                node_id=member.host,
                address="",  # nobody reaches it by one
                bundles=(0,),
                devices=(),  # a process uses the accelerators that its node shows it
                visible_variable=None,
            )
            for member in members
        ]

    def launch(self, specs: Sequence[WorkerSpec], recipe: Recipe, *, timeout_s: float) -> FolderCrew:
        crew = FolderCrew(self._backend, specs, recipe)
        try:
            crew.start(timeout_s=timeout_s)
        except BaseException:  # an interrupt too: nothing may be left behind
            crew.stop(timeout_s=timeout_s)
            raise
        return crew

    def release(self) -> None:
        return None  # the workers stay for the next group


class FolderCrew:
    def __init__(self, backend: FolderBackend, specs: Sequence[WorkerSpec], recipe: Recipe) -> None:
        self.pids: Sequence[int] = []
        self.master_address = ""
        self.master_port = 0
        self._backend = backend
        self._specs = list(specs)
        self._recipe = recipe
        self._mark = uuid.uuid4().hex
        self._members = [backend.member(spec.node.node_rank) for spec in specs]
        self._tolerated: frozenset[int] = frozenset(range(len(specs)))

    def start(self, *, timeout_s: float) -> None:
        self._backend.begin_epoch()
        for member in self._members:
            member.number = 0
        started = [self._start(spec.rank) for spec in self._specs]
        self.pids = self.gather(started, timeout_s=timeout_s, progress=Wait())

    def _start(self, rank: int) -> Call:
        spec, recipe = self._specs[rank], self._recipe
        group_env = spec.group_env(master_address=self.master_address, master_port=self.master_port)
        env = {**spec.env, **group_env, MARK: self._mark}
        return self._post(rank, ("start", env, recipe.target, recipe.args, dict(recipe.kwargs)))

    def tolerate(self, ranks: Collection[int]) -> None:
        """The loss of any other worker ends every wait, also for those that live; before this is called, of none."""
        self._tolerated = frozenset(ranks)

    def replace(self, rank: int, *, timeout_s: float) -> WorkerSpec:
        """Once its node has a worker again, make it anew there; returns where that is."""
        deadline, spec = time.monotonic() + timeout_s, self._specs[rank]
        (member,) = self._backend.await_workers([spec.node.node_rank], timeout_s=timeout_s)
        self._members[rank] = member
        self._specs[rank] = replace(spec, node=replace(spec.node, node_id=member.host))
        left_s = max(deadline - time.monotonic(), 1.0)
        new = self.gather([self._start(rank)], timeout_s=left_s, progress=Wait())
        self.pids = [*self.pids[:rank], *new, *self.pids[rank + 1 :]]
        return self._specs[rank]

    def share(self, value: Any) -> Any:
        return value

    def call(self, rank: int, method: str, drop: Drop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        return self._post(rank, ("call", method, drop, tuple(args), dict(kwargs)))

    def _post(self, rank: int, message: tuple[Any, ...]) -> Call:
        member, data = self._members[rank], pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._backend.changed:
            member.number += 1
            call = Call(spec=self._specs[rank], number=member.number, data=data)
            self._backend.post(member, call)
        return call

    def ready(self, futures: Sequence[Call], *, timeout_s: float) -> list[Call]:
        with self._backend.changed:
            self._backend.changed.wait_for(
                lambda: self._check() or any(call.done for call in futures), timeout=timeout_s
            )
            return [call for call in futures if call.done]

    def gather(self, futures: Sequence[Call], *, timeout_s: float, progress: Wait | None = None) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        progress = progress or Wait(first_s=30, every_s=30)
        changed = self._backend.changed
        with changed:
            while True:
                self._check()
                if any(call.error is not None for call in futures):
                    changed.wait_for(lambda: all(call.done for call in futures), timeout=STUMBLE_S)
                    raise _explain([call for call in futures if call.error is not None])
                missing = [call.spec for call in futures if not call.done]
                if not missing:
                    return [call.value for call in futures]
                listed = ", ".join(spec.where for spec in missing[:8])
                if time.monotonic() >= deadline:
                    raise WorkerTimeoutError(
                        f"no answer after {timeout_s:g} s from {len(missing)} of {len(futures)} workers: {listed}",
                        **whom(missing),
                    )
                progress.tell(f"waiting for {listed}")
                changed.wait(min(deadline - time.monotonic(), progress.until_word_s + 0.01))

    def _check(self) -> None:
        """Raise if someone is lost without whom nobody can go on."""
        self._backend.check()
        for spec, member in zip(self._specs, self._members, strict=True):
            if member.death is not None and spec.rank not in self._tolerated:
                raise WorkerDiedError(f"{spec.where} is dead: {member.death}", **whom([spec]))

    def is_alive(self, rank: int) -> bool:
        return self._members[rank].death is None

    def stop(self, *, timeout_s: float) -> None:
        """Workers drop what they have when they see the next epoch; the process of node 0 is ended."""
        self._backend.begin_epoch()
        self._backend.end_child()
        end_group(self._mark, timeout_s=timeout_s)
        with self._backend.changed:
            for member in self._members:
                self._backend.fail_calls(member, "its group was shut down")


def _explain(failed: Sequence[Call]) -> WorkerError:
    dead = [call for call in failed if isinstance(call.error, WorkerDiedError)]
    first = (dead or failed)[0]
    others = [call.spec for call in failed if call.spec is not first.spec]
    also = f"\nAlso failed: {', '.join(spec.where for spec in others[:8])}" if others else ""
    named = whom([first.spec, *others])
    if isinstance(first.error, WorkerDiedError):
        return WorkerDiedError(f"{first.error}{also}", **named)
    error = WorkerError(f"{first.spec.where} raised\n{first.error}{also}", **named)
    error.__cause__ = first.error.original if isinstance(first.error, RemoteFailureError) else first.error
    return error
