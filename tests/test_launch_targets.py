"""The contract that every target of `rollcall launch` keeps. A new target is tested by being in ``TARGETS``."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import signal
import subprocess
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_path import own_path
from typer.testing import CliRunner

from rollcall.base.errors import ClusterError
from rollcall.cli.main import app
from rollcall.config import load_config
from rollcall.launch.launch import TARGETS, get_target, make_request, start, stop
from rollcall.launch.record import LaunchError, find_record
from rollcall.launch.rendered import RUN_FILE_VARIABLE, Rendered
from rollcall.launch.target import RUN_FILE, LaunchRequest

SECTIONS = Path(__file__).parents[1] / "src/rollcall/launch/sections"
EXAMPLES = Path(__file__).parents[1] / "examples"
HOSTILE = "a b'c\"d$HOME`date`\\ ü✓*;#"
CRDS = Path(os.environ.get("ROLLCALL_KUBERAY_CRDS") or Path(__file__).parents[2] / "shared/kuberay")


@pytest.fixture(autouse=True)
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCALL_LAUNCHES", str(tmp_path / "launches"))
    return tmp_path / "launches"


def request_for(target: str, tmp_path: Path, *, env: dict[str, str] | None = None, **changes: Any) -> LaunchRequest:
    raw: dict[str, Any] = {
        **yaml.safe_load((SECTIONS / f"{target}.yaml").read_text()),
        "run": {"name": HOSTILE, "dir": f"/shared/{HOSTILE}"},
        "cluster": {"num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu", "env": {"GREETING": HOSTILE}},
    }
    raw["launch"][target]["env"] = env or {"MINE": HOSTILE}
    for key, value in changes.items():
        raw["launch"][target][key] = value
    return make_request(load_config(raw), target=target, name="one", cwd=tmp_path)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


def test_rendering_is_pure(target: str, tmp_path: Path, launches: Path) -> None:
    first, second = (get_target(target).render(request_for(target, tmp_path)) for _ in range(2))
    assert first == second
    assert not launches.exists()
    assert first.commands and first.files


@pytest.mark.parametrize(
    ("target", "key", "asked"),
    [("skypilot", "accelerators", "H100:4"), ("dstack", "gpu", "H100:80GB:4"), ("dstack", "gpu", 4)],
)
def test_another_number_of_gpus_than_slots_is_noted(target: str, key: str, asked: str | int, tmp_path: Path) -> None:
    raw = {"run": {"dir": "/shared/r"}, "launch": {target: {"resources": {key: asked}}}}
    for slots, is_noted in ((8, True), (4, False)):
        config = load_config({**raw, "cluster": {"num_nodes": 2, "num_gpus_per_node": slots}})
        notes = get_target(target).render(make_request(config, target=target, name="one", cwd=tmp_path)).notes
        assert any(f"{key}={asked} gives each node 4 GPUs" in note for note in notes) == is_noted


def test_the_run_file_that_nodes_get_is_the_one_that_was_given(target: str, tmp_path: Path) -> None:
    request = request_for(target, tmp_path)
    text = get_target(target).render(request).files[RUN_FILE]
    assert load_config(yaml.safe_load(text)) == request.config.model_copy(update={"launch": None})


def test_what_init_prints_can_be_tried_behind_any_run_file_and_problems_stand_below_the_plan(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = CliRunner().invoke(app, ["launch", "init", target]).output
    assert CliRunner().invoke(app, ["init", "run.yaml"]).exit_code == 0
    for number, file in enumerate((tmp_path / "run.yaml", *sorted(EXAMPLES.glob("*.yaml")))):
        text = file.read_text()
        if "\ncluster:" in text:
            continue
        run = tmp_path / f"{number}.yaml"
        run.write_text(text + section)
        done = CliRunner().invoke(app, ["launch", target, str(run), "--dry-run"])
        *plan, last = done.output.strip().splitlines()
        assert done.exit_code == last.startswith("# problem: "), f"{file}: {done.output}"
        assert any(line.startswith("# file ") for line in plan)
        # A job of Slurm runs in this folder.
        assert last.startswith("# problem: run.dir=runs/") is (target != "slurm"), last
    if target != "slurm":
        started = CliRunner().invoke(app, ["launch", target, "0.yaml"])
        assert started.exit_code == 1 and "error: run.dir=runs/" in started.output
        told = CliRunner().invoke(app, ["launch", target, "0.yaml", "--dry-run", "--json"])
        assert "run.dir=runs/" in json.loads(told.output)["problems"][0]


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
        return rendered.files["node.sh"]
    if target == "skypilot":
        return yaml.safe_load(rendered.files["task.yaml"])["run"]
    if target == "dstack":
        return "\n".join(yaml.safe_load(rendered.files["task.dstack.yml"])["commands"])
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
        "PATH": own_path(fake.parent), "HOME": "/home/a b", "SEEN": str(seen),
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


@pytest.mark.parametrize("value", [HOSTILE, "$(HOME) $$(HOME) $$ $", "line\nline", ""])
def test_any_value_of_a_variable_reaches_a_pod(tmp_path: Path, value: str) -> None:
    """Kubernetes replaces ``$(NAME)`` in values, and reads ``$$`` as ``$``."""
    manifest = yaml.safe_load(
        get_target("kuberay").render(request_for("kuberay", tmp_path, env={"MINE": value})).files["rayjob.yaml"]
    )
    groups = [
        manifest["spec"]["rayClusterSpec"]["headGroupSpec"],
        *manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"],
    ]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        (variable,) = [each for each in container["env"] if each["name"] == "MINE"]
        read = re.sub(r"\$\$|\$\(.*?\)", lambda found: "$" if found[0] == "$$" else "replaced", variable["value"])
        assert read == value


# Each target with its own tool replaced by a script that writes down how it was called, and what it has started


TOOLS = {"skypilot": "sky", "dstack": "dstack", "kuberay": "kubectl"}
# What each tool does and prints, in shell. `made` is there while the thing runs.
ANSWERS = {
    "sky": """
        *--help) echo "  --graceful    wait for uploads" ;;
        "jobs queue"*) if [ -e ending ]; then echo '[{"job_id": 7, "job_name": "one", "status": "CANCELLING"}]'; rm ending
            elif [ -e made ]; then echo 'Fetching...'; echo '[{"job_id": 7, "job_name": "one", "status": "RUNNING"}]'
            else echo "No in-progress managed jobs." >&2; status=1; fi ;;
        "jobs launch"*) [ "$ROLLCALL_TOKEN" ] && echo job >> made ;;
        "jobs cancel"*) rm made; [ ! -e slow ] || touch ending ;;
        "status"*) if [ -e made ]; then echo '[{"name": "one", "status": "UP"}]'; else echo '[]'; fi ;;
        "queue"*) if [ -e made ]; then echo '{"one": [{"job_id": 1, "status": "RUNNING"}]}'; else echo '{"one": []}'; fi ;;
        "launch"*) [ "$ROLLCALL_TOKEN" ] && echo cluster >> made ;;
        "down"*) rm made ;;""",
    "dstack": """
        "ps"*) if [ -e ending ]; then state=terminating; rm ending; elif [ -e made ]; then state=running; else state=done; fi
            echo '{"project": "'${PLACE:-p}'", "runs": [{"status": "'$state'", "run_spec": {"run_name": "one"}}]}' ;;
        "apply"*) [ "$ROLLCALL_TOKEN" ] && echo run >> made ;;
        "stop"*) rm made; [ ! -e slow ] || touch ending ;;""",
    "kubectl": """
        "config current-context") echo ${PLACE:-p} ;;
        *"get rayjob"*) if [ -e made ]; then echo '{"spec": {}, "status": {"jobDeploymentStatus": "'${STATE:-Running}'"}}'; fi ;;
        *"--dry-run"*) ;;
        "apply"*) [ -e made ] || echo rayjob >> made ;;
        *"delete rayjob"*) rm -f made ;;""",
}


@dataclass(frozen=True, kw_only=True)
class FakeTool:
    """In ``folder``: `calls`, one line each, and `made`, a line for each thing that was started."""

    folder: Path

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def made(self) -> list[str]:
        path = self.folder / "made"
        return path.read_text().split() if path.exists() else []

    def kill_its_caller(self, call: int, *, when: str) -> None:
        (self.folder / f"kill-{when}").write_text(str(call))


def fake_tool(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> FakeTool:
    folder = tmp_path / "tool"
    program = folder / "bin" / name
    program.parent.mkdir(parents=True)
    kill = '[ ! -e kill-{when} ] || [ "$(cat kill-{when})" != "$(wc -l < calls)" ] || {{ kill -9 $PPID; exit 1; }}'
    program.write_text(
        "\n".join(
            [
                "#!/bin/sh",
                f"cd {shlex.quote(str(folder))}",
                'printf "%s\\n" "$*" >> calls',
                kill.format(when="before"),
                f'case "$*" in {ANSWERS[name]} *) exit 2 ;; esac',
                kill.format(when="after"),
                "",
            ]
        )  # fmt: skip
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", own_path(program.parent))
    return FakeTool(folder=folder)


def start_in_child(target: str, request: LaunchRequest) -> int:
    """As a command of its own; returns how it ended, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            start(get_target(target), request, get_target(target).render(request))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


