"""Runs that are broken on purpose: two lab hosts of two slots, a run on them, and what is looked at when it has ended.

The run's controller and the head are on node 0, so faults of workers and of their node are node 1's (``faults.py``). A
fault waits until the run's events say that its phase of its step has begun, and then strikes at once. Nothing of an arena
is outside its own folder and its lab: several may be open on one machine at the same time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from lab.cluster import ENV, NODE_S
from lab.command import Command
from lab.lab import CHECKOUT, Host, Lab
from safetensors.torch import load_file
from tiny import save_model

from chaos.workers import workers_on
from rollcall.observe.events import read_phases
from rollcall.view.audit import audit

STEPS, SAVE_EVERY = 6, 2
PHASE_S = 300.0  # for a phase to come, with everything else that runs here
RUN_S = 900.0
LEFT_S = 120.0  # for processes of a node that is cut off to find out
DISK_MB = 96
# What a run is compared by, step by step, and how far it may be off where the number of processes changed in between. The
# loss alone would not tell: on fresh samples it is 0, whatever the weights.
CURVES = ("train/loss", "train/grad_norm", "train/entropy", "train/reward_mean")
TOLERANCE = 1e-3
COMPARED = 24  # steps: with more of them a difference of rounding may make a token another
WEIGHT_TOLERANCE = 1e-5  # mean over all weights; an update moves them by 1e-4
# Layouts of 2 x 2 slots: node 1 has actor and rollout, rollout alone, or actor alone.
PLACEMENTS = {
    "collocated": {"actor,rollout": "all"},
    "disaggregated": {"actor": "0", "rollout": "1-3"},
    "disaggregated, actors": {"rollout": "0", "actor": "1-3"},
    "sharded": {"actor,rollout": "all"},
    "sharded, actors": {"rollout": "0", "actor": "1-3"},
}
# Scored at a pace that leaves time to strike. The undisturbed run finds the same functions without the pauses.
REWARD = """
import time

def score(prompt, completion, *rest, **named):
    time.sleep({pause_s})
    return float(len(set(completion)))

def slow_score(prompt, completion, *rest, **named):
    time.sleep({long_pause_s})
    return float(len(set(completion)))
