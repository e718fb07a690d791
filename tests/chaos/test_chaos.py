"""Every fault of docs/faults.md on real hosts. `make chaos` runs them all; `make test` has lost processes in test_recovery.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
from lab.lab import needs_lab

from chaos.arena import STEPS, Arena, open_arena
from chaos.faults import strike, strike_held, wait_for_words

pytestmark = [needs_lab, pytest.mark.chaos, pytest.mark.slow]
ELASTIC: dict[str, Any] = {"elastic": {"min_nodes": 1, "wait_s": 5}}
MODES = ["collocated", "disaggregated", "disaggregated, actors"]
SHARDED = ["sharded", "sharded, actors"]
POINTS = ["forward", "backward", "all-reduce", "save"]
PHASES = ["rollout", "update", "sync", "checkpoint"]
# A disk comes first: it is mended last, when whoever shall complain of it is there again.
PAIRS = [
    ("worker killed", "controller killed"),
    ("disk full", "worker killed"),
    ("disk full", "controller killed"),
    ("folder unwritable", "worker killed"),
    ("node lost and back", "controller killed"),
    ("disk full", "node lost and back"),
]
RANDOM_FAULTS = [
    "worker killed", "worker stopped", "node lost and back", "network cut for 15 s", "controller killed", "disk full",
    "folder unwritable",
]  # fmt: skip


def every_pair(*axes: list[str]) -> list[tuple[str, ...]]:
    """Fewest combinations in which each value of an axis meets each value of every other axis.

    All combinations of three axes take two hours; what breaks has depended on two of them.
    """

    def pairs(combination: tuple[str, ...]) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(combination), 2))

    left = list(product(*axes))
    missing, chosen = set().union(*map(pairs, left)), list[tuple[str, ...]]()
    while missing:
        chosen.append(max(left, key=lambda one: len(pairs(one) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with open_arena(tmp_path_factory.mktemp("chaos")) as arena:
        yield arena


# The longest runs come first, so that the others run beside them.
@pytest.mark.parametrize(("mode", "steps"), [("collocated", 100), ("disaggregated", 240)])  # one goes on during faults
def test_thirty_random_faults_in_one_run(arena: Arena, mode: str, steps: int) -> None:
    chance = random.Random(7)
    with arena.run(mode, score="slow_score", steps=steps) as run:
        for _ in range(30):
            if run.next_step > steps - 4:
                break  # how many steps pass during a fault depends on the machine
            fault, phase = chance.choice(RANDOM_FAULTS), chance.choice(["rollout", "update", "sync"])
            if fault == "controller killed" and run.to_notice:  # nobody would be left to notice the fault before it
                _, words, since = run.to_notice[-1]
                wait_for_words(run, words, since=since)
            strike(run, fault, phase=phase, step=run.next_step)
        assert len(run.struck) >= 20
        run.end()


def test_a_killed_worker_costs_nothing_that_was_finished(arena: Arena) -> None:
    with arena.run("collocated") as run:
        strike(run, "worker killed", phase="update", step=3)
        run.end()


@pytest.mark.parametrize(
    ("mode", "fault", "phase"),
    every_pair(MODES, ["worker killed", "worker stopped", "node lost and back", "network cut for 60 s"], PHASES),
)
def test_workers_and_nodes_may_go_in_any_phase(arena: Arena, mode: str, fault: str, phase: str) -> None:
    with arena.run(mode) as run:
        strike(run, fault, phase=phase, step=4 if phase == "checkpoint" else 3)
        run.end()


@pytest.mark.parametrize("phase", ["aggregate", "engine restore"])
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_a_worker_may_stop_in_the_other_phases(arena: Arena, mode: str, phase: str) -> None:
    with arena.run(mode) as run:
        strike(run, "worker stopped", phase=phase, step=3)
        run.end()


@pytest.mark.parametrize(
    ("mode", "point"),
    [("collocated", "sending weights"), ("disaggregated", "receiving weights")],
    ids=["collocated", "disaggregated"],
)
def test_a_worker_may_stop_in_the_final_sync(arena: Arena, mode: str, point: str) -> None:
    with arena.run(mode) as run:
        strike_held(run, "worker stopped", point=point, phase="update", step=STEPS)
        run.end()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("mode", ["collocated", "disaggregated, actors"])
def test_an_actor_rank_may_die_at_any_point_of_its_work(arena: Arena, mode: str, point: str) -> None:
    with arena.run(mode) as run:
        strike_held(run, "worker killed", point=point, phase="rollout", step=3)
        run.end()


@pytest.mark.parametrize(
    ("mode", "fault", "point"),
    every_pair(
        ["collocated", "disaggregated, actors"],
        ["node lost and back", "node gone"],
        [point for point in POINTS if point != "save"],  # node 0 saves, which is the head's
    ),
)
def test_an_actor_node_may_go_at_any_point_of_its_work(arena: Arena, mode: str, fault: str, point: str) -> None:
    with arena.run(mode, **(ELASTIC if fault == "node gone" else {})) as run:
        strike_held(run, fault, point=point, phase="rollout", step=3)
        run.end()


@pytest.mark.parametrize(("mode", "fault", "phase"), every_pair(MODES, ["node gone", "network cut for good"], PHASES))
def test_a_node_that_does_not_come_back_is_done_without(arena: Arena, mode: str, fault: str, phase: str) -> None:
    # A node that only samples is done without in any case; one that trains, where the run may shrink.
    with arena.run(mode, **({} if mode == "disaggregated" else ELASTIC)) as run:
        strike(run, fault, phase=phase, step=4 if phase == "checkpoint" else 3)
        run.end()


@pytest.mark.parametrize("mode", ["collocated", "disaggregated, actors"])
def test_a_run_grows_back_when_the_node_returns(arena: Arena, mode: str) -> None:
    with arena.run(mode, steps=80, **ELASTIC) as run:
        strike(run, "node gone", phase="update", step=3)
        run.wait_for("checkpoint", step=6)
        run.to_notice.append(("node back", r"is back; the run continues with it", len(run.said)))
        run.arena.hosts[1].restart()
        run.arena.join(1)
        run.end()


@pytest.mark.parametrize(
    ("mode", "fault", "phase"),
    every_pair(["collocated", "disaggregated"], ["controller killed", "head killed"], PHASES),
)
def test_the_same_command_resumes(arena: Arena, mode: str, fault: str, phase: str) -> None:
    with arena.run(mode) as run:
        strike(run, fault, phase=phase, step=4 if phase == "checkpoint" else 3)
        run.end()


@pytest.mark.parametrize(
    ("mode", "fault", "phase"),
    every_pair(["collocated", "disaggregated"], ["disk full", "folder unwritable"], ["rollout", "checkpoint"]),
)
def test_a_disk_that_takes_nothing_is_waited_for(arena: Arena, mode: str, fault: str, phase: str) -> None:
    with arena.run(mode) as run:
        strike(run, fault, phase=phase, step=2)
        run.end()


@pytest.mark.parametrize("mode", SHARDED)
@pytest.mark.parametrize("fault", ["worker killed", "node lost and back", "controller killed", "disk full"])
def test_anything_may_happen_while_parts_are_written_beside_the_run(arena: Arena, mode: str, fault: str) -> None:
    with arena.run(mode) as run:
        strike(run, fault, phase="checkpoint", step=2 if fault == "disk full" else 4)
        run.end()


@pytest.mark.parametrize("mode", SHARDED)
def test_an_actor_rank_may_die_while_it_writes_its_part(arena: Arena, mode: str) -> None:
    with arena.run(mode) as run:
        strike_held(run, "worker killed", point="save", phase="rollout", step=3)
        run.end()


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_two_faults_at_once(arena: Arena, mode: str, pair: tuple[str, str]) -> None:
    with arena.run(mode) as run:
        strike(run, *pair, phase="rollout", step=3)
        run.end()
