"""How fast this node's TCP sockets send to other nodes, as the kernel counts it.

Any user may ask the kernel through a netlink socket (``sock_diag``). For each socket it says how many bytes the other side
has confirmed, how long the socket was busy sending, and how many bytes still wait. So a rate covers only the time with
something to send; an idle link has none. Traffic that does not use TCP (RDMA, shared memory) is not seen.

A link holds up a socket if many bytes wait in it at two looks in a row and it was busy between them. A receiver that does not
read is not the link's fault: then the receiver's window holds the socket back, and the link answers quickly.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

WAITING = 8192  # a message with fewer bytes is small, and shows only the link's delay
LEAST_BUSY_S = 0.5
TICK_S = 0.01  # the kernel's count of a busy time may be this much too short
NEAR_S = 0.1  # a round trip as short as this meets no queue

_SOCK_DIAG = 4
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2
_REQUEST_ALL = 0x301  # a request, for the whole table
_INFO = 2  # the attribute with struct tcp_info
_ESTABLISHED, _FIN_WAIT1, _CLOSE_WAIT, _LAST_ACK = 1, 4, 8, 9
# States that may have bytes to send.
_STATES = sum(1 << state for state in (_ESTABLISHED, _FIN_WAIT1, _CLOSE_WAIT, _LAST_ACK))
_HEADER = struct.Struct("=IHHII")
_ASK = struct.Struct("=BBBBI48x")
_MESSAGE = struct.Struct("=4x2x2x16s16s4xQ4x4xI8x")  # both addresses, cookie, bytes not confirmed
_TCP_INFO = struct.Struct("=68xI48xQ40xQQ")  # round trip, confirmed, busy, held by the receiver
_BUFFER = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One socket: totals since it was opened, and its state."""

    cookie: int  # no other socket has it, until the next boot
    own: str  # address
    peer: str
    waiting: int  # bytes that the other side has not confirmed
    confirmed: int
    busy_s: float  # in which there was something to send
    held_s: float  # of this, held back by the receiver's window
    round_trip_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """From this node to another one, since the last look."""

    fastest: float  # bytes a second, of any socket: at least this much went through
    waiting: int = 0  # bytes in sockets that their link holds up
    carried: int = 0  # bytes that went through these
    busy_s: float = 0.0  # in which they did


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    by_peer: Mapping[str, Flow] = field(default_factory=dict)  # by address
    addresses: frozenset[str] = frozenset()  # of this node, as its sockets have them


class FlowCounter:
    """Remembers the sockets of the last look."""

    def __init__(self) -> None:
        self._before: dict[int, Connection] = {}
        self._peers: frozenset[str] = frozenset()

    def count(self, connections: Collection[Connection], *, peers: Collection[str]) -> Flows:
        """The flows to these addresses. ``connections`` is the kernel's whole table; of others only the own address counts."""
        found: dict[str, Flow] = {}
        for one in connections:
            if one.peer in peers:
                # A socket that the last look did not see was opened after it, with all counts at 0.
                before = self._before.get(one.cookie) or replace(one, waiting=WAITING, confirmed=0, busy_s=0, held_s=0)
                flow = _flow(one, before) if one.peer in self._peers else Flow(fastest=0.0)
                found[one.peer] = _add(found.get(one.peer), flow)
        self._before = {one.cookie: one for one in connections if one.peer in peers}
        self._peers = frozenset(peers)
        return Flows(by_peer=found, addresses=frozenset(one.own for one in connections))


def _flow(now: Connection, before: Connection) -> Flow:
    busy_s, held_s = now.busy_s - before.busy_s, now.held_s - before.held_s
    carried = now.confirmed - before.confirmed
    fastest = carried / (busy_s + TICK_S)
    is_held_by_receiver = held_s > busy_s / 2 and now.round_trip_s < NEAR_S
    if min(now.waiting, before.waiting) < WAITING or busy_s < LEAST_BUSY_S or is_held_by_receiver:
        return Flow(fastest=fastest)
    return Flow(fastest=fastest, waiting=now.waiting, carried=carried, busy_s=busy_s)


def _add(flow: Flow | None, other: Flow) -> Flow:
    """Sockets to one node work at the same time: their bytes add up, their time does not."""
    if flow is None:
        return other
    return Flow(
        fastest=max(flow.fastest, other.fastest),
        waiting=flow.waiting + other.waiting,
        carried=flow.carried + other.carried,
        busy_s=max(flow.busy_s, other.busy_s),
    )


def read_connections() -> list[Connection]:
    """This node's connections, without loopback; none if the kernel does not say."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as netlink:
            netlink.settimeout(1.0)
            return [
                connection
                for family in (socket.AF_INET, socket.AF_INET6)
                for connection in _ask(netlink, family)
                if not ipaddress.ip_address(connection.peer).is_loopback
            ]
    except OSError:  # a sandbox may forbid it, and a kernel may not have it; then links are unknown
        return []


def _ask(netlink: socket.socket, family: int) -> Iterator[Connection]:
    ask = _ASK.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _STATES)
    netlink.send(_HEADER.pack(_HEADER.size + len(ask), _BY_FAMILY, _REQUEST_ALL, 1, 0) + ask)
    while True:
        data = netlink.recv(_BUFFER)
        while len(data) >= _HEADER.size:
            length, kind, *_ = _HEADER.unpack_from(data)
            body, data = data[_HEADER.size : length], data[_aligned(length) :]
            if kind == _DONE:
                return
            if kind == _ERROR:
                code = -struct.unpack_from("=i", body)[0]
                if code == errno.ENOENT:  # this family does not exist here
                    return
                raise OSError(code, os.strerror(code))
            if (connection := parse(body)) is not None:
                yield connection


def parse(body: bytes) -> Connection | None:
    """One socket of the kernel's answer; None: an old kernel, which counts less."""
    family = body[0]
    own, peer, cookie, waiting = _MESSAGE.unpack_from(body)
    data = body[_MESSAGE.size :]
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return None
        if kind == _INFO and length - 4 >= _TCP_INFO.size:
            round_trip, confirmed, busy, held = _TCP_INFO.unpack_from(data, 4)
            return Connection(
                cookie=cookie, own=_address(family, own), peer=_address(family, peer), waiting=waiting, confirmed=confirmed,
                busy_s=busy / 1e6, held_s=held / 1e6, round_trip_s=round_trip / 1e6,
            )  # fmt: skip
        data = data[_aligned(length) :]
    return None


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _address(family: int, raw: bytes) -> str:
    """As text; an IPv4 address in an IPv6 socket is the IPv4 address."""
    if family == socket.AF_INET:
        return socket.inet_ntop(family, raw[:4])
    if raw.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw)
