"""Episodes on two lab hosts, broken in the middle: whatever goes, the run ends with its steps and makes nothing finished again."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml
from lab.cluster import ENV, bring_up
from lab.command import Command
from lab.lab import CHECKOUT, Host, Lab, needs_lab
from tiny import save_model

from rollcall.base.journal import Journal
from rollcall.base.types import Completion
from rollcall.observe.live import ProcessState, read_live
from rollcall.view.audit import audit

pytestmark = [needs_lab, pytest.mark.slow]
RUN_S = 400.0
STRIKE_S = 200.0  # for the episodes to come in whose middle a fault strikes
STEPS, PROMPTS, SAMPLES = 3, 4, 4
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "RAY_worker_niceness": "0"}
# Of two nodes with a slot each. The environment's process on a node is beside what else is there.
ON_BOTH = {"actor,rollout": "0", "environment": "all"}
APART = {"actor,rollout": "0", "environment": "1"}
SAMPLED_ON_BOTH = {"actor": "0", "rollout": "all", "environment": "all"}
# Slow enough to be struck in the middle of a turn, and some slower than others: what has ended while its group is open is
# written once a second. It says where it ran.
GAME = """
import os, random, time

class Game:
    def reset(self, row):
        self.turns = 0
        return None

    def step(self, text, token_ids):
        time.sleep(random.choice((0.2, 1.6)))
        self.turns += 1
        node = float(os.uname().nodename[-1])
        if self.turns == 3:
            return "", len(set(text)) / 10, True, {"node": node}
        return "go on"
"""
# The same as a program: three questions of the model, from wherever it runs.
AGENT = """
import random
ids = post("/completions", {"prompt": row["prompt"], "return_token_ids": True})[1]["choices"][0]
for _ in range(2):
    time.sleep(random.choice((0.2, 1.2)))
    prompt = ids["prompt_token_ids"] + ids["token_ids"] + [5]
    ids = post("/completions", {"prompt": prompt, "return_token_ids": True})[1]["choices"][0]
