"""Runs that are broken on purpose: two lab hosts of two slots, a run on them, faults at a phase of a step, and the audit.

The run's controller and the head are on node 0, so faults of workers and of their node are node 1's. A fault waits until
the run's events say that its phase of its step has begun, and then strikes at once.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from lab.cluster import ENV, bring_up, rollcall
from lab.command import Command
from lab.lab import Host, Lab
from tiny import save_model

from rollcall.audit import audit
from rollcall.cluster.actor import MARK
from rollcall.observe.events import read_phases

STEPS, SAVE_EVERY = 6, 2
PHASE_S = 300.0  # for a phase to come, with everything else that runs here
RUN_S = 900.0
CUT_S = 60.0
DISK_MB = 96
TOLERANCE = 1e-3  # of a step's loss, where the number of processes changed in between
# Layouts of 2 x 2 slots: node 1 has actor and rollout, rollout alone, or actor alone.
PLACEMENTS = {
    "collocated": {"actor,rollout": "all"},
    "disaggregated": {"actor": "0", "rollout": "1-3"},
    "disaggregated, actors": {"rollout": "0", "actor": "1-3"},
}
SLOW_REWARD = """
import time

def score(prompt, completion, *rest, **named):
    time.sleep(0.02)
    return float(len(set(completion)))
"""


@dataclass(kw_only=True)
class Arena:
    """Two hosts that are one cluster, and a small disk that both see."""

    lab: Lab
    reference: dict[int, float]  # loss by step of the undisturbed run
    number: int = 0

    @property
    def hosts(self) -> list[Host]:
        return self.lab.hosts

    @property
    def disk(self) -> Path:
        return self.lab.shared / "disk"

    def join(self, rank: int) -> None:
        """What a person does on a node, whatever is on it."""
        node = ["node", "--rank", str(rank), "--num-nodes", "2", "--rendezvous", str(self.lab.shared), "--slots", "2"]
        done = rollcall(self.hosts[rank], *node, timeout_s=240)
        assert done.returncode == 0, done.stdout + done.stderr

    def mend(self) -> None:
        """All nodes up and joined, as a fault may have left them."""
        for rank, host in enumerate(self.hosts):
            if not host.is_up:
                host.restart()
            host.heal()
            self.join(rank)

    @contextmanager
    def run(self, mode: str, **trainer: Any) -> Iterator[Run]:
        self.number += 1
        run = Run(arena=self, name=f"run-{self.number}", mode=mode, trainer=trainer)
        run.start()
        try:
            yield run
        finally:
            if run.command.poll() is None:
                run.command.kill()
            (self.disk / "ballast").unlink(missing_ok=True)
            self.mend()


@dataclass(kw_only=True)
class Run:
    arena: Arena
    name: str
    mode: str
    trainer: dict[str, Any]
    command: Command = field(init=False)
    struck: list[str] = field(default_factory=list)
    before: str = ""  # what controllers said that were killed

    @property
    def said(self) -> str:
        return self.before + self.command.output

    @property
    def dir(self) -> Path:
        return self.arena.disk / self.name

    def start(self) -> None:
        """The run's command, the first time and after its controller was killed."""
        path = self.arena.lab.shared / f"{self.name}.yaml"
        if not path.exists():
            path.write_text(yaml.safe_dump(run_file(self.arena.lab.shared, self.dir, self.mode, self.trainer)))
        arguments = [sys.executable, "-m", "rollcall", "train", str(path)]
        env = {**ENV, "PYTHONPATH": str(self.arena.lab.shared)}
        self.command = self.arena.hosts[0].start(arguments, env=env, cwd=self.arena.lab.shared)

    def wait_for(self, phase: str, *, step: int) -> None:
        """Until this phase of this step, or a later one, has begun."""
        give_up = time.monotonic() + PHASE_S
        while not any(event.phase == phase and event.step >= step for event in read_phases(self.dir)):
            assert self.command.poll() is None, f"the run ended before {phase} of step {step}:\n{self.command.output}"
            assert time.monotonic() < give_up, f"{phase} of step {step} did not come:\n{self.command.output}"
            time.sleep(0.01)

    def end(self) -> None:
        """Wait for the run's own end, and look at everything it left."""
        status = self.command.wait(timeout_s=RUN_S)
        assert status == 0, f"{self.struck}: ended with {status}:\n{self.command.output}"
        found = audit(self.dir)
        assert found.is_clean and found.steps == self.steps, f"{self.struck}: {found}\n{self.command.output}"
        unseen = [fault for fault in self.struck if not re.search(NOTICED[fault.partition(" in ")[0]], self.said)]
        assert not unseen, f"{unseen}: the run never took notice:\n{self.said}"
        losses = loss_by_step(self.dir)
        assert sorted(losses) == list(range(1, self.steps + 1))
        if self.steps == STEPS:
            for step, loss in losses.items():
                assert abs(loss - self.arena.reference[step]) < TOLERANCE, f"{self.struck}: step {step}: {losses}"
        hung = [pid for host in self.arena.hosts for pid in workers_on(host)]
        assert not hung, f"{self.struck}: processes {hung} are left"
        print(f"\n{self.mode}: {', '.join(self.struck)}: {found.counts()}, loss as undisturbed, 0 processes left")

    @property
    def steps(self) -> int:
        return self.trainer.get("steps", STEPS)


