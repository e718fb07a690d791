"""A listening socket that admits callers who know a secret, and reveals nothing to other callers.

listener -> caller     a challenge, 32 random bytes
caller   -> listener   its own challenge, and the proof that it knows the secret: HMAC-SHA256 over both challenges
listener -> caller     its own proof

The secret itself is never sent, and a proof is valid for one connection. Before the proof, a caller receives 32 random bytes and has
``PROOF_S`` to send 64 bytes, which are not parsed. Many callers are served at once, so a silent caller does not delay the others.
After the proof, the connection is plain TCP: the door keeps strangers out, but it does not protect packets from someone who can read
or change them in transit.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rollcall.nodes.framing import read_exactly

CHALLENGE = 32  # bytes; a proof has the same length
PROOF_S = 5.0  # from connecting to the proof
# Callers that have not sent a proof. Beyond that, one caller from the host with the most callers is dropped.
MOST_WAITING = 128
BACKLOG = 1024  # connections that the kernel queues
PROBE_S = 2  # between two keepalive probes of an idle peer
SILENT_S = 8  # a peer that has not answered for this long is considered gone


def new_secret() -> str:
    return secrets.token_hex(32)


def answer(challenge: bytes, *, secret: str) -> tuple[bytes, bytes]:
    """Return a caller's reply to a challenge, and the proof that the caller must receive in return."""
    both = challenge + secrets.token_bytes(CHALLENGE)
    return both[CHALLENGE:] + _proof(secret, b"caller", both), _proof(secret, b"listener", both)


def prove(read: Callable[[int], bytes], write: Callable[[bytes], object], *, secret: str) -> bool:
    """Do the caller's part of the handshake, and return whether the listener knows the secret too."""
    reply, proof = answer(read(CHALLENGE), secret=secret)
    write(reply)
    return hmac.compare_digest(read(CHALLENGE), proof)


class StrangerError(ConnectionError):
    """The listener at this address does not know the secret."""


def enter(address: str, port: int, *, secret: str, timeout_s: float) -> socket.socket:
    """Connect through a door. Raise OSError if nothing listens at this address."""
    connection = socket.create_connection((address, port), timeout=timeout_s)
    try:
        connection.settimeout(PROOF_S)
        if not prove(partial(read_exactly, connection.recv), connection.sendall, secret=secret):
            raise ConnectionError("the listener does not know the secret")
    except OSError as error:
        connection.close()
        raise StrangerError(str(error)) from None
    connection.settimeout(None)
    watch_peer(connection)
    return connection


def listen_at(host: str) -> socket.socket:
    """Listen on this address only, not on the host's other addresses."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=BACKLOG)


def watch_peer(connection: socket.socket) -> None:
    """Send small messages at once, and make the kernel detect when the peer's host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_USER_TIMEOUT": SILENT_S * 1000}
    for name, value in {**times, "TCP_KEEPCNT": SILENT_S // PROBE_S}.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of these options
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclass(slots=True, kw_only=True)
class _Caller:
    host: str
    challenge: bytes
    until: float
    reply: bytes = b""


class Door:
    """Admits callers that know the secret. One thread uses it; callers are served only while ``accept`` runs."""

    def __init__(self, listener: socket.socket, *, secret: str) -> None:
        self._listener = listener
        self._secret = secret
        self._callers: dict[socket.socket, _Caller] = {}  # callers that have not sent a proof yet, oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when ``accept`` has work to do."""
        return self._selector.fileno()

    def accept(self, timeout_s: float) -> socket.socket | None:
        """Return the next caller that knows the secret, or `None` on timeout."""
        ends = time.monotonic() + timeout_s
        while True:
            until = min([ends, *(caller.until for caller in self._callers.values())])
            for key, _ in self._selector.select(max(until - time.monotonic(), 0)):
                if key.fileobj is self._listener:
                    self._greet()
                elif isinstance(key.fileobj, socket.socket) and self._hear(key.fileobj):
                    return key.fileobj
            now = time.monotonic()
            # Check this after reading, because this process itself may have been suspended.
            for late in [one for one, caller in self._callers.items() if caller.until <= now]:
                self._dismiss(late)
            if now >= ends:
                return None

    def close(self) -> None:
        for caller in list(self._callers):
            self._dismiss(caller)
        self._selector.close()
        self._listener.close()

    def _greet(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, or the caller has already gone
            if self._callers:
                self._dismiss(self._least_missed())
            return
        if len(self._callers) >= MOST_WAITING:
            self._dismiss(self._least_missed())
        connection.setblocking(False)
        host = peer[0] if isinstance(peer, tuple) else ""  # a Unix socket has no host
        caller = _Caller(host=host, challenge=secrets.token_bytes(CHALLENGE), until=time.monotonic() + PROOF_S)
        self._callers[connection] = caller
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(connection, caller.challenge)

    def _least_missed(self) -> socket.socket:
        """Return the longest-waiting caller from the host with the most callers, so a stranger's callers displace each other first."""
        counts = Counter(caller.host for caller in self._callers.values())
        host = max(counts, key=lambda one: counts[one])
        return next(one for one, caller in self._callers.items() if caller.host == host)

    def _hear(self, connection: socket.socket) -> bool:
        """Read from a caller, and return whether it has proved that it knows the secret. Disconnect a caller whose proof is wrong."""
        caller = self._callers.get(connection)
        if caller is None:  # it was just dropped to make room for a new caller
            return False
        try:
            data = connection.recv(2 * CHALLENGE - len(caller.reply))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        caller.reply += data
        if not data:
            self._dismiss(connection)
        if len(caller.reply) < 2 * CHALLENGE:
            return False
        both = caller.challenge + caller.reply[:CHALLENGE]
        known = hmac.compare_digest(caller.reply[CHALLENGE:], _proof(self._secret, b"caller", both))
        if not known or not self._send(connection, _proof(self._secret, b"listener", both)):
            self._dismiss(connection)
            return False
        self._selector.unregister(connection)
        del self._callers[connection]
        connection.setblocking(True)
        return True

    def _send(self, connection: socket.socket, data: bytes) -> bool:
        """Send without waiting: 32 bytes always fit into a new connection's buffer."""
        try:
            return connection.send(data) == len(data)
        except OSError:  # disconnected; the next read reports that
            return False

    def _dismiss(self, connection: socket.socket) -> None:
        if self._callers.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()


def _proof(secret: str, who: bytes, both: bytes) -> bytes:
    return hmac.new(secret.encode(), who + both, hashlib.sha256).digest()
