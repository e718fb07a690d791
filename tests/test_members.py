"""The nodes of a Ray by rank, as Ray lists them. The lists are made up, and no Ray runs."""

from __future__ import annotations

import importlib
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rollcall.base.errors import ClusterError, NoRoomError
from rollcall.base.wait import speaking
from rollcall.nodes.cluster import PlainRay
from rollcall.process.groups.backend import Ask
from rollcall.process.ray import members, reserve
from rollcall.process.ray.connect import hide_stacks
from rollcall.process.ray.members import RayNode, ranked_nodes, settle_ranks


def listed(address: str, *, node_id: str = "", label: int | None = None) -> dict[str, Any]:
    """A node as Ray lists it."""
    return {
        "Alive": True,
        "NodeID": node_id or address,
        "NodeManagerAddress": address,
        "Labels": {} if label is None else {"rollcall.rank": str(label)},
        "Resources": {"GPU": 8.0, f"node:{address}": 1.0},
    }


@pytest.fixture(autouse=True)
def as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_settled", {})
    monkeypatch.setattr(members, "_suspects", {})
    monkeypatch.setattr(members, "_answered", set())


def ranked(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any]) -> list[tuple[int, str]]:
    return [(node.rank, node.address) for node in look(monkeypatch, *nodes)]


def look(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any]) -> list[RayNode]:
    import ray
    from ray._private import state

    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {**nodes[0], "Alive": False, "NodeID": "gone"}])
    monkeypatch.setattr(state, "available_resources_per_node", dict)
    return ranked_nodes()


def test_nodes_are_ranked_by_their_own_rank_and_others_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    unranked = [listed(address) for address in ("fd00::1", "10.0.0.10", "10.0.0.9")]
    assert ranked(monkeypatch, *unranked) == [(0, "10.0.0.9"), (1, "10.0.0.10"), (2, "fd00::1")]
    labelled = [listed("10.0.0.1", label=2), listed("10.0.0.3", label=0), listed("10.0.0.2")]
    assert ranked(monkeypatch, *labelled) == [(0, "10.0.0.3"), (2, "10.0.0.1"), (3, "10.0.0.2")]
    with pytest.raises(ClusterError, match="two live nodes have rank 1: 10.0.0.1 and 10.0.0.2"):
        ranked(monkeypatch, listed("10.0.0.1", label=1), listed("10.0.0.2", label=1))


def test_nodes_that_join_before_a_run_is_placed_are_ranked_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (listed(f"10.0.0.{number}") for number in (1, 2, 3))
    assert ranked(monkeypatch, three) == [(0, "10.0.0.3")]
    assert ranked(monkeypatch, three, one, two) == [(0, "10.0.0.1"), (1, "10.0.0.2"), (2, "10.0.0.3")]


def test_the_nodes_of_a_run_keep_their_ranks_and_what_comes_back_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three, other = (listed(f"10.0.0.{number}") for number in (1, 2, 3, 9))
    settle_ranks(look(monkeypatch, one, two, three))
    left = [(0, "10.0.0.1"), (2, "10.0.0.3")]
    assert ranked(monkeypatch, three, one) == left
    again = listed("10.0.0.2", node_id="new")
    assert ranked(monkeypatch, three, one, again) == [(0, "10.0.0.1"), (1, "10.0.0.2"), (2, "10.0.0.3")]
    replaced = look(monkeypatch, three, one, other)
    assert [(node.rank, node.address) for node in replaced] == [(0, "10.0.0.1"), (1, "10.0.0.9"), (2, "10.0.0.3")]
    settle_ranks(replaced)
    assert ranked(monkeypatch, three, one, other, two)[-1] == (3, "10.0.0.2")


def test_a_silent_node_is_left_out_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import RayError

    nodes = [listed("10.0.0.1"), listed("10.0.0.2")]
    settle_ranks(look(monkeypatch, *nodes))
    answers: list[Any] = [None]
    monkeypatch.setitem(members._suspects, "10.0.0.1", ("call", 0.0))
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([] if answers[0] is None else calls, []))

    def get(call: Any) -> Any:
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    monkeypatch.setattr(ray, "get", get)
    assert ranked(monkeypatch, *nodes) == [(1, "10.0.0.2")]
    answers[0] = RayError("its node is dead")
    assert ranked(monkeypatch, *nodes) == [(1, "10.0.0.2")]
    answers[0] = True
    assert ranked(monkeypatch, *nodes) == [(0, "10.0.0.1"), (1, "10.0.0.2")] and not members._suspects


def test_a_node_that_is_back_while_ray_still_lists_its_predecessor_takes_its_rank_once_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    old, two, new = listed("10.0.0.1", node_id="old"), listed("10.0.0.2"), listed("10.0.0.1", node_id="new")
    settle_ranks(look(monkeypatch, old, two))
    answering: set[str] = set()
    monkeypatch.setattr(
        members, "suspect", lambda node_id: members._suspects.setdefault(node_id, (node_id, time.time()))
    )
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([call for call in calls if call in answering], []))
    monkeypatch.setattr(ray, "get", lambda call: None)
    assert ranked(monkeypatch, old, two, new) == [(1, "10.0.0.2")]
    answering.add("new")
    back = look(monkeypatch, old, two, new)
    assert [(node.rank, node.node_id, node.place) for node in back] == [
        (0, "new", "10.0.0.1"),
        (1, "10.0.0.2", "10.0.0.2"),
    ]
    answering.add("old")  # both live: two Rays on one host
    assert [node.place for node in look(monkeypatch, old, two, new)] == ["10.0.0.1 new", "10.0.0.2", "10.0.0.1 old"]


