"""A call that has become slow is told with who waits, for how long, and which link of their nodes is slow."""

from __future__ import annotations

from rollcall.groups.backend import NodeSeats, WorkerSpec
from rollcall.groups.failures import waits_words
from rollcall.groups.links import Links
from rollcall.groups.pulse import Seen
from rollcall.groups.slow import SlowCalls
from rollcall.groups.sockets import Flow, Flows


def make_spec(title: str, *, rank: int, node: str, address: str) -> WorkerSpec:
    seats = NodeSeats(node_rank=rank, node_id=node, address=address, bundles=(0,))
    return WorkerSpec(
        role="run", rank=rank, world_size=2, local_rank=0, local_world_size=1, node=seats, slots=(0,), share=1.0, env={},
        title=title,
    )  # fmt: skip


SPECS = {
    0: make_spec("actor rank 0", rank=0, node="a", address="10.0.0.1"),
    1: make_spec("rollout rank 0", rank=1, node="b", address="10.0.0.2"),
}


class Run:
    """An actor on node a that sends weights to an engine on node b, looked at every second."""

    def __init__(self) -> None:
        self.now_s, self.num_done = 0.0, 0
        self.links = Links()
        self.calls = SlowCalls(self.links)
        self.told: list[str] = []

    def send(self, *, seconds: int) -> None:
        """One sync that takes this long."""
        for second in range(1, seconds + 1):
            self.look(busy_s=float(second))
        self.num_done += 1
        self.longest_s = {"send_weights": float(seconds), "use_weights": float(seconds)}
        self.look(busy_s=0.0)

    longest_s: dict[str, float] = {}

    def look(self, *, busy_s: float) -> None:
        self.now_s += 1
        workers = {
            rank: Seen(
                is_alive=True, state="S", doing=method if busy_s else "", busy_s=busy_s, num_done=self.num_done,
                longest_s=self.longest_s,
            )
            for rank, method in enumerate(("send_weights", "use_weights"))
        }  # fmt: skip
        if (text := self.calls.note(workers, SPECS, now_s=self.now_s)) is not None:
            self.told.append(text)


def test_a_sync_that_has_become_slow_names_who_waits_and_that_no_link_is_known_to_be_slow() -> None:
    run = Run()
    run.send(seconds=2)
    assert run.told == []
    run.send(seconds=50)
    first, again = run.told
    assert "actor rank 0 on node 0 (10.0.0.1) has been in send_weights for 21 s (2.0 s at most before)" in first
    assert "rollout rank 0 on node 1 (10.0.0.2) has been in use_weights for 21 s" in first
    assert first.endswith("No link is known to be slow; `rollcall doctor` measures the links")
    assert "for 42 s" in again, "told again when it has taken twice as long"


def test_a_link_that_is_known_to_be_slow_is_named_soon() -> None:
    run = Run()
    run.send(seconds=1)
    run.links.note({1: Flows(addresses=frozenset({"10.0.0.2"}))}, now_s=run.now_s)
    for second in range(1, 6):
        flow = Flow(fastest=95e6, waiting=400_000, carried=18_000, busy_s=1.0)
        run.links.note({0: Flows(by_peer={"10.0.0.2": flow})}, now_s=run.now_s)
        run.look(busy_s=float(second))
    (told,) = run.told
    assert "actor rank 0 on node 0 (10.0.0.1) has been in send_weights for 4 s (1.0 s at most before)" in told
    assert "the link between nodes 0 and 1 is slow: 18 kB/s went from node 0 to node 1 over 4 s, with 400 kB" in told


def test_calls_as_long_as_before_and_first_ones_are_not_told() -> None:
    run = Run()
    run.send(seconds=40)
    run.send(seconds=45)
    assert run.told == []


def test_a_call_on_one_node_is_told_without_the_other() -> None:
    calls = SlowCalls(Links())
    for second in range(60):
        seen = Seen(is_alive=True, state="S", doing="update", busy_s=float(second), longest_s={"update": 1.0})
        if (text := calls.note({0: seen}, SPECS, now_s=float(second))) is not None:
            assert "actor rank 0 on node 0" in text and "node 1" not in text
            return
    raise AssertionError("nothing was told")


def test_who_is_waited_for_is_told_by_purpose() -> None:
    specs = [make_spec("", rank=rank, node="b", address="10.0.0.2") for rank in range(5)]
    actor = make_spec("actor rank 0", rank=0, node="a", address="10.0.0.1")
    where = ", ".join(f"run rank {rank} on node {rank} (10.0.0.2)" for rank in range(3))
    assert waits_words({"to send weights of version 4": [actor], "to take weights of version 4": specs}) == (
        "the run waited for actor rank 0 on node 0 (10.0.0.1) to send weights of version 4, and for "
        f"{where} and 2 more to take weights of version 4"
    )
    assert waits_words({}) == ""
