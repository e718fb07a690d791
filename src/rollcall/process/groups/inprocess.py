"""Slots and workers in this process, for debugging, for tests, and for one accelerator without Ray.

Every worker is a plain object. A call runs at once in the caller's thread, rank after rank, in that worker's environment. So
workers that wait for each other (collectives) need Ray. All workers see the same accelerators, because CUDA reads
the list of visible accelerators only once per process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollcall.base.wait import Wait
from rollcall.nodes.declared import environment
from rollcall.process.debug.here import post_mortem
from rollcall.process.groups.backend import Ask, Call, Carrier, Member, NodeSeats, Reservation, WorkerSpec
from rollcall.process.groups.dispatch import Drop, trim
from rollcall.process.groups.host import RemoteFailureError, call_method, lease_port, load_class
from rollcall.process.groups.pulse import RecordedCall


class InProcessBackend:
    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation:
        ranks = ask.node_ranks or tuple(range(len(ask.slots_per_node)))
        nodes = [
            NodeSeats(node_rank=rank, node_id=f"in-process-{rank}", address="127.0.0.1", bundles=tuple(range(count)))
            for rank, count in sorted(zip(ranks, ask.slots_per_node, strict=True))
            if count
        ]
        return Reservation(nodes=nodes, carrier=lambda recipe: InProcess())


class InProcess(Carrier):
    def __init__(self) -> None:
        self._lease = lease_port()
        self._loop = asyncio.new_event_loop()

    def launch(self, spec: WorkerSpec, *, lost: Member | None, wait: Wait) -> Member:
        return Member(spec, link=_Worker(self._loop, port=self._lease.getsockname()[1]))

    def send(self, call: Call, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        worker, began_s = call.member.link, time.time()
        try:
            call.finish(getattr(worker, method)(*args, **kwargs))
        except Exception as error:
            post_mortem(error)
            call.finish(error=RemoteFailureError.of(error))
        if method == "call":
            self.lookout.add(call.member.spec.rank, RecordedCall(args[0], began_s, time.time()))

    def is_alive(self, member: Member) -> bool:
        return not self._loop.is_closed()

    def stop(self, members: Sequence[Member], *, timeout_s: float) -> None:
        for member in members:
            member.link = None
        self._loop.close()
        self._lease.close()


class _Worker:
    """Does the same as ``host.Host``, but sets its environment only during a call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, port: int) -> None:
        self._loop = loop
        self._port = port

    def greet(self, leads: bool) -> tuple[int, int]:
        return os.getpid(), self._port

    def start(self, env: Mapping[str, str], target: str | type, /, *args: Any, **kwargs: Any) -> None:
        self._env = env
        with environment(env):
            self._worker = load_class(target)(*args, **kwargs)

    def call(self, method: str, drop: Drop, /, *args: Any, **kwargs: Any) -> Any:
        with environment(self._env):
            return trim(call_method(self._worker, method, args, kwargs, loop=self._loop), drop)
