"""Slots and workers in this process: for a debugger, for tests, for one accelerator without Ray.

Every worker is a plain object. A call runs at once in the caller's thread, rank after rank, in that worker's environment. So
workers that wait for each other (collectives) need Ray. All workers see the accelerators of the process: CUDA reads only
once which ones are visible.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollcall.debug.here import post_mortem
from rollcall.errors import WorkerDiedError
from rollcall.groups.backend import Ask, NodeSeats, Recipe, Reservation, WorkerSpec, whom
from rollcall.groups.dispatch import Drop, trim
from rollcall.groups.failures import failure_of
from rollcall.groups.host import call_method, lease_port, load_class
from rollcall.groups.pulse import DoneCall
from rollcall.groups.sightings import Lookout, Sightings
from rollcall.wait import Wait
from rollcall.worker_env.declared import environment

ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A call that has run."""

    spec: WorkerSpec
    result: Any
    error: Exception | None


class InProcessBackend:
    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation:
        ranks = ask.node_ranks or tuple(range(len(ask.slots_per_node)))
        nodes = [
            NodeSeats(node_rank=rank, node_id=f"in-process-{rank}", address=ADDRESS, bundles=tuple(range(count)))
            for rank, count in sorted(zip(ranks, ask.slots_per_node, strict=True))
            if count
        ]
        return Reservation(nodes=nodes, crew=InProcessCrew)


class InProcessCrew:
    def __init__(self, specs: Sequence[WorkerSpec], recipe: Recipe) -> None:
        self._lease = lease_port()
        self._loop = asyncio.new_event_loop()
        self.pids: Sequence[int] = [os.getpid()] * len(specs)
        self._specs = list(specs)
        self._workers: list[Any] = []
        self._recipe = recipe
        self._lookout = Lookout()

    def start(self, *, timeout_s: float) -> None:
        self._workers = self.gather([self._make(spec) for spec in self._specs], wait=Wait(timeout_s))

    def share(self, value: Any) -> Any:
        return value

    def call(self, rank: int, method: str, drop: Drop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Done:
        spec = self._specs[rank]
        if not self.is_alive(rank):
            return Done(spec=spec, result=None, error=WorkerDiedError("shut down", **whom([spec])))
        worker, began_s = self._workers[rank], time.time()
        done = self._run(spec, lambda: trim(call_method(worker, method, args, kwargs, loop=self._loop), drop))
        self._lookout.add(rank, DoneCall(method, began_s, time.time()))
        return done

    def _make(self, spec: WorkerSpec) -> Done:
        recipe = self._recipe
        return self._run(spec, lambda: load_class(recipe.target)(*recipe.args, **recipe.kwargs))

    def _run(self, spec: WorkerSpec, function: Any) -> Done:
        env = spec.group_env(master_address=ADDRESS, master_port=self._lease.getsockname()[1])
        with environment({**spec.env, **env}):
            try:
                return Done(spec=spec, result=function(), error=None)
            except Exception as error:
                post_mortem(error)
                return Done(spec=spec, result=None, error=error)

    def gather(self, futures: Sequence[Done], *, wait: Wait) -> list[Any]:
        if failed := [(done.spec, done.error) for done in futures if done.error is not None]:
            raise failure_of(failed)
        return [done.result for done in futures]

    def ready(self, futures: Sequence[Done], *, timeout_s: float) -> list[Done]:
        return list(futures)

    def is_alive(self, rank: int) -> bool:
        return rank < len(self._workers)

    def tolerate(self, ranks: Collection[int]) -> None:
        return None  # they live and die together

    def replace(self, rank: int, *, timeout_s: float) -> WorkerSpec:
        (self._workers[rank],) = self.gather([self._make(self._specs[rank])], wait=Wait(timeout_s))
        return self._specs[rank]

    def sightings(self, *, last: bool = False) -> Sightings:
        return self._lookout.take(self.pids[: len(self._workers)])

    def stop(self, *, timeout_s: float) -> None:
        self._workers = []
        self._loop.close()
        self._lease.close()