OF_TOOLS = [*((each, {}) for each in TOOLS), ("skypilot", {"managed": False})]


@pytest.mark.parametrize(("target", "changes"), OF_TOOLS)
def test_a_launch_starts_says_its_state_and_ends(
    target: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Path
) -> None:
    tool = fake_tool(tmp_path, TOOLS[target], monkeypatch)
    request = request_for(target, tmp_path, **changes)
    chosen = get_target(target)
    rendered = chosen.render(request)
    record = start(chosen, request, rendered)
    assert record.state == "started" and record.id
    assert len(tool.made) == 1
    started = "\n".join(tool.calls)
    assert str(launches / "one") in started
    for secret in launches.glob("one/token"):
        assert secret.read_text() not in started
        assert secret.stat().st_mode & 0o077 == 0
    assert "run" in chosen.status(record).lower() or "UP" in chosen.status(record)
    start(chosen, request, rendered)  # again: finds it
    assert len(tool.made) == 1
    stop("one")
    assert find_record("one") is None and tool.made == []


@pytest.mark.parametrize("target", ["skypilot", "dstack"])
def test_down_ends_when_the_machines_are_gone(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tools say that they will end something."""
    tool = fake_tool(tmp_path, TOOLS[target], monkeypatch)
    (tool.folder / "slow").touch()
    monkeypatch.setattr("rollcall.launch.target.ASK_EVERY_S", 0.0)
    request = request_for(target, tmp_path)
    start(get_target(target), request, get_target(target).render(request))
    monkeypatch.setattr("rollcall.launch.target.END_S", 0.0)
    with pytest.raises(LaunchError, match="was asked to end 'one', which still exists after 0 s; see `"):
        stop("one")
    assert find_record("one") is not None
    monkeypatch.setattr("rollcall.launch.target.END_S", 60.0)
    (tool.folder / "made").write_text("one\n")
    stop("one")
    assert not (tool.folder / "ending").exists() and find_record("one") is None


def test_the_state_of_a_skypilot_cluster_names_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster stays up after the run has ended."""
    fake_tool(tmp_path, "sky", monkeypatch)
    request = request_for("skypilot", tmp_path, managed=False)
    chosen = get_target("skypilot")
    record = start(chosen, request, chosen.render(request))
    assert chosen.status(record) == "the cluster is UP, and its task is RUNNING"


@pytest.mark.parametrize(
    ("target", "changes"),
    [pytest.param(*each, marks=() if each[0] == "kuberay" else pytest.mark.slow) for each in OF_TOOLS],
)
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_launch_that_is_killed_at_any_call_of_its_tool_is_finished_or_cleaned_up(
    target: str, changes: dict[str, Any], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Path
) -> None:
    tool = fake_tool(tmp_path, TOOLS[target], monkeypatch)
    request = request_for(target, tmp_path, **changes)
    for finish in (True, False):
        call = 0
        while True:
            call += 1
            (tool.folder / "calls").write_text("")
            tool.kill_its_caller(call, when=when)
            status = start_in_child(target, request)
            (tool.folder / f"kill-{when}").unlink()
            if status == 0:
                assert call > 1 and len(tool.made) == 1
                stop("one")
                break
            assert status == -signal.SIGKILL
            if finish:
                assert start_in_child(target, request) == 0
                assert len(tool.made) == 1, "one thing, however often it is started"
            stop("one")
            assert tool.made == [] and find_record("one") is None


@pytest.mark.parametrize("target", ["skypilot", "dstack", "kuberay"])
def test_modules_that_no_node_will_have_are_named(target: str, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def right(completion): return 1.0\n")
    request = request_for(target, tmp_path)
    reward = load_config({"reward": [{"type": "function", "path": "my_rewards:right"}]}).reward
    request = replace(request, config=request.config.model_copy(update={"reward": reward}))
    notes = " ".join(get_target(target).render(request).notes)
    assert "needs my_rewards.py, but this launch sends no modules to the nodes" in notes


@pytest.mark.parametrize(("target", "changes"), OF_TOOLS)
def test_what_another_has_started_under_the_name_is_left_alone(
    target: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = fake_tool(tmp_path, TOOLS[target], monkeypatch)
    (tool.folder / "made").write_text("theirs\n")
    request = request_for(target, tmp_path, **changes)
    with pytest.raises(LaunchError, match="already has 'one', which this launch did not start; choose another --name"):
        start(get_target(target), request, get_target(target).render(request))
    assert find_record("one") is None and tool.made == ["theirs"]


@pytest.mark.parametrize(("target", "changes"), OF_TOOLS)
def test_a_tool_that_cannot_be_asked_leaves_the_launch_on_record(
    target: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else machines would run on, paid for and known to nobody."""
    tool = fake_tool(tmp_path, TOOLS[target], monkeypatch)
    request = request_for(target, tmp_path, **changes)
    start(get_target(target), request, get_target(target).render(request))
    program = tool.folder / "bin" / TOOLS[target]
    works = program.read_text()
    program.write_text("#!/bin/sh\necho no route to the server >&2\nexit 1\n")
    with pytest.raises(LaunchError, match="ended with status 1"):
        stop("one")
    assert find_record("one") is not None and tool.made
    program.write_text(works)
    stop("one")
    assert find_record("one") is None and not tool.made


@pytest.mark.parametrize(("target", "changes"), OF_TOOLS)
def test_what_runs_is_not_taken_for_what_the_run_file_says_now(
    target: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Path
) -> None:
    tool = fake_tool(tmp_path, TOOLS[target], monkeypatch)
    chosen = get_target(target)
    first, other = (request_for(target, tmp_path, env={"MINE": value}, **changes) for value in ("a", "b"))
    start(chosen, first, chosen.render(first))
    before = {path.name: path.read_bytes() for path in (launches / "one").iterdir() if path.is_file()}
    with pytest.raises(LaunchError, match=r"with a different \S+: .*launch down one"):
        start(chosen, other, chosen.render(other))
    assert before == {path.name: path.read_bytes() for path in (launches / "one").iterdir() if path.is_file()}
    (tool.folder / "made").unlink()  # it has ended
    start(chosen, other, chosen.render(other))
    assert len(tool.made) == 1


@pytest.mark.parametrize("is_old", [False, True])
def test_skypilot_is_told_to_wait_for_uploads_where_it_can(
    is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = fake_tool(tmp_path, "sky", monkeypatch)
    if is_old:
        program = tool.folder / "bin/sky"
        program.write_text(program.read_text().replace("--graceful ", ""))
    request = request_for("skypilot", tmp_path)
    start(get_target("skypilot"), request, get_target("skypilot").render(request))
    stop("one")
    assert ("jobs cancel --yes 7" if is_old else "jobs cancel --yes --graceful 7") in tool.calls


@pytest.mark.parametrize("target", ["dstack", "kuberay"])
def test_where_the_tool_has_another_place_the_launch_is_not_taken_for_ended(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = fake_tool(tmp_path, TOOLS[target], monkeypatch)
    request = request_for(target, tmp_path)
    record = start(get_target(target), request, get_target(target).render(request))
    monkeypatch.setenv("PLACE", "other")
    for use in (lambda: stop("one"), lambda: get_target(target).status(record)):
        with pytest.raises(LaunchError, match="was launched in .* 'p', but the current one is 'other'"):
            use()
    assert tool.made and find_record("one") is not None
    monkeypatch.delenv("PLACE")
    stop("one")
    assert not tool.made


def test_a_rayjob_that_kuberay_refuses_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = fake_tool(tmp_path, "kubectl", monkeypatch)
    request = request_for("kuberay", tmp_path)
    record = start(get_target("kuberay"), request, get_target("kuberay").render(request))
    monkeypatch.setenv("STATE", "ValidationFailed")
    assert get_target("kuberay").follow(record) == 1
    assert "the RayJob is ValidationFailed" in capsys.readouterr().err and not any(" logs " in c for c in tool.calls)


def test_pods_get_more_of_a_spec_and_the_submitter_what_it_needs_of_it(tmp_path: Path) -> None:
    pod = {"tolerations": [{"operator": "Exists"}], "imagePullSecrets": [{"name": "mine"}]}
    labels = {"kueue.x-k8s.io/queue-name": "q"}

    def manifest(**changes: Any) -> dict[str, Any]:
        rendered = get_target("kuberay").render(request_for("kuberay", tmp_path, **changes))
        return yaml.safe_load(rendered.files["rayjob.yaml"])

    made = manifest(pod=pod, labels=labels)
    cluster = made["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["spec"].items() >= pod.items()
    submitter = made["spec"]["submitterPodTemplate"]["spec"]
    assert submitter["imagePullSecrets"] == [{"name": "mine"}] and "tolerations" not in submitter
    assert made["metadata"]["labels"].items() >= labels.items()
    assert "submitterPodTemplate" not in manifest(pod=pod, submission="SidecarMode")["spec"]
    for wrong in ({"pod": {"containers": []}}, {"pod": pod, "ray_cluster": "x"}):
        with pytest.raises(LaunchError, match="launch.kuberay.pod .*remove"):
            manifest(**wrong)


def test_a_run_file_that_no_command_line_can_hold_is_refused(tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / "kuberay.yaml").read_text())
    run = {"run": {"dir": "/shared/r"}, "cluster": {"num_nodes": 2}, "data": {"system": "x" * 100_000}}
    request = make_request(load_config({**raw, **run}), target="kuberay", name="one", cwd=tmp_path)
    with pytest.raises(LaunchError, match="KubeRay can pass at most 90000"):
        get_target("kuberay").render(request)


def test_a_rayjob_that_has_ended_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = fake_tool(tmp_path, "kubectl", monkeypatch)
    request = request_for("kuberay", tmp_path)
    chosen = get_target("kuberay")
    start(chosen, request, chosen.render(request))
    monkeypatch.setenv("STATE", "Failed")
    record = start(chosen, request, chosen.render(request))
    assert any(" delete rayjob " in line for line in tool.calls) and len(tool.made) == 1
    assert chosen.follow(record) == 1, "the job's own end, not that of `kubectl logs`"


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


@pytest.fixture(scope="module")
def rayjob() -> Any:
    """KubeRay's own schema of a job's spec, as a validator. The schema itself, which is long, is not checked."""
    jsonschema = pytest.importorskip("jsonschema")
    path = CRDS / "ray.io_rayjobs.yaml"
    if not path.exists():
        pytest.skip(f"KubeRay's schemas are not here: set ROLLCALL_KUBERAY_CRDS to a folder with {path.name}")
    crd = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    schema = next(each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == "v1")
    return jsonschema.Draft202012Validator(closed(schema)["properties"]["spec"])


@pytest.mark.parametrize(
    "changes",
    [
        {"ray_cluster": "mine"},
        {"claims": {"data": "/shared"}, "env_from_secrets": ["t"]},
        {
            "pod": {"tolerations": [{"operator": "Exists"}], "imagePullSecrets": [{"name": "mine"}]},
            "labels": {"a": "b"},
        },
    ],
)
def test_the_manifest_is_what_kuberay_takes(tmp_path: Path, changes: dict[str, Any], rayjob: Any) -> None:
    request = request_for("kuberay", tmp_path, **changes)
    manifest = yaml.safe_load(get_target("kuberay").render(request).files["rayjob.yaml"])
    rayjob.validate(manifest["spec"])
    assert not rayjob.is_valid({**manifest["spec"], "entrypont": "x"})
    variables = yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["env_vars"]
    assert base64.b64decode(variables[RUN_FILE_VARIABLE]).decode() == request.run_file
    assert not set('$`\\"') & set(json.dumps(variables).replace('"', "")), "KubeRay passes it through a shell"


def test_pods_of_different_sizes_are_refused(tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / "kuberay.yaml").read_text())
    sizes = {"nodes": [{"gpus": 4}, {"gpus": 2}]}
    config = load_config({**raw, "run": {"dir": "/shared/r"}, "cluster": sizes})
    request = make_request(config, target="kuberay", name="one", cwd=tmp_path)
    with pytest.raises(LaunchError, match="the same number of slots"):
        get_target("kuberay").render(request)


def test_the_run_file_that_nodes_get_has_the_keys_that_were_given(tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / "ssh.yaml").read_text())
    given = {
        "run": {"dir": "/shared/r"},
        "algorithm": {"name": "ppo"},
        "critic": {"weight_decay": 0.1},
        "reward": [{"type": "math"}, {"type": "exact", "weight": 2.0}],
        "cluster": {"num_nodes": 2, "component_placement": {"actor,critic,rollout": "all"}, "env": {}},
    }
    request = make_request(load_config({**raw, **given}), target="ssh", name="one", cwd=tmp_path)
    assert yaml.safe_load(request.run_file) == given
    assert load_config(yaml.safe_load(request.run_file)) == request.config.model_copy(update={"launch": None})


@pytest.mark.parametrize(
    "launch", [{"container": {"image": "x"}}, {"rendezvous": "/shared/r"}], ids=lambda launch: next(iter(launch))
)
def test_keys_that_only_plain_machines_heed_are_refused_elsewhere(
    target: str, launch: dict[str, Any], tmp_path: Path
) -> None:
    raw = yaml.safe_load((SECTIONS / f"{target}.yaml").read_text())
    run = {"run": {"dir": "/shared/r"}, "cluster": {"num_nodes": 2}}
    config = load_config({"launch": {**raw["launch"], **launch}, **run})
    if target in ("ssh", "slurm"):
        make_request(config, target=target, name="one", cwd=tmp_path)
        return
    with pytest.raises(LaunchError, match=f"launch.{next(iter(launch))} works only with ssh and slurm"):
        make_request(config, target=target, name="one", cwd=tmp_path)


def test_a_launch_does_not_go_to_a_ray_that_already_runs(target: str, tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / f"{target}.yaml").read_text())
    config = load_config({**raw, "cluster": {"num_nodes": 2, "ray_address": "head:6379"}})
    with pytest.raises(LaunchError, match="ray_address=head:6379.*remove the key"):
        make_request(config, target=target, name="one", cwd=tmp_path)


def test_paths_that_the_nodes_do_not_have_are_refused_before_anything_is_rented(target: str, tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / f"{target}.yaml").read_text())
    config = load_config({**raw, "run": {"dir": "runs/mine"}, "cluster": {"num_nodes": 2}})
    if target == "slurm":
        make_request(config, target=target, name="one", cwd=tmp_path)
        return
    with pytest.raises(ClusterError, match=r"run\.dir=runs/mine: relative paths start at .*run\.dir=/SHARED/runs/mine"):
        make_request(config, target=target, name="one", cwd=tmp_path)


def test_a_run_directory_in_a_bucket_that_is_copied_is_refused(tmp_path: Path) -> None:
    raw = {"run": {"dir": "/shared/r"}, "cluster": {"num_nodes": 2}}
    mounted = {"source": "s3://b", "mode": "MOUNT_CACHED"}
    for mounts, is_refused in (
        ({"/shared": "s3://b"}, True),
        ({"/shared": mounted}, False),
        ({"/data": "s3://b"}, False),
    ):
        config = load_config({**raw, "launch": {"skypilot": {"file_mounts": mounts}}})
        if is_refused:
            with pytest.raises(LaunchError, match="mode: MOUNT_CACHED"):
                make_request(config, target="skypilot", name="one", cwd=tmp_path)
            continue
        request = make_request(config, target="skypilot", name="one", cwd=tmp_path)
        task = yaml.safe_load(get_target("skypilot").render(request).files["task.yaml"])
        assert task["file_mounts"].items() >= mounts.items()
