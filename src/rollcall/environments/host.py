"""Environments on another node than the controller: a process there lets the controller in, and plays with its own processes.

    HostedEnvironments (hosted.py, the controller) --a connection for each episode--> EnvironmentHost --> ProcessEnvironments --> children

A connection is one episode: ``start``, then what a child is asked (child.py), then ``close``. One request is under way at a time;
``close`` may come while one is, and ends it. A connection that breaks off ends what its environment runs: the controller is gone, or
has given up on it. Who wants in must know the secret of the run (net/door.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from rollcall.environments.children import Setup
from rollcall.environments.frames import Answer, Failed, Opened, Worth, answer_bytes, receive, send
from rollcall.environments.processes import ProcessEnvironments
from rollcall.environments.protocol import Environment, EnvironmentFailed
from rollcall.net.door import Door, listen_at, watch_peer


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
    """Serves in a thread of its own until the process ends. Making it waits for the zygote, and refuses a class that cannot be used."""

    def __init__(self, setup: Setup, *, max_processes: int) -> None:
        self._environments = ProcessEnvironments(setup, max_processes=max_processes)
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
            tools=self._environments.tools,
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
        await self._environments.aclose()

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
        episode = _Episode(self._environments, writer)
        broken = True
        try:
            while (request := json.loads(await receive(reader)))["do"] != "close":
                episode.begin(request)
            broken = request["broken"]
        except (OSError, EOFError):
            pass  # the controller is gone, or its node
        finally:
            writer.close()  # which tells the controller that this host is there
            await episode.end(broken=broken)


class _Episode:
    """What a connection has started."""

    def __init__(self, environments: ProcessEnvironments, writer: asyncio.StreamWriter) -> None:
        self._environments = environments
        self._writer = writer
        self._environment: Environment | None = None
        self._work: asyncio.Task[None] | None = None

    def begin(self, request: dict[str, Any]) -> None:
        assert self._work is None or self._work.done(), "the controller asks one thing at a time"
        self._work = asyncio.create_task(self._answer(request))

    async def end(self, *, broken: bool) -> None:
        is_asked = self._work is not None and not self._work.done()
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        if self._environment is not None:
            await self._environment.close(broken=broken or is_asked)

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = await self._do(request)
        except EnvironmentFailed as error:
            answer = Failed(str(error))
        try:
            await send(self._writer, answer_bytes(answer))
        except OSError:
            pass  # the controller is gone, which the next read says too

    async def _do(self, request: dict[str, Any]) -> Answer:
        if request["do"] == "start":
            self._environment = await self._environments.start(request["kind"])
            return Opened(None)
        assert self._environment is not None, "start comes first"
        match request["do"]:
            case "reset":
                return Opened((await self._environment.reset(request["row"])).text)
            case "step":
                return await self._environment.step(request["text"], request["token_ids"])
            case "reward":
                return Worth(await self._environment.reward())
            case other:
                raise AssertionError(f"the controller asked for {other!r}")
