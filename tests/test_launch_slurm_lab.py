"""`rollcall launch slurm` on a real slurmctld and slurmd: four nodes of one slot, and a login node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from lab.cluster import ENV
from lab.lab import Lab
from lab.slurm import SlurmLab, needs_slurm

from rollcall.base.journal import Journal

pytestmark = [needs_slurm, pytest.mark.slow]
RUN_S = 600.0  # with everything else that runs here
STEPS = 40
TWO = {"num_nodes": 2}  # where a third node would only take longer to start
REWARDS = """
import time

def share(prompt, completion, answer, metadata):
    time.sleep({pause_s})
    return float(completion.strip() == answer)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with Lab(hosts=5, shared=tmp_path_factory.mktemp("lab") / "shared") as lab:
        yield SlurmLab(lab, gpus=2)


@pytest.fixture(autouse=True)
def _clean(slurm: SlurmLab) -> Iterator[None]:
    yield
    slurm.run("scancel", "--user=root", "--full", "--signal=KILL")
    slurm.run("scancel", "--user=root")
    slurm.wait_until(lambda: not slurm.ask("squeue", "-h"), "the queue is empty", timeout_s=90)
    for name in [name for name, state in slurm.states().items() if state.startswith("drain")]:
        slurm.ask("scontrol", "update", f"nodename={name}", "state=resume")


