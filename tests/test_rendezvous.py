"""How nodes find each other: the shared folder, addresses and ports, without a Ray."""

from __future__ import annotations

import json
import socket
import stat
from functools import partial
from pathlib import Path

import pytest
from cluster_nodes import make_node

from rollcall.base.errors import ClusterError
from rollcall.base.wait import speaking
from rollcall.nodes import rendezvous as module
from rollcall.nodes.address import free_ports, is_free, join_address, listens, own_address, split_address
from rollcall.nodes.head import HeadAnswer, HeadRefuses, HeadUnreachable
from rollcall.nodes.rendezvous import Found, Head, Rendezvous, look, poll, wait_at


def make_head(cluster_id: str = "id-1", *, address: str = "10.0.0.1:6379") -> Head:
    return Head(
        cluster="default",
        cluster_id=cluster_id,
        address=address,
        host="node0",
        dashboard="127.0.0.1:8265",
        started_at="2026-01-01T00:00:00+00:00",
    )


def answers(monkeypatch: pytest.MonkeyPatch, *given: str | Exception) -> list[tuple[str, str]]:
    """The head answers with these cluster ids or errors, in order; returns who was asked with which token."""
    asked: list[tuple[str, str]] = []

    def ask(address: str, *, token: str, tls: bool) -> HeadAnswer:
        asked.append((address, token))
        found = given[min(len(asked), len(given)) - 1]
        if isinstance(found, Exception):
            raise found
        node = make_node(0)
        return HeadAnswer(nodes=(_with_id(node, found),), dashboard=None)

    monkeypatch.setattr(module, "ask_head", ask)
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.01)
    return asked


def _with_id(node, cluster_id: str):
    from dataclasses import replace

    return replace(node, cluster_id=cluster_id)


def test_what_is_published_is_for_its_owner_alone_and_reads_back(tmp_path: Path) -> None:
    meeting = Rendezvous(tmp_path / "shared", "default")
    meeting.publish(make_head(), token="secret")
    assert meeting.read() == make_head() and meeting.read_token() == "secret"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (meeting.folder, meeting.head_file, meeting.token_file)]
    assert modes == [0o700, 0o600, 0o600]
    assert "secret" not in meeting.head_file.read_text()
    assert sorted(path.name for path in meeting.folder.iterdir()) == ["head.json", "token"]


def test_a_token_from_the_environment_is_not_written_and_an_older_one_goes(tmp_path: Path) -> None:
    meeting = Rendezvous(tmp_path, "default")
    meeting.publish(make_head("id-1"), token="old")
    meeting.publish(make_head("id-2"), token=None)
    assert meeting.read_token() is None


def test_withdrawing_leaves_what_another_bring_up_published(tmp_path: Path) -> None:
    meeting = Rendezvous(tmp_path, "default")
    meeting.publish(make_head("id-2"), token="secret")
    meeting.withdraw("id-1")
    assert meeting.read() is not None
    meeting.withdraw("id-2")
    assert list(meeting.folder.iterdir()) == []
    meeting.withdraw("id-2")


def test_a_living_head_that_is_itself_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, "id-1")
    meeting = Rendezvous(tmp_path, "default")
    meeting.publish(make_head(), token="secret")
    found = look(meeting, token=None)
    assert isinstance(found, Found) and (found.address, found.token) == ("10.0.0.1:6379", "secret")
    assert asked == [("10.0.0.1:6379", "secret")]


def test_the_environments_token_wins_over_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, "id-1")
    meeting = Rendezvous(tmp_path, "default")
    meeting.publish(make_head(), token="folder")
    look(meeting, token="environment")
    assert [token for _, token in asked] == ["environment"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (HeadUnreachable("gone"), "which does not answer"),
        (HeadRefuses("no"), "refuses the token in"),
        ("id-of-another", "a different cluster answers at that address"),
    ],
)
def test_a_stale_file_is_never_joined_and_the_deadline_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | Exception, words: str
) -> None:
    answers(monkeypatch, given)
    meeting = Rendezvous(tmp_path, "default")
    meeting.publish(make_head(), token="secret")
    with pytest.raises(ClusterError, match=f"rank 0 is missing .*10.0.0.1:6379 .*{words}"):
        poll(partial(look, meeting, token=None), timeout_s=0.05)


