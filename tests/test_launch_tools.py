"""What `rollcall launch` renders, read by the tools it is for: SkyPilot's and dstack's own parsers, each in its environment.

``scripts/setup_peers.sh .peers skypilot dstack`` makes the environments; ``$ROLLCALL_PEERS`` names another folder.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollcall.config import load_config
from rollcall.launch.launch import get_target, make_request

pytestmark = pytest.mark.launchers
ROOT = Path(__file__).parents[1]
PEERS = Path(os.environ.get("ROLLCALL_PEERS") or ROOT / ".peers")
SECTIONS = ROOT / "src/rollcall/launch/sections"
VALUE = "a b'c\"d$HOME`date`\\\nü✓*;# $$ $$$ ${{ run.args }} ${{ no $'$ name"
SKY = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(json.dumps({"run": task.run, "setup": task.setup, "nodes": task.num_nodes, "mounts": task.file_mounts}))
"""
DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
from dstack._internal.utils.interpolator import VariablesInterpolator
task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
read = VariablesInterpolator({"run": {"args": "theirs"}}, skip=["secrets", "groups"]).interpolate_or_error  # as `dstack apply`
print(json.dumps({"run": "\\n".join(map(read, task.commands)), "nodes": task.nodes, "env": list(task.env.dict()), "name": task.name}))
"""


def python_of(tool: str) -> Path:
    python = PEERS / tool / "bin/python"
    if not python.exists():
        pytest.skip(f"{tool} is not installed: scripts/setup_peers.sh {PEERS} {tool}")
    return python


def rendered(target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    monkeypatch.setenv("ROLLCALL_LAUNCHES", str(tmp_path / "launches"))
    raw: dict[str, Any] = {
        **yaml.safe_load((SECTIONS / f"{target}.yaml").read_text()),
        "cluster": {"num_nodes": 3, "num_gpus_per_node": 8},
        "run": {"dir": "/shared/run"},
    }
    raw["launch"][target].update(env={"MINE": VALUE}, **changes)
    request = make_request(load_config(raw), target=target, name="First_run", cwd=tmp_path)
    made = get_target(target).render(request)
    made.write(request.folder)
    return request.folder / name


def read(python: Path, script: str, path: Path, *, expect: int = 0) -> Any:
    env = {**os.environ, "HOME": str(path.parent), "ROLLCALL_TOKEN": "x" * 64, "HF_TOKEN": "y"}
    words = [str(python), "-c", script, str(path)]
    ended = subprocess.run(words, capture_output=True, text=True, env=env, timeout=180, cwd=path.parent)
    assert ended.returncode == expect, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1]) if not expect else ended.stderr


def value_in(script: str) -> str:
    """What the node's command gets, by the shell."""
    given = {
        "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "3",
        "DSTACK_MASTER_NODE_IP": "10.0.0.1", "DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "3",
    }  # fmt: skip
    script = script.replace("exec rollcall", 'printf %s "$MINE"; exit #')
    lines = [line for line in script.split("\n") if not line.startswith("pip ")]
    words = ["/bin/sh", "-c", "\n".join(lines)]
    return subprocess.run(words, env={**os.environ, **given}, capture_output=True, text=True, check=True).stdout


def test_skypilot_reads_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_of("skypilot")
    path = rendered("skypilot", "task.yaml", tmp_path, monkeypatch, secrets=["HF_TOKEN"], workdir=".")
    task = read(python, SKY, path)
    assert task["nodes"] == 3
    assert task["run"] == yaml.safe_load(path.read_text())["run"]
    assert value_in(task["run"]) == VALUE
    assert str(path.parent / "run.yaml") in task["mounts"].values()
    path.write_text(path.read_text() + "resorces: {}\n")
    assert "resorces" in read(python, SKY, path, expect=1)


def test_dstack_reads_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_of("dstack")
    path = rendered(
        "dstack", "task.dstack.yml", tmp_path, monkeypatch, secrets=["HF_TOKEN"], volumes=["data:/shared"], ports=[6006]
    )
    task = read(python, DSTACK, path)
    assert (task["nodes"], task["name"]) == (3, "first-run")
    assert {"ROLLCALL_TOKEN", "HF_TOKEN"} <= set(task["env"])
    assert value_in(task["run"]) == VALUE
    path.write_text(path.read_text() + "resorces: {}\n")
    assert "resorces" in read(python, DSTACK, path, expect=1)
