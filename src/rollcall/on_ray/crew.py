"""The running workers of one group on Ray: called, waited for, watched, replaced, ended.

Who waits for whom: ``gather`` waits for results in short turns, so that a loss that the watch has seen ends the wait at
once. The loss of a worker ends the waits for that worker; ``replace`` puts a new process in its seat. A group that needs
some of its workers says which others it tolerates to lose; the loss of a needed worker ends every wait.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import ray
from ray._private import state as ray_state  # the pinned Ray has no public call for actor states
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollcall.debug.board import BOARD
from rollcall.errors import ClusterError, PeerLostError, WorkerDiedError, WorkerError
from rollcall.groups.backend import Recipe, WorkerSpec, whom
from rollcall.groups.dispatch import Drop
from rollcall.groups.failures import RemoteFailureError, died, is_about_a_peer, listed, unanswered, waits_words
from rollcall.groups.host import DEBUG_HOST, GROUP_MARK, Host, end_group
from rollcall.groups.sightings import Sightings
from rollcall.groups.watch import SILENT_S
from rollcall.on_ray import zygote
from rollcall.on_ray.each_node import pinned
from rollcall.on_ray.sizes import is_large
from rollcall.on_ray.supervise import Supervisor
from rollcall.wait import Wait
from rollcall.worker_env.declared import for_ray

STUMBLE_S = 0.5  # when one worker dies in a collective, the others raise within moments, or before it is known
PEER_S = SILENT_S + 2  # a worker complains about its peer; by then the peer's loss is known
TURN_S = 0.5  # between two looks at what the watch has seen
LOOK_S = 0.25
KEPT_CALLS = 8  # of a worker, for errors to tell what was waited for; no more are under way at once


class RayCrew:
    def __init__(self, specs: Sequence[WorkerSpec], recipe: Recipe, *, group: PlacementGroup, may_fork: bool) -> None:
        """``may_fork``: its nodes were started by `rollcall node`, so Rollcall is in the Python of their Ray."""
        self._specs = list(specs)
        self._may_fork = may_fork and isinstance(recipe.target, str) and recipe.target.startswith("rollcall.")
        self._recipe = recipe
        self._group = group
        self._mark = uuid.uuid4().hex
        self._hosts = [self._create(spec) for spec in specs]
        self._calls = [host.call for host in self._hosts]
        self._rank_of = {host._actor_id.hex(): rank for rank, host in enumerate(self._hosts)}
        self.pids: Sequence[int] = []
        self._master_port = 0
        self._tolerated: frozenset[int] = frozenset(range(len(specs)))
        self._lost: dict[int, str] = {}  # why, by rank
        self._end: WorkerDiedError | None = None  # what every wait raises
        self._asked = [deque[tuple[str, str]](maxlen=KEPT_CALLS) for _ in specs]  # task and what for, by rank
        self._waited_for: dict[int, Sequence[Any]] = {}  # futures, by thread that waits
        self._changing = threading.Lock()
        self._supervisor = Supervisor(self._mark, on_loss=self._lose)

    def _create(self, spec: WorkerSpec) -> Any:
        has_gpu = bool(spec.node.devices)
        strategy = PlacementGroupSchedulingStrategy(
            self._group,
            placement_group_bundle_index=spec.node.bundles[spec.slots[0]],
            placement_group_capture_child_tasks=False,
        )
        env_vars = {**for_ray(spec.env), GROUP_MARK: self._mark}
        if self._may_fork:
            module = str(self._recipe.target).rpartition(".")[0]
            runtime_env = zygote.runtime_env(module, self._mark, env_vars)
        else:
            runtime_env = {"env_vars": env_vars}
        # Ray counts a process on several slots on its first; the virtual cluster keeps other workers off the rest.
        return (
            ray.remote(Host)
            .options(
                num_gpus=spec.share if has_gpu else 0,
                num_cpus=0 if has_gpu else spec.share,
                max_restarts=0,
                scheduling_strategy=strategy,
                runtime_env=runtime_env,
            )
            .remote(f"{spec.role} rank {spec.rank}, node {spec.node.node_rank}")
        )

    def start(self, *, timeout_s: float) -> None:
        wait = Wait(timeout_s)
        self._supervisor.start({spec.node.node_id for spec in self._specs})
        (self._master_port,) = self.gather([self._hosts[0].lease_port.remote()], wait=wait)
        self.pids = self.gather([host.find_pid.remote() for host in self._hosts], wait=wait)
        for spec, pid in zip(self._specs, self.pids, strict=True):
            self._supervisor.add(spec, pid=pid)  # before they start, which may be what they get stuck in
        self.gather([self._start(spec) for spec in self._specs], wait=wait)

    def _start(self, spec: WorkerSpec) -> Any:
        recipe = self._recipe
        target = recipe.target if isinstance(recipe.target, str) else ray.put(recipe.target)
        args = [self.share(value) for value in recipe.args]
        kwargs = {name: self.share(value) for name, value in recipe.kwargs.items()}
        env = spec.group_env(master_address=self._specs[0].node.address, master_port=self._master_port)
        env[DEBUG_HOST] = spec.node.address
        return self._hosts[spec.rank].start.remote(env, target, *args, **kwargs)

    def tolerate(self, ranks: Collection[int]) -> None:
        self._tolerated = frozenset(ranks)

    def replace(self, rank: int, *, timeout_s: float) -> WorkerSpec:
        spec = self._specs[rank]
        self._supervisor.remove(rank)
        with self._changing:
            if self._end is not None:
                raise self._end
            ray.kill(self._hosts[rank])
            host = self._hosts[rank] = self._create(spec)
        self._calls[rank] = host.call
        self._rank_of[host._actor_id.hex()] = rank
        self._lost.pop(rank, None)
        wait = Wait(timeout_s, first_s=30, every_s=300)
        (pid,) = self.gather([host.find_pid.remote()], wait=wait)
        node_id = self._actor(rank)["Address"]["NodeID"]
        if node_id != spec.node.node_id:  # another node has taken over the rank
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            node = replace(spec.node, node_id=node_id, address=addresses[node_id])
            spec = self._specs[rank] = replace(spec, node=node)
        self.pids = [*self.pids[:rank], pid, *self.pids[rank + 1 :]]
        self._supervisor.add(spec, pid=pid)
        self.gather([self._start(spec)], wait=wait)
        return spec

    def _lose(self, losses: Mapping[int, str]) -> None:
        """The watch has seen these losses; called in its thread."""
        self._lost.update(losses)
        self._supervisor.lose(losses)
        fatal = [rank for rank in losses if rank not in self._tolerated]
        if fatal and self._end is None:
            self._end = self._died(fatal)

    def _died(self, ranks: Sequence[int]) -> WorkerDiedError:
        specs = [self._specs[rank] for rank in ranks]
        others = f"\nAlso lost: {listed(specs[1:])}" if len(specs) > 1 else ""
        return died(specs, f"{self._lost[ranks[0]]}{self._waits()}{others}")

    def _waits(self) -> str:
        """What is waited for in any thread, as the end of a sentence."""
        found: dict[str, list[WorkerSpec]] = {}
        for future in [one for futures in list(self._waited_for.values()) for one in futures]:
            spec = self._spec_of(future)
            if spec is None or (spec.rank not in self._lost and self._is_done(future)):
                continue
            task = future.task_id().hex()
            if what := next((words for number, words in list(self._asked[spec.rank]) if number == task), ""):
                found.setdefault(what, []).append(spec)
        words = waits_words(found)
        return f"; {words}" if words else ""

    @staticmethod
    def _is_done(future: Any) -> bool:
        return bool(ray.wait([future], timeout=0, fetch_local=False)[0])

    @contextmanager
    def _waiting_for(self, futures: Sequence[Any]) -> Iterator[None]:
        thread = threading.get_ident()
        self._waited_for[thread] = futures
        try:
            yield
        finally:
            self._waited_for.pop(thread, None)

    def _check(self, futures: Sequence[Any]) -> None:
        """Raise if the crew cannot go on, or a worker that owes one of these results is lost."""
        if self._end is not None:
            raise self._end
        if owed := self._owed_by_lost(futures):
            if lost := self._missing(owed):
                raise self._died([spec.rank for spec in lost])

    def share(self, value: Any) -> Any:
        return ray.put(value) if is_large(value) else value

    def call(self, rank: int, method: str, drop: Drop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        future = self._calls[rank].remote(method, drop, *args, **kwargs)
        purpose = self._recipe.purposes.get(method, f"to return from {method}").format(*args)
        self._asked[rank].append((future.task_id().hex(), purpose))
        return future

    def ready(self, futures: Sequence[Any], *, timeout_s: float) -> list[Any]:
        if self._end is not None:
            raise self._end
        futures = list(futures)
        lost = self._owed_by_lost(futures)
        first, _ = ray.wait(futures, timeout=0 if lost else timeout_s, fetch_local=False)
        done = ray.wait(futures, num_returns=len(futures), timeout=0, fetch_local=False)[0] if first else []
        return [*done, *(future for future in lost if future not in done)]

    def _owed_by_lost(self, futures: Sequence[Any]) -> list[Any]:
        if not self._lost:
            return []
        return [one for one in futures if (spec := self._spec_of(one)) is not None and spec.rank in self._lost]

    def gather(self, futures: Sequence[Any], *, wait: Wait) -> list[Any]:
        futures = list(futures)
        with self._waiting_for(futures):
            return self._gather(futures, wait=wait)

    def _gather(self, futures: list[Any], *, wait: Wait) -> list[Any]:
        while True:
            self._check(futures)
            began_s = time.monotonic()
            try:
                return ray.get(futures, timeout=min(wait.until_word_s, TURN_S))
            except RayTaskError as error:  # first: Ray lets it also be an instance of what the worker raised
                self._explain(futures, error)
            except GetTimeoutError:
                if BOARD.is_held:
                    wait.excuse(time.monotonic() - began_s)
                if not wait.is_word_due and not wait.is_over:
                    continue
                missing = self._missing(futures)
                if missing and wait.is_over:
                    raise unanswered(missing, total=len(futures), timeout_s=wait.timeout_s) from None
                if missing:
                    wait.tell(f"waiting for {listed(missing)}")
            except RayError as error:
                self._explain(futures, error)

    def _missing(self, futures: list[Any]) -> list[WorkerSpec]:
        _, pending = ray.wait(futures, num_returns=len(futures), timeout=0, fetch_local=False)
        return [spec for spec in map(self._spec_of, pending) if spec is not None]

    def _spec_of(self, future: Any) -> WorkerSpec | None:
        """The worker that owes this result; None: it belongs to another group."""
        rank = self._rank_of.get(future.task_id().actor_id().hex())
        return None if rank is None else self._specs[rank]

    def _explain(self, futures: list[Any], error: Exception) -> NoReturn:
        """Raise what the failed call means: a dead worker comes before those that failed because of its death."""
        ready, _ = ray.wait(futures, num_returns=len(futures), timeout=STUMBLE_S, fetch_local=False)
        failed: list[tuple[WorkerSpec, Exception]] = []
        for future in ready:
            spec = self._spec_of(future)
            try:
                ray.get(future, timeout=10)
            except RayError as found:
                if spec is not None:
                    failed.append((spec, found))
        if not failed:
            raise error
        dead = [(spec, found) for spec, found in failed if isinstance(found, RayActorError)]
        dead += [(spec, found) for spec, found in failed if (spec, found) not in dead and not self.is_alive(spec.rank)]
        spec, found = (dead or failed)[0]
        others = [other for other, _ in failed if other is not spec]
        also = f"\nAlso failed: {listed(others)}" if others else ""
        if dead:
            # Ray knows that it ended, the watch knows why.
            why = self._lost.get(spec.rank) or _death(found)
            self._supervisor.lose({each.rank: why for each, _ in dead})
            raise died([spec, *others], f"{why}{self._waits()}{also}") from found
        named = whom([spec, *others])
        cause = getattr(found, "cause", None)  # of what the worker's own code raised
        if isinstance(cause, RemoteFailureError):
            if is_about_a_peer(cause.original, cause.text):
                self._blame(futures, f"{spec.where} raised\n{cause}{also}")
                raise PeerLostError(f"{spec.where} lost its peer:\n{cause}{also}", **named) from cause.original
            raise WorkerError(f"{spec.where} raised\n{cause}{also}", **named) from cause.original
        raise WorkerError(f"{spec.where} gave no result: {found}{also}", **named) from found

    def _blame(self, futures: Sequence[Any], complaint: str) -> None:
        """Raise for a dead worker among those that were called, once its death is known; return if none is dead."""
        ranks = sorted({spec.rank for spec in map(self._spec_of, futures) if spec is not None})
        deadline = time.monotonic() + PEER_S
        while time.monotonic() < deadline:
            self._check(futures)
            if dead := [rank for rank in ranks if rank in self._lost or not self.is_alive(rank)]:
                spec = self._specs[dead[0]]
                why = self._lost.get(spec.rank) or "its process is gone"
                raise died([self._specs[rank] for rank in dead], f"{why}{self._waits()}\n{complaint}")
            time.sleep(LOOK_S)

    def is_alive(self, rank: int) -> bool:
        return rank not in self._lost and self._actor(rank).get("State") == "ALIVE"

    def _actor(self, rank: int) -> dict[str, Any]:
        return ray_state.actors(self._hosts[rank]._actor_id.hex())

    def sightings(self, *, last: bool = False) -> Sightings:
        return self._supervisor.sightings(self.pids, last=last)

    def stop(self, *, timeout_s: float) -> None:
        """End the workers on all nodes at once; lost nodes are not waited for."""
        lost = {self._specs[rank].node.node_id for rank in self._lost if rank not in self._supervisor.answering}
        with self._changing:  # no worker is added from now on
            named = whom(self._specs)
            self._end = self._end or WorkerDiedError(f"{self._specs[0].role} has been shut down", **named)
            for host in self._hosts:
                ray.kill(host)
        self._supervisor.stop()
        used = {spec.node.node_id: spec.node for spec in self._specs if spec.node.node_id not in lost}
        ends = {
            node_id: _end.options(**pinned(node_id)).remote(self._mark, timeout_s)
            for node_id in used
            if node_id in _alive_nodes()
        }
        problems = []
        for node_id, left in _answers(ends, timeout_s=timeout_s).items():
            where = f"node {used[node_id].node_rank} ({used[node_id].address})"
            if left is None:
                problems.append(f"{where} has not said within {timeout_s:g} s that they ended")
            elif left:
                problems.append(f"{where} still has processes {left}")
        if problems:
            raise ClusterError(f"the processes of {self._specs[0].role} cannot be ended: {'; '.join(problems)}")


@ray.remote
def _end(mark: str, timeout_s: float) -> list[int]:
    return end_group(mark, timeout_s=timeout_s)


def _alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _answers(ends: Mapping[str, Any], *, timeout_s: float) -> dict[str, list[int] | None]:
    """What each node still runs; None: it does not answer. Nodes that leave in the meantime are left out, with their processes."""
    deadline, left = time.monotonic() + timeout_s, dict(ends)
    found: dict[str, list[int] | None] = {}
    while left and time.monotonic() < deadline:
        ready, _ = ray.wait(list(left.values()), timeout=TURN_S)
        for node_id in [node_id for node_id, end in left.items() if end in ready]:
            try:
                found[node_id] = ray.get(left.pop(node_id))
            except RayError:
                continue
        if not ready:
            alive = _alive_nodes()
            left = {node_id: end for node_id, end in left.items() if node_id in alive}
    return found | dict.fromkeys(left)


def _death(error: Exception) -> str:
    """Ray's reason, without its field list and its general advice."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return lines[-1].partition(" Some common causes include")[0].removesuffix(".") if lines else type(error).__name__
