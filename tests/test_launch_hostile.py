"""Values, files, records and tools that mean harm: `rollcall launch` refuses them in one sentence, and waits for none."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from own_path import own_path

from rollcall.config import load_config
from rollcall.errors import ConfigError
from rollcall.launch import slurm_queue
from rollcall.launch.errors import LaunchError
from rollcall.launch.launch import make_request, stop
from rollcall.launch.profile import read_profile
from rollcall.launch.record import (
    RECORD,
    Part,
    all_records,
    find_record,
    get_record,
    held,
    launch_token,
    named_record,
    new_record,
    own_folder,
    readable_records,
)
from rollcall.launch.rendered import Command, Rendered
from rollcall.launch.ssh import shell as remote_shell
from rollcall.launch.ssh.answers import OF_CHECK, last_answer
from rollcall.launch.ssh.hosts import HOSTS, choose_hosts, claim, hosts_of
from rollcall.launch.ssh.shell import Outcome, RemoteShell
from rollcall.launch.ssh.site import Site
from rollcall.launch.targets import get_target, target_names
from rollcall.launch.tool import ask
from rollcall.nodes.here import Here
from rollcall.redact import redact

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


@pytest.mark.parametrize("target", target_names())
def test_a_secret_among_the_variables_of_nodes_is_not_rendered(target: str, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("WANDB_API_KEY=opensesame\n")
    for env, profile, name in (({"HF_TOKEN": "opensesame"}, None, "HF_TOKEN"), ({}, "profile", "WANDB_API_KEY")):
        with pytest.raises(LaunchError, match=f"{name}: .*env_pass") as caught:
            rendered(target, tmp_path, launch={"profile": profile}, env=env)
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("target", target_names())
def test_a_secret_in_a_command_is_not_rendered(target: str, tmp_path: Path) -> None:
    raw = yaml.safe_load((SECTIONS / f"{target}.yaml").read_text())
    raw["cluster"] = {"num_nodes": 2, "num_gpus_per_node": 2, "accelerator": "cpu"}
    raw["run"] = {"dir": "/shared/run"}

    def refused(**sections: Any) -> str:
        with pytest.raises(LaunchError, match="would hold the secret's value") as caught:
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
        with pytest.raises(ConfigError, match=r"secrets.*write names alone") as caught:
            rendered(target, tmp_path, secrets=[text])
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "key"), [("ssh", "user"), ("ssh", "interface"), ("slurm", "interface"), ("kuberay", "namespace")]
)
@pytest.mark.parametrize("value", ["-oProxyCommand=x", "--x", "a\nb", "", "\x1b[2J", "\u202ea"])
def test_a_word_for_a_tool_is_not_an_option_and_can_be_printed(
    target: str, key: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"launch.{target}.{key}"):
        rendered(target, tmp_path, launch=None, **{key: value})


@pytest.mark.parametrize("container", [
    {"image": "--privileged"}, {"image": "x", "shm": "--privileged"}, {"image": "x", "devices": ["-v/:/host"]},
    {"image": "x", "build": "--x"}, {"image": "x", "mounts": ["/a:b"]}, {"image": "x", "mounts": ["/a:"]},
    {"image": "x", "mounts": ["/a:/b\n"]}, {"image": "x", "mounts": ["/a,/b"], "runtime": "apptainer"},
])  # fmt: skip
def test_what_a_container_runtime_would_read_otherwise_is_refused(container: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((LaunchError, ConfigError), match="launch.container|commas"):
        rendered("slurm", tmp_path, launch={"container": container})


def test_a_folder_that_cannot_be_mounted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    with pytest.raises(LaunchError, match="cannot have the folder"):
        rendered("slurm", tmp_path / "a:b", launch={"container": {"image": "x"}})


@pytest.mark.parametrize("option", ["--job-name=x", "--job=x", "-Jx", "--array=1-4", "-a1", "-Mall", "--wrap=id"])
def test_an_option_that_would_hide_the_job_from_its_launch_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="to find its job again"):
        rendered("slurm", tmp_path, options=[option])


# Hosts


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=x", "u@-oProxyCommand=x", "a\x9b2J", "\u202e", "$(id)", "a b", "x" * 2000]
)
def test_a_host_is_a_name_or_an_address(host: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="which ssh cannot reach"):
        rendered("ssh", tmp_path, hosts=["a", host])


@pytest.mark.parametrize(
    "host", ["node-0.example.org", "me@10.0.0.1", "fd00::1", "fe80::1%eth0", "ssh://me@h:2222", "knoten_ü"]
)
def test_every_form_of_a_host_is_taken(host: str, tmp_path: Path) -> None:
    assert choose_hosts([host], count=1, name="one", cwd=tmp_path) == (host,)


def test_a_file_of_hosts_or_variables_is_a_regular_one_of_bounded_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(LaunchError, match="pipe or a device"):
            choose_hosts(path, count=1, name="one", cwd=tmp_path)
        with pytest.raises(LaunchError, match="pipe or a device"):
            read_profile(path)


def test_a_long_file_of_hosts_is_read_in_time_that_grows_with_it(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("\n".join(f"host{number}" for number in range(200_000)))
    assert choose_hosts(tmp_path / "hosts", count=2, name="one", cwd=tmp_path) == ("host0", "host1")


# Records


def forged(launches: Path, **changes: Any) -> Path:
    folder = launches / "one"
    folder.mkdir(parents=True, exist_ok=True)
    good = {
        "name": "one", "target": "ssh", "state": "started", "run_dir": "r", "started": "2026-11-16T12:00:00+00:00", "by": "me@here", "parts": [],
        "facts": {},
    }  # fmt: skip
    (folder / RECORD).write_text(json.dumps({**good, **changes}))
    return folder


@pytest.mark.parametrize("changes", [
    {"name": "../../victim"}, {"name": "two"}, {"facts": []}, {"facts": {"a": 1}}, {"started": 5}, {"started": "\x1b[2J"}, {"state": "x"}, {"more": 1},
    {"parts": [{"kind": 1, "where": "a"}]}, {"parts": [{"kind": "node", "where": "a", "more": 1}]}, {"parts": {}},
])  # fmt: skip
def test_a_forged_record_is_refused_before_anything_is_done_with_it(changes: dict[str, Any], launches: Path) -> None:
    victim = launches.parent / "victim"
    victim.mkdir()
    forged(launches, **changes)
    for use in (get_record, stop):
        with pytest.raises(LaunchError, match="is not a record of a launch"):
            use("one")
    assert victim.exists()


def test_a_record_that_is_no_file_of_bounded_size_is_not_waited_for(launches: Path) -> None:
    folder = forged(launches)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_text("[" * 200_000)):
        (folder / RECORD).unlink()
        make(folder / RECORD)
        with pytest.raises(LaunchError, match="is not a record of a launch"):
            find_record("one")


def test_a_record_that_cannot_be_read_is_named_and_the_others_are_listed(
    launches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_record("two", target="slurm", run_dir="r").save()
    forged(launches, state="eaten")
    own_folder("three")
    (launches / "three" / RECORD).mkdir()
    assert [each.name for each in readable_records()] == ["two"]
    assert named_record(None).name == "two"
    said = capsys.readouterr().err
    assert "one/launch.json is not a record of a launch" in said and "three/launch.json is not a record" in said
    with pytest.raises(LaunchError, match="is not a record"):
        all_records()  # whether its hosts are in use is not known


@pytest.mark.parametrize("hosts", ["5", '"ab"', "[1]", '["-oProxyCommand=x"]'])
def test_forged_hosts_of_a_record_are_refused(hosts: str, launches: Path) -> None:
    forged(launches, facts={HOSTS: hosts})
    with pytest.raises(LaunchError, match="hosts"):
        hosts_of(get_record("one"))


def test_a_folder_that_cannot_be_written_is_named(launches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollcall.launch.record.write_atomic", full)
    with pytest.raises(LaunchError, match=f"{launches} cannot be written: No space left on device; make room there"):
        new_record("one", target="ssh", run_dir="r").save()


def test_a_folder_of_another_user_is_not_used_and_does_not_hide_ones_own(
    launches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged(launches)
    monkeypatch.setattr("os.getuid", lambda: 4711)
    assert all_records() == []
    for use in (find_record, own_folder):
        with pytest.raises(LaunchError, match="belongs to user .*, not to you"):
            use("one")


def test_a_link_is_not_a_launchs_folder(launches: Path, tmp_path: Path) -> None:
    forged(launches).rename(tmp_path / "elsewhere")
    (launches / "one").symlink_to(tmp_path / "elsewhere")
    for use in (find_record, own_folder):
        with pytest.raises(LaunchError, match="is a link or a file"):
            use("one")


def test_a_launchs_folder_is_its_owners_alone(launches: Path) -> None:
    folder = forged(launches)
    folder.chmod(0o777)
    with held("one"):
        assert folder.stat().st_mode & 0o077 == 0


def test_the_lock_on_hosts_follows_no_link(launches: Path, tmp_path: Path) -> None:
    record = new_record("one", target="ssh", run_dir="r").save()
    (tmp_path / "victim").write_text("precious")
    for path in [*launches.glob(".hosts*"), launches / f".hosts-{os.getuid()}.lock", launches / ".hosts.lock"]:
        path.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        claim(record, ["a"])
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_token_that_is_no_token_is_not_sent(launches: Path) -> None:
    folder = forged(launches)
    (folder / "token").write_text("x; rm -rf ~")
    with pytest.raises(LaunchError, match="holds no token"):
        launch_token(folder)


def test_ending_what_was_never_launched_leaves_nothing(launches: Path) -> None:
    with pytest.raises(LaunchError, match="nothing named 'typo'"):
        stop("typo")
    assert not (launches / "typo").exists()


# What tools print


def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, text: str, name: str = "tool") -> Command:
    program = tmp_path / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", own_path(program.parent))
    return Command(words=(name, "list"), what="list the things")


def test_a_tool_that_prints_without_an_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.launch.tool.MOST_BYTES", 1 << 20)
    with pytest.raises(LaunchError, match="prints more than 1 MiB"):
        ask(tool(tmp_path, monkeypatch, text="exec yes"))


def test_a_tool_that_hangs_or_leaves_something_behind_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match="has not ended after 0 s"):
        ask(tool(tmp_path, monkeypatch, text="exec sleep 30"), timeout_s=0.3)
    left = "sleep 30 & echo $! > left; echo answer"
    monkeypatch.chdir(tmp_path)
    assert ask(tool(tmp_path, monkeypatch, text=left), timeout_s=20) == "answer\n"
    os.kill(int((tmp_path / "left").read_text()), 9)


def test_what_a_tool_prints_does_not_control_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="no such thing") as caught:
        ask(tool(tmp_path, monkeypatch, text=r"printf 'no such thing \033[2J\033]0;mine\007\n' >&2; exit 1"))
    assert str(caught.value).replace("\n", "").isprintable()


RUBBISH = ["hello", "[" * 100_000, '{"a": ', "[1]", "{}}", '[{"job_id": "x"}]', '{"runs": [3]}', '{"status": []}']


@pytest.mark.parametrize(("target", "name"), [("skypilot", "sky"), ("dstack", "dstack"), ("kuberay", "kubectl")])
@pytest.mark.parametrize("text", RUBBISH)
def test_rubbish_from_a_tool_is_one_sentence_and_no_start(
    target: str, name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").write_text(text)
    tool(tmp_path, monkeypatch, name=name, text=f"cat {tmp_path}/answer")
    record = new_record("one", target=target, run_dir="r").with_part(Part(kind="managed job", where="x", id="7"))
    for use in (get_target(target).status, get_target(target).stop):
        try:
            use(record)
        except LaunchError as error:
            assert "printed" in str(error)


@pytest.mark.parametrize(
    "text", ["rubbish", "1|2", "--all|RUNNING|None|1:00|n|SCRIPT", "0 -u root|RUNNING|None|1:00|n|SCRIPT"]
)
def test_rubbish_from_squeue_ends_no_job(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = new_record("one", target="slurm", run_dir="r").with_part(Part(kind="job", where="slurm", id="41")).save()
    text = text.replace("SCRIPT", str(record.folder / "job.sh"))
    tool(tmp_path, monkeypatch, name="scancel", text=f"touch {tmp_path}/cancelled")
    tool(tmp_path, monkeypatch, name="squeue", text=f"echo {shlex.quote(text)}")
    for use in (get_target("slurm").status, get_target("slurm").stop):
        with pytest.raises(LaunchError, match="where a job was expected"):
            use(record)
    assert not (tmp_path / "cancelled").exists()


THEIRS = {
    "skypilot": ("sky", '[{"job_id": 8, "job_name": "one", "status": "RUNNING"}]'),
    "dstack": ("dstack", '{"runs": [{"id": "8", "status": "running", "run_spec": {"run_name": "one"}}]}'),
    "kuberay": ("kubectl", '{"metadata": {"uid": "8"}, "status": {"jobDeploymentStatus": "Running"}}'),
    "slurm": ("squeue", "8|RUNNING|None|1:00|n|SCRIPT"),
}


@pytest.mark.parametrize("target", THEIRS)
@pytest.mark.parametrize(("id", "is_ended"), [("7", False), ("8", True), ("", True)])
def test_down_ends_what_this_launch_started_and_nothing_else_of_its_name(
    target: str, id: str, is_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, answer = THEIRS[target]
    kind, where = {"skypilot": ("managed job", "sky"), "slurm": ("job", "slurm")}.get(target, ("x", target))
    record = new_record("one", target=target, run_dir="r").with_part(Part(kind=kind, where=where, id=id)).save()
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
    monkeypatch.setenv("SBATCH_JOB_NAME", "mine")
    monkeypatch.setenv("SBATCH_PARTITION", "kept")
    tool(tmp_path, monkeypatch, name="squeue", text=f"env > {tmp_path}/env")
    slurm_queue.find(new_record("one", target="slurm", run_dir="r"))
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert not names & {"SQUEUE_STATES", "SCANCEL_INTERACTIVE"} and "SBATCH_PARTITION" in names


def test_a_job_gets_nothing_of_the_allocation_it_is_submitted_from_and_the_run_file_comes_before_the_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SLURM_CONF", "SLURM_JWT", "SBATCH_QOS", "SBATCH_PARTITION",
                 "SBATCH_TIMELIMIT", "SBATCH_MEM_PER_CPU", "SBATCH_GRES", "SBATCH_JOB_NAME", "SBATCH_ACCOUNT"):  # fmt: skip
        monkeypatch.setenv(name, "mine")

    def kept(script: str) -> set[str]:
        return {name for name in slurm_queue.variables(script) if name.startswith(("SLURM_", "SBATCH_"))}

    shell = {"SLURM_CONF", "SLURM_JWT", "SBATCH_QOS", "SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_MEM_PER_CPU",
             "SBATCH_GRES", "SBATCH_ACCOUNT", "SBATCH_JOB_NAME"}  # fmt: skip
    assert kept("") == shell
    lines = ["--job-name=x", "--partition=a", "--time=1", "--mem=0", "--gpus-per-node=8", "--qos=high"]
    script = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + "echo --account=x\n"
    assert kept(script) == {"SLURM_CONF", "SLURM_JWT", "SBATCH_ACCOUNT"}


@pytest.mark.parametrize("target", ["skypilot", "kuberay"])
def test_a_launch_that_has_started_nothing_says_so(target: str) -> None:
    record = new_record("one", target=target, run_dir="r")
    for use in (get_target(target).status, get_target(target).logs, get_target(target).follow):
        with pytest.raises(LaunchError, match="has started nothing yet"):
            use(record)


# What hosts print


def said_by_a_host(script: str) -> tuple[Outcome, list[str]]:
    told: list[str] = []
    shell = RemoteShell(["bash", "-s"], host="a", script=f"{script}\nexit\n", tell=lambda host, line: told.append(line))
    give_up = time.monotonic() + 30
    while not shell.is_over and time.monotonic() < give_up:
        time.sleep(0.01)
    return shell.outcome(), told


def test_what_a_host_prints_does_not_control_the_terminal() -> None:
    outcome, told = said_by_a_host(r"printf 'one\033[2J\n10%%\r20%%\n\tü\n'; printf '\033]0;mine\007' >&2")
    assert sorted(told) == sorted(["one\ufffd[2J", "20%", "\tü", "\ufffd]0;mine\ufffd"])
    assert all(line.replace("\t", "").isprintable() for line in outcome.last)


@pytest.mark.slow
def test_of_a_host_that_prints_without_an_end_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shell, "MOST_KEPT", 1 << 17)
    outcome, told = said_by_a_host(
        "head -c 3000000 /dev/zero | tr '\\0' x; echo; yes | head -n 100000; echo '{\"a\": 1}'"
    )
    assert len(outcome.out) <= 1 << 17 and outcome.out.endswith('y\n{"a": 1}\n')
    assert max(map(len, told)) <= remote_shell.LONGEST_LINE


def test_a_secret_in_a_host_s_line_without_an_end_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shell, "LONGEST_LINE", 1 << 17)
    for num_before in (65_530, 131_066):
        _, told = said_by_a_host(
            f"head -c {num_before} /dev/zero | tr '\\0' x; printf ' A_KEY=opensesame '; head -c 200000 /dev/zero"
        )
        shown = "".join(map(redact, told))
        assert "sesame" not in shown and "open" not in shown and len(told) > 1


GOOD_HERE = {"version": "1", "host": "a", "address": "10.0.0.1:7000", "is_alone": False, "rank": None}


@pytest.mark.parametrize("changes", [
    {"address": 7}, {"address": "nowhere"}, {"version": ["1"]}, {"rank": "0"}, {"host": "\x1b[2J"}, {"more": 1}, {"is_alone": 0},
])  # fmt: skip
def test_a_forged_answer_of_a_machine_is_none(changes: dict[str, Any]) -> None:
    assert Here.of(json.dumps(GOOD_HERE)) is not None
    assert Here.of(json.dumps({**GOOD_HERE, **changes})) is None
    assert Here.of("{" * 100_000) is None


@pytest.mark.parametrize(
    "line", ["{}", '{"num_slots": "4", "dashboard_url": null}', '{"num_slots": 4, "dashboard_url": 3}', "{" * 100_000]
)
def test_a_forged_answer_of_a_head_is_one_sentence(line: str) -> None:
    outcome = Outcome(host="a", status=0, out=f"{line}\n", last=())
    with pytest.raises(LaunchError, match="a: answered .* which is not what Rollcall prints"):
        last_answer(outcome, OF_CHECK)


@pytest.mark.parametrize("fact", ["5", "{}", '{"cluster": 5}', "rubbish", '{"cluster": "one", "port": "x"}'])
def test_a_forged_way_to_hosts_is_refused(fact: str, launches: Path) -> None:
    forged(launches, facts={HOSTS: '["a"]', "ssh": fact})
    with pytest.raises(LaunchError, match="does not say how its hosts are reached"):
        Site.of_record(get_record("one"))


def test_launches_of_other_users_have_containers_of_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, again = (rendered("slurm", tmp_path, launch={"container": {"image": "x"}}) for _ in range(2))
    monkeypatch.setattr("os.getuid", lambda: 4711)
    theirs = rendered("slurm", tmp_path, launch={"container": {"image": "x"}})
    names = [re.findall(r"rollcall-one-\w+", made.file("node.sh").text)[0] for made in (mine, again, theirs)]
    assert names[0] == names[1] != names[2]
