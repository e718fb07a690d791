"""The controller's side of environments and programs that the placement assigns to other nodes. The hosts' side is in host.py.

An episode goes to the host with the fewest episodes per CPU and has its own connection. A host is lost when a connection to it breaks,
cannot be opened within ``CONNECT_S``, or is silent for ``SILENT_S`` during a call or for ``ANSWER_S`` while an episode is being
closed. The kernel detects a dead node within ``nodes.door.SILENT_S``. A lost host is not the fault of its episodes:
``EnvironmentLost`` makes them restart on a different host. ``renew`` creates a new host in a thread. If no host is left, the run waits
for one.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollcall.base.errors import WorkerLostError
from rollcall.base.wait import say, warn
from rollcall.environments.host import HostPlace
from rollcall.environments.processes import ANSWERS, kind_of
from rollcall.environments.protocol import Ended, Environment, EnvironmentFailed, EnvironmentLost
from rollcall.environments.zygote import MAX_ANSWER_BYTES
from rollcall.nodes.door import enter
from rollcall.nodes.framing import JSON
from rollcall.process.worker import Ending, Link, Lost, Raised, Worker, reader

CONNECT_S = 20.0
ANSWER_S = 15.0
SILENT_S = 60.0  # during a call, a host sends a sign of life every BEAT_S (answering.py)
_NOTHING = reader(None)
_ANSWERS = {**ANSWERS, "run": reader(Ended | None), "start": _NOTHING, "stop": _NOTHING, "close": _NOTHING}


class _Host:
    """A host and its running episodes. ``place`` is None while the host is lost."""

    def __init__(self, place: HostPlace) -> None:
        self.place: HostPlace | None = place
        self.playing: set[_Hosted] = set()


class HostedEnvironments:
    """Implements ``protocol.Environments`` and ``protocol.Programs`` for one event loop. ``renew`` runs in a thread and
    replaces a lost host, or raises if it cannot. If no host is left, an episode waits up to ``wait_s`` for one."""

    def __init__(self, places: Sequence[HostPlace], *, renew: Callable[[int], HostPlace], wait_s: float) -> None:
        self._tools = places[0].tools
        self._hosts = [_Host(place) for place in places]
        self._renew = renew
        self._wait_s = wait_s
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._is_closed = False

    def tools_of(self, kind: str) -> tuple[dict[str, Any], ...]:
        return tuple(self._tools[kind_of(kind, self._tools)])

    async def find_host(self) -> _Hosted:
        while True:
            host = await self._choose()
            assert host.place is not None
            found = _Hosted(self, host, host.place)
            host.playing.add(found)
            try:
                await found.connect()
            except BaseException as error:
                host.playing.discard(found)
                if not isinstance(error, OSError):  # a timeout is an OSError too
                    raise
                self.lose(host, found.place, f"it cannot be reached: {str(error) or 'no answer in time'}")
            else:
                if host.place is found.place:
                    return found
                await found.close(broken=True)  # the host was lost in the meantime

    def ends(self) -> None:
        self._is_closed = True

    async def aclose(self) -> None:
        self.ends()
        for host in self._hosts:
            for playing in list(host.playing):
                playing.abort()

    async def _choose(self) -> _Host:
        """Return the least busy host. Wait while all hosts are lost."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                raise EnvironmentFailed("environments are closed: the run has ended")
            if num_cpus := {host: host.place.num_cpus for host in self._hosts if host.place is not None}:
                return min(num_cpus, key=lambda host: len(host.playing) / num_cpus[host])
            self._changed.clear()
            try:
                async with asyncio.timeout(self._wait_s):  # in Python 3.11, wait_for may swallow a cancellation
                    await self._changed.wait()
            except TimeoutError:
                why = f"no node for environments is left, and none came back within {self._wait_s:g} s"
                raise WorkerLostError(why, role="environment", ranks=range(len(self._hosts)), node_ranks=[]) from None

    def lose(self, host: _Host, place: HostPlace, why: str) -> None:
        if host.place is not place or self._is_closed:
            return  # already known
        host.place = None
        warn(f"{place.name} is lost; its episodes restart on another host: {why}")
        for playing in list(host.playing):
            playing.abort()
        loop = asyncio.get_running_loop()

        def replace() -> None:
            found: HostPlace | Exception
            try:
                found = self._renew(self._hosts.index(host))
            except Exception as error:  # noqa: BLE001 - any error is raised again when an episode looks for a host
                found = error
            with suppress(RuntimeError):  # the loop has ended, and so has the run
                loop.call_soon_threadsafe(self._take, host, place.name, found)

        threading.Thread(target=replace, name=f"replacing {place.name}", daemon=True).start()

    def _take(self, host: _Host, name: str, found: HostPlace | Exception) -> None:
        if isinstance(found, Exception):
            self._failure = found
        else:
            host.place = found
            say(f"{name} has been replaced and is playing episodes again")
        self._changed.set()