class Launch:
    """A run file in a folder of its own in the shared folder, and `rollcall launch` there on the login node."""

    def __init__(
        self, slurm: SlurmLab, name: str, *, pause_s: float = 0.0, cluster: dict[str, Any] | None = None, **section: Any
    ) -> None:
        self.slurm, self.name = slurm, name
        self.folder = slurm.lab.shared / "runs" / name
        self.folder.mkdir(parents=True)
        (self.folder / "lab_rewards.py").write_text(REWARDS.format(pause_s=pause_s))
        run = {
            "run": {"name": name, "dir": str(self.folder / "run"), "seed": 0},
            "cluster": {"num_nodes": 3, "num_gpus_per_node": 1, "accelerator": "cpu", **(cluster or {})},
            "model": {"path": "builtin:arithmetic", "device": "auto"},
            "data": {"train": "builtin:arithmetic", "val": None, "prompts_per_step": 12, "max_prompt_tokens": 16},
            "rollout": {"samples_per_prompt": 2, "max_response_tokens": 4},
            "reward": [{"type": "function", "path": "lab_rewards:share"}],
            "trainer": {"steps": STEPS, "eval_every": 0, "save_every": 10, "loggers": [], "num_threads": 1},
            "prepare": {"each_node": ["echo prepared by $(hostname)"], "once": ["echo once by $(hostname)"]},
            "launch": {"slurm": {"cpus_per_task": 2, "env": {"GREETING": "it's $HOME"}, **section}},
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump(run))
        self.env = {
            **slurm.env,
            **ENV,
            "ROLLCALL_LAUNCHES": str(slurm.lab.shared / "launches"),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def rollcall(self, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollcall", "launch", *words]
        return self.slurm.login.run(command, env=self.env, cwd=self.folder, timeout_s=timeout_s)

    def start(self, *options: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return self.rollcall("slurm", "run.yaml", *options, timeout_s=timeout_s)

    @property
    def log(self) -> str:
        path = self.slurm.lab.shared / "launches" / self.name / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def job(self) -> str:
        return self.slurm.ask("squeue", "-h", f"--name=rollcall-{self.name}", "-o", "%i")

    def wait_for(self, text: str, *, timeout_s: float = RUN_S) -> None:
        self.slurm.wait_until(lambda: re.search(text, self.log), f"{text!r} in the log", timeout_s=timeout_s)

    def wait_for_steps(self, count: int) -> None:
        path = self.folder / "run/metrics.jsonl"
        self.slurm.wait_until(
            lambda: path.exists() and path.read_text().count("\n") >= count,
            f"{count} steps\n{self.log}",
            timeout_s=RUN_S,
        )

    def trained(self) -> list[int]:
        with Journal(self.folder / "run/journal") as journal:
            return sorted(journal.trained())


def left_on(slurm: SlurmLab) -> dict[str, list[str]]:
    return {host.name: left for host in slurm.lab.hosts if (left := slurm.own_processes(host))}


def test_a_job_of_three_nodes_trains_and_leaves_nothing(slurm: SlurmLab) -> None:
    launch = Launch(slurm, "train")
    done = launch.start("--wait", timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr + slurm.tell()
    assert len(set(re.findall(r"prepared by (node\d)", done.stdout))) == 3 and done.stdout.count("once by") == 2
    assert launch.trained() == list(range(1, STEPS + 1))
    assert "it succeeded (status 0)" in launch.rollcall("status", "train").stdout
    slurm.wait_until(lambda: not left_on(slurm), f"nothing runs: {left_on(slurm)}")
    assert launch.rollcall("down", "train").returncode == 0
    print(json.dumps({"seconds": json.loads((launch.folder / "run/summary.json").read_text())["seconds"]}))


def test_a_node_offers_the_gpus_that_slurm_gave_it_which_is_its_limit(slurm: SlurmLab) -> None:
    """The cards are files that Slurm hands out, so the command is one that says how it was called."""
    fake = slurm.lab.shared / "fake/rollcall"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "cards $CUDA_VISIBLE_DEVICES; words $*"\n')
    fake.chmod(0o755)
    gpus = {"accelerator": "gpu", "num_gpus_per_node": 2}
    launch = Launch(slurm, "gpus", cluster=gpus, lines=[f"export PATH={fake.parent}:$PATH"])
    done = launch.start("--wait")
    assert done.returncode == 0, done.stdout + done.stderr + slurm.tell()
    assert sorted(re.findall(r"(\d): cards 0,1; words node --run .* --rank (\d) --slots 2", done.stdout)) == [
        ("0", "0"), ("1", "1"), ("2", "2"),
    ]  # fmt: skip
    assert launch.rollcall("down", "gpus").returncode == 0


def test_before_its_time_limit_a_job_saves_requeues_itself_and_ends_at_the_same_step(slurm: SlurmLab) -> None:
    launch = Launch(slurm, "limit", pause_s=0.4, cluster=TWO, time="30", signal_s=60)
    assert launch.start().returncode == 0
    job = launch.job
    assert job and "is already running" in launch.start().stderr, "a second start finds it"
    assert launch.job == job
    launch.wait_for_steps(3)
    used = slurm.ask("squeue", "-h", "-j", job, "-o", "%M")  # such as 1:05
    slurm.ask("scontrol", "update", f"jobid={job}", f"timelimit={int(used.split(':')[-2]) + 2}")
    launch.wait_for("requeues itself")
    before = launch.trained()
    assert before and len(before) < STEPS, "the limit came in the middle"
    slurm.wait_until(lambda: slurm.state_of(job) == "PENDING", "the job waits again", timeout_s=90)
    assert not left_on(slurm)
    # Slurm waits two minutes. Within the second of the requeue it would still take the job for the one that was killed.
    slurm.ask("scontrol", "update", f"jobid={job}", "starttime=now+10", "timelimit=20")
    (launch.folder / "lab_rewards.py").write_text(REWARDS.format(pause_s=0.0))
    done = launch.rollcall("logs", "limit", "--follow", timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr + slurm.tell()
    assert launch.trained() == list(range(1, STEPS + 1))
    with Journal(launch.folder / "run/journal") as journal:
        draws = [draw for entry in journal.trained().values() for draw in entry.draws]
    assert len(draws) == len(set(draws)), "nothing is trained twice"


def test_a_node_that_is_drained_in_the_middle_keeps_its_job_and_gets_no_other(slurm: SlurmLab) -> None:
    launch = Launch(slurm, "drain", pause_s=0.3)
    assert launch.start().returncode == 0
    job = launch.job
    launch.wait_for_steps(3)
    drained = slurm.ask("scontrol", "show", "hostnames", slurm.ask("squeue", "-h", "-j", job, "-o", "%N")).splitlines()[
        1
    ]
    slurm.ask("scontrol", "update", f"nodename={drained}", "state=drain", "reason=test")
    assert "RUNNING" in launch.rollcall("status", "drain").stdout
    slurm.ask("scancel", "--signal=USR1", "--batch", job)  # as Slurm does it before the time limit
    launch.wait_for("requeues itself")
    slurm.wait_until(lambda: slurm.state_of(job) == "PENDING", "the job waits again", timeout_s=90)
    slurm.ask("scontrol", "update", f"jobid={job}", "starttime=now+10")
    (launch.folder / "lab_rewards.py").write_text(REWARDS.format(pause_s=0.0))
    slurm.wait_until(lambda: slurm.state_of(job) == "RUNNING", "the job runs again", timeout_s=90)
    nodes = slurm.ask("scontrol", "show", "hostnames", slurm.ask("squeue", "-h", "-j", job, "-o", "%N")).splitlines()
    assert len(nodes) == 3 and drained not in nodes
    done = launch.rollcall("logs", "drain", "--follow", timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr + slurm.tell()
    assert launch.trained() == list(range(1, STEPS + 1))


def test_down_lets_the_run_save_and_leaves_no_process(slurm: SlurmLab) -> None:
    launch = Launch(slurm, "down", pause_s=0.3, cluster=TWO)
    assert launch.start().returncode == 0
    launch.wait_for_steps(3)
    job = launch.job
    done = launch.rollcall("down", "down", timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert slurm.state_of(job) == "CANCELLED" and not slurm.ask("squeue", "-h")
    assert not left_on(slurm), slurm.tell()
    assert list((launch.folder / "run/checkpoints").iterdir())


def test_nodes_start_inside_an_allocation_that_runs(slurm: SlurmLab) -> None:
    said = slurm.run("salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2").stderr
    job = re.findall(r"Granted job allocation (\d+)", said)[0]
    launch = Launch(slurm, "attach", cluster=TWO, attach=int(job))
    done = launch.start("--wait", timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr + launch.log + slurm.tell()
    assert launch.trained() == list(range(1, STEPS + 1))
    assert slurm.state_of(job) == "RUNNING", "the allocation is its owner's"
    assert launch.rollcall("down", "attach").returncode == 0
    again = Launch(slurm, "attach2", pause_s=0.3, cluster=TWO, attach=int(job))
    assert again.start().returncode == 0
    assert "is already running" in again.start().stderr
    again.wait_for_steps(3)
    assert again.rollcall("down", "attach2", timeout_s=240).returncode == 0
    assert slurm.state_of(job) == "RUNNING"
    slurm.wait_until(lambda: not left_on(slurm), f"nothing runs: {left_on(slurm)}")
