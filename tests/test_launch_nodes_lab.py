"""What `rollcall launch` renders for the nodes, run as it is on lab hosts.

The shell of SkyPilot's and dstack's tasks, with the variables that these tools set, by the shell that they use (read in SkyPilot
0.14.1 and dstack 0.22.5).
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.cluster import ENV, leftovers
from lab.command import Command
from lab.lab import Host, Lab, needs_lab

from rollcall.config import load_config
from rollcall.inspect.audit import audit
from rollcall.launch.launch import make_request
from rollcall.launch.rendered import Rendered
from rollcall.launch.targets import get_target
from rollcall.observe.events import read_phases
from rollcall.stop import STOPPED

pytestmark = [needs_lab, pytest.mark.slow]
RUN_S = 600.0
SECRET = "5ca1ab1e" * 8
ACTIVATE = Path(sys.prefix) / "bin/activate"
BARE = {"PATH": "/usr/local/bin:/usr/bin:/bin"}  # `rollcall` is found by way of `activate` alone
VALUE = "a b'c\"d$$HOME`date`\\ ${{ x.y }} ü✓*;#"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(hosts=2, shared=tmp_path_factory.mktemp("lab") / "shared") as made:
        yield made


def run_file(lab: Lab, name: str, **changes: Any) -> dict[str, Any]:
    steps = changes.pop("steps", 20)
    return {
        "run": {"name": name, "dir": str(lab.shared / name), "seed": 0},
        "cluster": {
            "num_nodes": 2, "num_gpus_per_node": 1, "accelerator": "cpu",
            "component_placement": {"actor,rollout": "all"},
        },
        "model": {"path": "builtin:arithmetic", "device": "cpu"},
        "data": {"train": "builtin:arithmetic", "val": None, "prompts_per_step": 4, "max_prompt_tokens": 16},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4},
        "reward": [{"type": "exact"}],
        "trainer": {"steps": steps, "eval_every": 0, "save_every": 100, "num_threads": 1, "loggers": []},
        **changes,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tool:
    """How a tool runs its task on a node."""

    name: str
    section: dict[str, Any]
    file: str
    mounts: Callable[[dict[str, Any]], dict[str, str]]  # path on the node: path here
    words: Callable[[dict[str, Any], Host], list[str]]  # the process that it starts
    variables: Callable[[int, Sequence[Host]], dict[str, str]]

    def rendered(self, lab: Lab, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Rendered:
        monkeypatch.setenv("ROLLCALL_LAUNCHES", str(lab.shared / "launches"))
        section = {"activate": str(ACTIVATE), "env": {**ENV, "MINE": VALUE}, **self.section}
        config = load_config({**run, "launch": {self.name: section}})
        request = make_request(config, target=self.name, name="one", cwd=lab.shared)
        made = get_target(self.name).render(request)
        made.write(request.folder)
        return made

    def start(self, lab: Lab, rendered: Rendered) -> list[Command]:
        task = yaml.safe_load(rendered.file(self.file).text)
        started = []
        for rank, host in enumerate(lab.hosts):
            for there, here in self.mounts(task).items():
                path = host.root / there.replace("~", str(host.home), 1).lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(here, path)
            env = {**BARE, **self.variables(rank, lab.hosts), "ROLLCALL_TOKEN": SECRET}
            words = self.words(task, host)
            # Without what the lab itself gives a host's commands.
            plain = [
                "env",
                "-i",
                *(f"{name}={value}" for name, value in {**env, "HOME": str(host.home)}.items()),
                *words,
            ]
            started.append(host.start(plain, cwd=host.home))
        return started


def sky_words(task: dict[str, Any], host: Host) -> list[str]:
    (host.root / "tmp/sky_app").write_text(f"#!/bin/bash\nexport PYTHONUNBUFFERED=1\n{task['run']}\n")
    return ["/bin/bash", "-i", "/tmp/sky_app"]


def sky_variables(rank: int, hosts: Sequence[Host]) -> dict[str, str]:
    return {
        "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(host.ip for host in hosts),
        "SKYPILOT_NUM_NODES": str(len(hosts)), "SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_TASK_ID": "sky-1-one",
        # SkyPilot's own Ray started the process; and on Slurm, ranks of another order are around.
        "RAY_CLIENT_MODE": "0", "RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "3", "OMP_NUM_THREADS": "1",
        "SLURM_NODEID": str(len(hosts) - 1 - rank), "SLURM_NNODES": str(len(hosts)),
    }  # fmt: skip


def dstack_words(task: dict[str, Any], host: Host) -> list[str]:
    return ["/bin/sh" if "image" in task else "/bin/bash", "-i", "-c", " && ".join(map(str.strip, task["commands"]))]


def dstack_variables(rank: int, hosts: Sequence[Host]) -> dict[str, str]:
    return {
        "DSTACK_NODE_RANK": str(rank), "DSTACK_NODES_NUM": str(len(hosts)), "DSTACK_MASTER_NODE_IP": hosts[0].ip,
        "DSTACK_NODES_IPS": "\n".join(host.ip for host in hosts), "DSTACK_GPUS_PER_NODE": "0", "DSTACK_GPUS_NUM": "0",
    }  # fmt: skip


TOOLS = {
    "skypilot": Tool(
        name="skypilot", section={}, file="task.yaml", mounts=lambda task: task["file_mounts"],
        words=sky_words, variables=sky_variables,
    ),
    "dstack": Tool(
        name="dstack", section={"image": "mine"}, file="task.dstack.yml",
        mounts=lambda task: {each["path"]: each["local_path"] for each in task["files"]},
        words=dstack_words, variables=dstack_variables,
    ),
}  # fmt: skip


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest) -> Tool:
    return TOOLS[request.param]


@pytest.fixture
def skys_ray(lab: Lab, tool: Tool) -> Iterator[None]:
    """The port that SkyPilot's own Ray has on every node of its clusters."""
    listen = "import socket, time; s = socket.create_server(('0.0.0.0', 6380)); time.sleep(3600)"
    held = [host.start([sys.executable, "-c", listen]) for host in lab.hosts] if tool.name == "skypilot" else []
    yield
    for command in held:
        command.kill()


