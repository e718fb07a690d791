"""Exchanges short messages between a sender and each of its receivers over a socket, as JSON with a length prefix.

When a peer exits, its line closes, so this is detected at once. A host that disappears is detected within ``door.SILENT_S``, because its
kernel stops answering. A peer that is alive but silent is detected at the deadline. Every error names the peer. The sender listens on a
local socket name or on a TCP port, and reads no message before the peer has proved that it was invited (``nodes/door.py``).
"""

from __future__ import annotations

import secrets
import select
import selectors
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rollcall.base.errors import MissingPeerError
from rollcall.base.wait import Wait
from rollcall.engine.weights.protocol import Carrying, Invitation
from rollcall.nodes.door import BACKLOG, Door, listen_at, new_secret, prove, watch_peer
from rollcall.nodes.framing import json_frame, read_exactly, read_json_frame

HELLO_S = 5.0  # a peer that has proved its invitation must send its name within this time


class Line:
    def __init__(self, connection: socket.socket, *, peer: str) -> None:
        self.peer = peer
        self.socket = connection
        if connection.family != socket.AF_UNIX:
            watch_peer(connection)

    def tell(self, message: Mapping[str, Any], deadline: Wait) -> None:
        self.write(json_frame(message), deadline)

    def hear(self, deadline: Wait) -> dict[str, Any]:
        try:
            return read_json_frame(lambda count: self.read(count, deadline))
        except ConnectionError as error:
            raise self.gone(error) from None

    def write(self, data: bytes, deadline: Wait) -> None:
        with self._naming_peer(deadline):
            self.socket.sendall(data)

    def read(self, count: int, deadline: Wait) -> bytes:
        return read_exactly(lambda most: self.read_some(most, deadline), count)

    def read_some(self, most: int, deadline: Wait) -> bytes:
        """Read at least one byte."""
        while True:
            try:
                self.socket.settimeout(deadline.until_word_s)
                data = self.socket.recv(most)
            except TimeoutError as error:
                if error.errno:  # the kernel reports that the other host does not answer
                    raise self.gone(error) from None
                if deadline.is_over:
                    raise self._silent(deadline) from None
                deadline.tell(f"weights: waiting for {self.peer}")
                continue
            except OSError as error:
                raise self.gone(error) from None
            if not data:
                raise self.gone(None)
            return data

    def send_descriptor(self, descriptor: int, deadline: Wait) -> None:
        with self._naming_peer(deadline):
            socket.send_fds(self.socket, [b"f"], [descriptor])

    def take_descriptor(self, deadline: Wait) -> int:
        with self._naming_peer(deadline):
            _, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        if not descriptors:
            raise self.gone(None)
        return descriptors[0]

    def is_closed(self) -> bool:
        """Return whether the peer has closed the line, even if some of its earlier data is still unread."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.socket.close()

    @contextmanager
    def _naming_peer(self, deadline: Wait) -> Iterator[None]:
        try:
            self.socket.settimeout(deadline.left_s)
            yield
        except OSError as error:
            # An error with an errno comes from the kernel and means that the host does not answer.
            is_silent = isinstance(error, TimeoutError) and not error.errno
            raise (self._silent(deadline) if is_silent else self.gone(error)) from None

    def gone(self, error: OSError | None) -> MissingPeerError:
        return MissingPeerError(f"{self.peer} disconnected during a weight update{f' ({error})' if error else ''}")

    def _silent(self, deadline: Wait) -> MissingPeerError:
        return MissingPeerError(
            f"{self.peer} did not answer within {deadline.timeout_s:g} s, the time limit for a weight update"
        )


def hear_all(lines: Mapping[str, Line], deadline: Wait, *, waiting_for: str) -> dict[str, dict[str, Any]]:
    """Read one message from each line. At the deadline, raise an error that names all missing peers."""
    heard: dict[str, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for name, line in lines.items():
            selector.register(line.socket, selectors.EVENT_READ, name)
        while missing := ", ".join(name for name in lines if name not in heard):
            found = selector.select(deadline.until_word_s)
            for key, _ in found:
                heard[key.data] = lines[key.data].hear(deadline)
                selector.unregister(key.fileobj)
            if not found and deadline.is_over:
                raise MissingPeerError(f"no {waiting_for} from {missing} within {deadline.timeout_s:g} s")
            if not found:
                deadline.tell(f"weights: waiting for the {waiting_for} from {missing}")
    return heard


class Desk:
    """Listens for the receivers of one sender."""

    def __init__(
        self, *, sender: str, receivers: Sequence[str], carrying: Carrying, host: str, timeout_s: float
    ) -> None:
        self._receivers = tuple(receivers)
        local = f"rollcall-weights-{secrets.token_hex(12)}" if carrying == "shared_memory" else ""
        if local:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0{local}")  # not a file, so it disappears with the process
            listener.listen(BACKLOG)
        else:
            listener = listen_at(host)
        self.invitation = Invitation(
            sender=sender,
            carrying=carrying,
            host=host,
            port=0 if local else listener.getsockname()[1],
            local=local,
            secret=new_secret(),
            timeout_s=timeout_s,
        )
        self._door = Door(listener, secret=self.invitation.secret)

    def welcome(self, deadline: Wait) -> tuple[dict[str, Line], dict[str, dict[str, Any]]]:
        """Wait for all receivers to connect. Return, by receiver, the line to it and its hello message."""
        lines: dict[str, Line] = {}
        hellos: dict[str, dict[str, Any]] = {}
        while missing := [name for name in self._receivers if name not in lines]:
            connection = self._door.accept(deadline.until_word_s)
            if connection is None and not deadline.is_over:
                deadline.tell(f"weights: waiting for {', '.join(missing)} to connect")
                continue
            if connection is None:
                _close_all(lines)
                raise MissingPeerError(
                    f"{len(missing)} of {len(self._receivers)} weight receivers did not connect within "
                    f"{deadline.timeout_s:g} s: {', '.join(missing)}"
                )
            line = Line(connection, peer="a receiver of weights")
            try:
                hello = line.hear(Wait(min(HELLO_S, deadline.left_s)))
            except MissingPeerError:  # the peer gave up in the meantime
                hello = {}
            name = line.peer = hello.get("name", "")
            if name not in self._receivers:
                line.close()
                continue
            lines[name], hellos[name] = line, hello
            if hello.get("gone"):
                _close_all(lines)
                raise MissingPeerError(f"{name} was lost and will not receive its weights")
        return {name: lines[name] for name in self._receivers}, hellos

    def close(self) -> None:
        self._door.close()


def call(invitation: Invitation, *, name: str, deadline: Wait, about: Mapping[str, Any]) -> Line:
    """Open a receiver's line to its sender."""
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
            f"{name} cannot reach {invitation.sender}, the sender of its weights, on {where}: {error}"
        ) from None
    line = Line(connection, peer=invitation.sender)
    try:
        read, write = partial(line.read, deadline=deadline), partial(line.write, deadline=deadline)
        if not prove(read, write, secret=invitation.secret):
            raise MissingPeerError(
                f"the process at the address of {invitation.sender} does not know the invitation's secret"
            )
        line.tell({"name": name, **about}, deadline)
    except BaseException:
        line.close()
        raise
    return line


def decline(invitation: Invitation, *, name: str, timeout_s: float) -> None:
    """Tell a sender that a lost receiver will not connect. Another process calls this on behalf of that receiver."""
    call(invitation, name=name, deadline=Wait(timeout_s), about={"gone": True}).close()


def _close_all(lines: Mapping[str, Line]) -> None:
    for line in lines.values():
        line.close()
