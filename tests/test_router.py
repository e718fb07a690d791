"""The router alone, on workers that exist only as a clock: who gets what, and how long a step takes."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from requests_of import SAMPLING, add, make_group

from rollcall.base.errors import ConfigError
from rollcall.config import parse_config
from rollcall.engine.protocol import Request
from rollcall.run.router import RETRY_VERSIONS, RolloutWorker, Router


def names(requests: list[Request]) -> set[str]:
    return {request.id.partition("/")[0] for request in requests}


@dataclass
class Simulation:
    """Workers with ``places`` groups at once, each of which takes ``seconds[worker]``."""

    seconds: list[float]
    places: int
    size: int = 2
    weights: list[float] | None = None
    nodes: list[int] | None = None
    now_s: float = 0.0
    num_added: int = 0
    backlog: list[list[list[Request]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        nodes = self.nodes or list(range(len(self.seconds)))
        places = [RolloutWorker(worker=worker, node_rank=node, name=f"w{worker}") for worker, node in enumerate(nodes)]
        room = self.places * self.size
        self.router = Router(places, room=room, node_weights=self.weights, clock=lambda: self.now_s)
        self.backlog = [[] for _ in self.seconds]

    def step(self, num_groups: int, *, version: int = 0) -> tuple[float, Counter[str]]:
        """How long so many groups take, and who made how many."""
        started_s, made, events = self.now_s, Counter[str](), list[tuple[float, int, list[str]]]()
        busy = [0] * len(self.seconds)
        for _ in range(num_groups):
            add(self.router, make_group(self.num_added, size=self.size))
            self.num_added += 1
        while True:
            self._move(version)
            for worker, waiting in enumerate(self.backlog):
                while waiting and busy[worker] < self.places:
                    busy[worker] += 1
                    group = [request.id for request in waiting.pop(0)]
                    heapq.heappush(events, (self.now_s + self.seconds[worker], worker, group))
                self.router.note_waiting(worker, self.size * len(waiting))
            if not events:
                break
            self.now_s, worker, group = heapq.heappop(events)
            busy[worker] -= 1
            made[{self.router.finish(name) for name in group}.pop()] += 1
        assert sum(made.values()) == num_groups
        return self.now_s - started_s, made

    def _move(self, version: int) -> None:
        for worker, cancelled in self.router.take_back():
            waiting = self.backlog[worker]
            assert {request.id for request in waiting.pop()} == set(cancelled), "the last in order had not begun"
        for worker, requests in self.router.hand_out(version=version):
            assert len(names(requests)) == 1, "a group goes to one worker"
            self.backlog[worker].append(requests)


def test_node_weights_are_the_shares_of_the_tasks_whatever_the_speed() -> None:
    simulation = Simulation([4.0, 1.0, 1.0], places=2, weights=[2, 1, 1])
    _, made = simulation.step(40)
    assert made == {"w0": 20, "w1": 10, "w2": 10}


def test_the_workers_of_a_node_share_its_part() -> None:
    simulation = Simulation([1.0] * 4, places=2, weights=[3, 1], nodes=[0, 0, 0, 1])
    _, made = simulation.step(48)
    assert made == {"w0": 12, "w1": 12, "w2": 12, "w3": 12}


def test_a_weight_of_zero_leaves_a_node_out() -> None:
    _, made = Simulation([1.0, 1.0], places=2, weights=[0, 1]).step(10)
    assert made == {"w1": 10}


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")]])
def test_a_run_file_with_impossible_weights_is_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="node_weights"):
        parse_config({"cluster": {"num_nodes": 2, "node_weights": weights}})


@pytest.mark.parametrize("num_groups", [8, 64, 250])
def test_equal_workers_get_equal_work_step_after_step(num_groups: int) -> None:
    simulation = Simulation([1.0] * 8, places=32)
    for _ in range(4):
        seconds, made = simulation.step(num_groups)
        assert seconds == 1.0 and max(made.values()) - min(made[f"w{worker}"] for worker in range(8)) <= 1


def test_a_slow_worker_costs_its_share_and_not_the_step() -> None:
    balanced, slow = Simulation([1.0] * 8, places=4), Simulation([4.0] + [1.0] * 7, places=4)
    for _ in range(3):
        balanced_s, _ = balanced.step(256)
        slow_s, made = slow.step(256)
    assert balanced_s == 8.0
    assert slow_s == 9.0, "a worker of a quarter speed leaves 7.25 of 8, and groups are whole"
    assert 0 < made["w0"] <= 8


def test_a_slow_worker_gets_nothing_that_others_finish_before_it() -> None:
    simulation = Simulation([4.0, 1.0, 1.0, 1.0], places=8)
    simulation.step(32)  # nothing is known yet
    for _ in range(2):
        seconds, made = simulation.step(24)
        assert seconds == 1.0 and made["w0"] == 0


def test_a_worker_that_was_too_slow_is_tried_again_later() -> None:
    simulation = Simulation([4.0, 1.0, 1.0, 1.0], places=8)
    simulation.step(32)
    simulation.seconds[0] = 1.0
    for version in range(1, RETRY_VERSIONS + 40):
        _, made = simulation.step(24, version=version)
    assert made["w0"] >= 5, "a fair share would be 6"


def test_a_run_that_begins_at_a_late_version_takes_nobody_for_forgotten() -> None:
    simulation = Simulation([1.0] * 4, places=8)
    for version in (50, 51):
        seconds, made = simulation.step(32, version=version)
        assert seconds == 1.0 and set(made.values()) == {8}


def test_a_worker_that_is_stuck_gets_nothing_more() -> None:
    simulation = Simulation([1.0, 1.0, 1.0], places=2)
    simulation.step(30)
    simulation.seconds[0] = 1000.0
    _, made = simulation.step(60)
    assert made["w0"] <= 3


def workers(count: int) -> list[RolloutWorker]:
    return [RolloutWorker(worker=worker, node_rank=0, name=f"w{worker}") for worker in range(count)]


def test_what_is_not_begun_goes_from_a_busy_worker_to_an_idle_one() -> None:
    now = [0.0]
    router = Router(workers(2), room=2, node_weights=None, clock=lambda: now[0])
    for name in range(4):
        add(router, make_group(name))
    given = router.hand_out()
    assert Counter(worker for worker, _ in given) == {0: 2, 1: 2}, "one to work on, one to begin with next"
    mine = {worker: [requests for who, requests in given if who == worker] for worker in (0, 1)}
    now[0] = 1.0
    for request in [request for requests in mine[1] for request in requests]:
        assert router.finish(request.id) == "w1"
    router.note_waiting(1, 0)
    router.note_waiting(0, 2)
    last = mine[0][1]
    assert router.take_back() == [(0, [request.id for request in last])] and router.take_back() == []
    assert router.hand_out() == [(1, last)]
    assert {router.finish(request.id) for request in last} == {"w1"}
    assert {router.finish(request.id) for request in mine[0][0]} == {"w0"}


def test_a_worker_gets_more_when_a_completion_has_ended_and_not_only_when_a_group_has() -> None:
    """So that no engine starves while the longest completion of a group goes on."""
    router = Router(workers(1), room=32, node_weights=None, clock=lambda: 0.0)
    for name in range(8):
        add(router, make_group(name, size=8))
    given = [request for _, requests in router.hand_out() for request in requests]
    assert len(given) == 32 + 8, "what it can decode, and some ahead"
    for request in given[:3]:
        router.finish(request.id)
        assert [len(requests) for _, requests in router.hand_out()] == ([8] if request is given[0] else [])
    assert router.load(0) == 45


def test_what_is_dropped_is_no_load_and_does_not_go_out() -> None:
    router = Router(workers(1), room=2, node_weights=None, clock=lambda: 0.0)
    for name in "abcd":
        add(router, make_group(name))
    given = [request.id for _, requests in router.hand_out() for request in requests]
    assert given == ["a/0", "a/1", "b/0", "b/1"]
    for name in ("a/0", "a/1", "b/0", "c/0", "c/1", "d/1"):
        router.drop(name)
    assert router.load(0) == 1
    assert [[request.id for request in requests] for _, requests in router.hand_out()] == [["d/0"]]
    router.finish("b/1")
    router.finish("d/0")
    assert router.load(0) == 0


def test_groups_go_out_in_their_order() -> None:
    router = Router(workers(1), room=2, node_weights=None, clock=lambda: 0.0)
    for step, name in ((3, "late"), (1, "early"), (2, "middle")):
        add(router, make_group(name, order=(step, 0, 0)))
    order: list[str] = []
    while given := router.hand_out():
        for request in [request for _, requests in given for request in requests]:
            order.append(request.id)
            router.finish(request.id)
    assert order == ["early/0", "early/1", "middle/0", "middle/1", "late/0", "late/1"]


def turn_of(router: Router, session: str, turn: int) -> int:
    """The worker that gets it."""
    prompt = np.array([1], dtype=np.int32)
    router.add(Request(id=f"{session}/{turn}", prompt_ids=prompt, seed=turn, sampling=SAMPLING, session=session))
    ((worker, _),) = router.hand_out()
    return worker


@pytest.mark.parametrize("weights", [None, [1, 1, 2]])
def test_a_session_stays_with_its_worker_while_that_has_room(weights: list[float] | None) -> None:
    workers = [RolloutWorker(worker=worker, node_rank=worker, name=f"w{worker}") for worker in range(3)]
    router = Router(workers, room=2, node_weights=weights, clock=lambda: 0.0)
    homes = {f"s{number}": turn_of(router, f"s{number}", 0) for number in range(6)}
    assert set(homes.values()) == {0, 1, 2}
    for turn in (1, 2):
        for session in reversed(homes):
            router.finish(f"{session}/{turn - 1}")
            assert turn_of(router, session, turn) == homes[session]
    for session in homes:
        router.finish(f"{session}/2")
    assert router.end_session("s0") == [homes["s0"]] and router.end_session("s0") == []


def test_a_session_moves_when_its_worker_is_full_or_gone_and_stays_there() -> None:
    workers = [RolloutWorker(worker=worker, node_rank=0, name=f"w{worker}") for worker in range(2)]
    router = Router(workers, room=1, node_weights=None, clock=lambda: 0.0)
    first = turn_of(router, "s", 0)
    router.finish("s/0")
    add(router, make_group("big", size=1))
    ((busy, _),) = router.hand_out()
    assert busy == first == 0
    assert turn_of(router, "s", 1) == 1
    router.finish("big/0")
    router.finish("s/1")
    assert turn_of(router, "s", 2) == 1
    router.finish("s/2")
    router.lose(1)
    assert turn_of(router, "s", 3) == 0
    router.finish("s/3")
    assert router.end_session("s") == [0]