def test_a_stale_file_is_waited_past_until_a_fresh_one_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "id-2")
    meeting = Rendezvous(tmp_path, "default")
    meeting.publish(make_head("id-1"), token="old")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        meeting.publish(make_head("id-2", address="10.0.0.2:7000"), token="new")

    with speaking(say):
        found = poll(partial(look, meeting, token=None), timeout_s=30.0)
    assert (found.address, found.token) == ("10.0.0.2:7000", "new")
    assert len(said) == 1 and "10.0.0.1:6379" in said[0]


@pytest.mark.parametrize("text", ["", "{", '{"address": 1}', "[]"])
def test_a_file_that_cannot_be_read_is_waited_past(tmp_path: Path, text: str) -> None:
    meeting = Rendezvous(tmp_path, "default")
    meeting.publish(make_head(), token="secret")
    meeting.head_file.write_text(text)
    with pytest.raises(ClusterError, match=r"waiting for rank 0 to publish .*head\.json"):
        poll(partial(look, meeting, token=None), timeout_s=0.0)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="does not exist on this node"):
        poll(partial(look, Rendezvous(tmp_path / "typo", "default"), token=None), timeout_s=0.0)


def test_a_head_without_a_token_in_the_folder_says_which_variable_is_missing(tmp_path: Path) -> None:
    meeting = Rendezvous(tmp_path, "default")
    meeting.publish(make_head(), token=None)
    with pytest.raises(ClusterError, match="set the same value on this node"):
        poll(partial(look, meeting, token=None), timeout_s=0.0)


def test_a_ray_that_is_not_ours_is_not_joined_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = HeadAnswer(nodes=(_with_id(make_node(0), None),), dashboard=None)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(module, "ask_head", lambda address, *, token, tls: stranger)
    with pytest.raises(ClusterError, match="was not started by `rollcall node`"):
        wait_at("10.0.0.1:6379", token="secret", tls=False, timeout_s=5.0)


def test_published_files_name_no_token_in_their_json(tmp_path: Path) -> None:
    meeting = Rendezvous(tmp_path, "default")
    meeting.publish(make_head(), token="secret")
    assert "token" not in json.loads(meeting.head_file.read_text())


@pytest.mark.parametrize(
    ("text", "parts"),
    [("node0:6379", ("node0", 6379)), ("[fd00::2]:80", ("fd00::2", 80)), ("10.0.0.1:1", ("10.0.0.1", 1))],
)
def test_an_address_is_taken_apart_and_put_together(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts and join_address(*parts) == text


@pytest.mark.parametrize("text", ["node0", "node0:", ":6379", "fd00::2:6379", "node0:http", "node0:0", "node0:70000"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ClusterError):
        split_address(text)


@pytest.mark.parametrize("toward", ["127.0.0.1", "127.0.0.9"])
def test_the_address_is_chosen_by_the_route_to_the_head(toward: str) -> None:
    assert own_address(toward=toward, node_ip=None, interface=None) == "127.0.0.1"


def test_the_address_can_be_set_by_hand_or_by_interface() -> None:
    assert own_address(toward="192.0.2.77", node_ip="127.0.0.1", interface=None) == "127.0.0.1"
    assert own_address(toward=None, node_ip=None, interface="lo") == "127.0.0.1"


def test_an_address_or_interface_that_this_node_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(
        ClusterError, match=r"203\.0\.113\.9 is not an address of this node \(its addresses: .*127\.0\.0\.1 \(lo\)"
    ):
        own_address(toward=None, node_ip="203.0.113.9", interface=None)
    with pytest.raises(ClusterError, match="--interface eth99 does not exist on this node; its interfaces are .*lo"):
        own_address(toward=None, node_ip=None, interface="eth99")
    with pytest.raises(ClusterError, match="--node-ip head is not an IP address"):
        own_address(toward=None, node_ip="head", interface=None)


def test_free_ports_are_distinct_and_can_be_bound() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            assert not is_free(port)


def test_a_listener_is_seen_and_its_absence_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = join_address("127.0.0.1", server.getsockname()[1])
        assert listens(address, timeout_s=1.0)
    assert not listens(address, timeout_s=1.0)
