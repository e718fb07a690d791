"""Environments on another node than the controller: a process there lets the controller in, and plays with its own processes.

    HostedEnvironments (hosted.py, the controller) --a connection for each episode--> EnvironmentHost --> ProcessEnvironments --> children
                                                                                                     `--> ProgramsHere --> programs

A connection is one episode, and to the controller a ``Worker``. An environment is called as a child is (child.py), after ``start``; a
program is called with ``run``, which says every ``BEAT_S`` that it goes on. One such call is under way at a time. ``stop`` and ``close`` may
come meanwhile, and end it. A connection that breaks off ends what runs for it: the controller is gone, or has given up on it. Who wants
in must know the secret of the run (net/door.py), and can start nothing but what this host was made for.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollcall.environments.processes import ProcessEnvironments
from rollcall.environments.program import ProgramsHere
from rollcall.environments.protocol import Ended, Environment, EnvironmentFailed
from rollcall.environments.results import Answer, Left, Opened, Worth, answer_bytes
from rollcall.net.door import Door, listen_at, watch_peer
from rollcall.process.framing import DONE, HEAD, JSON, LENGTH, PART, RAISED, frame
from rollcall.wait import warn

BEAT_S = 5.0
RunsHere = ProcessEnvironments | ProgramsHere


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """Where a host is, as the controller knows it."""

    name: str  # for messages
    address: str
    port: int
    secret: str = field(repr=False)
    num_cpus: int
    tools: dict[str, list[dict[str, Any]]]  # of each kind


class EnvironmentHost:
    """Serves in a thread of its own until the process ends."""

    def __init__(self, here: RunsHere) -> None:
        self._here = here
        self._loop = asyncio.new_event_loop()
        self._serving: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def listen(self, address: str, *, name: str, secret: str) -> HostPlace:
        listener = listen_at(address)
        port = listener.getsockname()[1]
        self._door = Door(listener, secret=secret)
        threading.Thread(target=self._run, name="environment host", daemon=True).start()
        return HostPlace(
            name=name,
            address=address,
            port=port,
            secret=secret,
            num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            tools=self._here.tools,
        )

    def close(self) -> None:
        """End what runs here. A second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._door.fileno(), self._let_in)
        self._loop.run_forever()

    async def _end(self) -> None:
        self._loop.remove_reader(self._door.fileno())
        self._door.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._here.aclose()

    def _let_in(self) -> None:
        connection = self._door.accept(0)
        if connection is None:
            return
        task = self._loop.create_task(self._serve(connection))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        watch_peer(connection)
        reader, writer = await asyncio.open_connection(sock=connection)
        episode = _Episode(self._here, writer)
        broken = True
        try:
            broken = await episode.serve(reader)
        except (OSError, EOFError):
            pass  # the controller is gone, or its node
        finally:
            writer.close()
            await episode.end(broken=broken)


class _Episode:
    """What a connection has started."""

    def __init__(self, here: RunsHere, writer: asyncio.StreamWriter) -> None:
        self._here = here
        self._writer = writer
        self._environment: Environment | None = None
        self._stop = asyncio.Event()  # of its program
        self._work: asyncio.Task[None] | None = None

    async def serve(self, reader: asyncio.StreamReader) -> bool:
        """Until it is closed. Whether it is broken."""
        while True:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            message = await reader.readexactly(size)
            number, _ = HEAD.unpack_from(message)
            method, args = json.loads(message[HEAD.size :])
            if method in ("close", "stop"):
                await self._say(number, DONE, answer_bytes(None))
                if method == "close":
                    return bool(args[0])
                self._stop.set()
                continue
            assert self._work is None or self._work.done(), "the controller asks one thing at a time"
            self._work = asyncio.create_task(self._answer(number, method, args))

    async def end(self, *, broken: bool) -> None:
        is_asked = self._work is not None and not self._work.done()
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        if self._environment is not None:
            await self._environment.close(broken=broken or is_asked)

    async def _answer(self, number: int, method: str, args: list[Any]) -> None:
        try:
            kind, body = DONE, answer_bytes(await self._do(number, method, args))
        except EnvironmentFailed as error:
            kind, body = RAISED, JSON.dumps(["EnvironmentFailed", str(error), ""])
        except Exception as error:  # noqa: BLE001 - a host that says nothing would count as lost, with all that it plays
            warn(f"{method} failed on this host: {''.join(traceback.format_exception(error)).strip()}")
            kind, body = RAISED, JSON.dumps(["", f"its host failed: {type(error).__name__}: {error}", ""])
        await self._say(number, kind, body)

    async def _say(self, number: int, kind: int, body: bytes) -> None:
        with suppress(OSError):  # the controller is gone, which the next read says too
            self._writer.write(frame(HEAD.pack(number, kind) + body))
            await self._writer.drain()

    async def _do(self, number: int, method: str, args: list[Any]) -> Answer:
        if isinstance(self._here, ProgramsHere):
            assert method == "run", f"the controller asked a program for {method!r}"
            return await self._run(number, self._here, *args)
        if method == "start":
            self._environment = await self._here.start(*args)
            return None
        environment = self._environment
        assert environment is not None, "start comes first"
        match method:
            case "reset":
                return Opened((await environment.reset(*args)).text)
            case "step":
                return await environment.step(*args)
            case "reward":
                return Worth(await environment.reward())
            case "attributes":
                return Left(await environment.attributes())
            case other:
                raise AssertionError(f"the controller asked for {other!r}")

    async def _run(self, number: int, programs: ProgramsHere, variables: Mapping[str, str]) -> Ended:
        running = asyncio.create_task(programs.run(variables, stop=self._stop))
        try:
            while not (await asyncio.wait({running}, timeout=BEAT_S))[0]:
                await self._say(number, PART, answer_bytes(None))
            return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
