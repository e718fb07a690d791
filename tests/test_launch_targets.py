"""The contract that every target of `rollcall launch` keeps. A new target is tested by being in ``target_names()``."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollcall.config import load_config
from rollcall.launch.errors import LaunchError
from rollcall.launch.from_variable import VARIABLE
from rollcall.launch.launch import make_request, start, stop
from rollcall.launch.record import find_record
from rollcall.launch.rendered import Rendered
from rollcall.launch.target import RUN_FILE, Request
from rollcall.launch.targets import get_target, target_names

SECTIONS = Path(__file__).parents[1] / "src/rollcall/launch/sections"
HOSTILE = "a b'c\"d$HOME`date`\\ ü✓*;#"
CRDS = Path(os.environ.get("ROLLCALL_KUBERAY_CRDS") or Path(__file__).parents[2] / "shared/kuberay")


@pytest.fixture(autouse=True)
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCALL_LAUNCHES", str(tmp_path / "launches"))
    return tmp_path / "launches"


def request_for(target: str, tmp_path: Path, *, env: dict[str, str] | None = None, **changes: Any) -> Request:
    raw: dict[str, Any] = {
        "run": {"name": HOSTILE, "dir": f"/shared/{HOSTILE}"},
        "cluster": {"num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu", "env": {"GREETING": HOSTILE}},
        **yaml.safe_load((SECTIONS / f"{target}.yaml").read_text()),
    }
    raw["launch"][target]["env"] = env or {"MINE": HOSTILE}
    for key, value in changes.items():
        raw["launch"][target][key] = value
    return make_request(load_config(raw), target=target, name="one", cwd=tmp_path)


@pytest.fixture(params=target_names())
def target(request: pytest.FixtureRequest) -> str:
    return request.param


def test_rendering_is_pure(target: str, tmp_path: Path, launches: Path) -> None:
    first, second = (get_target(target).render(request_for(target, tmp_path)) for _ in range(2))
    assert first == second
    assert not launches.exists()
    assert first.commands and first.files


def test_the_run_file_that_nodes_get_is_the_one_that_was_given(target: str, tmp_path: Path) -> None:
    request = request_for(target, tmp_path)
    text = get_target(target).render(request).file(RUN_FILE).text
    assert load_config(yaml.safe_load(text)) == request.config.model_copy(update={"launch": None})


def test_the_section_that_init_prints_has_every_needed_key(target: str, tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / f"{target}.yaml").read_text())
    assert list(raw) == ["launch"]
    assert getattr(load_config({**raw, "cluster": {"num_nodes": 2}}).launch, target) is not None


def test_a_run_file_without_the_section_says_how_to_get_one(target: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"rollcall launch init {target}"):
        make_request(load_config({"cluster": {}}), target=target, name="one", cwd=tmp_path)
    with pytest.raises(LaunchError, match="cluster"):
        make_request(load_config({}), target=target, name="one", cwd=tmp_path)


def test_a_secret_is_not_rendered(target: str, tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / f"{target}.yaml").read_text())
    config = load_config({**raw, "cluster": {"num_nodes": 2, "env": {"HF_TOKEN": "hf_sesame"}}})
    with pytest.raises(LaunchError, match="HF_TOKEN.*env_pass") as caught:
        make_request(config, target=target, name="one", cwd=tmp_path)
    assert "sesame" not in str(caught.value)


def test_a_missing_tool_is_one_sentence(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    request = request_for(target, tmp_path)
    rendered = get_target(target).render(request)
    with pytest.raises(LaunchError, match="not on this machine's PATH"):
        start(get_target(target), request, rendered)
    record = find_record("one")
    assert record is None, "nothing was started"


def shell_of(target: str, rendered: Rendered) -> str | None:
    """The lines of shell that a node runs; None for a target without any."""
    if target == "slurm":
        return rendered.file("node.sh").text
    if target == "skypilot":
        return yaml.safe_load(rendered.file("task.yaml").text)["run"]
    if target == "dstack":
        return "\n".join(yaml.safe_load(rendered.file("task.dstack.yml").text)["commands"])
    return None


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=WORDS)
def test_any_value_of_a_variable_reaches_the_node(target: str, tmp_path: Path, value: str) -> None:
    """Through the YAML and a real shell, with `rollcall` replaced by a program that prints what it gets."""
    rendered = get_target(target).render(request_for(target, tmp_path, env={"MINE": value}))
    if (script := shell_of(target, rendered)) is None:
        pytest.skip("its nodes run no shell of ours")
    lines = [line for line in script.split("\n") if not line.startswith("pip ")]
    fake = tmp_path / "bin/rollcall"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nprintf %s "$MINE" > "$SEEN"\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    seen = tmp_path / "seen"
    env = {
        "PATH": f"{fake.parent}:/usr/bin:/bin", "HOME": "/home/a b", "SEEN": str(seen),
        "SKYPILOT_NODE_IPS": "fd00::1\nfd00::2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
        "DSTACK_MASTER_NODE_IP": "fd00::1", "DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "SLURM_PROCID": "0",
    }  # fmt: skip
    ended = subprocess.run(["sh", "-c", "\n".join(lines)], env=env, capture_output=True, text=True, check=True)
    assert seen.read_bytes().decode() == value
    words = ended.stdout.splitlines()
    assert words[:2] == ["node", "--run"]
    if target != "slurm":  # its nodes find each other in a folder
        assert words[words.index("--head-address") + 1] == "[fd00::1]:6399"
        assert words[words.index("--rank") + 1] == "1" and words[words.index("--num-nodes") + 1] == "2"


# Each target with its own tool replaced by a script that writes down how it was called


def fake_tool(tmp_path: Path, name: str, *, answers: str = "") -> Path:
    calls = tmp_path / f"{name}.calls"
    program = tmp_path / "tools" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {shlex.quote(str(calls))}\n{answers}\n')
    program.chmod(0o755)
    return calls


TOOLS = {"skypilot": "sky", "dstack": "dstack", "kuberay": "kubectl"}


def test_a_launch_starts_says_its_state_and_ends(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Path
) -> None:
    if target not in TOOLS:
        pytest.skip("it has its own tests with its own tool")
    calls = fake_tool(tmp_path, TOOLS[target])
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    request = request_for(target, tmp_path)
    chosen = get_target(target)
    rendered = chosen.render(request)
    record = start(chosen, request, rendered)
    assert record.state == "started" and record.parts[0].id
    started = calls.read_text()
    assert str(launches / "one") in started
    for secret in launches.glob("one/token"):
        assert secret.read_text() not in started
        assert secret.stat().st_mode & 0o077 == 0
    assert chosen.status(record)
    start(chosen, request, rendered)  # again: finishes, and does not fail
    stop("one")
    assert find_record("one") is None
    assert calls.read_text().splitlines()[-1] != started.splitlines()[-1]


# KubeRay's own schema


def closed(schema: Any) -> Any:
    """A key that the schema does not list is refused; Kubernetes' own words in JSON schema's terms."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return made


