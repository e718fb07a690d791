"""What the sockets of a node say of its links: only bytes that wait for the link itself count."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace

import pytest

from rollcall.groups.sockets import Connection, Flow, FlowCounter, parse, read_connections

PEERS = {"10.0.0.2"}
IDLE = Connection(
    cookie=1, own="10.0.0.1", peer="10.0.0.2", waiting=0, confirmed=1000, busy_s=7.0, held_s=0.0, round_trip_s=0.0002,
)  # fmt: skip
BEGUN = replace(IDLE, waiting=400_000)
LATER = replace(BEGUN, waiting=364_000, confirmed=37_000, busy_s=9.0, round_trip_s=3.0)


def flow(*looks: Connection) -> Flow:
    """From the last look but one to the last."""
    counter = FlowCounter()
    return [counter.count([look], peers=PEERS) for look in (looks[0], *looks)][-1].by_peer["10.0.0.2"]


def test_bytes_that_wait_at_two_looks_are_told_with_what_went_through_between_them() -> None:
    assert flow(BEGUN, LATER) == Flow(fastest=36_000 / 2.01, waiting=364_000, carried=36_000, busy_s=2.0)


def test_a_link_that_is_idle_or_has_just_begun_is_not_held_up() -> None:
    assert flow(IDLE, IDLE) == Flow(fastest=0.0)
    assert not flow(IDLE, LATER).waiting, "busy with small messages until a moment ago, maybe"


def test_a_transfer_between_two_looks_tells_what_the_link_can_carry() -> None:
    assert flow(IDLE, replace(IDLE, confirmed=1000 + 24_000_000, busy_s=7.24)).fastest == pytest.approx(96e6)


def test_small_messages_tell_of_no_rate() -> None:
    small = replace(IDLE, waiting=200)
    assert not flow(small, replace(small, busy_s=9.0, confirmed=3000)).waiting


def test_a_receiver_that_does_not_read_is_no_slow_link() -> None:
    assert not flow(BEGUN, replace(LATER, held_s=1.9, round_trip_s=0.0002)).waiting
    assert flow(BEGUN, replace(LATER, held_s=1.9)).waiting, "a window that is full of what is on a slow way"


def test_sockets_to_one_node_add_up() -> None:
    counter, other = FlowCounter(), {"cookie": 2}
    counter.count([], peers=PEERS)
    counter.count([BEGUN, replace(BEGUN, **other)], peers=PEERS)
    found = counter.count([LATER, replace(LATER, **other)], peers=PEERS).by_peer["10.0.0.2"]
    assert found == Flow(fastest=36_000 / 2.01, waiting=728_000, carried=72_000, busy_s=2.0)


def test_a_socket_opened_since_the_last_look_counts_from_its_beginning() -> None:
    counter = FlowCounter()
    counter.count([], peers=PEERS)
    found = counter.count([replace(LATER, busy_s=1.5)], peers=PEERS)
    assert found.by_peer["10.0.0.2"].carried == 37_000 and found.addresses == {"10.0.0.1"}
    assert FlowCounter().count([LATER], peers=()).by_peer == {}, "somebody else's"


def message(*, family: int, own: bytes, peer: bytes, info: bytes) -> bytes:
    """As Linux lays it out: struct inet_diag_msg, then an attribute that is skipped, then struct tcp_info."""
    head = struct.pack("=BBBB", family, 1, 0, 0) + struct.pack("!HH", 4000, 5000)
    head += own.ljust(16, b"\0") + peer.ljust(16, b"\0") + struct.pack("=IQIIIII", 2, 77, 0, 0, 364_000, 0, 9)
    return head + struct.pack("=HHB3x", 5, 8, 0) + struct.pack("=HH", 4 + len(info), 2) + info


def tcp_info() -> bytes:
    info = bytearray(232)
    struct.pack_into("=I", info, 68, 3_000_000)
    struct.pack_into("=Q", info, 120, 37_000)
    struct.pack_into("=QQ", info, 168, 9_000_000, 500_000)
    return bytes(info)


def test_a_socket_of_the_kernels_answer_is_read() -> None:
    own, peer = socket.inet_aton("10.0.0.1"), socket.inet_aton("10.0.0.2")
    expected = Connection(
        cookie=77, own="10.0.0.1", peer="10.0.0.2", waiting=364_000, confirmed=37_000, busy_s=9.0, held_s=0.5,
        round_trip_s=3.0,
    )  # fmt: skip
    assert parse(message(family=socket.AF_INET, own=own, peer=peer, info=tcp_info())) == expected
    mapped = [b"\0" * 10 + b"\xff\xff" + address for address in (own, peer)]
    assert parse(message(family=socket.AF_INET6, own=mapped[0], peer=mapped[1], info=tcp_info())) == expected
    assert parse(message(family=socket.AF_INET, own=own, peer=peer, info=tcp_info()[:104])) is None, "an old kernel"


def test_this_machines_own_sockets_can_be_asked_for() -> None:
    assert isinstance(read_connections(), list), "none of them, where the kernel does not tell"
