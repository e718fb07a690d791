"""Every fault of docs/faults.md on real hosts. The short ones are in `make test`; `make chaos` runs them all."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from lab.lab import needs_lab

from chaos.arena import Arena, open_arena, strike

pytestmark = [needs_lab, pytest.mark.chaos]
ELASTIC = {"elastic": {"min_nodes": 1, "wait_s": 5}}
WORKER_PHASES = ["rollout", "update", "sync", "checkpoint"]
RANDOM_FAULTS = ["worker killed", "worker stopped", "node lost and back", "controller killed", "disk full"]


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with open_arena(tmp_path_factory.mktemp("chaos")) as arena:
        yield arena


def test_a_killed_worker_costs_nothing_that_was_finished(arena: Arena) -> None:
    with arena.run("collocated") as run:
        strike(run, "worker killed", "update", step=3)
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("phase", WORKER_PHASES)
@pytest.mark.parametrize("fault", ["worker killed", "worker stopped", "node lost and back", "network cut for 60 s"])
@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "disaggregated, actors"])
def test_workers_and_nodes_may_go_in_any_phase(arena: Arena, mode: str, fault: str, phase: str) -> None:
    with arena.run(mode) as run:
        strike(run, fault, phase, step=4 if phase == "checkpoint" else 3)
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "update"])
@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "disaggregated, actors"])
def test_a_node_that_does_not_come_back_is_done_without(arena: Arena, mode: str, phase: str) -> None:
    with arena.run(mode, **ELASTIC) as run:
        strike(run, "node gone", phase, step=3)
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("phase", WORKER_PHASES)
@pytest.mark.parametrize("fault", ["controller killed", "head killed"])
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_the_same_command_resumes(arena: Arena, mode: str, fault: str, phase: str) -> None:
    with arena.run(mode) as run:
        strike(run, fault, phase, step=4 if phase == "checkpoint" else 3)
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "checkpoint"])
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_a_full_disk_is_waited_for(arena: Arena, mode: str, phase: str) -> None:
    with arena.run(mode) as run:
        strike(run, "disk full", phase, step=2)
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_two_faults_at_once(arena: Arena, mode: str) -> None:
    with arena.run(mode) as run:
        strike(run, "worker killed", "rollout", step=3)
        strike(run, "controller killed", "rollout", step=3)
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_thirty_random_faults_in_one_run(arena: Arena, mode: str) -> None:
    chance = random.Random(7)
    with arena.run(mode, steps=64) as run:
        for number in range(30):
            strike(run, chance.choice(RANDOM_FAULTS), chance.choice(["rollout", "update", "sync"]), step=2 * number + 2)
        run.end()
