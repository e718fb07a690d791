"""Short messages between a sender and each of its receivers, over a socket: JSON with its length in front.

A closed line means that the peer is gone, which is noticed at once; a host that is gone without a word, within ``SILENT_S``,
since its kernel answers no more; a peer that lives and is silent, at the deadline. All name the peer. The sender listens,
on a name of this host or on a TCP port, and lets in whom it expects and who knows its secret.
"""

from __future__ import annotations

import json
import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollcall.weights.protocol import Carrying, Invitation, MissingPeerError

HELLO_S = 5.0  # whoever connects says who it is within this time
FIRST_WORD_S, NEXT_WORD_S = 2.0, 10.0  # when a wait is told of
PROBE_S = 2  # between two questions to the peer's kernel, while nothing is said
SILENT_S = 8  # without an answer of it the peer is gone
LONGEST_MESSAGE = 256 << 20
_LENGTH = struct.Struct("<I")


class Deadline:
    """One for all waits of an update; long waits say what they wait for."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ends = time.monotonic() + timeout_s
        self._tell_at = time.monotonic() + FIRST_WORD_S

    @property
    def left_s(self) -> float:
        return max(self._ends - time.monotonic(), 0.001)

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._ends

    @property
    def until_word_s(self) -> float:
        """How long to wait at most before saying so."""
        return max(min(self._tell_at, self._ends) - time.monotonic(), 0.001)

    def tell(self, what: str) -> None:
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + NEXT_WORD_S
            print(f"{what} ({self.timeout_s - self.left_s:.0f} s)", file=sys.stderr, flush=True)


class Line:
    def __init__(self, connection: socket.socket, *, peer: str) -> None:
        self.peer = peer
        self.socket = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _probe(connection)

    def tell(self, message: Mapping[str, Any], deadline: Deadline) -> None:
        data = json.dumps(message).encode()
        self.write(_LENGTH.pack(len(data)) + data, deadline)

    def hear(self, deadline: Deadline) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > LONGEST_MESSAGE:
            raise MissingPeerError(f"{self.peer} says something of {length} bytes, which is no message of ours")
        return json.loads(self._read(length, deadline))

    def write(self, data: bytes, deadline: Deadline) -> None:
        try:
            self.socket.settimeout(deadline.left_s)
            self.socket.sendall(data)
        except TimeoutError as error:
            raise (self.gone(error) if error.errno else self._silent(deadline)) from None
        except OSError as error:
            raise self.gone(error) from None

    def read_some(self, most: int, deadline: Deadline) -> bytes:
        """At least one byte."""
        while True:
            try:
                self.socket.settimeout(deadline.until_word_s)
                data = self.socket.recv(most)
            except TimeoutError as error:
                if error.errno:  # the kernel's word: nobody answers there
                    raise self.gone(error) from None
                if deadline.has_passed:
                    raise self._silent(deadline) from None
                deadline.tell(f"weights: waiting for {self.peer}")
                continue
            except OSError as error:
                raise self.gone(error) from None
            if not data:
                raise self.gone(None)
            return data

    def send_descriptor(self, descriptor: int, deadline: Deadline) -> None:
        try:
            self.socket.settimeout(deadline.left_s)
            socket.send_fds(self.socket, [b"f"], [descriptor])
        except OSError as error:
            raise self.gone(error) from None

    def take_descriptor(self, deadline: Deadline) -> int:
        try:
            self.socket.settimeout(deadline.left_s)
            _, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        except TimeoutError:
            raise self._silent(deadline) from None
        except OSError as error:
            raise self.gone(error) from None
        if not descriptors:
            raise self.gone(None)
        return descriptors[0]

    def is_closed(self) -> bool:
        """Whether the peer has hung up, with or without unread words of it."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.socket.close()

    def gone(self, error: OSError | None) -> MissingPeerError:
        return MissingPeerError(f"{self.peer} is gone in the middle of a weight update{f' ({error})' if error else ''}")

    def _silent(self, deadline: Deadline) -> MissingPeerError:
        return MissingPeerError(f"no word from {self.peer} within {deadline.timeout_s:g} s of a weight update")

    def _read(self, count: int, deadline: Deadline) -> bytes:
        parts: list[bytes] = []
        while count:
            parts.append(self.read_some(min(count, 1 << 20), deadline))
            count -= len(parts[-1])
        return b"".join(parts)


