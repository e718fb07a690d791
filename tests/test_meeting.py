"""The store where a torch group meets, and the greeting over the group's own connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rollcall.nodes import door
from rollcall.nodes.door import listen_at, new_secret
from rollcall.nodes.meeting import MeetingServer, MeetingStore, Place, greet

WAIT_S = 600.0


@pytest.fixture
def place() -> Iterator[Place]:
    listener, secret = listen_at("127.0.0.1"), new_secret()
    server = MeetingServer(listener, secret=secret)
    yield Place(address="127.0.0.1", port=listener.getsockname()[1], secret=secret)
    server.close()


def test_members_see_each_others_keys(place: Place) -> None:
    one, other = MeetingStore(place, timeout_s=WAIT_S), MeetingStore(place, timeout_s=WAIT_S)
    one.set("key", b"\x00\xff value")
    assert other.get("key") == b"\x00\xff value"
    assert one.add("count", 2) == 2 and other.add("count", 3) == 5 and one.get("count") == b"5"
    assert other.check(["key", "count"]) and not other.check(["key", "none"])
    assert one.compare_set("new", "", "first") == b"first"
    assert one.compare_set("new", "wrong", "second") == b"first"
    assert one.compare_set("new", "first", "second") == b"second"
    assert one.num_keys() == 3 and one.delete_key("new") and not one.delete_key("new")
    one.close()
    other.close()


def test_a_get_waits_for_its_key_and_says_where_when_it_does_not_come(place: Place) -> None:
    one, other = MeetingStore(place, timeout_s=WAIT_S), MeetingStore(place, timeout_s=WAIT_S)
    later = threading.Timer(0.1, one.set, args=("key", "value"))
    later.start()
    assert other.get("key") == b"value"
    with pytest.raises(dist.DistStoreError, match=f"Timed out waiting 0.1 s for none: .* 127.0.0.1 port {place.port}"):
        other.wait(["none"], timedelta(seconds=0.1))
    one.close()
    other.close()


def test_a_stranger_neither_reads_nor_writes_a_key(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PROOF_S", 0.2)
    member = MeetingStore(place, timeout_s=WAIT_S)
    member.set("key", "value")
    guess = Place(address=place.address, port=place.port, secret="a guess")
    with pytest.raises(dist.DistNetworkError, match="cannot connect to the group's store at"):
        MeetingStore(guess, timeout_s=0.5)
    request = b'{"do": "set", "keys": ["key"], "values": [""]}'
    with socket.create_connection((place.address, place.port), timeout=WAIT_S) as stranger:
        stranger.sendall(len(request).to_bytes(4, "little") + request)
        assert len(stranger.recv(1000)) == door.CHALLENGE
        assert stranger.recv(1000) == b""
    with pytest.raises(RuntimeError):  # torch's own client, whose store this is not
        dist.TCPStore(place.address, place.port, is_master=False, timeout=timedelta(seconds=1)).get("key")
    assert member.get("key") == b"value" and member.num_keys() == 1
    member.close()


def test_a_store_whose_server_is_gone_says_so() -> None:
    listener = listen_at("127.0.0.1")
    server = MeetingServer(listener, secret="a secret")
    store = MeetingStore(
        Place(address="127.0.0.1", port=listener.getsockname()[1], secret="a secret"), timeout_s=WAIT_S
    )
    server.close()
    with pytest.raises(dist.DistStoreError, match="Connection closed by peer: the group's store at .* does not answer"):
        store.set("key", "value")


def gloo(store: MeetingStore, *, rank: int, size: int) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=WAIT_S)
    return kind(store, rank, size, options)


def greet_among(place: Place, secrets: list[str]) -> list[str]:
    """What each member of a gloo group raises, by rank."""
    found = [""] * len(secrets)

    def member(rank: int) -> None:
        store = MeetingStore(place, timeout_s=WAIT_S)
        group = gloo(store, rank=rank, size=len(secrets))
        try:
            greet(group, store, name="all", rank=rank, members=range(len(secrets)), secret=secrets[rank])
        except dist.DistNetworkError as error:
            found[rank] = str(error)
        everyone.wait(WAIT_S)
        store.close()

    everyone = threading.Barrier(len(secrets))
    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(len(secrets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return found


def test_members_of_a_gloo_group_greet_each_other(place: Place) -> None:
    assert greet_among(place, [place.secret] * 3) == ["", "", ""]


def test_who_sits_in_a_members_place_without_the_secret_is_found_out(place: Place) -> None:
    honest, other, stranger = greet_among(place, [place.secret, place.secret, "a guess"])
    for rank, text in enumerate([honest, other]):
        assert f"rank {rank} is connected to a program that is not rank 2 of group all" in text
    assert stranger
