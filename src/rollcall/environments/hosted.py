"""Environments and programs on the nodes that the placement names, as the controller uses them (host.py is the other side).

An episode goes to the host with the fewest episodes for its CPUs, and has a connection of its own there. A host is lost when a
connection to it breaks off, cannot be made within ``CONNECT_S``, does not end within ``ANSWER_S`` of a call that was given up, or says
nothing of its program for ``SILENT_S``; the kernel finds a node that is gone within ``net.door.SILENT_S``. Episodes that a lost host was
playing are not failures of the environment: ``EnvironmentLost`` has them played again on another host. ``renew`` makes a new host in a
thread; with none left, the run waits for one.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rollcall.environments.child import MAX_ANSWER_BYTES
from rollcall.environments.episode import one_ends_within
from rollcall.environments.frames import (
    Failed,
    Left,
    Opened,
    Running,
    Worth,
    read_answer,
    receive,
    request_bytes,
    send,
)
from rollcall.environments.host import HostPlace
from rollcall.environments.processes import kind_of
from rollcall.environments.protocol import Ended, Environment, EnvironmentFailed, EnvironmentLost, Opening, StepResult
from rollcall.errors import WorkerLostError
from rollcall.net.door import CHALLENGE, answer, watch_peer
from rollcall.wait import say, warn

CONNECT_S = 20.0
AGAIN_S = 0.2
ANSWER_S = 15.0
SILENT_S = 60.0  # a host speaks of its program every BEAT_S (host.py)
_T = TypeVar("_T")
_BROKEN = (OSError, EOFError)  # a wait that is over is an OSError too


class _Host:
    """``place`` is None while it is lost."""

    def __init__(self, place: HostPlace) -> None:
        self.place: HostPlace | None = place
        self.num_cpus = place.num_cpus
        self.playing: set[_Hosted] = set()
        self.num_coming = 0

    @property
    def load(self) -> float:
        return (len(self.playing) + self.num_coming) / self.num_cpus


class HostedEnvironments:
    """Implements ``protocol.Environments`` and ``protocol.Programs``, for one event loop. ``renew`` puts a new host in the
    place of a lost one, and raises if it cannot; it runs in a thread. With no host left, an episode waits ``wait_s`` for one."""

    def __init__(
        self, places: Sequence[HostPlace], *, renew: Callable[[int], HostPlace], needs_ids: bool, wait_s: float
    ) -> None:
        self.needs_ids = needs_ids
        self._tools = places[0].tools
        self._hosts = [_Host(place) for place in places]
        self._renew = renew
        self._wait_s = wait_s
        self._failure: Exception | None = None
        self._changed: asyncio.Event | None = None
        self._is_closed = False

    def tools_of(self, kind: str) -> tuple[dict[str, Any], ...]:
        return tuple(self._tools[kind_of(kind, self._tools)])

    async def find_host(self) -> _Hosted:
        while True:
            host = await self._choose()
            place = host.place
            assert place is not None
            host.num_coming += 1
            try:
                reader, writer = await _connect_in_time(place)
            except _BROKEN as error:
                self._lose(host, place, f"it cannot be reached: {_shown(error)}")
                continue
            finally:
                host.num_coming -= 1
            if host.place is not place:  # lost meanwhile
                writer.close()
                continue
            found = _Hosted(self, host, place, reader=reader, writer=writer)
            host.playing.add(found)
            return found

    def ends(self) -> None:
        self._is_closed = True

    async def aclose(self) -> None:
        self.ends()
        for host in self._hosts:
            for playing in list(host.playing):
                playing.abort()

    async def _choose(self) -> _Host:
        """The host with the least to do; waits while all are lost."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                raise EnvironmentFailed("environments are closed: the run has ended")
            if there := [host for host in self._hosts if host.place is not None]:
                return min(there, key=lambda host: host.load)
            self._changed = self._changed or asyncio.Event()
            self._changed.clear()
            try:
                async with asyncio.timeout(self._wait_s):  # wait_for (3.11) may forget that it is cancelled
                    await self._changed.wait()
            except TimeoutError:
                raise WorkerLostError(
                    f"no node for environments is left, and none came back within {self._wait_s:g} s",
                    role="environment",
                    ranks=range(len(self._hosts)),
                    node_ranks=[],
                ) from None

    def lose(self, playing: _Hosted, why: str) -> None:
        self._lose(playing.host, playing.place, why)

    def _lose(self, host: _Host, place: HostPlace, why: str) -> None:
        if host.place is not place or self._is_closed:
            return  # known
        host.place = None
        warn(f"{place.name} is lost; its episodes are played again elsewhere: {why}")
        for playing in list(host.playing):
            playing.abort()
        loop = asyncio.get_running_loop()
        arguments = (self._hosts.index(host), place.name, loop)
        threading.Thread(target=self._replace, args=arguments, name=f"replacing {place.name}", daemon=True).start()

    def _replace(self, number: int, name: str, loop: asyncio.AbstractEventLoop) -> None:
        place: HostPlace | Exception
        try:
            place = self._renew(number)
        except Exception as error:  # noqa: BLE001 - raised where a host is looked for, whatever it is
            place = error
        try:
            loop.call_soon_threadsafe(self._take, number, name, place)
        except RuntimeError:
            pass  # the loop has ended, and with it the run

    def _take(self, number: int, name: str, place: HostPlace | Exception) -> None:
        if isinstance(place, Exception):
            self._failure = place
        else:
            host = self._hosts[number]
            host.place, host.num_cpus = place, place.num_cpus
            say(f"{name} is replaced and plays again")
        if self._changed is not None:
            self._changed.set()