metrics = {"node": float(os.uname().nodename[-1]), "is_local": float(base.hostname.startswith("127."))}
print(json.dumps({"reward": len(set(ids["text"])) / 10, "metrics": metrics}))
"""
CLASS = {"type": "step", "path": "slow_game:Game"}


@dataclass(kw_only=True)
class Arena:
    lab: Lab
    runs: list[Run] = field(default_factory=list)

    @property
    def hosts(self) -> list[Host]:
        return self.lab.hosts

    def join(self, *ranks: int) -> None:
        options = ("--rendezvous", str(self.lab.shared), "--slots", "1")
        bring_up({rank: self.hosts[rank] for rank in ranks}, *options, num_nodes=2, env=NO_GPU)

    def run(self, placement: dict[str, str], *, environment: dict[str, Any] = CLASS) -> Run:
        folder = self.lab.shared / f"run-{len(self.runs)}"
        folder.mkdir()
        document = run_file(self.lab.shared, folder / "run", placement, environment)
        (folder / "run.yaml").write_text(yaml.safe_dump(document))
        run = Run(arena=self, folder=folder)
        self.runs.append(run)
        run.start()
        return run


@dataclass(kw_only=True)
class Run:
    arena: Arena
    folder: Path
    commands: list[Command] = field(default_factory=list)

    @property
    def dir(self) -> Path:
        return self.folder / "run"

    @property
    def said(self) -> str:
        return "".join(command.output for command in self.commands)

    def start(self) -> None:
        paths = f"{self.arena.lab.shared}{os.pathsep}{CHECKOUT / 'src'}"
        command = [sys.executable, "-m", "rollcall", "train", str(self.folder / "run.yaml")]
        env = {**ENV, **NO_GPU, "PYTHONPATH": paths}
        self.commands.append(self.arena.hosts[0].start(command, env=env, cwd=self.arena.lab.shared))

    def wait_for_episodes(self, *, step: int) -> None:
        """Until some of this step have ended, and others have not."""
        path, give_up = self.dir / f"journal/{step:06d}.attempts", time.monotonic() + STRIKE_S
        while not (path.exists() and path.stat().st_size):
            assert self.commands[-1].poll() is None, f"the run ended before episodes of step {step}:\n{self.said}"
            assert time.monotonic() < give_up, f"no episode of step {step} came:\n{self.said}"
            time.sleep(0.02)

    def worker(self, role: str, *, node: int) -> ProcessState:
        give_up = time.monotonic() + STRIKE_S
        while time.monotonic() < give_up:
            live = read_live(self.dir)
            if live is not None:
                for one in live.processes:
                    if role in one.roles and one.node == node and one.state != "lost":
                        return one
            time.sleep(0.2)
        raise AssertionError(f"live.json has no {role} on node {node}:\n{self.said}")

    def end(self) -> list[Completion]:
        """All episodes, once the run has come to its own end and nothing finished was made again."""
        status = self.commands[-1].wait(timeout_s=RUN_S)
        assert status == 0, f"ended with {status}:\n{self.said}"
        found = audit(self.dir)
        assert found.is_clean and found.steps == STEPS, f"{found}\n{self.said}"
        assert found.counts()["episodes_regenerated"] == 0
        with Journal(self.dir / "journal") as journal:
            groups = [group for step in journal.steps() for group in journal.read(step)]
        assert len(groups) == STEPS * PROMPTS and all(len(group.completions) == SAMPLES for group in groups)
        return [completion for group in groups for completion in group.completions]


def run_file(shared: Path, run_dir: Path, placement: dict[str, str], environment: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": {"name": "episodes", "dir": str(run_dir)},
        "cluster": {
            "num_nodes": 2, "num_gpus_per_node": 1, "accelerator": "cpu", "component_placement": placement
        },
        "model": {"path": str(shared / "model"), "device": "cpu"},
        "data": {"train": str(shared / "rows.jsonl"), "val": None, "prompts_per_step": PROMPTS},
        "rollout": {"samples_per_prompt": SAMPLES, "max_response_tokens": 100},
        "environment": {**environment, "max_turns": 4, "max_turn_tokens": 6, "max_running": 8},
        "actor": {"lr": 1.0e-4},
        "trainer": {
            "steps": STEPS, "save_every": 1, "eval_every": 0, "num_threads": 1, "loggers": [], "max_restarts": 10,
        },
    }  # fmt: skip


def errors_of(completions: list[Completion]) -> list[str]:
    return [one.episode.error for one in completions if one.episode is not None and one.episode.error]


def nodes_of(completions: list[Completion]) -> set[float]:
    return {one.episode.metrics["node"] for one in completions if one.episode is not None and not one.episode.error}


def kill_on(host: Host, pid: int) -> None:
    done = host.run(["kill", "-KILL", str(pid)])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def arena(two_hosts: Arena) -> Iterator[Arena]:
    """With no run of an earlier test, and both nodes."""
    yield two_hosts
    for command in (command for run in two_hosts.runs for command in run.commands):
        if command.poll() is None:
            command.kill()
    if not two_hosts.hosts[1].is_up:
        two_hosts.hosts[1].restart()
        two_hosts.join(1)


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    shared = tmp_path_factory.mktemp("lab") / "shared"
    shared.mkdir()
    save_model(shared / "model")
    (shared / "slow_game.py").write_text(GAME)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (shared / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Lab(hosts=2, shared=shared) as lab:
        arena = Arena(lab=lab)
        arena.join(0, 1)
        yield arena


def test_environments_run_on_the_nodes_that_they_are_placed_on(arena: Arena) -> None:
    run = arena.run(APART)
    made = run.end()
    assert not errors_of(made) and nodes_of(made) == {1.0}, run.said


def test_a_killed_controller_resumes_with_the_episodes_that_are_missing(arena: Arena) -> None:
    run = arena.run(ON_BOTH)
    run.wait_for_episodes(step=2)
    run.commands[-1].kill()
    run.start()
    made = run.end()
    assert not errors_of(made) and nodes_of(made) == {0.0, 1.0}, run.said


def test_a_killed_rollout_process_costs_no_episode(arena: Arena) -> None:
    run = arena.run(SAMPLED_ON_BOTH)
    worker = run.worker("rollout", node=1)
    run.wait_for_episodes(step=2)
    kill_on(arena.hosts[1], worker.pid)
    assert not errors_of(run.end()), run.said


def test_a_killed_host_of_environments_costs_no_finished_episode_and_is_nobodys_failure(arena: Arena) -> None:
    run = arena.run(APART)
    host = run.worker("environment", node=1)
    run.wait_for_episodes(step=2)
    kill_on(arena.hosts[1], host.pid)
    made = run.end()
    assert "environment rank 0 on node 1" in run.said and "its episodes restart on another host" in run.said
    assert not errors_of(made), run.said


def test_a_killed_process_of_an_episode_fails_that_episode_alone(arena: Arena) -> None:
    run = arena.run(APART)
    run.wait_for_episodes(step=2)
    zygote, *children = sorted(
        process.pid for process in arena.hosts[1].processes() if "rollcall.environments.zygote" in process.cmdline
    )
    kill_on(arena.hosts[1], children[-1])
    errors = errors_of(run.end())
    assert len(errors) <= 1 and all("its process died (SIGKILL" in error for error in errors), (errors, run.said)


def test_a_lost_node_of_environments_is_done_without(arena: Arena) -> None:
    run = arena.run(ON_BOTH)
    run.worker("environment", node=1)
    run.wait_for_episodes(step=2)
    arena.hosts[1].power_off()
    made = run.end()
    assert "its episodes restart on another host" in run.said and not errors_of(made), run.said


def test_a_killed_host_of_programs_costs_no_finished_episode_and_leaves_no_program(arena: Arena) -> None:
    command = programs.write(arena.lab.shared, AGENT, name="lab_agent.py")
    run = arena.run(APART, environment={"type": "agent", "run": command})
    host = run.worker("environment", node=1)
    run.wait_for_episodes(step=2)
    kill_on(arena.hosts[1], host.pid)
    made = run.end()
    assert "environment rank 0 on node 1" in run.said and "its episodes restart on another host" in run.said
    assert not errors_of(made) and nodes_of(made) == {1.0}, run.said
    assert {one.episode.metrics["is_local"] for one in made if one.episode is not None} == {0.0}
    left = [process for one in arena.hosts for process in one.processes() if "lab_agent.py" in process.cmdline]
    assert not left, left
