"""A key-value store through which the processes of a torch group find each other. Only processes with the group's secret can use it.

torch's own store listens on every interface and serves everyone who connects. Its keys contain the peers' addresses and the number by which
NCCL recognizes its members. This store listens on one address, behind a door (``nodes/door.py``). A thread of the first process serves it.

gloo's own connections are plain TCP, and a stranger that connects first can take a member's place. So ``greet`` makes the members of
a group authenticate each other over those connections before anything else is sent. NCCL rejects a caller that does not know the
number in the store.

Who waits for whom: a ``get`` waits until another member has ``set`` its key, at most for the store's timeout.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rollcall.nodes.door import CHALLENGE, Door, enter, watch_peer
from rollcall.nodes.framing import json_frame, read_exactly, read_json_frame

SLICE_S = 1.0  # the longest single wait; between two waits, other threads of this process can use the connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The address of a group's store, and the secret that the group's members share."""

    address: str
    port: int
    secret: str = field(repr=False)


class MeetingServer:
    """Serves the store to the members. The caller has bound the listener and sends its port to the other members."""

    def __init__(self, listener: socket.socket, *, secret: str) -> None:
        self._door = Door(listener, secret=secret)
        self._values: dict[str, str] = {}  # each character is one byte of the value
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._welcome, name="meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()

    def _welcome(self) -> None:
        while not self._is_closed:
            connection = self._door.accept(0.5)
            if connection is not None:
                watch_peer(connection)
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), name="meeting", daemon=True).start()
        self._door.close()
        for connection in self._connections:
            _hang_up(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            while True:
                connection.sendall(json_frame(self._do(**read_json_frame(partial(read_exactly, connection.recv)))))
        except OSError:  # the member is gone, or the server was closed
            connection.close()

    def _do(self, *, do: str, keys: list[str], values: Sequence[str] = (), add: int = 0, wait_s: float = 0) -> Any:
        with self._changed:
            match do:
                case "set":
                    self._values[keys[0]] = values[0]
                    self._changed.notify_all()
                    return None
                case "add":
                    total = int(self._values.get(keys[0], "0")) + add
                    self._values[keys[0]] = str(total)
                    self._changed.notify_all()
                    return total
                case "wait":
                    return self._changed.wait_for(lambda: all(key in self._values for key in keys), wait_s)
                case "get":
                    return self._values.get(keys[0])
                case "compare_set":
                    held = self._values.get(keys[0])
                    if held == values[0] or (held is None and not values[0]):
                        held = self._values[keys[0]] = values[1]
                        self._changed.notify_all()
                    return values[0] if held is None else held
                case "delete":
                    return self._values.pop(keys[0], None) is not None
                case "count":
                    return len(self._values)
                case _:
                    raise ConnectionError(f"a member sent an unknown request: {do!r}")


class MeetingStore(dist.Store):
    """A member's client for the store. torch also calls it from threads of its own.

    torch keeps no Python reference to it, so code that creates a group with it must keep it for as long as the group lives.
    """

    def __init__(self, place: Place, *, timeout_s: float) -> None:
        super().__init__()
        self._place = place
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket = _enter(place, timeout_s=timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        found = self._ask("get", [key])
        if found is None:
            raise dist.DistStoreError(f"{key} was deleted from the group's store ({self._where})")
        return found.encode("latin-1")

    def add(self, key: str, value: int) -> int:
        return self._ask("add", [key], add=value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        ends = time.monotonic() + seconds
        while not self._ask("wait", keys, wait_s=max(min(SLICE_S, ends - time.monotonic()), 0.0)):
            if time.monotonic() >= ends:
                raise dist.DistStoreError(
                    f"Timed out waiting {seconds:g} s for {', '.join(keys)}: a member of the group did not connect to {self._where}"
                )

    def check(self, keys: list[str]) -> bool:
        return self._ask("wait", keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare_set", [key], expected, desired).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", [key])

    def num_keys(self) -> int:
        return self._ask("count", [])

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def clone(self) -> MeetingStore:
        return self

    def close(self) -> None:
        _hang_up(self._socket)

    @property
    def _where(self) -> str:
        return f"{self._place.address} port {self._place.port}"

    def _ask(self, do: str, keys: list[str], *values: str | bytes, **more: Any) -> Any:
        given = [(value.encode() if isinstance(value, str) else value).decode("latin-1") for value in values]
        with self._lock:
            try:
                self._socket.sendall(json_frame({"do": do, "keys": list(keys), "values": given, **more}))
                return read_json_frame(partial(read_exactly, self._socket.recv))
            except OSError as error:
                raise dist.DistStoreError(
                    f"Connection closed by peer: the group's store at {self._where} does not answer ({error})"
                ) from None


def greet(group: Any, store: MeetingStore, *, name: str, rank: int, members: Sequence[int], secret: str) -> None:
    """Make the members of a gloo group prove to each other, over the group's own connections, that they know the secret.

    ``members`` are their ranks in the store, in the group's order; ``name`` is different for each group that uses the store.
    """
    if len(members) < 2:
        return
    challenge = secrets.token_bytes(CHALLENGE)
    store.set(f"greet/{name}/{rank}", challenge)
    greetings: dict[int, torch.Tensor] = {}
    works: list[tuple[int, Any, torch.Tensor]] = []  # keeps each tensor alive until it is sent
    for place, other in enumerate(members):
        if other == rank:
            continue
        theirs = store.get(f"greet/{name}/{other}")
        proof = torch.frombuffer(bytearray(_greeting(secret, name, rank, other, theirs)), dtype=torch.uint8)
        greetings[other] = torch.zeros(CHALLENGE, dtype=torch.uint8)
        works.append((other, group.send([proof], place, 0), proof))
        works.append((other, group.recv([greetings[other]], place, 0), greetings[other]))
    silent: dict[int, str] = {}
    ends = time.monotonic() + 60.0  # members that greet are already connected, so a peer that stays silent is not one
    # Check all of them: if this stopped at the first stranger, other members would not get a greeting.
    for other, work, _ in works:
        try:
            work.wait(timedelta(seconds=max(ends - time.monotonic(), 0.001)))
        except RuntimeError as error:
            silent.setdefault(other, str(error).splitlines()[0])
    for other, words in greetings.items():
        if other in silent:
            raise _stranger(name, rank, other, f"it sent no greeting ({silent[other]})")
        if not hmac.compare_digest(bytes(words.tolist()), _greeting(secret, name, other, rank, challenge)):
            raise _stranger(name, rank, other, "it does not know the group's secret")


def _greeting(secret: str, name: str, who: int, whom: int, challenge: bytes) -> bytes:
    return hmac.new(secret.encode(), f"greet|{name}|{who}|{whom}|".encode() + challenge, hashlib.sha256).digest()


def _stranger(name: str, rank: int, other: int, why: str) -> dist.DistNetworkError:
    return dist.DistNetworkError(
        f"rank {rank} is connected to a program that is not rank {other} of group {name}: {why}. Someone else on this network "
        "is connecting to the run's ports; see docs/clusters.md (who can reach what)"
    )


def _enter(place: Place, *, timeout_s: float) -> socket.socket:
    """Connect through the door. Wait until it is open, because the first process may start a moment later."""
    ends = time.monotonic() + timeout_s
    while True:
        left_s = max(ends - time.monotonic(), 0.1)
        try:
            return enter(place.address, place.port, secret=place.secret, timeout_s=left_s)
        except OSError as error:
            if time.monotonic() + SLICE_S >= ends:
                raise dist.DistNetworkError(
                    f"cannot connect to the group's store at {place.address} port {place.port}; waited {timeout_s:g} s ({error})"
                ) from None
        time.sleep(min(0.1, left_s))


def _hang_up(connection: socket.socket) -> None:
    """Shut the connection down before closing it: a close alone does not wake a thread that is reading from the socket."""
    with suppress(OSError):  # the other side closed it first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