class _Connection(Link):
    """A link to a host."""

    pid = 0

    def __init__(self, connection: socket.socket, *, where: str) -> None:
        super().__init__(connection)
        self.where = where

    def end(self, *, grace_s: float, ask_stack: bool = False) -> Ending:
        self.connection.close()
        return Ending(how="the connection broke off", status=None)


class _Hosted(Environment):
    """A connection to a host, and the environment or program at the other end of it. Implements ``protocol.Host``,
    ``protocol.Environment`` and ``protocol.ProgramHost``."""

    def __init__(self, owner: HostedEnvironments, host: _Host, place: HostPlace) -> None:
        self.host, self.place = host, place
        self._owner = owner
        self._worker: Worker
        self._is_lost = False

    async def connect(self) -> None:
        link = _Connection(await _connect(self.place), where=self.place.name)
        self._worker = Worker(link, name=self.place.name, hears=JSON, answers=_ANSWERS, longest=MAX_ANSWER_BYTES + 1024)

    async def start(self, kind: str) -> Environment:
        try:
            await self.call("start", kind)
        except BaseException:
            await self.close(broken=True)
            raise
        return self

    async def run(self, variables: Mapping[str, str], *, stop: asyncio.Event) -> Ended:
        """Run the program. Raise ``EnvironmentLost`` if its host is gone, because then the program is not to blame."""

        async def tell() -> None:
            await stop.wait()
            with suppress(Lost):  # then the call to `run` fails with Lost too
                await self._worker.call("stop", deadline_s=SILENT_S)

        telling = asyncio.create_task(tell())
        broken = True
        try:
            ended = await self.call("run", dict(variables))
            broken = False
            return ended
        finally:
            telling.cancel()
            with suppress(EnvironmentLost):  # the outcome of its call is already known
                await self.close(broken=broken)

    async def close(self, *, broken: bool) -> None:
        """Hang up. Raise ``EnvironmentLost`` if a call failed because the host is gone; the environment is not to blame for that."""
        self.host.playing.discard(self)
        try:
            if not self._is_lost:
                await self._worker.call("close", broken, deadline_s=ANSWER_S)
        except Lost as lost:
            if broken:  # otherwise the episode has ended normally
                raise self._lose(lost) from None
        finally:
            self._worker.close()

    def abort(self) -> None:
        """End the call that is waiting for a lost host."""
        self._is_lost = True
        if hasattr(self, "_worker"):
            self._worker.close()

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await self._worker.call(method, *args, deadline_s=SILENT_S)
        except Lost as lost:
            raise self._lose(lost) from None
        except Raised as raised:
            why = raised.message
            if raised.kind != "EnvironmentFailed":
                why = f"its host failed: {raised.kind}: {why}\n{raised.trace}"
            raise EnvironmentFailed(why) from None

    def _lose(self, lost: Lost) -> EnvironmentLost:
        self._is_lost = True
        self._owner.lose(self.host, self.place, lost.why)
        return EnvironmentLost(f"{self.place.name} is lost: it {lost.why}")


async def _connect(place: HostPlace) -> socket.socket:
    """Connect. Retry if the connection breaks, because the host may be busy or flooded with foreign connections."""
    async with asyncio.timeout(CONNECT_S):
        while True:
            try:
                return await asyncio.to_thread(
                    enter, place.address, place.port, secret=place.secret, timeout_s=CONNECT_S
                )
            except ConnectionRefusedError:  # nothing listens on this port any more
                raise
            except ConnectionError:
                await asyncio.sleep(0.2)
