"""Slots whose processes are forked on this machine: a run of several actors without Ray. Each node has a temporary folder."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any

from commands import fork_context

from rollcall.base.wait import Wait
from rollcall.process.groups.backend import Ask, Call, Carrier, Member, NodeSeats, Recipe, Reservation, WorkerSpec
from rollcall.process.groups.dispatch import trim
from rollcall.process.groups.host import RemoteFailureError, call_method, load_class

ADDRESS = "127.0.0.1"


class ForkedBackend:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.carriers: list[Forked] = []

    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation:
        ranks = ask.node_ranks or tuple(range(len(ask.slots_per_node)))
        nodes = [
            NodeSeats(node_rank=rank, node_id=f"forked-{rank}", address=ADDRESS, bundles=tuple(range(count)))
            for rank, count in sorted(zip(ranks, ask.slots_per_node, strict=True))
        ]
        return Reservation(nodes=nodes, carrier=self._carrier)

    def _carrier(self, recipe: Recipe) -> Forked:
        self.carriers.append(Forked(self.folder))
        return self.carriers[-1]


class Forked(Carrier):
    peer_s = 2.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[Any] = []

    def launch(self, spec: WorkerSpec, *, lost: Member | None, wait: Wait) -> Member:
        assert lost is None, "no test asks for it"
        context = fork_context()
        ours, theirs = context.Pipe()
        tmp = self._folder / f"node-{spec.node.node_rank}"
        tmp.mkdir(parents=True, exist_ok=True)
        process = context.Process(target=_work, args=(theirs, str(tmp)), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        member = Member(spec)
        member.link = _Seat(process, ours, lost=lambda: self.lose({member: "its process has ended"}))
        return member

    def send(self, call: Call, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        call.link = call.member.link.ask((method, tuple(args), dict(kwargs)))

    def settle(self, calls: Sequence[Call], *, timeout_s: float, through_failures: bool = False) -> None:
        done = wait([call.link for call in calls], timeout=timeout_s, return_when=FIRST_EXCEPTION).done
        for call in calls:
            if call.link in done and not call.is_done:
                error = call.link.exception()
                call.finish(None if error else call.link.result(), error=error)

    def answered(self, calls: Sequence[Call], *, timeout_s: float) -> Collection[Call]:
        done = wait([call.link for call in calls], timeout=timeout_s, return_when=FIRST_COMPLETED).done
        return [call for call in calls if call.link in done]

    def is_alive(self, member: Member) -> bool:
        return member.link.process.is_alive()

    def stop(self, members: Sequence[Member], *, timeout_s: float) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class _Seat:
    """One process: it does one call after the other."""

    def __init__(self, process: Any, pipe: Any, *, lost: Any) -> None:
        self.process, self._pipe, self._lost = process, pipe, lost
        self._asked: list[Future[Any]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, message: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._asked.append(future)
            try:
                self._pipe.send(message)
            except OSError:
                future.set_exception(EOFError("its process has ended"))
        return future

    def _listen(self) -> None:
        while True:
            try:
                failure, result = self._pipe.recv()
            except (EOFError, OSError):
                self._lost()
                with self._lock:
                    for future in self._asked:
                        if not future.done():
                            future.set_exception(EOFError("its process has ended"))
                return
            with self._lock:
                future = self._asked.pop(0)
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)


def _work(pipe: Any, tmp: str) -> None:
    import tempfile

    os.environ["TMPDIR"] = tmp
    tempfile.tempdir = None  # it is read again
    loop = asyncio.new_event_loop()
    worker: Any = None
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            if method == "greet":
                result = os.getpid(), 0
            elif method == "start":
                env, target, *given = args
                os.environ.update({**env, "TMPDIR": tmp})
                worker, result = load_class(target)(*given, **kwargs), None
            else:
                name, drop, *given = args
                result = trim(call_method(worker, name, given, kwargs, loop=loop), drop)
            pipe.send((None, result))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            pipe.send((RemoteFailureError.of(error), None))