@pytest.mark.parametrize(
    "changes", [{}, {"ray_cluster": "mine"}, {"claims": {"data": "/shared"}, "env_from_secrets": ["t"]}]
)
def test_the_manifest_is_what_kuberay_takes(tmp_path: Path, changes: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    path = CRDS / "ray.io_rayjobs.yaml"
    if not path.exists():
        pytest.skip(f"KubeRay's schemas are not here: set ROLLCALL_KUBERAY_CRDS to a folder with {path.name}")
    crd = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    schema = next(each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == "v1")
    request = request_for("kuberay", tmp_path, **changes)
    manifest = yaml.safe_load(get_target("kuberay").render(request).file("rayjob.yaml").text)
    spec = closed(schema)["properties"]["spec"]
    jsonschema.validate(manifest["spec"], spec)
    wrong = {**manifest["spec"], "entrypont": "x"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, spec)
    variables = yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["env_vars"]
    assert base64.b64decode(variables[VARIABLE]).decode() == request.run_file.text
    assert not set('$`\\"') & set(json.dumps(variables).replace('"', "")), "KubeRay passes it through a shell"


def test_pods_of_different_sizes_are_refused(tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / "kuberay.yaml").read_text())
    config = load_config({**raw, "cluster": {"nodes": [{"gpus": 4}, {"gpus": 2}]}})
    request = make_request(config, target="kuberay", name="one", cwd=tmp_path)
    with pytest.raises(LaunchError, match="one size"):
        get_target("kuberay").render(request)
