"""What `rollcall launch` renders for the nodes, run as it is on lab hosts.

The shell of SkyPilot's and dstack's tasks, with the variables that these tools set, by the shell that they use (read in SkyPilot
0.14.1 and dstack 0.22.5). Of KubeRay's manifest the commands that its operator makes of it for the head, a worker and the submitter
(read in KubeRay 1.7.0-rc.0).
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

from rollcall.base.stop import STOPPED
from rollcall.config import load_config
from rollcall.launch.launch import get_target, make_request
from rollcall.launch.rendered import Rendered
from rollcall.observe.events import read_phases
from rollcall.view.audit import audit

pytestmark = [needs_lab, pytest.mark.slow]
RUN_S = 600.0
SECRET = "7f3a9c51e0b24d68" * 4
ACTIVATE = Path(sys.prefix) / "bin/activate"
BARE = {"PATH": "/usr/local/bin:/usr/bin:/bin"}  # `rollcall` is found by way of `activate` alone
VALUE = "a b'c\"d$$HOME`date`\\ ${{ x.y }} ü✓*;#"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(hosts=3, shared=tmp_path_factory.mktemp("lab") / "shared") as made:
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
        task = yaml.safe_load(rendered.files[self.file])
        started = []
        hosts = lab.hosts[:2]
        for rank, host in enumerate(hosts):
            for there, here in self.mounts(task).items():
                path = host.root / there.replace("~", str(host.home), 1).lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(here, path)
            env = {**BARE, **self.variables(rank, hosts), "ROLLCALL_TOKEN": SECRET}
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
        "RAY_CLIENT_MODE": "0", "RAY_JOB_ID": "01000000", "OMP_NUM_THREADS": "1",
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


@pytest.fixture
def tool(request: pytest.FixtureRequest) -> Tool:
    return TOOLS[request.param]


@pytest.fixture
def skys_ray(lab: Lab, tool: Tool) -> Iterator[None]:
    """The port that SkyPilot's own Ray has on every node of its clusters."""
    listen = "import socket, time; s = socket.create_server(('0.0.0.0', 6380)); time.sleep(3600)"
    held = [host.start([sys.executable, "-c", listen]) for host in lab.hosts[:2]] if tool.name == "skypilot" else []
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


