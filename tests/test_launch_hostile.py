"""What `rollcall launch` refuses in one sentence: secrets in rendered files, words that a tool would read as options, damaged
records, and answers of tools and hosts that are not what they should be."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from own_path import own_path

from rollcall.base.errors import ConfigError
from rollcall.config import load_config
from rollcall.launch.launch import TARGETS, get_target, make_request, stop
from rollcall.launch.record import (
    RECORD,
    LaunchError,
    all_records,
    find_record,
    get_record,
    held,
    launch_token,
    named_record,
    new_record,
    own_folder,
)
from rollcall.launch.rendered import Rendered
from rollcall.launch.slurm import Slurm
from rollcall.launch.ssh.machines import choose_hosts
from rollcall.launch.ssh.shell import Login, Outcome, run_on_all
from rollcall.launch.target import ask
from rollcall.nodes.machine import Here

SECTIONS = Path(__file__).parents[1] / "src/rollcall/launch/sections"


@pytest.fixture(autouse=True)
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCALL_LAUNCHES", str(tmp_path / "launches"))
    return tmp_path / "launches"


def rendered(target: str, folder: Path, *, launch: dict[str, Any] | None = None, **changes: Any) -> Rendered:
    raw = yaml.safe_load((SECTIONS / f"{target}.yaml").read_text())
    raw["cluster"] = {"num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu"}
    raw["launch"].update(launch or {})
    raw["launch"][target].update(changes)
    return get_target(target).render(make_request(load_config(raw), target=target, name="one", cwd=folder))


# Values of a run file


@pytest.mark.parametrize("target", TARGETS)
def test_a_secret_among_the_variables_of_nodes_is_not_rendered(target: str, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("WANDB_API_KEY=opensesame\n")
    for env, profile, name in (({"HF_TOKEN": "opensesame"}, None, "HF_TOKEN"), ({}, "profile", "WANDB_API_KEY")):
        with pytest.raises(LaunchError, match=f"{name}: .*env_pass") as caught:
            rendered(target, tmp_path, launch={"profile": profile}, env=env)
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("target", TARGETS)
def test_a_secret_in_a_command_is_not_rendered(target: str, tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / f"{target}.yaml").read_text())
    raw["cluster"] = {"num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu"}
    raw["run"] = {"dir": "/shared/run"}

    def refused(**sections: Any) -> str:
        with pytest.raises(LaunchError, match="would contain the secret's value") as caught:
            make_request(load_config({**raw, **sections}), target=target, name="one", cwd=tmp_path)
        assert "sesame" not in str(caught.value)
        return str(caught.value).partition(":")[0]

    assert refused(prepare={"each_node": ["true", "HF_TOKEN=opensesame get"]}) == "prepare.each_node[1]"
    assert refused(prepare={"once": ["git clone https://me:opensesame@host/x"]}) == "prepare.once[0]"
    fine = ["HF_TOKEN=$HF_TOKEN get", "git clone https://me:${GIT_TOKEN}@host/x", 'A_KEY="$(cat /run/key)" get']
    make_request(load_config({**raw, "prepare": {"once": fine}}), target=target, name="one", cwd=tmp_path)
    for key in {"slurm": ["lines"], "skypilot": ["setup"], "dstack": ["setup"]}.get(target, []):
        section = {**raw["launch"][target], key: ["export HF_TOKEN=opensesame"]}
        assert refused(launch={target: section}) == f"launch.{target}.{key}[0]"


@pytest.mark.parametrize("target", ["skypilot", "dstack"])
def test_secrets_are_named_and_never_written(target: str, tmp_path: Path) -> None:
    for text in ("HF_TOKEN=opensesame", "--env-file=x", "", "A B"):
        with pytest.raises(ConfigError, match=r"secrets.*write only names") as caught:
            rendered(target, tmp_path, secrets=[text])
        assert "sesame" not in str(caught.value)


# Hosts


@pytest.mark.parametrize(
    "host", ["node-0.example.org", "me@10.0.0.1", "fd00::1", "fe80::1%eth0", "ssh://me@h:2222", "knoten_ü"]
)
def test_every_form_of_a_host_is_taken(host: str, tmp_path: Path) -> None:
    assert choose_hosts([host], count=1, name="one", cwd=tmp_path) == (host,)


# Records


def damaged(launches: Path, **changes: Any) -> None:
    path = new_record("one", target="ssh", run_dir="r").save().folder / RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("changes", [{"state": "x"}, {"started": "soon"}, {"facts": []}])
def test_a_damaged_record_is_refused_before_anything_is_done_with_it(changes: dict[str, Any], launches: Path) -> None:
    damaged(launches, **changes)
    for use in (get_record, stop):
        with pytest.raises(LaunchError, match="is not a valid launch record .*manually stop what this launch started"):
            use("one")


def test_a_record_that_cannot_be_read_is_named_and_the_others_are_listed(
    launches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_record("two", target="slurm", run_dir="r").save()
    damaged(launches, state="eaten")
    own_folder("three")
    (launches / "three" / RECORD).mkdir()
    assert [each.name for each in all_records(strict=False)] == ["two"]
    assert named_record(None).name == "two"
    said = capsys.readouterr().err
    assert (
        "one/launch.json is not a valid launch record" in said
        and "three/launch.json is not a valid launch record" in said
    )
    with pytest.raises(LaunchError, match="is not a valid launch record"):
        all_records()  # whether its hosts are in use is not known


def test_only_its_owner_reads_a_launch(launches: Path) -> None:
    with held("one"):
        token = launch_token(launches / "one")
        assert (launches / "one").stat().st_mode & 0o077 == 0
    assert launch_token(launches / "one") == token and (launches / "one/token").stat().st_mode & 0o077 == 0


def test_ending_what_was_never_launched_leaves_nothing(launches: Path) -> None:
    with pytest.raises(LaunchError, match="no launch named 'typo'"):
        stop("typo")
    assert not (launches / "typo").exists()


# What tools print


def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, text: str, name: str = "tool") -> tuple[str, str]:
    program = tmp_path / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", own_path(program.parent))
    return (name, "list")


def test_a_tool_that_hangs_or_leaves_something_behind_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(LaunchError, match="did not finish within 0 s"):
        patch.setattr("rollcall.launch.target.ASK_S", 0.3)
        ask(*tool(tmp_path, monkeypatch, text="exec sleep 30"), what="list")
    left = "sleep 30 & echo $! > left; echo answer"
    monkeypatch.chdir(tmp_path)
    assert ask(*tool(tmp_path, monkeypatch, text=left), what="list") == "answer\n"
    os.kill(int((tmp_path / "left").read_text()), 9)


def test_what_a_tool_prints_does_not_control_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="no such thing") as caught:
        said = tool(tmp_path, monkeypatch, text=r"printf 'no such thing \033[2J\033]0;mine\007\n' >&2; exit 1")
        ask(*said, what="list")
    assert str(caught.value).replace("\n", "").isprintable()


RUBBISH = ["hello", '{"a": ', "[1]", "{}}", '[{"job_id": "x"}]', '{"runs": [3]}', '{"status": []}']


@pytest.mark.parametrize(("target", "name"), [("skypilot", "sky"), ("dstack", "dstack"), ("kuberay", "kubectl")])
@pytest.mark.parametrize("text", RUBBISH)
def test_rubbish_from_a_tool_is_one_sentence_and_no_start(
    target: str, name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").write_text(text)
    tool(tmp_path, monkeypatch, name=name, text=f"cat {tmp_path}/answer")
    record = new_record("one", target=target, run_dir="r").having(id="7").knowing(kind="managed job")
    for use in (get_target(target).status, get_target(target).stop):
        try:
            use(record)
        except LaunchError as error:
            assert "printed" in str(error)


THEIRS = {
    "skypilot": ("sky", '[{"job_id": 8, "job_name": "one", "status": "RUNNING"}]'),
    "dstack": ("dstack", '{"runs": [{"id": "8", "status": "running", "run_spec": {"run_name": "one"}}]}'),
    "kuberay": ("kubectl", '{"metadata": {"uid": "8"}, "status": {"jobDeploymentStatus": "Running"}}'),
    "slurm": ("squeue", "8|SCRIPT|RUNNING n 1:00"),
}


@pytest.mark.parametrize("target", THEIRS)
@pytest.mark.parametrize(("id", "is_ended"), [("7", False), ("8", True), ("", True)])
def test_down_ends_what_this_launch_started_and_nothing_else_of_its_name(
    target: str, id: str, is_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, answer = THEIRS[target]
    kind = {"skypilot": "managed job", "slurm": ""}.get(target, "x")
    record = new_record("one", target=target, run_dir="r").having(id=id).knowing(kind=kind).save()
    (tmp_path / "answer").write_text(answer.replace("SCRIPT", str(record.folder / "job.sh")))
    end = f"cancel|stop|delete|scancel) rm {tmp_path}/answer; touch {tmp_path}/answer {tmp_path}/ended ;;"
    text = f'for word in "${{0##*/}}" "$@"; do case $word in {end} esac; done; cat {tmp_path}/answer'
    for each in (name, "scancel"):
        tool(tmp_path, monkeypatch, name=each, text=text)
    stop("one")
    assert (tmp_path / "ended").exists() == is_ended
    assert find_record("one") is None


def test_wishes_for_slurms_tools_in_the_shell_do_not_hide_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "COMPLETED")
    monkeypatch.setenv("SCANCEL_INTERACTIVE", "true")
    monkeypatch.setenv("SBATCH_PARTITION", "kept")
    tool(tmp_path, monkeypatch, name="squeue", text=f"env > {tmp_path}/env")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "kept")
    Slurm().find(new_record("one", target="slurm", run_dir="r").knowing(kind=""))
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert not names & {"SQUEUE_STATES", "SCANCEL_INTERACTIVE", "SLURM_JOB_ID"}, "an allocation's are not the job's"
    assert names >= {"SBATCH_PARTITION", "SLURM_CONF"}


@pytest.mark.parametrize("target", ["slurm", "skypilot", "dstack", "kuberay"])
def test_a_launch_that_has_started_nothing_says_so(target: str) -> None:
    record = new_record("one", target=target, run_dir="r")
    for use in (get_target(target).status, get_target(target).logs, get_target(target).follow):
        with pytest.raises(LaunchError, match="has not started anything yet"):
            use(record)


# What hosts print


class LocalShell(Login):
    """The "host" is a bash of this machine."""

    def words(self, host: str, *options: str) -> tuple[str, ...]:
        return ("bash", "-s")


def said_by_a_host(script: str) -> tuple[Outcome, list[str]]:
    told: list[str] = []
    (outcome,) = run_on_all(
        LocalShell(), {"a": f"{script}\nexit\n"}, timeout_s=30.0, tell=lambda host, line: told.append(line)
    )
    return outcome, told


def test_what_a_host_prints_does_not_control_the_terminal() -> None:
    outcome, told = said_by_a_host(r"printf 'one\033[2J\n10%%\r20%%\n\tü\n'; printf '\033]0;mine\007' >&2")
    assert told == ["one\ufffd[2J", "20%", "\tü", "\ufffd]0;mine\ufffd"] == list(outcome.lines)


def test_of_a_host_that_prints_much_the_end_is_kept() -> None:
    outcome, told = said_by_a_host("yes | head -n 5000; echo '{\"a\": 1}'")
    assert len(told) == 5001 and len(outcome.lines) == 1000 and outcome.answer == '{"a": 1}'


def test_a_host_that_ignores_the_end_of_its_stdin_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.launch.ssh.shell.LET_GO_S", 0.3)
    scripts = {"a": "exit 3\n", "b": "sleep 600\n"}
    failed, other = run_on_all(LocalShell(), scripts, together=True)
    # Where the first fails at once, the other may end before it has read its script.
    assert failed.status == 3 and other.status in (None, 0) and other.was_let_go and not failed.was_let_go


GOOD_HERE = {"version": "1", "host": "a", "address": "10.0.0.1:7000", "is_alone": False, "rank": None}


@pytest.mark.parametrize("changes", [
    {"address": 7}, {"address": "nowhere"}, {"version": ["1"]}, {"rank": "0"}, {"host": "\x1b[2J"}, {"more": 1}, {"is_alone": 0},
])  # fmt: skip
def test_a_forged_answer_of_a_machine_is_none(changes: dict[str, Any]) -> None:
    assert Here.of(json.dumps(GOOD_HERE)) is not None
    assert Here.of(json.dumps({**GOOD_HERE, **changes})) is None
    assert Here.of("{" * 100_000) is None


def test_launches_of_other_users_have_containers_of_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, again = (rendered("slurm", tmp_path, launch={"container": {"image": "x"}}) for _ in range(2))
    monkeypatch.setattr("os.getuid", lambda: 4711)
    theirs = rendered("slurm", tmp_path, launch={"container": {"image": "x"}})
    names = [re.findall(r"rollcall-one-\w+", made.files["node.sh"])[0] for made in (mine, again, theirs)]
    assert names[0] == names[1] != names[2]