class _Hosted:
    """A connection to a host, and what is behind it. Implements ``protocol.Host`` with ``protocol.Environment``, and
    ``protocol.ProgramHost``."""

    def __init__(
        self,
        owner: HostedEnvironments,
        host: _Host,
        place: HostPlace,
        *,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.host = host
        self.place = place
        self._owner = owner
        self._reader = reader
        self._writer = writer
        self._tools: tuple[dict[str, Any], ...] = ()
        self._is_lost = False
        self._is_closed = False

    async def start(self, kind: str) -> Environment:
        is_started = False
        try:
            try:
                self._tools = self._owner.tools_of(kind)
            except ValueError as error:
                raise EnvironmentFailed(str(error)) from None
            await self._ask({"do": "start", "kind": kind}, Opened)
            is_started = True
        finally:
            if not is_started:
                await self.close(broken=True)
        return self

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        return Opening(text=(await self._ask({"do": "reset", "row": dict(row)}, Opened)).text, tools=self._tools)

    async def step(self, text: str, token_ids: Sequence[int]) -> StepResult:
        ids = [int(token) for token in token_ids] if self._owner.needs_ids else []
        return await self._ask({"do": "step", "text": text, "token_ids": ids}, StepResult)

    async def reward(self) -> float | None:
        return (await self._ask({"do": "reward"}, Worth)).worth

    async def attributes(self) -> dict[str, Any]:
        return (await self._ask({"do": "attributes"}, Left)).attributes

    async def run(self, variables: Mapping[str, str], *, stop: asyncio.Event) -> Ended:
        """``EnvironmentLost``: its host is gone, and the program is not to blame."""
        telling = asyncio.create_task(self._tell(stop))
        has_ended = False
        try:
            await self._say({"do": "run", "variables": dict(variables)})
            while not isinstance(said := await self._hear_in_time(), Ended):
                continue
            has_ended = True
            return said
        except asyncio.CancelledError:
            with suppress(EnvironmentLost):  # who gave it up does not want it played again
                await self.close(broken=True)
            raise
        finally:
            telling.cancel()
            await self.close(broken=not has_ended)

    async def close(self, *, broken: bool) -> None:
        """``EnvironmentLost``: a call was given up because the host is gone, and the environment is not to blame."""
        if self._is_closed:
            return
        self._is_closed = True
        self.host.playing.discard(self)
        try:
            if not self._is_lost:
                await send(self._writer, request_bytes({"do": "close", "broken": broken}))
                if broken:
                    async with asyncio.timeout(ANSWER_S):
                        await self._hang_up()
        except _BROKEN as error:
            if broken:  # else the episode has ended well
                raise self._lost(error) from None
        finally:
            self._writer.close()

    def abort(self) -> None:
        """Its host is lost: end the call that waits for it."""
        self._is_lost = True
        self._writer.transport.abort()

    async def _hang_up(self) -> None:
        """A host that is there closes the connection. An answer that nobody waits for may come before."""
        while await self._reader.read(1 << 16):
            continue

    async def _ask(self, request: dict[str, Any], wanted: type[_T]) -> _T:
        await self._say(request)
        return await self._hear(wanted)

    async def _say(self, request: dict[str, Any]) -> None:
        body = request_bytes(request)
        if len(body) > MAX_ANSWER_BYTES:
            raise EnvironmentFailed(
                f"{request['do']} takes {len(body):,} bytes, and a node is sent at most {MAX_ANSWER_BYTES:,}; leave long columns out of "
                "the data"
            )
        try:
            await send(self._writer, body)
        except _BROKEN as error:
            raise self._lost(error) from None

    async def _hear(self, *wanted: type[_T]) -> _T:
        try:
            said = read_answer(await receive(self._reader), *wanted)
        except _BROKEN as error:
            raise self._lost(error) from None
        if isinstance(said, Failed):
            raise EnvironmentFailed(said.failed)
        return said

    async def _hear_in_time(self) -> Running | Ended:
        hearing = asyncio.create_task(self._hear(Running, Ended))
        try:
            if not await one_ends_within(SILENT_S, hearing):
                raise self._lost(TimeoutError(f"it has said nothing of its program for {SILENT_S:g} s"))
            return hearing.result()
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)  # one reads at a time

    async def _tell(self, stop: asyncio.Event) -> None:
        await stop.wait()
        with suppress(EnvironmentLost):  # which who waits for the end hears too
            await self._say({"do": "stop"})

    def _lost(self, error: Exception) -> EnvironmentLost:
        self._is_lost = True
        why = _shown(error)
        self._owner.lose(self, why)
        return EnvironmentLost(f"{self.place.name} is lost: {why}")


async def _connect_in_time(place: HostPlace) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Again where the connection breaks off: its host may be busy, or strangers may crowd its door."""
    async with asyncio.timeout(CONNECT_S):
        while True:
            try:
                return await _connect(place)
            except (ConnectionRefusedError, _Stranger):  # nobody listens there any more
                raise
            except (ConnectionError, EOFError):
                await asyncio.sleep(AGAIN_S)


class _Stranger(ConnectionError):
    pass


async def _connect(place: HostPlace) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To a host that has proved that it knows the secret."""
    reader, writer = await asyncio.open_connection(place.address, place.port)
    try:
        watch_peer(writer.get_extra_info("socket"))
        reply, proof = answer(await reader.readexactly(CHALLENGE), secret=place.secret)
        writer.write(reply)
        if not hmac.compare_digest(await reader.readexactly(CHALLENGE), proof):
            raise _Stranger("who answers there does not know the secret of this run")
    except BaseException:
        writer.close()
        raise
    return reader, writer


def _shown(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection broke off"
    return str(error) or "no answer in time"