# Both tools start a node in the same way: each test has one of them.
@pytest.mark.parametrize("tool", ["skypilot"], indirect=True)
@pytest.mark.usefixtures("skys_ray")
def test_a_task_trains_stops_with_75_and_trains_on(lab: Lab, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lab.shared / tool.name
    rendered = tool.rendered(lab, run_file(lab, tool.name), monkeypatch)
    first = tool.start(lab, rendered)
    wait_for_step(first, run_dir, 3)
    for host in lab.hosts[:2]:
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


@pytest.mark.parametrize("tool", ["dstack"], indirect=True)
@pytest.mark.usefixtures("skys_ray")
def test_a_task_whose_run_fails_ends_on_every_node(lab: Lab, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_file(lab, f"{tool.name}-bad")
    run["data"]["train"] = str(lab.shared / "missing.jsonl")
    commands = tool.start(lab, tool.rendered(lab, run, monkeypatch))
    ended = statuses(commands)
    assert len(set(ended)) == 1 and ended[0] not in (0, STOPPED), printed(commands)
    assert "missing.jsonl" in commands[0].output


SERVICE = "one-head-svc.default.svc.cluster.local"
DASHBOARD = f"http://{SERVICE}:8265"
JOB = "one-x7k2p"
HEALTH = "import urllib.request; r=urllib.request.urlopen('{}', timeout=10); exit(0 if b'success' in r.read() else 1)"


def ray_start(group: dict[str, Any], *, head: bool) -> list[str]:
    """The words of a Ray container: what the operator adds to `rayStartParams`, its options in the order of their names."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    memory = int(limits["memory"].removesuffix("Gi")) * 2**30
    added = {
        "metrics-export-port": "8080", "block": "true", "dashboard-agent-listen-port": "52365",
        "num-cpus": str(limits["cpu"]), "memory": str(memory), **({} if head else {"address": f"{SERVICE}:6379"}),
    }  # fmt: skip
    options = "".join(
        f" --{name} " if value == "true" else f" --{name}={value} "
        for name, value in sorted((added | group["rayStartParams"]).items())
    )
    command = f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; ray start {'--head ' if head else ''}{options}"
    return ["/bin/bash", "-c", "--", command]


def pod_env(group: dict[str, Any], *, head: bool) -> dict[str, str]:
    own = {each["name"]: each["value"].replace("$$", "$") for each in group["template"]["spec"]["containers"][0]["env"]}
    return {
        **own, "RAY_CLUSTER_NAME": "one", "RAY_PORT": "6379", "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_ADDRESS": "127.0.0.1:6379" if head else f"{SERVICE}:6379", "FQ_RAY_IP": SERVICE, **token_env(),
    }  # fmt: skip


def token_env() -> dict[str, str]:
    """As from the secret that the operator makes where `authOptions` asks for a token."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": SECRET}


def submitter(spec: dict[str, Any]) -> list[str]:
    """The words of the Kubernetes job that submits, in K8sJobMode."""
    health = HEALTH.format(f"{DASHBOARD}/api/gcs_healthz")
    runtime = json.dumps(json.dumps(yaml.safe_load(spec["runtimeEnvYAML"])))
    submit = f"ray job submit --address {DASHBOARD} --no-wait --runtime-env-json {runtime} --submission-id {JOB}"
    lines = [
        f'until python -c "{health}" >/dev/null 2>&1 ; do echo "Waiting" ; sleep 2 ; done ;',
        f"if ! ray job status --address {DASHBOARD} {JOB} >/dev/null 2>&1 ;",
        f"then {submit} -- {spec['entrypoint'].strip()} ; fi ; ray job logs --address {DASHBOARD} --follow {JOB}",
    ]
    return ["/bin/bash", "-ce", "--", " ".join(lines)]


def test_the_pods_of_a_rayjob_train(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLCALL_LAUNCHES", str(lab.shared / "launches"))
    marks = lab.shared / "marks"
    marks.mkdir()
    run = {
        **run_file(lab, "kuberay", steps=3),
        "prepare": {"each_node": [f"touch {marks}/$(hostname)"], "once": [f"touch {marks}/once"]},
    }
    section = {"image": "mine", "cpus": 2, "memory": "4Gi", "env": {**ENV, "MINE": VALUE}}
    config = load_config({**run, "launch": {"kuberay": section}})
    rendered = get_target("kuberay").render(make_request(config, target="kuberay", name="one", cwd=lab.shared))
    spec = yaml.safe_load(rendered.files["rayjob.yaml"])["spec"]
    pods = spec["rayClusterSpec"]
    assert pods["authOptions"] == {"mode": "token"}
    head, worker, other = lab.hosts
    with (lab.etc / "hosts").open("a") as file:
        file.write(f"{head.ip} {SERVICE}\n")
    image = {"PATH": f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"}  # it has Python, Ray and Rollcall
    (group,) = pods["workerGroupSpecs"]
    started = [
        head.start(ray_start(pods["headGroupSpec"], head=True), env=image | pod_env(pods["headGroupSpec"], head=True)),
        worker.start(ray_start(group, head=False), env=image | pod_env(group, head=False)),
    ]
    submitted = other.run(submitter(spec), env={**image, **token_env()}, timeout_s=RUN_S)
    said = submitted.stdout + submitted.stderr
    assert submitted.returncode == 0, said + printed(started)
    assert json.loads((lab.shared / "kuberay/summary.json").read_text())["steps"] == 3, said
    assert audit(lab.shared / "kuberay").is_clean
    assert sorted(path.name for path in marks.iterdir()) == ["node0", "node1", "once"], said
    assert SECRET not in said
    for command in started:
        assert command.poll() is None, "the pods are the operator's to end"
        command.kill()
