"""The mail between a master and its workers, the master's side: who is there, calls out, answers in. The workers' side is
``worker``; ``layout`` says what lies where.

A call is a file in its worker's inbox, its answer a file in ``answers``. The label of both is master, worker and epoch: a
worker answers what is meant for it, by this master, for its current group. Node 0 runs its worker in a child process of
the master, which is reached the same way.

One thread, the postman, takes answers and watches the workers. A worker is dead when its counter no longer changes, when it has
said goodbye, or when another process has taken its place; the calls that it had then fail.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollcall.errors import ClusterError, NoRoomError, WorkerDiedError
from rollcall.groups.backend import WorkerSpec, whom
from rollcall.groups.failures import RemoteFailureError
from rollcall.groups.folder.layout import Messages, State, about_this_process, label_of, refuse_second
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
from rollcall.stop import Stopped
from rollcall.wait import Wait

APPEAR_S = 600.0  # until every worker is there; a person starts them
OUTSTANDING = 8  # call files in one inbox


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """A call on its way, and its outcome."""

    spec: WorkerSpec
    number: int
    data: bytes | None  # None: it is in the inbox
    done: bool = False
    value: Any = None
    error: Exception | None = None

    def fail(self, why: str) -> None:
        """Its worker is dead."""
        self.error, self.done = WorkerDiedError(why, **whom([self.spec])), True


class Member:
    """The worker process of one node; a new process is a new member."""

    def __init__(self, rank: int, *, facts: Mapping[str, Any]) -> None:
        self.rank = rank
        self.incarnation: str = facts["incarnation"]
        self.host: str = facts["host"]
        self.death: str | None = None
        self.number = 0
        self.calls: dict[int, Call] = {}  # in the inbox, by number
        self.waiting: deque[Call] = deque()  # not there yet


class Post:
    """The master of a folder, used in a ``with`` block; at its end the workers are told how the run ended."""

    def __init__(
        self,
        folder: Path,
        *,
        num_nodes: int,
        run: str,
        options: Mapping[str, str] | None = None,
        appear_s: float = APPEAR_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self.folder = own_folder(folder)
        self.num_nodes = num_nodes
        self.epoch = 0
        self.changed = threading.Condition()
        self._messages = Messages(self.folder)
        self._appear_s = appear_s
        self._silent_s = silent_s
        self._presence = Presence(
            self._messages.master,
            {**about_this_process(), "state": State.RUNNING, "why": "", "run": run, "epoch": 0}
            | {
                "options": {"--num-nodes": str(num_nodes), **(options or {})},
                "folder": str(self.folder),
                "dismissed": [],
            },
        )
        self._peers = {rank: Peer(self._messages.node(rank)) for rank in range(num_nodes)}
        self.members: dict[int, Member] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._rhythm = Rhythm()
        self._ended = threading.Event()
        self._postman = threading.Thread(target=self._carry, name="postman", daemon=True)
        self._trouble: Exception | None = None

    def __enter__(self) -> Self:
        self._messages.root.mkdir(mode=0o700, exist_ok=True)
        refuse_second(self._messages.master, who="a master")
        self._messages.answers.mkdir(mode=0o700, exist_ok=True)
        for folder in (self._messages.answers, self._messages.master):
            sweep(folder)
        self._presence.begin()
        self._postman.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        why = "" if error is None else (str(error).splitlines() or [type(error).__name__])[0]
        why = "Ctrl-C" if isinstance(error, KeyboardInterrupt) and not isinstance(error, Stopped) else why
        self._ended.set()
        self.end_child()
        self._presence.end(state=State.ENDED if error is None else State.BROKE_OFF, why=why)

    def await_workers(self, ranks: Sequence[int], *, timeout_s: float) -> list[Member]:
        """A living worker of each rank."""
        if 0 in ranks:
            self.start_child()
        wait = Wait(timeout_s, every_s=5)
        while missing := [rank for rank in ranks if not self._welcome(rank)]:
            self.check()
            listed = ", ".join(map(str, missing))
            what = f"waiting for worker {listed} of {self.num_nodes} nodes to appear in {self.folder}"
            if not wait.again(what, after_s=0.1):
                raise NoRoomError(
                    f"worker {listed} did not appear in {self.folder} within {timeout_s:g} s; on each of those nodes run `rollcall train "
                    f"RUN.yaml --worker R --num-nodes {self.num_nodes} --log-path {self.folder}`, then this command again"
                )
        return [self.members[rank] for rank in ranks]

    def _welcome(self, rank: int) -> bool:
        """Whether there is a living worker of this rank; a new one takes the place of a dead one."""
        with self.changed:
            known = self.members.get(rank)
            if known is not None and known.death is None:
                return True
            peer = self._peers[rank]
            facts = peer.facts
            if not peer.is_alive or facts.get("state") != State.HERE:
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
            self.members[rank] = Member(rank, facts=facts)
            return True

    def facts_of(self, member: Member) -> tuple[Mapping[str, Any], float]:
        """What this worker last said of itself, and how many seconds ago that was seen."""
        peer = self._peers[member.rank]
        return (peer.facts, peer.silent_s) if peer.incarnation == member.incarnation else ({}, 0.0)

    def await_beat(self, members: Sequence[Member], *, timeout_s: float) -> None:
        """Until each of these workers has told what it did until now, or is dead, or the time is over."""
        wait = Wait(timeout_s)
        told = {member.rank: self._peers[member.rank].facts.get("counter") for member in members}
        while not wait.is_over and any(
            member.death is None and self._peers[member.rank].facts.get("counter") == told[member.rank]
            for member in members
        ):
            time.sleep(BEAT_S / 10)

    def start_child(self) -> None:
        """Start node 0's worker. It ends when its standard input ends, so with this process."""
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

    def begin_epoch(self) -> None:
        """Start a new group: workers drop all work for an older one."""
        self.epoch += 1
        self._presence.say(epoch=self.epoch)

    def post(self, member: Member, call: Call) -> None:
        """Put a call into the inbox, or into the queue if the inbox is full."""
        with self.changed:
            if member.death is not None:
                call.fail(member.death)
                return
            member.waiting.append(call)
            self._rhythm.hurry()
            self._fill(member)

    def _fill(self, member: Member) -> None:
        inbox = self._messages.inbox(member.rank)
        while member.waiting and len(member.calls) < OUTSTANDING:
            call = member.waiting.popleft()
            assert call.data is not None
            member.calls[call.number] = call
            data, call.data = call.data, None
            put(inbox / message_name(self._label(member), call.number), data)

    def _label(self, member: Member) -> str:
        return label_of(master=self._presence.incarnation, worker=member.incarnation, epoch=self.epoch)

    def _carry(self) -> None:
        """The postman's loop."""
        looked = 0.0
        while not self._ended.wait(self._rhythm.wait_s):
            try:
                found = self._take_answers()
                if time.monotonic() - looked > BEAT_S / 2:
                    self._look_at_workers()
                    looked = time.monotonic()
                self._rhythm.hurry() if found else self._rhythm.slow_down()
            except Exception as error:  # those that wait for an answer must know that none will come
                with self.changed:
                    self._trouble = error
                    self.changed.notify_all()
                return

    def check(self) -> None:
        if self._trouble is not None:
            raise ClusterError(f"the messages in {self.folder} cannot be read: {self._trouble}") from self._trouble

    def _take_answers(self) -> bool:
        answers, found = self._messages.answers, False
        for name in names(answers):
            data = read(answers / name)
            if data is None:
                continue
            call = self._call_of(name)
            if call is None:
                remove(answers / name)  # of an earlier conversation
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
                self._fill(self.members[call.spec.node.node_rank])
                self.changed.notify_all()
        return found

    def _call_of(self, name: str) -> Call | None:
        """The call that this file answers."""
        parsed = read_name(name)
        if parsed is None:
            return None
        label, number = parsed
        with self.changed:
            for member in self.members.values():
                if label == self._label(member) and member.death is None:
                    return member.calls.pop(number, None)
        return None

    def _look_at_workers(self) -> None:
        for peer in self._peers.values():
            peer.look()
        with self.changed:
            for rank, member in self.members.items():
                if member.death is None and (why := self._cause_of_death(rank, member)):
                    self._bury(rank, why)

    def _cause_of_death(self, rank: int, member: Member) -> str | None:
        peer = self._peers[rank]
        if rank == 0 and self._child is not None and (status := self._child.poll()) is not None:
            return f"its process ended with status {status}"
        if peer.incarnation != member.incarnation:
            return f"another process took its place, on {peer.facts.get('host')}"
        if peer.facts.get("state") == State.LEFT:
            return f"it said goodbye ({peer.facts.get('why')})"
        if peer.silent_s > self._silent_s:
            return f"its counter in {self._messages.node(rank)} has not moved for {peer.silent_s:.0f} s"
        return None

    def _bury(self, rank: int, why: str) -> None:
        member = self.members.get(rank)
        if member is None or member.death is not None:
            return
        member.death = why
        self.fail_calls(member, why)
        # If it lives after all, because it was only stopped for a while, it must come back as a new worker.
        self._presence.say(dismissed=[member.incarnation for member in self.members.values() if member.death])

    def fail_calls(self, member: Member, why: str) -> None:
        for call in (*member.calls.values(), *member.waiting):
            call.fail(why)
        member.calls.clear()
        member.waiting.clear()
        self.changed.notify_all()