def hear_all(lines: Mapping[str, Line], deadline: Deadline, *, waiting_for: str) -> dict[str, dict[str, Any]]:
    """One message from each; the deadline's error names those that are missing."""
    heard: dict[str, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for name, line in lines.items():
            selector.register(line.socket, selectors.EVENT_READ, name)
        while len(heard) < len(lines):
            for key, _ in selector.select(deadline.until_word_s):
                heard[key.data] = lines[key.data].hear(deadline)
                selector.unregister(key.fileobj)
            missing = [name for name in lines if name not in heard]
            if missing and deadline.has_passed:
                raise MissingPeerError(f"no {waiting_for} within {deadline.timeout_s:g} s from {', '.join(missing)}")
            if missing:
                deadline.tell(f"weights: waiting for the {waiting_for} of {', '.join(missing)}")
    return heard


class Desk:
    """Where a sender listens."""

    def __init__(
        self, *, sender: str, receivers: Sequence[str], carrying: Carrying, host: str, timeout_s: float
    ) -> None:
        self._receivers = tuple(receivers)
        is_local = carrying == "shared_memory"
        local = f"rollcall-weights-{secrets.token_hex(12)}" if is_local else ""
        self._socket = _listen_locally(local) if is_local else _listen()
        self.invitation = Invitation(
            sender=sender,
            carrying=carrying,
            host=host,
            port=0 if is_local else self._socket.getsockname()[1],
            local=local,
            secret=secrets.token_hex(16),
            timeout_s=timeout_s,
        )

    def welcome(self, deadline: Deadline) -> tuple[dict[str, Line], dict[str, dict[str, Any]]]:
        """A line to every receiver, and what each said of itself."""
        lines: dict[str, Line] = {}
        hellos: dict[str, dict[str, Any]] = {}
        while missing := [name for name in self._receivers if name not in lines]:
            try:
                self._socket.settimeout(deadline.until_word_s)
                connection, _ = self._socket.accept()
            except TimeoutError:
                if deadline.has_passed:
                    for line in lines.values():
                        line.close()
                    raise MissingPeerError(
                        f"{len(missing)} of {len(self._receivers)} receivers of weights did not come within "
                        f"{deadline.timeout_s:g} s: {', '.join(missing)}"
                    ) from None
                deadline.tell(f"weights: waiting for {', '.join(missing)} to come")
                continue
            line = Line(connection, peer="a stranger")
            try:
                hello = line.hear(Deadline(min(HELLO_S, deadline.left_s)))
                name = self._name(hello)
            except (MissingPeerError, ValueError):
                name, hello = None, {}
            if name is None:
                line.close()
                continue
            line.peer = name
            lines[name], hellos[name] = line, hello
            if hello.get("gone"):
                for line in lines.values():
                    line.close()
                raise MissingPeerError(f"{name} is lost, and does not come for its weights")
        return {name: lines[name] for name in self._receivers}, hellos

    def close(self) -> None:
        self._socket.close()

    def _name(self, hello: Any) -> str | None:
        if not isinstance(hello, dict) or not isinstance(hello.get("secret"), str):
            return None
        known = secrets.compare_digest(hello["secret"].encode(), self.invitation.secret.encode())
        return hello["name"] if known and hello.get("name") in self._receivers else None


def call(invitation: Invitation, *, name: str, deadline: Deadline, about: Mapping[str, Any]) -> Line:
    """A receiver's line to its sender."""
    try:
        if invitation.local:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(deadline.left_s)
            connection.connect(f"\0{invitation.local}")
        else:
            connection = socket.create_connection((invitation.host, invitation.port), timeout=deadline.left_s)
    except OSError as error:
        where = "this host" if invitation.local else f"{invitation.host}:{invitation.port}"
        raise MissingPeerError(
            f"{name} cannot reach {invitation.sender}, which sends weights, on {where}: {error}"
        ) from None
    line = Line(connection, peer=invitation.sender)
    line.tell({"name": name, "secret": invitation.secret, **about}, deadline)
    return line


def decline(invitation: Invitation, *, name: str, timeout_s: float) -> None:
    """Tell a sender that waits for this receiver that it does not come, on the behalf of one that is lost."""
    call(invitation, name=name, deadline=Deadline(timeout_s), about={"gone": True}).close()


def _probe(connection: socket.socket) -> None:
    """Let the kernel find out whether the peer's host is there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_USER_TIMEOUT": SILENT_S * 1000}
    for name, value in {**times, "TCP_KEEPCNT": SILENT_S // PROBE_S}.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has them all
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _listen_locally(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")  # no file: it is gone with the process
    listener.listen(1024)
    return listener


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