def statuses(commands: Sequence[Command]) -> list[int]:
    return [command.wait(timeout_s=RUN_S) for command in commands]


def printed(commands: Sequence[Command]) -> str:
    return "\n".join(f"{command.host}:\n{command.output}" for command in commands)


def wait_for_step(commands: Sequence[Command], run_dir: Path, step: int) -> None:
    give_up = time.monotonic() + RUN_S
    while not any(phase.step >= step for phase in read_phases(run_dir)):
        assert all(command.poll() is None for command in commands), printed(commands)
        assert time.monotonic() < give_up, printed(commands)
        time.sleep(0.2)


def end(host: Host) -> None:
    """SIGTERM to the process that the tool started; the rest of the node learns of it from there."""
    (one,) = [each for each in host.processes() if "node --run" in each.cmdline and "nsenter" not in each.cmdline]
    assert host.run(["kill", "-TERM", str(one.pid)]).returncode == 0


@pytest.mark.usefixtures("skys_ray")
def test_a_task_trains_stops_with_75_and_trains_on(lab: Lab, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lab.shared / tool.name
    rendered = tool.rendered(lab, run_file(lab, tool.name), monkeypatch)
    first = tool.start(lab, rendered)
    wait_for_step(first, run_dir, 3)
    for host in lab.hosts:
        end(host)
    assert statuses(first) == [STOPPED, STOPPED], printed(first)
    assert not (run_dir / "summary.json").exists(), "it was stopped before its end"
    second = tool.start(lab, rendered)
    assert statuses(second) == [0, 0], printed(second)
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 20
    assert audit(run_dir).is_clean
    assert SECRET not in printed([*first, *second])
    left = [line for lines in leftovers(lab.hosts).values() for line in lines if "6380" not in line]
    assert not [line for line in left if line.startswith("process")], left


@pytest.mark.usefixtures("skys_ray")
def test_a_task_whose_run_fails_ends_on_every_node(lab: Lab, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_file(lab, f"{tool.name}-bad")
    run["data"]["train"] = str(lab.shared / "missing.jsonl")
    commands = tool.start(lab, tool.rendered(lab, run, monkeypatch))
    ended = statuses(commands)
    assert len(set(ended)) == 1 and ended[0] not in (0, STOPPED), printed(commands)
    assert "missing.jsonl" in commands[0].output
