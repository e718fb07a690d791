"""Slots whose processes are forked on this machine: a run of several actors without Ray. Each node has a temporary folder."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from commands import fork_context

from rollcall.errors import WorkerDiedError, WorkerError
from rollcall.groups.backend import Ask, NodeSeats, Recipe, Reservation, WorkerSpec, whom
from rollcall.groups.dispatch import Drop, trim
from rollcall.groups.failures import RemoteFailureError, failure_of, is_about_a_peer
from rollcall.groups.host import call_method, load_class
from rollcall.groups.sightings import Sightings
from rollcall.wait import Wait

ADDRESS = "127.0.0.1"
LAST_BREATH_S = 2.0


class ForkedBackend:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.crews: list[ForkedCrew] = []

    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation:
        ranks = ask.node_ranks or tuple(range(len(ask.slots_per_node)))
        nodes = [
            NodeSeats(node_rank=rank, node_id=f"forked-{rank}", address=ADDRESS, bundles=tuple(range(count)))
            for rank, count in sorted(zip(ranks, ask.slots_per_node, strict=True))
        ]
        return Reservation(nodes=nodes, crew=self._crew)

    def _crew(self, specs: Sequence[WorkerSpec], recipe: Recipe) -> ForkedCrew:
        self.crews.append(ForkedCrew(specs, recipe, folder=self.folder))
        return self.crews[-1]


class ForkedCrew:
    def __init__(self, specs: Sequence[WorkerSpec], recipe: Recipe, *, folder: Path) -> None:
        self._specs, self._recipe, self._folder = list(specs), recipe, folder
        self.processes: list[Any] = []
        self._seats: list[_Seat] = []
        self.pids: Sequence[int] = []

    def start(self, *, timeout_s: float) -> None:
        context = fork_context()
        for spec in self._specs:
            here, there = context.Pipe()
            tmp = self._folder / f"node-{spec.node.node_rank}"
            tmp.mkdir(parents=True, exist_ok=True)
            env = {**spec.group_env(master_address=ADDRESS, master_port=0), **spec.env, "TMPDIR": str(tmp)}
            process = context.Process(target=_work, args=(there, env), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._seats.append(_Seat(spec, here))
        self.pids = [process.pid for process in self.processes]
        recipe = self._recipe
        self.gather(
            [seat.ask("start", None, (recipe.target, recipe.args, dict(recipe.kwargs)), {}) for seat in self._seats],
            wait=Wait(timeout_s),
        )

    def share(self, value: Any) -> Any:
        return value

    def call(self, rank: int, method: str, drop: Drop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        return self._seats[rank].ask(method, drop, tuple(args), dict(kwargs))

    def gather(self, futures: Sequence[Future[Any]], *, wait: Wait) -> list[Any]:
        """As on a cluster the loss of any process ends every wait."""
        while not all(future.done() for future in futures):
            self._raise_lost()
            for future in self.ready(futures, timeout_s=0.05):
                try:
                    future.result()  # a failure ends the wait for the others
                except WorkerError as error:
                    self._raise_lost(after=error)
                    raise
            time.sleep(0.005)
        return [future.result() for future in futures]

    def _raise_lost(self, *, after: WorkerError | None = None) -> None:
        """A process that is dead is the reason; ``after`` a failure that is about another process, one may still be dying."""
        give_up = time.monotonic() + (
            LAST_BREATH_S if after is not None and is_about_a_peer(after, str(after)) else 0.0
        )
        while True:
            pairs = zip(self._seats, self.processes, strict=True)
            if lost := next((seat.spec for seat, one in pairs if not one.is_alive()), None):
                raise WorkerDiedError(f"{lost.where} is dead", **whom([lost])) from after
            if time.monotonic() >= give_up:
                return
            time.sleep(0.01)

    def ready(self, futures: Sequence[Future[Any]], *, timeout_s: float) -> list[Any]:
        return list(wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED).done)

    def is_alive(self, rank: int) -> bool:
        return self.processes[rank].is_alive()

    def tolerate(self, ranks: Collection[int]) -> None:
        return None

    def replace(self, rank: int, *, timeout_s: float) -> WorkerSpec:
        raise AssertionError("no test asks for it")

    def sightings(self, *, last: bool = False) -> Sightings:
        return Sightings()  # its processes are not looked at

    def stop(self, *, timeout_s: float) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class _Seat:
    """One process: it does one call after the other."""

    def __init__(self, spec: WorkerSpec, pipe: Any) -> None:
        self.spec, self._pipe = spec, pipe
        self._asked: list[Future[Any]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, method: str, drop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._asked.append(future)
            try:
                self._pipe.send((method, drop, args, kwargs))
            except OSError:
                future.set_exception(self._died())
        return future

    def _listen(self) -> None:
        while True:
            try:
                failure, result = self._pipe.recv()
            except (EOFError, OSError):
                with self._lock:
                    for future in self._asked:
                        if not future.done():
                            future.set_exception(self._died())
                return
            with self._lock:
                future = self._asked.pop(0)
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure_of([(self.spec, failure)]))

    def _died(self) -> WorkerDiedError:
        return WorkerDiedError(f"{self.spec.where} is dead", **whom([self.spec]))


def _work(pipe: Any, env: Mapping[str, str]) -> None:
    import tempfile

    os.environ.update(env)
    tempfile.tempdir = None  # it is read again
    loop = asyncio.new_event_loop()
    worker: Any = None
    while True:
        try:
            method, drop, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            if method == "start":
                target, given, named = args
                worker, result = load_class(target)(*given, **named), None
            else:
                result = trim(call_method(worker, method, args, kwargs, loop=loop), drop)
            pipe.send((None, result))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            pipe.send((RemoteFailureError.of(error), None))
