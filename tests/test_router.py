"""The router alone, on workers that exist only as a clock: who gets what, and how long a step takes."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from rollcall.config import parse_config
from rollcall.engine.protocol import Ended, Finished, Request, Sampling
from rollcall.errors import ConfigError
from rollcall.roles.engine_seat import EngineSeat
from rollcall.roles.router import RETRY_VERSIONS, RolloutWorker, Router

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop_token_ids=(0,), stop_strings=())


def make_request(name: object, *, size: int = 2, session: str | None = None) -> Request:
    prompt = np.array([1], dtype=np.int32)
    return Request(id=str(name), prompt_ids=prompt, seeds=tuple(range(size)), sampling=SAMPLING, session=session)


@dataclass
class Simulation:
    """Workers with ``places`` requests at once, each of which takes ``seconds[worker]``."""

    seconds: list[float]
    places: int
    size: int = 2
    weights: list[float] | None = None
    nodes: list[int] | None = None
    now_s: float = 0.0
    num_added: int = 0
    backlog: list[list[Request]] = field(default_factory=list)

    def __post_init__(self) -> None:
        nodes = self.nodes or list(range(len(self.seconds)))
        places = [RolloutWorker(worker=worker, node_rank=node, name=f"w{worker}") for worker, node in enumerate(nodes)]
        room = self.places * self.size
        self.router = Router(places, room=room, node_weights=self.weights, clock=lambda: self.now_s)
        self.backlog = [[] for _ in self.seconds]

    def step(self, num_requests: int, *, version: int = 0) -> tuple[float, Counter[str]]:
        """How long so many requests take, and who made how many."""
        started_s, made, events = self.now_s, Counter[str](), list[tuple[float, int, str]]()
        busy = [0] * len(self.seconds)
        for _ in range(num_requests):
            self.router.add(make_request(self.num_added, size=self.size))
            self.num_added += 1
        while True:
            self._move(version)
            for worker, waiting in enumerate(self.backlog):
                while waiting and busy[worker] < self.places:
                    busy[worker] += 1
                    heapq.heappush(events, (self.now_s + self.seconds[worker], worker, waiting.pop(0).id))
                self.router.note_waiting(worker, num_waiting=len(waiting), returned=[])
            if not events:
                break
            self.now_s, worker, name = heapq.heappop(events)
            busy[worker] -= 1
            made[self.router.finish(name)] += 1
        assert self.router.num_unfinished == 0 and sum(made.values()) == num_requests
        return self.now_s - started_s, made

    def _move(self, version: int) -> None:
        for worker, count in self.router.ask_back().items():
            returned = [self.backlog[worker].pop().id for _ in range(min(count, len(self.backlog[worker])))]
            self.router.note_waiting(worker, num_waiting=len(self.backlog[worker]), returned=returned)
        for worker, request in self.router.hand_out(version=version):
            self.backlog[worker].append(request)


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


@pytest.mark.parametrize("num_requests", [8, 64, 250])
def test_equal_workers_get_equal_work_step_after_step(num_requests: int) -> None:
    simulation = Simulation([1.0] * 8, places=32)
    for _ in range(4):
        seconds, made = simulation.step(num_requests)
        assert seconds == 1.0 and max(made.values()) - min(made[f"w{worker}"] for worker in range(8)) <= 1


def test_a_slow_worker_costs_its_share_and_not_the_step() -> None:
    balanced, slow = Simulation([1.0] * 8, places=4), Simulation([4.0] + [1.0] * 7, places=4)
    for _ in range(3):
        balanced_s, _ = balanced.step(256)
        slow_s, made = slow.step(256)
    assert balanced_s == 8.0
    assert slow_s == 9.0, "a worker of a quarter speed leaves 7.25 of 8, and requests are whole"
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


def test_what_is_not_begun_goes_from_a_busy_worker_to_an_idle_one() -> None:
    now = [0.0]
    places = [RolloutWorker(worker=worker, node_rank=0, name=f"w{worker}") for worker in range(2)]
    router = Router(places, room=2, node_weights=None, clock=lambda: now[0])
    for name in range(4):
        router.add(make_request(name))
    given = router.hand_out()
    assert Counter(worker for worker, _ in given) == {0: 2, 1: 2}, "one to work on, one to begin with next"
    mine = {worker: [request.id for who, request in given if who == worker] for worker in (0, 1)}
    now[0] = 1.0
    for name in mine[1]:
        assert router.finish(name) == "w1"
    router.note_waiting(1, num_waiting=0, returned=[])
    router.note_waiting(0, num_waiting=1, returned=[])
    assert router.ask_back() == {0: 1} and router.ask_back() == {}, "asked once"
    router.note_waiting(0, num_waiting=0, returned=[mine[0][1]])
    ((worker, request),) = router.hand_out()
    assert worker == 1 and request.id == mine[0][1] and request.seeds == (0, 1)
    assert router.finish(mine[0][1]) == "w1" and router.finish(mine[0][0]) == "w0"


class CountingEngine:
    """Finishes what it has at every second poll, and says how much it was given at once."""

    def __init__(self) -> None:
        self.version = self.num_preemptions = self.num_polls = self.most = 0
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []

    @property
    def num_unfinished(self) -> int:
        return len(self.requests)

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.most = max(self.most, sum(len(request.seeds) for request in self.requests))

    def poll(self) -> list[Finished]:
        self.num_polls += 1
        if self.num_polls % 2:
            return []
        done, self.requests = self.requests, []
        return [Finished(request_id=request.id, completions=()) for request in done]

    def take_ended(self) -> list[Ended]:
        return []

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def update_weights(self, version: int) -> None:
        self.version = version

    def end_session(self, session: str) -> None:
        self.ended.append(session)


def test_a_seat_gives_its_engine_what_it_has_room_for_and_the_rest_back() -> None:
    engine = CountingEngine()
    seat = EngineSeat(engine, room=4)
    progress = seat.advance([make_request(name) for name in "abcde"], [], give_back=2, look_s=5)
    assert progress.returned == ["e", "d"], "the last come back first"
    assert [item.request_id for item in progress.finished] == ["a", "b"] and progress.num_waiting == 0
    progress = seat.advance([], [], give_back=5, look_s=5)
    assert progress.returned == [] and [item.request_id for item in progress.finished] == ["c"]
    assert engine.most == 4


def test_a_request_larger_than_the_room_runs_alone() -> None:
    seat = EngineSeat(CountingEngine(), room=4)
    big, small = make_request("big", size=9), make_request("small")
    progress = seat.advance([big, small], [], give_back=0, look_s=5)
    assert [item.request_id for item in progress.finished] == ["big"]
    assert [item.request_id for item in seat.advance([], [], give_back=0, look_s=5).finished] == ["small"]


def test_a_seat_whose_parameters_change_decodes_nothing_until_it_has_their_version() -> None:
    engine = CountingEngine()
    seat = EngineSeat(engine, room=4)
    seat.hold()
    progress = seat.advance([make_request("a")], [], give_back=0, look_s=5)
    assert progress.held_at == 0 and engine.num_polls == 0 and not progress.finished
    engine.update_weights(1)
    progress = seat.advance([], [], give_back=0, look_s=5)
    assert progress.held_at is None and [item.request_id for item in progress.finished] == ["a"]


def test_an_aborted_request_reaches_the_engine_even_where_there_is_no_room() -> None:
    engine = CountingEngine()
    seat = EngineSeat(engine, room=2)
    seat.advance([make_request("a"), make_request("b"), make_request("c")], ["c"], give_back=0, look_s=5)
    assert engine.aborted == ["c"]


def test_ended_sessions_reach_the_engine() -> None:
    engine = CountingEngine()
    EngineSeat(engine, room=2).advance([make_request("a")], [], ended=["s1", "s2"], give_back=0, look_s=5)
    assert engine.ended == ["s1", "s2"]


def turn_of(router: Router, session: str, turn: int) -> int:
    """The worker that gets it."""
    router.add(make_request(f"{session}/{turn}", size=1, session=session))
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
    router.add(make_request("big", size=1))
    ((busy, _),) = router.hand_out()
    assert busy == first == 0
    assert turn_of(router, "s", 1) == 1
    router.finish("big")
    router.finish("s/1")
    assert turn_of(router, "s", 2) == 1
    router.finish("s/2")
    router.lose(1)
    assert turn_of(router, "s", 3) == 0
    router.finish("s/3")
    assert router.end_session("s") == [0]
