"""What every worker group promises, whatever carries its calls: losses, complaints about a peer, deadlines, replacement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from rollcall.base.errors import PeerLostError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rollcall.base.wait import Wait
from rollcall.process.groups.backend import Call, Carrier, Member, NodeSeats, Recipe, WorkerSpec
from rollcall.process.groups.gang import Gang
from rollcall.process.groups.host import RemoteFailureError

WAIT_S = 60.0


class Scripted(Carrier):
    """Answers when the test says so."""

    peer_s = 0.5

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.gone: set[Member] = set()
        self.num_launched = 0

    def launch(self, spec: WorkerSpec, *, lost: Member | None, wait: Wait) -> Member:
        self.num_launched += 1
        return Member(spec, link=self.num_launched)

    def send(self, call: Call, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if method == "greet":
            call.finish((call.member.link, 7000 if args[0] else 0))
        elif method == "start":
            call.finish()
        else:
            call.link = []  # the answer, once there is one

    def answer(self, call: Call, value: Any) -> None:
        with self.changed:
            call.link.append(value)
            self.changed.notify_all()

    def settle(self, calls: Sequence[Call], *, timeout_s: float, through_failures: bool = False) -> None:
        def is_enough() -> bool:
            failed = any(isinstance(call.link[0], Exception) for call in calls if call.link)
            return all(call.is_done or call.link for call in calls) or (failed and not through_failures)

        with self.changed:
            is_all = self.changed.wait_for(is_enough, timeout=timeout_s)
            for call in calls if is_all or through_failures else ():  # all or none, as Ray does
                if call.link and not call.is_done:
                    is_error = isinstance(call.link[0], Exception)
                    call.finish(None if is_error else call.link[0], error=call.link[0] if is_error else None)

    def answered(self, calls: Sequence[Call], *, timeout_s: float) -> Collection[Call]:
        with self.changed:
            self.changed.wait_for(lambda: any(call.is_done or call.link for call in calls), timeout=timeout_s)
            return [call for call in calls if call.is_done or call.link]

    def is_alive(self, member: Member) -> bool:
        return member not in self.gone

    def stop(self, members: Sequence[Member], *, timeout_s: float) -> None:
        self.gone |= {*members}


def make_gang(count: int = 3) -> tuple[Gang, Scripted]:
    node = NodeSeats(node_rank=0, node_id="n", address="10.0.0.1", bundles=tuple(range(count)))
    specs = [
        WorkerSpec(
            role="actor", rank=rank, world_size=count, local_rank=rank, local_world_size=count, node=node, slots=(rank,),
            share=1.0, env={},
        )
        for rank in range(count)
    ]  # fmt: skip
    carrier = Scripted()
    purposes = {"update": "to train on step {0}"}
    gang = Gang(specs, Recipe(target="a.B", args=(), kwargs={}, purposes=purposes), carrier)
    gang.start(timeout_s=WAIT_S)
    return gang, carrier


def ask(gang: Gang, rank: int, *args: Any) -> Call:
    return gang.call(rank, "update", (), args, {})


def soon(work: Callable[[], Any]) -> None:
    threading.Timer(0.1, work).start()


def gather(gang: Gang, *calls: Call, timeout_s: float = WAIT_S) -> list[Any]:
    return gang.gather(list(calls), wait=Wait(timeout_s, stalls=False))


def test_answers_come_in_the_order_of_the_calls_and_the_same_call_may_be_waited_for_twice() -> None:
    gang, carrier = make_gang()
    calls = [ask(gang, rank, 1) for rank in range(3)]
    for rank in (2, 0, 1):
        carrier.answer(calls[rank], rank)
    assert gang.ready(calls, timeout_s=0) == calls
    assert gather(gang, *calls, calls[0]) == [0, 1, 2, 0] == gather(gang, *calls, calls[0])
    assert [member.pid for member in gang.members] == [1, 2, 3]


def test_the_loss_of_a_needed_worker_ends_every_wait_and_says_what_was_waited_for() -> None:
    gang, _ = make_gang()
    gang.tolerate([2])
    call = ask(gang, 0, 7)
    soon(lambda: gang.lose({gang.members[1]: "its node is silent"}))
    with pytest.raises(WorkerDiedError) as caught:
        gather(gang, call)
    assert str(caught.value) == (
        "actor rank 1 on node 0 (10.0.0.1) is dead: its node is silent; the run waited for actor rank 0 on node 0 (10.0.0.1) to "
        "train on step 7"
    )
    with pytest.raises(WorkerDiedError, match="actor rank 1"):
        gang.ready([call], timeout_s=0)


def test_the_loss_of_a_tolerated_worker_ends_the_waits_for_it_and_another_takes_its_seat() -> None:
    gang, carrier = make_gang()
    gang.tolerate([2])
    lost, kept = ask(gang, 2, 1), ask(gang, 0, 1)
    gang.lose({gang.members[2]: "killed"})
    assert gang.ready([lost, kept], timeout_s=0) == [lost]
    carrier.answer(kept, "fine")
    assert gather(gang, kept) == ["fine"]
    with pytest.raises(WorkerDiedError, match="actor rank 2 .* killed"):
        gather(gang, lost)
    assert not gang.is_alive(2)
    gang.replace(2, timeout_s=WAIT_S)
    again = ask(gang, 2, 1)
    carrier.answer(again, "new")
    assert gather(gang, again) == ["new"] and gang.is_alive(2) and gang.members[2].pid == 4
    assert [(turn.rank, turn.is_lost) for turn in gang.sightings().turns] == [(2, True), (2, False)]


def test_an_answer_from_before_a_loss_counts() -> None:
    gang, carrier = make_gang()
    call = ask(gang, 1, 1)
    carrier.answer(call, "done")
    gang.lose({gang.members[1]: "killed"})
    assert gather(gang, call) == ["done"]


def test_a_complaint_about_a_peer_becomes_the_death_of_that_peer() -> None:
    gang, carrier = make_gang()
    calls = [ask(gang, rank, 1) for rank in range(3)]
    carrier.answer(calls[0], RemoteFailureError.of(ConnectionError("Connection reset by peer")))
    soon(lambda: carrier.gone.add(gang.members[2]))
    with pytest.raises(WorkerDiedError, match="(?s)actor rank 2 .* is dead: its process is gone.*Connection reset"):
        gather(gang, *calls)


def test_a_complaint_about_a_peer_that_lives_is_a_loss_and_other_errors_are_the_workers_own() -> None:
    gang, carrier = make_gang()
    calls = [ask(gang, rank, 1) for rank in range(2)]
    carrier.answer(calls[0], RemoteFailureError.of(ConnectionError("Connection reset by peer")))
    with pytest.raises(PeerLostError, match="actor rank 0 .* lost its peer"):
        gather(gang, *calls)
    failed = ask(gang, 1, 2)
    carrier.answer(failed, RemoteFailureError.of(KeyError("row")))
    with pytest.raises(WorkerError, match="(?s)actor rank 1 .* raised.*KeyError") as caught:
        gather(gang, failed)
    assert isinstance(caught.value.__cause__, KeyError) and not isinstance(caught.value, WorkerDiedError)


def test_of_several_failures_a_death_is_reported_and_the_others_are_named() -> None:
    gang, carrier = make_gang()
    calls = [ask(gang, rank, 1) for rank in range(3)]
    carrier.gone.add(gang.members[2])
    carrier.answer(calls[1], RemoteFailureError.of(ValueError("bad")))
    carrier.answer(calls[2], EOFError("it has ended"))
    with pytest.raises(WorkerDiedError, match="(?s)actor rank 2 .*Also failed: actor rank 1"):
        gather(gang, *calls)


def test_a_deadline_names_the_workers_that_have_not_answered() -> None:
    gang, carrier = make_gang()
    calls = [ask(gang, rank, 1) for rank in range(3)]
    carrier.answer(calls[0], 0)
    with pytest.raises(
        WorkerTimeoutError, match="no answer after 0.2 s from 2 of 3 workers: actor rank 1 .*actor rank 2"
    ):
        gather(gang, *calls, timeout_s=0.2)
    for call in calls[1:]:
        carrier.answer(call, 1)
    assert gather(gang, *calls) == [0, 1, 1]


def test_a_gang_that_was_stopped_answers_nothing() -> None:
    gang, _ = make_gang()
    call = ask(gang, 0, 1)
    gang.stop(timeout_s=WAIT_S)
    with pytest.raises(WorkerDiedError, match="actor has been shut down"):
        gather(gang, call)
    with pytest.raises(WorkerDiedError, match="shut down"):
        gang.replace(0, timeout_s=WAIT_S)
