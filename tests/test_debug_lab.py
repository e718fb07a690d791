"""The debugger across real hosts: a worker that stops is found, looked at from another host and let go, and the run loses nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.cluster import ENV, bring_up, rollcall
from lab.lab import Command, Host, Lab, needs_lab

from rollcall.base.journal import Journal
from rollcall.process.groups.sightings import LEAST_S

pytestmark = [needs_lab, pytest.mark.slow]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
WAIT_S = 240.0
NUM_STEPS = 4
OPTIMIZER = """
import os, torch

class Stopping(torch.optim.AdamW):
    def step(self, *args, **kwargs):
        seen = self.seen = getattr(self, "seen", 0) + 1
        if seen == 2 and os.environ["RANK"] == "1":
            {what}
        return super().step(*args, **kwargs)
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    hosts: list[Host]  # the last one is not a node
    shared: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Lab(hosts=3, shared=tmp_path_factory.mktemp("lab") / "shared") as lab:
        options = ("--rendezvous", str(lab.shared), "--slots", "1")
        env = {**NO_GPU, "PYTHONPATH": str(lab.shared)}
        bring_up(dict(enumerate(lab.hosts[:2])), *options, env=env)
        yield Cluster(hosts=lab.hosts, shared=lab.shared)


def start_run(cluster: Cluster, name: str, *options: str, what: str, **sections: Any) -> tuple[Command, Path]:
    """Train on both nodes, with an optimizer that does ``what`` in its second update on node 1."""
    (cluster.shared / f"{name}_optimizer.py").write_text(OPTIMIZER.format(what=what))
    run_dir = cluster.shared / name
    run = {
        "run": {"name": name, "dir": str(run_dir)},
        "cluster": {
            "num_nodes": 2, "num_gpus_per_node": 1, "accelerator": "cpu", "component_placement": {"actor,rollout": "all"},
            **sections,
        },
        "model": {"path": "builtin:arithmetic", "device": "cpu"},
        "data": {"train": "builtin:arithmetic", "val": None, "prompts_per_step": 4, "max_prompt_tokens": 16},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4},
        "reward": [{"type": "exact"}],
        "actor": {"optimizer": {"name": f"{name}_optimizer.Stopping"}},
        "trainer": {"steps": NUM_STEPS, "save_every": 1, "eval_every": 0, "num_threads": 1, "loggers": []},
    }  # fmt: skip
    path = cluster.shared / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run))
    command = [sys.executable, "-m", "rollcall", "train", str(path), *options]
    return cluster.hosts[0].start(command, env={**ENV, **NO_GPU, "PYTHONPATH": str(cluster.shared)}), run_dir


def wait_for(condition: Any, *, run: Command) -> Any:
    until = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < until, run.output
        time.sleep(0.2)
    return found


def wait_for_stop(run: Command, run_dir: Path) -> dict[str, Any]:
    (found,) = wait_for(lambda: (run_dir / "debugger.json").exists() and waiting(run_dir), run=run)
    return found


def waiting(run_dir: Path) -> list[dict[str, Any]]:
    return json.loads((run_dir / "debugger.json").read_text())