# Faults. Each takes the run and leaves it to itself, or sees to what a person would see to.


def kill_worker(run: Run) -> None:
    os.kill(some_worker(run), signal.SIGKILL)


def stop_worker(run: Run) -> None:
    os.kill(some_worker(run), signal.SIGSTOP)


def lose_node_and_return(run: Run) -> None:
    host = run.arena.hosts[1]
    host.power_off()
    time.sleep(2)
    host.restart()
    run.arena.join(1)


def lose_node_for_good(run: Run) -> None:
    run.arena.hosts[1].power_off()


def cut_for_a_while(run: Run) -> None:
    host = run.arena.hosts[1]
    host.cut()
    time.sleep(CUT_S)
    host.heal()
    run.arena.join(1)


def kill_controller(run: Run) -> None:
    run.command.kill()
    run.before = run.said
    run.start()


def kill_head(run: Run) -> None:
    """The head's host loses its power, and with it the controller; its launcher starts it again, then the command."""
    run.arena.hosts[0].power_off()
    run.arena.hosts[0].restart()
    run.arena.join(0)
    run.arena.join(1)
    run.before = run.said
    run.start()


def fill_disk(run: Run) -> None:
    ballast = run.arena.disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * (1 << 20))
        except OSError:
            pass  # full
    time.sleep(8)
    assert run.command.poll() is None, f"a full disk ended the run:\n{run.command.output}"
    ballast.unlink()


FAULTS: dict[str, Callable[[Run], None]] = {
    "worker killed": kill_worker,
    "worker stopped": stop_worker,
    "node lost and back": lose_node_and_return,
    "node gone": lose_node_for_good,
    "network cut for 60 s": cut_for_a_while,
    "controller killed": kill_controller,
    "head killed": kill_head,
    "disk full": fill_disk,
}


# What the run says of each: a fault that nobody took notice of was none.
LOST = r"is lost, others do its part|goes on from the newest checkpoint"
NOTICED = {
    "worker killed": LOST,
    "worker stopped": r"(?s)is stopped \(state T\).*Thread 0x",
    "node lost and back": LOST,
    "node gone": LOST,
    "network cut for 60 s": LOST,
    "controller killed": r"resuming ",
    "head killed": r"resuming ",
    "disk full": r"No space left on device",
}


def strike(run: Run, fault: str, phase: str, *, step: int) -> None:
    run.wait_for(phase, step=step)
    FAULTS[fault](run)
    run.struck.append(f"{fault} in {phase} of step {step}")


def some_worker(run: Run) -> int:
    """A worker of node 1 that holds a role, by its number here."""
    give_up = time.monotonic() + PHASE_S
    while not (found := [pid for pid in workers_on(run.arena.hosts[1]) if has_role(pid)]):
        assert time.monotonic() < give_up, f"no worker on node 1:\n{run.command.output}"
        time.sleep(0.2)
    return random.Random(0).choice(sorted(found))


def has_role(pid: int) -> bool:
    """The process that looks after the node's workers belongs to their group and has none; nor have children of theirs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::chaos rank")
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_on(host: Host) -> list[int]:
    """All processes of the run's group there."""
    found = []
    for pid in host.seen_from_here():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if any(variable.startswith(f"{MARK}=".encode()) for variable in variables):
            found.append(pid)
    return found


# The run


def run_file(shared: Path, run_dir: Path, mode: str | None, trainer: dict[str, Any]) -> dict[str, Any]:
    run: dict[str, Any] = {
        "run": {"name": "chaos", "dir": str(run_dir)},
        "model": {"path": str(shared / "model"), "device": "cpu"},
        "data": {"train": str(shared / "sums.jsonl"), "val": None, "prompts_per_step": 8},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 12},
        "reward": [{"type": "function", "path": "slow_reward:score"}],
        "actor": {"lr": 1.0e-4},
        "trainer": {
            "steps": STEPS, "save_every": SAVE_EVERY, "eval_every": 0, "num_threads": 1, "loggers": [], "max_restarts": 40,
            **trainer,
        },
    }  # fmt: skip
    if mode is not None:
        run["cluster"] = {
            "num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu", "component_placement": PLACEMENTS[mode]
        }  # fmt: skip
    return run


def loss_by_step(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


@contextmanager
def open_arena(folder: Path) -> Iterator[Arena]:
    shared = folder / "shared"
    disk = shared / "disk"
    disk.mkdir(parents=True)
    save_model(shared / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (shared / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (shared / "slow_reward.py").write_text(SLOW_REWARD)
    # Before the hosts are made, which see the same disk from then on.
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", str(disk)], check=True)
    try:
        reference = undisturbed(shared, folder / "reference")
        with Lab(hosts=2, shared=shared) as lab:
            bring_up(dict(enumerate(lab.hosts)), "--rendezvous", str(lab.shared), "--slots", "2")
            yield Arena(lab=lab, reference=reference)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def undisturbed(shared: Path, run_dir: Path) -> dict[int, float]:
    """The same run in one process, where nothing happens."""
    path = shared / "reference.yaml"
    path.write_text(yaml.safe_dump(run_file(shared, run_dir, None, {})))
    command = [sys.executable, "-m", "rollcall", "train", str(path)]
    env = {**os.environ, "PYTHONPATH": str(shared), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=shared, env=env, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    return loss_by_step(run_dir)
