"""Who gets in, what the others get, and that they cost nobody anything."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rollcall.nodes import door
from rollcall.nodes.door import CHALLENGE, Door, answer, listen_at

WAIT_S = 600.0


@pytest.fixture
def opened() -> Iterator[tuple[Door, tuple[str, int]]]:
    listener = listen_at("127.0.0.1")
    entrance = Door(listener, secret="a secret")
    yield entrance, listener.getsockname()
    entrance.close()


def enter(address: tuple[str, int], secret: str = "a secret", *, at_a_time: int = 1000) -> tuple[socket.socket, bool]:
    """A caller that does all it should, if need be slowly; whether the listener proved itself too."""
    caller = socket.create_connection(address, timeout=WAIT_S)
    reply, proof = answer(read(caller), secret=secret)
    for start in range(0, len(reply), at_a_time):
        caller.sendall(reply[start : start + at_a_time])
    return caller, read(caller) == proof


def read(caller: socket.socket) -> bytes:
    data = b""
    while len(data) < CHALLENGE and (more := caller.recv(CHALLENGE - len(data))):
        data += more
    return data


@pytest.mark.parametrize("at_a_time", [1000, 32, 7])
def test_who_knows_the_secret_gets_in_and_knows_the_listener(
    opened: tuple[Door, tuple[str, int]], at_a_time: int
) -> None:
    entrance, address = opened
    found: list[tuple[socket.socket, bool]] = []
    caller = threading.Thread(target=lambda: found.append(enter(address, at_a_time=at_a_time)))
    caller.start()
    inside = entrance.accept(WAIT_S)
    caller.join(WAIT_S)
    assert inside is not None and found[0][1]
    found[0][0].sendall(b"hello")
    assert inside.recv(5) == b"hello"
    inside.close()
    found[0][0].close()


def test_a_guess_is_hung_up_on_without_a_word(opened: tuple[Door, tuple[str, int]]) -> None:
    entrance, address = opened
    heard: list[bytes] = []

    def guess() -> None:
        with socket.create_connection(address, timeout=WAIT_S) as caller:
            reply, _ = answer(read(caller), secret="a guess")
            caller.sendall(reply)
            heard.append(caller.recv(100))

    caller = threading.Thread(target=guess)
    caller.start()
    while caller.is_alive():
        assert entrance.accept(0.05) is None
    assert heard == [b""]


def test_a_proof_is_good_for_one_connection(opened: tuple[Door, tuple[str, int]]) -> None:
    entrance, address = opened
    replies: list[bytes] = []

    def enter_and_repeat() -> None:
        with socket.create_connection(address, timeout=WAIT_S) as caller:
            reply, _ = answer(read(caller), secret="a secret")
            caller.sendall(reply)
            read(caller)
        with socket.create_connection(address, timeout=WAIT_S) as caller:
            read(caller)
            caller.sendall(reply)
            replies.append(caller.recv(100))

    caller = threading.Thread(target=enter_and_repeat)
    caller.start()
    first = entrance.accept(WAIT_S)
    assert first is not None
    first.close()
    while caller.is_alive():
        assert entrance.accept(0.05) is None
    assert replies == [b""]


def test_the_silent_are_let_go_when_their_time_is_over(
    opened: tuple[Door, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "PROOF_S", 0.0)
    entrance, address = opened
    with socket.create_connection(address, timeout=WAIT_S) as silent:
        assert entrance.accept(0.1) is None
        assert len(read(silent)) == CHALLENGE and silent.recv(1) == b""


def test_a_flood_of_silent_callers_is_bounded_and_keeps_nobody_out(
    opened: tuple[Door, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "PROOF_S", 1e6)
    monkeypatch.setattr(door, "MOST_WAITING", 8)
    entrance, address = opened
    flood = [socket.create_connection(address, timeout=WAIT_S) for _ in range(50)]
    found: list[tuple[socket.socket, bool]] = []
    caller = threading.Thread(target=lambda: found.append(enter(address)))
    caller.start()
    inside = entrance.accept(WAIT_S)
    caller.join(WAIT_S)
    assert inside is not None and found[0][1]
    assert len(entrance._callers) <= 8
    for one in [inside, found[0][0], *flood]:
        one.close()


def test_a_crowd_of_one_host_pushes_out_its_own(
    opened: tuple[Door, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "PROOF_S", 1e6)
    monkeypatch.setattr(door, "MOST_WAITING", 8)
    entrance, address = opened
    with socket.create_connection(address, timeout=WAIT_S) as first:
        assert entrance.accept(0.01) is None
        reply, _ = answer(read(first), secret="a secret")
        crowd = [socket.create_connection(address, timeout=WAIT_S, source_address=("127.0.0.2", 0)) for _ in range(30)]
        for _ in crowd:
            assert entrance.accept(0.001) is None
        first.sendall(reply)
        inside = entrance.accept(WAIT_S)
        assert inside is not None
        for one in [inside, *crowd]:
            one.close()


def test_what_was_said_in_time_is_heard_by_a_listener_that_stood_still(
    opened: tuple[Door, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "PROOF_S", 0.1)
    entrance, address = opened
    with socket.create_connection(address, timeout=WAIT_S) as caller:
        assert entrance.accept(0.01) is None
        caller.sendall(answer(read(caller), secret="a secret")[0])
        time.sleep(0.3)
        inside = entrance.accept(0)
        assert inside is not None
        inside.close()


def test_a_caller_that_speaks_while_it_makes_way_does_no_harm(
    opened: tuple[Door, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "PROOF_S", 1e6)
    monkeypatch.setattr(door, "MOST_WAITING", 1)
    entrance, address = opened
    with socket.create_connection(address, timeout=WAIT_S) as first:
        assert entrance.accept(0.01) is None and len(read(first)) == CHALLENGE
        # Both are seen at once: who makes way has something to say.
        with socket.create_connection(address, timeout=WAIT_S) as second:
            first.sendall(b"x")
            assert entrance.accept(0.01) is None and len(read(second)) == CHALLENGE