def typed(host: Host, where: str, *lines: str) -> str:
    """What a terminal on that host shows when these lines are typed."""
    text = "".join(f"{line}\\n" for line in lines)
    command = f"printf '{text}' | {sys.executable} -m rollcall debug {where}"
    done = host.run(["sh", "-c", command], env={**ENV, **NO_GPU}, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def steps_trained(run_dir: Path) -> list[int]:
    with Journal(run_dir / "journal") as journal:
        return sorted(journal.trained())


def test_a_worker_at_a_breakpoint_is_attached_to_from_other_hosts_and_goes_on(cluster: Cluster) -> None:
    head, node, outsider = cluster.hosts
    run, run_dir = start_run(cluster, "stops", what="breakpoint()")
    stop = wait_for_stop(run, run_dir)
    stopped_s = time.monotonic()
    assert (stop["role"], stop["rank"], stop["node"], stop["address"]) == ("actor+rollout", 1, 1, node.ip)
    listed = json.loads(rollcall(head, "debug", "--json").stdout)["waiting"]
    assert [(one["number"], one["run"], one["line"]) for one in listed] == [(1, str(run_dir), stop["line"])]
    assert "secret" not in listed[0] and f"`rollcall debug {run_dir} 1`" in run.output

    # From a host that is not a node, by the run directory; then that host loses its power.
    session = f"(echo 'p seen * 1000'; sleep 600) | {sys.executable} -m rollcall debug {run_dir} 1"
    lost = outsider.start(["sh", "-c", session], env={**ENV, **NO_GPU})
    wait_for(lambda: "2000" in lost.output, run=run)
    outsider.power_off()

    # Longer than any worker may be silent in a call: its peer waits for it in the same update.
    time.sleep(max(LEAST_S + 15 - (time.monotonic() - stopped_s), 0))
    assert "is still waiting" in typed(head, f"{run_dir} 1", "p seen", "quit")
    shown = typed(head, "1", "p seen + 40", "where", "continue")
    assert "42" in shown and "stops_optimizer.py" in shown and "continues" in shown
    assert run.wait(timeout_s=WAIT_S) == 0, run.output
    assert steps_trained(run_dir) == list(range(1, NUM_STEPS + 1))
    assert "attempt" not in run.output and "is dead" not in run.output, run.output
    assert not (run_dir / "debugger.json").exists()


def test_a_worker_that_raises_waits_where_it_raised_with_post_mortem(cluster: Cluster) -> None:
    run, run_dir = start_run(cluster, "raises", "--post-mortem", what='raise KeyError("no such row")')
    stop = wait_for_stop(run, run_dir)
    assert "KeyError" in stop["why"] and (stop["rank"], stop["node"]) == (1, 1)
    shown = typed(cluster.hosts[0], "1", "p seen + 40", "continue")
    assert "KeyError" in shown and "42" in shown
    assert run.wait(timeout_s=WAIT_S) == 1
    assert "no such row" in run.output and "attempt" not in run.output
    assert steps_trained(run_dir) == [1]


def test_rays_own_debugger_reaches_a_worker_with_the_clusters_token(cluster: Cluster) -> None:
    head, node, _ = cluster.hosts
    run, run_dir = start_run(cluster, "rays", what="breakpoint()", env={"RAY_DEBUG": "legacy"})
    wait_for(lambda: "RemotePdb session open at localhost" in run.output, run=run)
    time.sleep(LEAST_S + 15)  # longer than any worker may be silent in a call
    address = json.loads((cluster.shared / "default/head.json").read_text())["address"]
    ray = Path(sys.executable).with_name("ray")
    lines = "sleep 15; echo 0; sleep 3; echo 'p seen + 40'; sleep 3; echo c; sleep 3"
    command = f"({lines}) | {ray} debug --address {address}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/tmp/rollcall-0/default/token", "RAY_DEBUG": "legacy"}
    shown = node.run(["sh", "-c", command], env={**ENV, **NO_GPU, **token}, timeout_s=180)
    assert "rays_optimizer.py" in shown.stdout and "42" in shown.stdout, shown.stdout + shown.stderr
    assert run.wait(timeout_s=WAIT_S) == 0, run.output
    assert steps_trained(run_dir) == list(range(1, NUM_STEPS + 1))
    assert "attempt" not in run.output and "is dead" not in run.output, run.output


GAME = """
import os

class Game:
    def reset(self, row):
        return "="

    def step(self, text, token_ids):
        try:
            os.close(os.open({once!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            breakpoint()
        return "", float(len(text)), True
"""


def test_an_environment_on_another_node_waits_longer_than_its_limits_and_goes_on(cluster: Cluster) -> None:
    head, node = cluster.hosts[:2]
    (cluster.shared / "lab_game.py").write_text(GAME.format(once=str(cluster.shared / "once")))
    run_dir, path = cluster.shared / "game", cluster.shared / "game.yaml"
    run = {
        "run": {"name": "game", "dir": str(run_dir)},
        "cluster": {
            "num_nodes": 2, "num_gpus_per_node": 1, "accelerator": "cpu",
            "component_placement": {"actor,rollout": "0", "environment": "1"},
        },
        "model": {"path": "builtin:arithmetic", "device": "cpu"},
        "data": {"train": "builtin:environment", "val": None, "prompts_per_step": 4, "max_prompt_tokens": 16},
        "environment": {
            "type": "step", "path": "lab_game:Game", "max_turns": 2, "call_timeout_s": 5, "episode_timeout_s": 10,
        },
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4},
        "reward": [{"type": "environment"}],
        "trainer": {"steps": 2, "save_every": 0, "eval_every": 0, "num_threads": 1, "loggers": []},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(run))
    env = {**ENV, **NO_GPU, "PYTHONPATH": str(cluster.shared)}
    command = head.start([sys.executable, "-m", "rollcall", "train", str(path)], env=env, cwd=cluster.shared)
    stop = wait_for_stop(command, run_dir)
    assert "environment" in stop["role"] and (stop["node"], stop["address"]) == (1, node.ip)
    time.sleep(12)  # longer than both limits
    shown = typed(head, f"{run_dir} 1", "p token_ids and 6 * 7", "continue")
    assert "42" in shown and "continues" in shown
    assert command.wait(timeout_s=WAIT_S) == 0, command.output
    assert steps_trained(run_dir) == [1, 2]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["episode/timed_out_fraction"] for row in rows if "episode/timed_out_fraction" in row] == [0.0, 0.0]
