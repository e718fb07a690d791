"""`rollcall launch skypilot` with the real SkyPilot, whose machines come from a real Slurm: a login node and two nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from lab.cluster import ENV
from lab.lab import CHECKOUT, Lab
from lab.skypilot import CLUSTER, SkyLab, kept, needs_skypilot

from rollcall.base.journal import Journal

pytestmark = [needs_skypilot, pytest.mark.slow, pytest.mark.launchers]
ALL_S = 1800.0  # SkyPilot takes minutes to start where other things run too
STEPS = 5
REWARDS = """
import time

def share(prompt, completion, answer, metadata):
    time.sleep({pause_s})
    return float(completion.strip() == answer)
"""


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyLab]:
    with Lab(hosts=4, shared=tmp_path_factory.mktemp("lab") / "shared", keep=kept()) as lab:
        yield SkyLab(lab)


class Launch:
    """A run file in a folder of its own, and `rollcall launch` there on the laptop."""

    def __init__(self, sky: SkyLab, name: str, *, steps: int = STEPS, pause_s: float = 0.0, **section: Any) -> None:
        self.sky, self.name = sky, name
        self.folder = sky.slurm.lab.shared / "runs" / name
        self.folder.mkdir(parents=True)
        (self.folder / "lab_rewards.py").write_text(REWARDS.format(pause_s=pause_s))
        run = {
            "run": {"name": name, "dir": str(self.folder / "run"), "seed": 0},
            "cluster": {"num_nodes": 2, "num_gpus_per_node": 1, "accelerator": "cpu"},
            "model": {"path": "builtin:arithmetic", "device": "auto"},
            "data": {"train": "builtin:arithmetic", "val": None, "prompts_per_step": 12, "max_prompt_tokens": 16},
            "rollout": {"samples_per_prompt": 2, "max_response_tokens": 4},
            "reward": [{"type": "function", "path": "lab_rewards:share"}],
            "trainer": {"steps": steps, "eval_every": 0, "save_every": 5, "loggers": [], "num_threads": 1},
            "prepare": {"each_node": ["echo prepared by $(hostname)"]},
            "launch": {
                "skypilot": {
                    "resources": {"infra": f"slurm/{CLUSTER}", "cpus": 2},
                    "workdir": ".",
                    "activate": f"{sys.prefix}/bin/activate",
                    "env": {**ENV, "PYTHONPATH": str(CHECKOUT / "src"), "GREETING": "it's $HOME"},
                    **section,
                }
            },
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump(run))

    def rollcall(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollcall", "launch", *words]
        return self.sky.laptop.run(command, env=self.sky.env, cwd=self.folder, timeout_s=ALL_S)

    def start(self) -> subprocess.CompletedProcess[str]:
        return self.rollcall("skypilot", "run.yaml")

    def trained(self) -> list[int]:
        if not (self.folder / "run/journal").exists():
            return []
        with Journal(self.folder / "run/journal") as journal:
            return sorted(journal.trained())


def told(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def test_a_cluster_of_skypilot_trains_on_two_nodes_and_leaves_nothing(sky: SkyLab) -> None:
    launch = Launch(sky, "cluster", managed=False)
    done = launch.start()
    assert done.returncode == 0, told(done) + sky.slurm.tell()
    job = sky.slurm.ask("squeue", "-h", "-o", "%i %D")
    assert job.endswith(" 2"), "one job of two nodes"
    followed = launch.rollcall("logs", "cluster", "--follow")
    assert followed.returncode == 0, told(followed) + sky.slurm.tell()
    assert all(f"prepared by {node.name}" in followed.stdout for node in sky.slurm.nodes)
    assert launch.trained() == list(range(1, STEPS + 1))
    assert "the cluster is UP, and its task is SUCCEEDED" in launch.rollcall("status", "cluster").stdout
    assert "Job finished (status: SUCCEEDED)" in launch.rollcall("logs", "cluster").stdout
    assert sky.slurm.ask("squeue", "-h", "-o", "%i %D") == job, "the cluster stays"
    ended = launch.rollcall("down", "cluster")
    assert ended.returncode == 0, told(ended)
    sky.slurm.wait_until(lambda: not sky.slurm.ask("squeue", "-h"), "the queue is empty")
    assert sky.left == []


def test_down_of_a_managed_job_of_skypilot_returns_when_slurm_has_ended_it(sky: SkyLab) -> None:
    """Processes are not looked at: Ray's outlive a run that is killed where Slurm knows processes by their parents, as in the lab."""
    launch = Launch(sky, "managed", steps=1000, pause_s=0.3)
    done = launch.start()
    assert done.returncode == 0, told(done) + sky.slurm.tell()
    sky.slurm.wait_until(lambda: len(launch.trained()) >= 2, "two steps are trained", timeout_s=ALL_S)
    assert "RUNNING" in launch.rollcall("status", "managed").stdout
    ended = launch.rollcall("down", "managed")
    assert ended.returncode == 0, told(ended)
    assert sky.slurm.ask("squeue", "-h") == ""
