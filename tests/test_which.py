"""Which cluster a command means, and what it says where there is more than one. No Ray is started or asked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import make_node, make_record
from typer.testing import CliRunner

from rollcall.base.errors import ClusterError
from rollcall.base.wait import speaking
from rollcall.cli.main import app
from rollcall.nodes import bootstrap, head
from rollcall.nodes import cluster as which
from rollcall.nodes.cluster import OurCluster, PlainRay, find_cluster, is_same_address, wished_cluster, wished_dashboard
from rollcall.nodes.head import HeadAnswer, HeadRefuses, HeadUnreachable
from rollcall.nodes.rank import rank_by_address
from rollcall.nodes.state import write_record
from rollcall.run import api


@pytest.fixture(autouse=True)
def nothing_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path))
    which.say_once.cache_clear()
    for name in ("RAY_ADDRESS", "ROLLCALL_CLUSTER", which.IN_A_JOB):
        monkeypatch.delenv(name, raising=False)


def heard(said: list[str], name: str | None = None, **wish: str) -> which.Cluster:
    with speaking(said.append):
        return find_cluster(name, **wish)


def told_by_a_stranger(monkeypatch: pytest.MonkeyPatch, *, status: int = 0, err: str = "", **row: Any) -> HeadAnswer:
    """The answer of a head that says this of its one node."""
    good = {
        "node_id": "ab", "alive": True, "is_head": True, "address": "192.0.2.7", "host": "theirs", "started_ms": 1, "ended_ms": 0, "temp_dir": "/t",
        "labels": {}, "resources": {"GPU": 2}, "ports": {},
    }  # fmt: skip
    found = {"nodes": [{**good, **row}], "dashboard": None, "open": True, "versions": {"Ray": 2}}
    done = subprocess.CompletedProcess([], status, json.dumps(found), err)
    monkeypatch.setattr(head, "listens", lambda *args, **options: True)
    monkeypatch.setattr("rollcall.nodes.head.subprocess.run", lambda *args, **options: done)
    return head.ask_head("192.0.2.7:6379", token=None)


def test_what_a_stranger_at_an_address_says_is_text_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = told_by_a_stranger(monkeypatch, host="\x1b[2Jevil")
    assert answer.nodes[0].host == "\ufffd[2Jevil" and answer.versions == {"Ray": "2"}
    with pytest.raises(HeadUnreachable, match="labels that Rollcall did not set"):
        told_by_a_stranger(monkeypatch, labels={"rollcall.rank": "first"})
    with pytest.raises(HeadUnreachable, match="evil") as caught:
        told_by_a_stranger(monkeypatch, status=1, err="Traceback\nRpcError: \x1b[2Jevil")
    assert str(caught.value).isprintable()


def test_without_a_wish_it_is_the_cluster_of_this_node() -> None:
    assert wished_cluster() is None and find_cluster() == OurCluster("default")
    write_record(make_record())
    assert wished_cluster() == OurCluster("default")


def test_an_address_of_ray_is_an_explicit_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    said: list[str] = []
    assert heard(said) == PlainRay("192.0.2.7:6379", where="RAY_ADDRESS") and said == []
    named = heard(said, ray_address="192.0.2.8:6379")
    assert named == PlainRay("192.0.2.8:6379", where="cluster.ray_address") and said == []


def test_where_both_are_there_one_line_says_which_was_taken_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(make_record())
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    said: list[str] = []
    for _ in range(2):
        assert heard(said) == PlainRay("192.0.2.7:6379")
    (line,) = said
    assert (
        "using the Ray cluster at 192.0.2.7:6379, because RAY_ADDRESS names it, and not this node's cluster 'default'"
        in line
    )
    assert heard(said, "default") == OurCluster("default")
    assert said[1:] == ["note: using cluster 'default', because --cluster names it, and not RAY_ADDRESS=192.0.2.7:6379"]
    monkeypatch.setenv("ROLLCALL_CLUSTER", "default")
    assert heard(said) == OurCluster("default") and "ROLLCALL_CLUSTER names it" in said[2]
    assert heard(said, ray_address="192.0.2.8:6379") == PlainRay("192.0.2.8:6379", where="cluster.ray_address")


def test_the_address_of_our_own_head_is_our_own_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(make_record())
    monkeypatch.setenv("RAY_ADDRESS", make_record().head_address)
    said: list[str] = []
    assert heard(said) == OurCluster("default") and said == []


def test_inside_a_job_it_is_the_ray_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(make_record())
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    monkeypatch.setenv("ROLLCALL_CLUSTER", "default")
    monkeypatch.setenv(which.IN_A_JOB, "{}")
    assert find_cluster(ray_address="192.0.2.8:6379") == PlainRay("192.0.2.7:6379")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://192.0.2.7:10001", "an address for Ray Client, which Rollcall does not use; give the head's address"),
        ("http://192.0.2.7:8265", "is the address of a dashboard, which only runs jobs"),
        ("192.0.2.7", "RAY_ADDRESS: '192.0.2.7' is not an address; write HOST:PORT"),
        ("no-such-host.invalid:6379", "RAY_ADDRESS: cannot find an address for host 'no-such-host.invalid'"),
        ("auto", "RAY_ADDRESS=auto: Ray is not running on this machine"),
    ],
)
def test_what_is_no_address_of_a_head_is_refused(monkeypatch: pytest.MonkeyPatch, address: str, words: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(which, "raylets_here", dict)
    with pytest.raises(ClusterError, match=words):
        find_cluster()


def test_auto_is_the_only_ray_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(which, "raylets_here", lambda: {"a": "192.0.2.7:6379"})
    assert find_cluster() == PlainRay("192.0.2.7:6379")
    monkeypatch.setattr(which, "raylets_here", lambda: {"a": "192.0.2.7:6379", "b": "192.0.2.7:6380"})
    with pytest.raises(
        ClusterError, match="nodes of 2 Ray clusters run on this machine; write one of 192.0.2.7:6379, "
    ):
        find_cluster()


def test_local_names_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert wished_cluster() is None


def test_a_dashboard_is_enough_for_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://192.0.2.7:8265")
    assert wished_dashboard() == "http://192.0.2.7:8265" and wished_dashboard("mine") is None
    assert wished_dashboard(ray_address="192.0.2.8:6379") is None


def test_a_head_is_the_same_by_any_address_of_its_host() -> None:
    assert is_same_address("192.0.2.7:6379", "192.0.2.7:6379")
    assert is_same_address("127.0.0.1:6379", "127.0.0.2:6379")
    assert not is_same_address("127.0.0.1:6379", "127.0.0.1:6380")
    assert not is_same_address("127.0.0.1:6379", "192.0.2.7:6379")


def test_down_stops_nothing_of_a_ray_that_someone_else_started(monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(make_record())
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    monkeypatch.setattr(bootstrap, "stop_node", lambda name: pytest.fail("something was stopped"))
    done = CliRunner().invoke(app, ["down"])
    assert (
        done.exit_code == 0
        and "nothing was stopped, because Rollcall did not start the Ray cluster at 192.0.2.7:6379" in done.stdout
    )
    assert "and not this node's cluster 'default'" in done.stderr


# Ranks


def test_nodes_without_a_rank_are_ranked_by_address_those_without_slots_last() -> None:
    nodes = {
        "a": (None, "10.0.0.10", True),
        "b": (None, "10.0.0.9", True),
        "head": (None, "10.0.0.1", False),
        "six": (None, "fd00::1", True),
    }
    assert rank_by_address(nodes) == {"b": 0, "a": 1, "six": 2, "head": 3}


def test_nodes_that_carry_a_rank_keep_it_and_others_follow() -> None:
    nodes = {"a": (None, "10.0.0.1", True), "b": (2, "10.0.0.9", True)}
    assert rank_by_address(nodes) == {"b": 2, "a": 3}


def test_a_node_keeps_its_rank_while_another_is_gone_and_a_new_one_takes_the_free_rank() -> None:
    known = {"10.0.0.1": 0, "10.0.0.2": 1, "10.0.0.3": 2}
    left: dict[str, tuple[int | None, str, bool]] = {name: (None, name, True) for name in known if name != "10.0.0.2"}
    assert rank_by_address(left, known=known) == {"10.0.0.1": 0, "10.0.0.3": 2}
    back = left | {"10.0.0.2": (None, "10.0.0.2", True)}
    assert rank_by_address(back, known=known) == {"10.0.0.1": 0, "10.0.0.2": 1, "10.0.0.3": 2}
    other = left | {"10.0.0.9": (None, "10.0.0.9", True)}
    assert rank_by_address(other, known=known) == {"10.0.0.1": 0, "10.0.0.9": 1, "10.0.0.3": 2}


# A Ray that is known by its address


def answer(*addresses: str, alive: bool = True, **more: object) -> HeadAnswer:
    from dataclasses import replace

    nodes = tuple(
        replace(make_node(None, host=address, alive=alive), address=address, node_id=address) for address in addresses
    )
    return HeadAnswer(nodes=nodes, dashboard=None, **more)  # type: ignore[arg-type]


def asked(monkeypatch: pytest.MonkeyPatch, found: HeadAnswer | Exception) -> PlainRay:
    def ask(address: str, *, token: str | None, timeout_s: float) -> HeadAnswer:
        assert token is None
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(which, "ask_head", ask)
    monkeypatch.setattr(which, "listens", lambda address, timeout_s: True)
    return PlainRay("10.0.0.9:6379")


def test_its_living_nodes_have_ranks_and_the_dead_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = answer("10.0.0.3", "10.0.0.9", alive=False)
    cluster = asked(
        monkeypatch, HeadAnswer(nodes=(*answer("10.0.0.10", "10.0.0.9").nodes, *dead.nodes), dashboard=None)
    )
    nodes = cluster.ask().nodes
    assert [(node.rank, node.address) for node in nodes] == [(0, "10.0.0.9"), (1, "10.0.0.10"), (None, "10.0.0.3")]
    assert cluster.num_nodes(cluster.ask()) == 2


def test_nobody_at_the_address_is_said_with_what_names_it() -> None:
    with pytest.raises(HeadUnreachable, match="no answer at 127.0.0.1:1, which comes from RAY_ADDRESS"):
        PlainRay("127.0.0.1:1").ask()


def test_nobody_at_the_address_is_said_before_torch_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "outside_loop", lambda work: pytest.fail("it would load torch"))
    run = {"cluster": {"num_nodes": 2, "num_gpus_per_node": 1}, "run": {"dir": str(tmp_path / "run")}}
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(HeadUnreachable, match="no answer at 127.0.0.1:1, which comes from RAY_ADDRESS"):
        api.train(run)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ClusterError, match="not part of a cluster"):
        api.train(run)
    assert not (tmp_path / "run").exists()


def test_a_machine_that_is_no_node_of_it_is_told_what_to_do() -> None:
    with pytest.raises(
        ClusterError, match=r"not a node of the Ray cluster at .* \(its nodes: 192.0.2.7\).*ray start --address="
    ):
        PlainRay("192.0.2.7:6379").own_node(answer("192.0.2.7"))
    assert PlainRay("192.0.2.7:6379").own_node(answer("192.0.2.7", "127.0.0.1")).address == "127.0.0.1"


def test_a_node_is_known_by_its_process_where_its_address_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(which, "raylets_here", lambda: {"192.0.2.8": "192.0.2.7:6379"})
    assert PlainRay("192.0.2.7:6379").own_node(answer("192.0.2.7", "192.0.2.8")).address == "192.0.2.8"


@pytest.mark.parametrize(("what", "version"), [("Ray", "2.9.3"), ("Python", "3.8.1")])
def test_other_versions_are_refused_before_ray_does(what: str, version: str) -> None:
    with pytest.raises(ClusterError, match=f"runs {what} {version}, but this environment has {what} "):
        PlainRay("127.0.0.1:6379").own_node(answer("127.0.0.1", versions={what: version}))


def test_its_token_is_used_where_it_wants_one_and_not_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    cluster = PlainRay("127.0.0.1:6379")
    assert cluster.environment(answer(is_open=True)) == {"RAY_AUTH_MODE": "disabled"}
    assert cluster.environment(answer()) == {"RAY_AUTH_MODE": "token"}
    monkeypatch.setenv("RAY_AUTH_MODE", "k8s")
    assert cluster.environment(answer()) == {"RAY_AUTH_MODE": "k8s"}


def test_its_token_is_where_ray_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PlainRay("127.0.0.1:6379").token is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("of-the-home\n")
    assert PlainRay("127.0.0.1:6379").token == "of-the-home"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-shell")
    assert PlainRay("127.0.0.1:6379").token == "of-the-shell"


def test_a_refusal_says_which_token_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollcall.nodes.head import _refusal

    assert "requires a token, but this shell has none: set RAY_AUTH_TOKEN" in _refusal("x:1", ours=False, tried="none")
    assert "(RAY_AUTH_TOKEN)" in _refusal("x:1", ours=False, tried="RAY_AUTH_TOKEN")
    with pytest.raises(HeadRefuses):
        asked(monkeypatch, HeadRefuses("no")).ask()