"""
# Root without the privilege to write where modes forbid it.
AS_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")

ROWS: list[dict[str, Any]] = []  # one of each run, for the table at the end


@dataclass(kw_only=True)
class Arena:
    """Two hosts that are one cluster, and a small disk that both see."""

    lab: Lab
    number: int = 0
    references: dict[int, Path] = field(default_factory=dict)  # undisturbed runs, by their number of steps

    @property
    def hosts(self) -> list[Host]:
        return self.lab.hosts

    @property
    def disk(self) -> Path:
        return self.lab.shared / "disk"

    def start(self, rank: int, *arguments: str) -> Command:
        """A `rollcall` command on a host. Its Python path has the reward and what holds workers (``holds.py``)."""
        # The slots are logical ones, also on a machine with an accelerator.
        env = {**ENV, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{self.lab.shared}{os.pathsep}{CHECKOUT / 'src'}"}
        command = [*AS_USER, sys.executable, "-m", "rollcall", *arguments]
        return self.hosts[rank].start(command, env=env, cwd=self.lab.shared)

    def join(self, *ranks: int) -> None:
        """What a person does on nodes, whatever is on them."""
        options = ["--num-nodes", "2", "--rendezvous", str(self.lab.shared), "--slots", "2"]
        commands = [self.start(rank, "node", "--rank", str(rank), *options) for rank in ranks]
        for command in commands:
            status = command.wait(timeout_s=NODE_S)
            assert status == 0, f"{command} ended with {status}:\n{command.output}"

    def mend(self) -> None:
        """All nodes up and joined, as a fault may have left them."""
        (self.disk / "ballast").unlink(missing_ok=True)
        for path in (*self.lab.shared.glob("hold-*"), *self.lab.shared.glob("held-*")):
            path.unlink()
        for host in self.hosts:
            if not host.is_up:
                host.restart()
            host.heal()
        self.join(0, 1)

    @contextmanager
    def run(self, mode: str, *, score: str = "score", **trainer: Any) -> Iterator[Run]:
        self.number += 1
        run = Run(arena=self, name=f"run-{self.number}", mode=mode, score=score, trainer=trainer)
        run.start()
        try:
            yield run
        finally:
            if run.command.poll() is None:
                run.command.kill()
            ROWS.append(run.row())
            self.mend()
            shutil.rmtree(run.dir, ignore_errors=True)  # the disk is small

    def reference(self, steps: int) -> Path:
        """The same run in one process, where nothing happens."""
        if steps not in self.references:
            run_dir = self.lab.shared.parent / f"reference-{steps}"
            path = self.lab.shared / f"reference-{steps}.yaml"
            contents = run_file(self.lab.shared, run_dir, mode=None, score="score", trainer={"steps": steps})
            path.write_text(yaml.safe_dump(contents))
            command = [sys.executable, "-m", "rollcall", "train", str(path)]
            places = f"{run_dir.parent}{os.pathsep}{CHECKOUT / 'src'}"
            env = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=run_dir.parent, env=env, capture_output=True, text=True, timeout=RUN_S)
            assert done.returncode == 0, done.stderr
            self.references[steps] = run_dir
        return self.references[steps]


@dataclass(kw_only=True)
class Run:
    arena: Arena
    name: str
    mode: str
    score: str
    trainer: dict[str, Any]
    commands: list[Command] = field(default_factory=list)  # one more each time that its controller was killed
    struck: list[tuple[str, str]] = field(default_factory=list)  # fault and phase
    # A fault, what the run says of it, and since where in its output.
    to_notice: list[tuple[str, str, int]] = field(default_factory=list)
    hung: int | None = None  # processes left when it had ended

    @property
    def command(self) -> Command:
        return self.commands[-1]

    @property
    def said(self) -> str:
        return "".join(command.output for command in self.commands)

    @property
    def dir(self) -> Path:
        return self.arena.disk / self.name

    @property
    def steps(self) -> int:
        return self.trainer.get("steps", STEPS)

    @property
    def next_step(self) -> int:
        """The first of which nothing has begun."""
        return 1 + max((event.step for event in read_phases(self.dir)), default=0)

    def start(self) -> None:
        """The run's command, the first time and after its controller was killed."""
        path = self.arena.lab.shared / f"{self.name}.yaml"
        if not path.exists():
            contents = run_file(self.arena.lab.shared, self.dir, mode=self.mode, score=self.score, trainer=self.trainer)
            path.write_text(yaml.safe_dump(contents))
        self.commands.append(self.arena.start(0, "train", str(path)))

    def wait_for(self, phase: str, *, step: int) -> None:
        """Until this phase of this step, or a later one, has begun."""
        give_up = time.monotonic() + PHASE_S
        while not any(event.phase == phase and event.step >= step for event in read_phases(self.dir)):
            assert self.command.poll() is None, f"the run ended before {phase} of step {step}:\n{self.said}"
            assert time.monotonic() < give_up, f"{phase} of step {step} did not come:\n{self.said}"
            time.sleep(0.01)

    def end(self) -> None:
        """Wait for the run's own end, and look at everything it left."""
        status = self.command.wait(timeout_s=RUN_S)
        assert status == 0, f"{self.struck}: ended with {status}:\n{self.said}"
        found = audit(self.dir)
        assert found.is_clean and found.steps == self.steps, f"{self.struck}: {found}\n{self.said}"
        unseen = [fault for fault, words, since in self.to_notice if not re.search(words, self.said[since:])]
        assert not unseen, f"{unseen}: the run never took notice:\n{self.said}"
        self._compare(self.arena.reference(min(self.steps, COMPARED)))
        left = self._wait_for_processes()
        assert not left, f"{self.struck}: processes {left} are left\n{self.said}"

    def _compare(self, reference: Path) -> None:
        """With a run that nothing happened to: every step's numbers, and the weights at the end."""
        ours, theirs = rows_by_step(self.dir), rows_by_step(reference)
        assert sorted(ours) == list(range(1, self.steps + 1))
        for step in range(1, min(self.steps, COMPARED) + 1):
            row = theirs[step]
            for name in CURVES:
                assert abs(ours[step][name] - row[name]) < TOLERANCE, (
                    f"{self.struck}: {name} of step {step} is {ours[step][name]}, undisturbed {row[name]}\n{self.said}"
                )
        if self.steps > COMPARED:
            return
        ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (self.dir, reference))
        total = sum(float((ours[name] - tensor).abs().sum()) for name, tensor in theirs.items())
        mean = total / sum(tensor.numel() for tensor in theirs.values())
        assert mean < WEIGHT_TOLERANCE, f"{self.struck}: the weights are off by {mean} on average\n{self.said}"

    def _wait_for_processes(self) -> list[int]:
        """Those still there at the deadline."""
        give_up = time.monotonic() + LEFT_S
        while left := [pid for host in self.arena.hosts for pid in workers_on(host)]:
            if time.monotonic() > give_up:
                break
            time.sleep(0.5)
        self.hung = len(left)
        return left

    def row(self) -> dict[str, Any]:
        """Of the table at the end; a run that did not come to its end has no number of hung processes."""
        has_journal = (self.dir / "journal").is_dir()
        counts = audit(self.dir).counts() if has_journal else {}
        names = [fault for fault, _ in self.struck]
        return {
            "fault": names[0] if len(names) == 1 else f"{len(names)} random faults" if names else "none",
            "mode": self.mode + (", elastic" if "elastic" in self.trainer else ""),
            "phase": self.struck[0][1] if len(names) == 1 else "any",
            "steps": counts.get("steps"),
            "skipped": counts.get("prompts_skipped"),
            "trained twice": counts.get("trained_twice"),
            "regenerated": counts.get("groups_regenerated"),
            "torn": counts.get("files_torn"),
            "hung": self.hung,
        }


