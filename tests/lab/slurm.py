"""Slurm on lab hosts: slurmctld on the first host, slurmd on the others, munged on all of them (Debian's packages).

The first host is the login node. Commands of Slurm find the configuration by ``SLURM_CONF``, which the shared folder holds.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

import pytest

from lab.lab import Host, Lab, LabError, missing_for_lab

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
CPUS = 2
READY_S = 60.0
CONF = """
ClusterName=lab
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=20
KillWait=60
OverTimeLimit=0
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
StateSaveLocation=/run/slurmctld
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_for_slurm() -> str | None:
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"Slurm in the lab needs {', '.join(absent)} (apt install slurmctld slurmd slurm-client munge)"
    return missing_for_lab()


needs_slurm = pytest.mark.skipif(missing_for_slurm() is not None, reason=missing_for_slurm() or "")


class SlurmLab:
    """``login`` submits, ``nodes`` run jobs; ``gpus``: card files that each node offers to jobs.

    ``hosts`` are those of Slurm, the login node first; without it, all of the lab.
    """

    def __init__(self, lab: Lab, *, gpus: int = 0, hosts: Sequence[Host] | None = None) -> None:
        self.lab = lab
        self.login, *self.nodes = hosts or lab.hosts
        self.folder = lab.shared / "slurm"
        self.folder.mkdir(mode=0o755)
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._gpus = gpus
        self._write()
        for host in (self.login, *self.nodes):
            self._munge(host)
        self.start_controller()
        for host in self.nodes:
            self.start_node(host)
        self.wait_until(lambda: self.states() == {host.name: "idle" for host in self.nodes}, "all nodes are idle")

    def start_controller(self) -> None:
        self.login.run(["mkdir", "-p", "/run/slurmctld"])
        self._started(self.login, ["slurmctld"])

    def start_node(self, host: Host) -> None:
        self._cards(host)
        self._started(host, ["slurmd", "-N", host.name])

    def run(
        self, *words: str, host: Host | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login node, or on another."""
        return (host or self.login).run(words, env={**self.env, **(env or {})}, timeout_s=timeout_s)

    def ask(self, *words: str) -> str:
        done = self.run(*words)
        if done.returncode:
            raise LabError(f"{words} ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        return dict(line.split() for line in self.ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines())

    def state_of(self, job: str) -> str:
        """Its state, also for some minutes after its end; empty when Slurm has forgotten it."""
        shown = self.run("scontrol", "show", "job", job).stdout
        found = re.search(r"JobState=(\w+)", shown)
        return found.group(1) if found else ""

    def wait_until(self, is_so: object, what: str, *, timeout_s: float = READY_S) -> None:
        assert callable(is_so)
        give_up = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > give_up:
                raise LabError(f"{what}: not so after {timeout_s:g} s\n{self.tell()}")
            time.sleep(0.5)

    def tell(self) -> str:
        """What there is to know when something goes wrong."""
        parts = [self.run("sinfo", "-N", "-l").stdout, self.run("squeue", "-l").stdout]
        for log in sorted([*self.folder.glob("*.log"), *self.lab.shared.glob("launches/*/log")]):
            parts.append(f"== {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]))
        return "\n".join(parts)

    def own_processes(self, host: Host) -> list[str]:
        """What runs on a host, without Slurm's daemons."""
        daemons = {"munged", "slurmd", "slurmctld", "slurmscriptd"}
        return [f"{process.pid} {process.cmdline}" for process in host.processes() if process.name not in daemons]

    def _write(self) -> None:
        gres = f" Gres=gpu:{self._gpus}" if self._gpus else ""
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.ip} CPUs={CPUS} RealMemory=4000{gres} State=UNKNOWN"
            for host in self.nodes
        )
        text = CONF.format(controller=f"{self.login.name}({self.login.ip})", folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
        cards = f"NodeName={','.join(host.name for host in self.nodes)} Name=gpu File=/tmp/nvidia[0-{self._gpus - 1}]\n"
        (self.folder / "gres.conf").write_text(cards if self._gpus else "")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)

    def _munge(self, host: Host) -> None:
        self.run("mkdir", "-p", "/run/munge", host=host)
        done = self.run(
            "munged", "--force", f"--key-file={self.folder}/munge.key", "--socket=/run/munge/munge.socket.2",
            "--pid-file=/run/munge/munged.pid", "--log-file=/run/munge/munged.log", "--seed-file=/run/munge/seed", host=host,
        )  # fmt: skip
        if done.returncode:
            raise LabError(f"munged on {host.name}: {done.stdout}{done.stderr}")

    def _cards(self, host: Host) -> None:
        # Slurm wants device files; those of /dev/null are enough.
        for index in range(self._gpus):
            self.run("mknod", f"/tmp/nvidia{index}", "c", "1", "3", host=host)

    def _started(self, host: Host, words: Sequence[str]) -> None:
        done = self.run(*words, host=host)
        if done.returncode:
            raise LabError(f"{words} on {host.name}: {done.stdout}{done.stderr}")
