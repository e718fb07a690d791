"""Waiting for accelerators: who is there, who is missing, and when there are too many. The head's answers are made up."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_nodes import make_node, make_record

from rollcall.base.errors import ClusterError
from rollcall.base.wait import speaking
from rollcall.nodes import check
from rollcall.nodes import cluster as which
from rollcall.nodes.check import list_nodes, wait_for_slots
from rollcall.nodes.cluster import OurCluster
from rollcall.nodes.head import HeadAnswer, HeadUnreachable, NodeInfo
from rollcall.nodes.state import NodeRecord, forget, write_record


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[HeadAnswer | Exception]:
    """What the head answers, one after the other; the last answer stays."""
    answers: list[HeadAnswer | Exception] = []

    def ask(cluster: str, *, head_address: str, timeout_s: float) -> HeadAnswer:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(which, "ask_own_head", ask)
    monkeypatch.setattr(check, "ASK_EVERY_S", 0.01)
    write_record(make_record())
    return answers


def answer(*nodes: NodeInfo) -> HeadAnswer:
    return HeadAnswer(nodes=nodes, dashboard=None)


def wait(num_slots: int, *, timeout_s: float = 30.0) -> tuple[check.Roster, list[str]]:
    said: list[str] = []
    with speaking(said.append):
        return wait_for_slots(OurCluster("default"), num_slots=num_slots, timeout_s=timeout_s), said


def test_it_waits_until_all_have_joined_and_says_who_is_missing(head: list) -> None:
    head += [answer(make_node(0)), answer(*map(make_node, range(3))), answer(*map(make_node, range(4)))]
    found, said = wait(32)
    assert [node.rank for node in found.alive] == [0, 1, 2, 3] and found.missing == []
    assert "8 of 32" in said[0] and "rank 0 node0 (10.0.0.0) 8" in said[0] and "missing: ranks 1-3" in said[0]


def test_a_node_that_is_coming_up_is_waited_for_by_name(head: list, monkeypatch: pytest.MonkeyPatch) -> None:
    forget("default")
    looks = iter([None, None])

    def come_up(cluster: str) -> NodeRecord | None:
        return next(looks, make_record())

    monkeypatch.setattr(which, "read_record", come_up)
    write_record(make_record())
    head += [answer(make_node(0, slots=32))]
    _, said = wait(32)
    assert said[0] == "waiting for `rollcall node` to add this node to cluster 'default'"


def test_a_node_that_nobody_brings_up_is_waited_for_until_the_deadline(head: list) -> None:
    forget("default")
    with pytest.raises(ClusterError, match="not part of a cluster 'default'"):
        wait(32, timeout_s=0.3)


def test_a_deadline_names_the_missing_rank_and_how_to_start_it(head: list) -> None:
    head += [answer(make_node(0), make_node(1), make_node(2))]
    with pytest.raises(ClusterError, match=r"24 of 32 .*missing: rank 3; .*--num-nodes 4 --rendezvous /shared"):
        wait(32, timeout_s=0.05)


def test_a_node_that_was_there_is_missed_by_address_and_time(head: list) -> None:
    write_record(replace(make_record(), accelerator="cpu", cluster="mine"))
    lost_s = time.mktime((2026, 11, 18, 12, 3, 44, 0, 0, -1))
    dead = replace(make_node(3, alive=False), ended_ms=round(lost_s * 1000))
    head += [answer(*map(make_node, range(3)), dead)]
    wanted = "missing: rank 3 (10.0.0.3, lost at 12:03:44); on its host, run `rollcall node --rank 3 --num-nodes 4 --rendezvous /shared"
    with pytest.raises(ClusterError, match=rf"{re.escape(wanted)} --slots 8 --cluster mine`"):
        wait_for_slots(OurCluster("mine"), num_slots=32, timeout_s=0.0)


def test_ranks_that_are_missing_are_told_in_spans(head: list) -> None:
    write_record(make_record(num_nodes=10))
    head += [answer(make_node(0), make_node(4))]
    with pytest.raises(ClusterError, match=r"missing: ranks 1-3, 5-9;"):
        wait(80, timeout_s=0.0)


def test_more_than_expected_is_an_error_with_the_list(head: list) -> None:
    head += [answer(*(make_node(rank, slots=10) for rank in range(4)))]
    with pytest.raises(
        ClusterError, match=r"40 accelerators have joined, but 32 were expected: .*rank 3 node3 \(10.0.0.3\) 10"
    ):
        wait(32)


def test_too_few_slots_with_every_node_there_asks_for_another_number(head: list) -> None:
    head += [answer(*(make_node(rank, slots=4) for rank in range(4)))]
    with pytest.raises(ClusterError, match="all 4 nodes have joined, so ask for 16"):
        wait(32, timeout_s=0.0)


def test_a_head_that_does_not_answer_is_waited_for_and_named(head: list) -> None:
    gone = HeadUnreachable("no answer at the head's address 10.0.0.0:6379")
    head += [gone, answer(make_node(0, slots=32))]
    found, said = wait(32)
    assert found.num_slots == 32 and "10.0.0.0:6379" in said[0]
    head[:] = [gone]
    with pytest.raises(ClusterError, match=r"10.0.0.0:6379; run `rollcall status` on 10.0.0.0 "):
        wait(32, timeout_s=0.0)


def test_a_dead_node_does_not_count_and_its_replacement_stands_for_its_rank(head: list) -> None:
    dead = make_node(1, alive=False, started_ms=1, host="old")
    head += [answer(make_node(0), dead, make_node(1, started_ms=2, host="new")), answer(make_node(0), dead)]
    replaced, lost = list_nodes(OurCluster("default")), list_nodes(OurCluster("default"))
    assert [node.host for node in replaced.nodes] == ["node0", "new"]
    assert (lost.num_slots, lost.missing, [node.alive for node in lost.nodes]) == (8, [1, 2, 3], [True, False])


def test_a_dead_node_that_started_later_does_not_hide_a_living_one(head: list) -> None:
    head += [answer(make_node(1, started_ms=1), make_node(1, alive=False, started_ms=2))]
    assert list_nodes(OurCluster("default")).nodes[0].alive


def test_a_node_that_was_not_started_by_us_counts_and_has_no_rank(head: list) -> None:
    head += [answer(make_node(0, slots=4), make_node(None, slots=4, host="stranger"))]
    found, _ = wait(8)
    assert [node.host for node in found.nodes] == ["node0", "stranger"]


def test_a_head_of_another_bring_up_is_not_taken_for_this_one(head: list) -> None:
    write_record(make_record())
    other = answer(make_node(0))
    head += [HeadAnswer(nodes=tuple(_with_id(node, "id-2") for node in other.nodes), dashboard=None)]
    with pytest.raises(ClusterError, match="was started again after this node joined"):
        list_nodes(OurCluster("default"))


def test_a_node_without_a_cluster_is_told_how_to_join_and_which_it_has(head: list) -> None:
    with pytest.raises(ClusterError, match="not part of a cluster 'mine'; it is part of default"):
        list_nodes(OurCluster("mine"))


def _with_id(node: NodeInfo, cluster_id: str) -> NodeInfo:
    from dataclasses import replace

    return replace(node, cluster_id=cluster_id)