def run_file(shared: Path, run_dir: Path, *, mode: str | None, score: str, trainer: dict[str, Any]) -> dict[str, Any]:
    run: dict[str, Any] = {
        "run": {"name": "chaos", "dir": str(run_dir)},
        "model": {"path": str(shared / "model"), "device": "cpu"},
        "data": {"train": str(shared / "sums.jsonl"), "val": None, "prompts_per_step": 8},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 12},
        "reward": [{"type": "function", "path": f"paced:{score}"}],
        "actor": {"lr": 1.0e-4},
        "trainer": {
            "steps": STEPS, "save_every": SAVE_EVERY, "eval_every": 0, "num_threads": 1, "loggers": [], "max_restarts": 40,
            **trainer,
        },
    }  # fmt: skip
    if mode is not None:
        if mode.startswith("sharded"):  # each actor has a part, and writes it beside the run
            run["actor"]["sharding"] = "fsdp"
        run["cluster"] = {
            "num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu", "component_placement": PLACEMENTS[mode]
        }  # fmt: skip
    return run


def rows_by_step(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step's update."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "train/loss" in row}


@contextmanager
def open_arena(folder: Path) -> Iterator[Arena]:
    shared = folder / "shared"
    disk = shared / "disk"
    disk.mkdir(parents=True)
    save_model(shared / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (shared / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (shared / "paced.py").write_text(REWARD.format(pause_s=0.02, long_pause_s=0.1))
    (folder / "paced.py").write_text(REWARD.format(pause_s=0, long_pause_s=0))
    shutil.copy(Path(__file__).with_name("holds.py"), shared / "sitecustomize.py")
    # Before the hosts are made, which see the same disk from then on.
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", str(disk)], check=True)
    try:
        with Lab(hosts=2, shared=shared) as lab:
            arena = Arena(lab=lab)
            arena.join(0, 1)
            yield arena
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