def test_slots_are_tied_to_a_rank_else_to_an_address_else_to_the_node_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = look(monkeypatch, listed("10.0.0.1", label=0))
    assert (own.selector, own.tie) == ({"rollcall.rank": "0"}, {})
    (plain,) = look(monkeypatch, listed("10.0.0.1"))
    assert (plain.selector, plain.tie) == ({}, {"node:10.0.0.1": 0.001})
    twins = look(monkeypatch, listed("10.0.0.1", node_id="a"), listed("10.0.0.1", node_id="b"))
    assert [(node.selector, node.tie) for node in twins] == [
        ({"ray.io/node-id": "a"}, {}),
        ({"ray.io/node-id": "b"}, {}),
    ]


def test_a_wait_names_the_lost_nodes_since_when_and_the_command_to_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    GcsNodeInfo: Any = importlib.import_module("ray.core.generated.gcs_pb2").GcsNodeInfo  # noqa: N806
    lost_s = time.mktime((2026, 11, 18, 12, 3, 44, 0, 0, -1))
    infos = {
        b"a": GcsNodeInfo(node_manager_address="10.0.0.1", labels={"rollcall.rank": "0"}),
        b"b": GcsNodeInfo(
            node_manager_address="10.0.0.2", labels={"rollcall.rank": "1"}, end_time_ms=round(lost_s * 1000),
            state=GcsNodeInfo.GcsNodeState.DEAD,
        ),
        b"c": GcsNodeInfo(node_manager_address="10.0.0.3"),
    }  # fmt: skip
    client = SimpleNamespace(get_all_node_info=lambda timeout: infos)
    monkeypatch.setattr("ray._private.worker.global_worker", SimpleNamespace(gcs_client=client))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(members, "_this_ray", lambda: "")
    monkeypatch.setattr(members, "_settled", {"": {"10.0.0.3": 2}})
    monkeypatch.setattr(members, "_suspects", {b"c".hex(): (None, lost_s + 1)})
    monkeypatch.setattr(reserve, "ranked_nodes", lambda: left)
    left = look(monkeypatch, listed("10.0.0.1", label=0))
    backend, said = reserve.RayBackend(PlainRay("10.0.0.1:6379")), []

    def ask(*slots: int) -> str:
        wanted = Ask(name="x", slots_per_node=slots, use_gpus=True, node_ranks=None)
        with speaking(said.append), pytest.raises(NoRoomError) as caught:
            backend.reserve(wanted, timeout_s=0.0)
        return str(caught.value)

    rank_1 = "10.0.0.2, lost at 12:03:44"
    assert ask(8, 8) == (
        f"not enough room after waiting 0 s for rank 1 ({rank_1}); on its host, run `ray start --address=10.0.0.1:6379`"
    )
    assert f"ranks 1 ({rank_1}), 2 (10.0.0.3, lost at 12:03:45), 3-4; on each of their hosts, run" in ask(8, 8, 8, 8, 8)
    assert "not enough room after waiting 0 s for slots: 9 slots were requested" in ask(9)
    with pytest.raises(
        NoRoomError, match=rf"min_nodes=2 is more than the 1 node that joined.*rank 1 \({rank_1}\); on its host"
    ):
        monkeypatch.setattr(reserve, "NODES_DEADLINE_S", 0.0)
        reserve.wait_for_nodes(backend.cluster, 2, fewest=2, wait_s=0.0)


def test_where_no_node_declares_a_gpu_the_wait_says_how_to_declare_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ask(name="x", slots_per_node=(1,), use_gpus=True, node_ranks=None)
    bare = {**listed("10.0.0.1"), "Resources": {"CPU": 2.0}}
    assert "`ray start --num-gpus N`" in reserve._lack(ask, look(monkeypatch, bare))
    assert "`ray start --num-gpus N`" not in reserve._lack(ask, look(monkeypatch, listed("10.0.0.1")))


def test_the_stack_of_a_raylet_that_ends_is_left_out_of_what_ray_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as Ray 2.60 gives them."""
    worker: Any = importlib.import_module("ray._private.worker")
    shown: list[str] = []
    monkeypatch.setattr(
        worker, "print_worker_logs", lambda data, file, ignore_prefix=False: shown.extend(data["lines"])
    )
    hide_stacks()
    hide_stacks()  # once is enough
    lines = [
        "[2026-11-18 03:28:09,102 C 25017 25017] (raylet) node_manager.cc:3576: Check failed",
        "*** StackTrace Information ***",
        "/lib/ray/raylet(+0xf24678) [0xaaaabd1e4678] ray::operator<<()",
        "/lib/ray/raylet(+0x22443c) [0xaaaabc4e443c]",
        "/lib/aarch64-linux-gnu/libc.so.6(__libc_start_main+0x98) [0xffffb4ae7818] __libc_start_main",
        "[2026-11-18 03:28:09,200 E 25017 25017] logging.cc:520: *** SIGABRT received at time=1731 on cpu 1 ***",
        "[2026-11-18 03:28:09,200 E 25017 25017] logging.cc:520: PC: @     0x7f2c1a89a00b  (unknown)  raise",
        "The node with node id: 35d667 has been marked dead because the detector has missed too many heartbeats from it.",
        "1 Workers killed due to memory pressure (OOM)",
    ]
    worker.print_worker_logs({"pid": "raylet", "lines": lines}, sys.stdout)
    assert shown == [lines[0], lines[-1]]
    worker.print_worker_logs({"pid": 7, "lines": lines[2:3]}, sys.stdout)
    assert shown[2:] == lines[2:3], "what a worker prints stays"
