"""Slots and workers on nodes that share a folder and nothing else. ``post`` carries the calls.

Who waits for whom: ``reserve`` for a worker on every node; ``start`` for every worker to be made; ``gather`` for answers.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollcall.errors import ClusterError
from rollcall.groups.backend import Ask, NodeSeats, Recipe, Reservation, WorkerSpec
from rollcall.groups.dispatch import Drop
from rollcall.groups.failures import died, failure_of, listed, unanswered
from rollcall.groups.folder.mailbox import BEAT_S
from rollcall.groups.folder.post import Call, Post
from rollcall.groups.folder.told import read_told
from rollcall.groups.host import GROUP_MARK, end_group
from rollcall.groups.sightings import Lookout, Sightings
from rollcall.wait import Wait

STUMBLE_S = 0.5  # when one worker dies, others may fail because of it, a moment before its death is known


class FolderBackend(Post):
    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation:
        """Wait until every node has a worker. The deadline is our own: a person starts them by hand."""
        wanted = ask.node_ranks or tuple(range(len(ask.slots_per_node)))
        if max(ask.slots_per_node) > 1 or max(wanted) >= self.num_nodes:
            raise ClusterError(
                f"slots {list(ask.slots_per_node)} were asked for, and each of the {self.num_nodes} nodes of {self.folder} has one"
            )
        members = self.await_workers(sorted(wanted), timeout_s=self._appear_s)
        # Without devices: a process uses the accelerators that its node shows it.
        nodes = [NodeSeats(node_rank=one.rank, node_id=one.host, address="", bundles=(0,)) for one in members]
        return Reservation(nodes=nodes, crew=partial(FolderCrew, self))  # the workers stay for the next group


class FolderCrew:
    def __init__(self, post: Post, specs: Sequence[WorkerSpec], recipe: Recipe) -> None:
        self.pids: Sequence[int] = []
        self._post = post
        self._specs = list(specs)
        self._recipe = recipe
        self._mark = uuid.uuid4().hex
        self._members = [post.members[spec.node.node_rank] for spec in specs]
        self._tolerated: frozenset[int] = frozenset(range(len(specs)))
        self._lookout = Lookout()
        self._heard = [0] * len(specs)  # calls that each worker has told

    def start(self, *, timeout_s: float) -> None:
        self._post.begin_epoch()
        for member in self._members:
            member.number = 0
        self.pids = self.gather([self._start(spec.rank) for spec in self._specs], wait=Wait(timeout_s))

    def _start(self, rank: int) -> Call:
        spec, recipe = self._specs[rank], self._recipe
        # The nodes have no network between them, so no process of the group listens.
        env = {**spec.env, **spec.group_env(master_address="", master_port=0), GROUP_MARK: self._mark}
        return self._send(rank, ("start", env, recipe.target, recipe.args, dict(recipe.kwargs)))

    def tolerate(self, ranks: Collection[int]) -> None:
        self._tolerated = frozenset(ranks)

    def replace(self, rank: int, *, timeout_s: float) -> WorkerSpec:
        """Wait until its node has a worker again, and make it there; returns where that is."""
        wait, spec = Wait(timeout_s), self._specs[rank]
        (member,) = self._post.await_workers([spec.node.node_rank], timeout_s=timeout_s)
        self._members[rank] = member
        self._specs[rank] = replace(spec, node=replace(spec.node, node_id=member.host))
        new = self.gather([self._start(rank)], wait=wait)
        self.pids = [*self.pids[:rank], *new, *self.pids[rank + 1 :]]
        self._heard[rank] = 0
        self._lookout.regain(rank, f"process {new[0]} on {member.host}")
        return self._specs[rank]

    def share(self, value: Any) -> Any:
        return value

    def call(self, rank: int, method: str, drop: Drop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        return self._send(rank, ("call", method, drop, tuple(args), dict(kwargs)))

    def _send(self, rank: int, message: tuple[Any, ...]) -> Call:
        member, data = self._members[rank], pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._post.changed:
            member.number += 1
            call = Call(spec=self._specs[rank], number=member.number, data=data)
            self._post.post(member, call)
        return call

    def ready(self, futures: Sequence[Call], *, timeout_s: float) -> list[Call]:
        with self._post.changed:
            self._post.changed.wait_for(lambda: self._check() or any(call.done for call in futures), timeout=timeout_s)
            return [call for call in futures if call.done]

    def gather(self, futures: Sequence[Call], *, wait: Wait) -> list[Any]:
        changed = self._post.changed
        with changed:
            while True:
                self._check()
                if any(call.error is not None for call in futures):
                    changed.wait_for(lambda: all(call.done for call in futures), timeout=STUMBLE_S)
                    raise failure_of([(call.spec, call.error) for call in futures if call.error is not None])
                missing = [call.spec for call in futures if not call.done]
                if not missing:
                    return [call.value for call in futures]
                if wait.is_over:
                    raise unanswered(missing, total=len(futures), timeout_s=wait.timeout_s)
                wait.tell(f"waiting for {listed(missing)}")
                changed.wait(wait.until_word_s)

    def _check(self) -> None:
        """Raise if a worker is lost that the group cannot go on without."""
        self._post.check()
        for spec, member in zip(self._specs, self._members, strict=True):
            if member.death is not None and spec.rank not in self._tolerated:
                raise died([spec], member.death)

    def is_alive(self, rank: int) -> bool:
        return self._members[rank].death is None

    def sightings(self, *, last: bool = False) -> Sightings:
        if last:
            self._post.await_beat(self._members, timeout_s=3 * BEAT_S)
        for rank, member in enumerate(self._members):
            facts, age_s = self._post.facts_of(member)
            answered_s = time.time() - age_s
            heard = read_told(facts, mark=self._mark, after=self._heard[rank])
            if heard is not None:
                self._heard[rank] = heard.num_calls
                node, there_s = member.incarnation, heard.now_s
                self._lookout.note(node, {rank: heard.seen}, there_s=there_s, asked_s=answered_s, answered_s=answered_s)
            if member.death is not None:
                self._lookout.lose(rank, member.death)
        return self._lookout.take(self.pids)

    def stop(self, *, timeout_s: float) -> None:
        """Workers drop their work when they see the next epoch; the process of node 0 is ended."""
        self._post.begin_epoch()
        self._post.end_child()
        end_group(self._mark, timeout_s=timeout_s)
        with self._post.changed:
            for member in self._members:
                self._post.fail_calls(member, "its group was shut down")
