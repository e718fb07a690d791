"""`rollcall launch slurm` without Slurm: what is rendered, run by a real shell with small programs in place of Slurm's tools."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from own_path import own_path

from rollcall.config import load_config
from rollcall.launch import slurm as module
from rollcall.launch.launch import make_request, start, stop
from rollcall.launch.record import LaunchError, LaunchRecord, find_record, new_record
from rollcall.launch.rendered import Rendered
from rollcall.launch.slurm import Slurm
from rollcall.launch.target import LaunchRequest

HOSTILE = "a b'c\"d$HOME`date` ü✓*;#%j"


@pytest.fixture(autouse=True)
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCALL_LAUNCHES", str(tmp_path / HOSTILE))
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.02)
    return tmp_path / HOSTILE


def request_for(
    tmp_path: Path, *, cluster: dict[str, Any] | None = None, launch: dict[str, Any] | None = None, **section: Any
) -> LaunchRequest:
    nodes = {"num_nodes": 3, "num_gpus_per_node": 2, **(cluster or {})}
    raw = {"cluster": nodes, "launch": {**(launch or {}), "slurm": section}}
    return make_request(load_config(raw), target="slurm", name="one", cwd=tmp_path)


def rendered(tmp_path: Path, **section: Any) -> Rendered:
    return Slurm().render(request_for(tmp_path, **section))


def options(made: Rendered) -> list[str]:
    return [word for word in made.commands[0].words if word.startswith("--")]


def test_the_section_becomes_options_of_sbatch(tmp_path: Path, launches: Path) -> None:
    made = rendered(
        tmp_path, partition="main", account="mine", time="04:00:00", gpus_per_node="h100:8", cpus_per_task=16, mem="200G",
        constraint="[rack1|rack2]&nvlink", nodelist="node[01-04]", options=["--exclusive", "--qos=high"], signal_s=300,
    )  # fmt: skip
    assert made.commands[0].words == (
        "sbatch", "--parsable", "--exclusive", "--qos=high", "--job-name=rollcall-one", "--partition=main", "--account=mine",
        "--time=04:00:00", "--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=h100:8", "--cpus-per-task=16", "--mem=200G",
        "--constraint=[rack1|rack2]&nvlink", "--nodelist=node[01-04]", "--signal=B:USR1@300",
        f"--output={str(launches / 'one/log').replace('%', '%%')}", "--open-mode=append", f"--chdir={tmp_path}", "--requeue",
        str(launches / "one/job.sh"),
    )  # fmt: skip


def test_gpus_are_those_of_the_run_file_and_logical_slots_need_none(tmp_path: Path) -> None:
    assert "--gpus-per-node=2" in options(rendered(tmp_path))
    on_cpus = Slurm().render(request_for(tmp_path, cluster={"accelerator": "cpu"}))
    assert not [line for line in options(on_cpus) if line.startswith("--gpus")]
    asked_otherwise = options(rendered(tmp_path, options=["--gres=gpu:h100:2"]))
    assert [line for line in asked_otherwise if line.startswith(("--gpu", "--gres"))] == ["--gres=gpu:h100:2"]
    mixed = request_for(tmp_path, cluster={"num_nodes": 2, "num_gpus_per_node": 4, "nodes": [{"gpus": 4}, {"gpus": 2}]})
    with pytest.raises(LaunchError, match="different sizes"):
        Slurm().render(mixed)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"attach": 7},
        {"modules": ["cuda/12.8", "it's"], "lines": ["ulimit -n 4096 # mine"], "activate": "~/my venv/bin/activate"},
    ],
)
def test_a_shell_can_read_the_scripts(tmp_path: Path, section: dict[str, Any]) -> None:
    made = rendered(tmp_path, env={"X": HOSTILE}, **section)
    for name in ("job.sh", "node.sh"):
        subprocess.run(["bash", "-n"], input=made.files[name], text=True, check=True)


# With programs in place of Slurm's


class Tools:
    """Programs on PATH. The queue is a folder with a file for each job or step: its name, then its state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue = folder / "queue"
        self.queue.mkdir(parents=True)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        self.calls.touch()
        self.program(
            "sbatch",
            'case $1 in --test-only) exit 0 ;; esac\nfor script; do :; done\necho "$script" > "$queue/41"; echo 41',
        )
        self.program(
            "squeue",
            'for file in "$queue"/*; do [ -e "$file" ] || continue; id=${file##*/}; text=$(cat "$file")\n'
            'case "$* $id" in *--steps*.*) echo "$id|$text" ;; *--steps* | *.[0-9]) ;; *"%T %D"*) echo "RUNNING 3" ;;\n'
            '*) echo "$id|$text|RUNNING node[1-3] 1:05" ;; esac; done',
        )
        self.program("scancel", 'for id; do :; done\nrm -f "$queue/$id"')
        self.program("sacct", 'echo "TIMEOUT|0:0"')
        self.program("scontrol", "exit 0")
        self.program("srun", "exit 1")

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        queue = f"queue={shlex.quote(str(self.queue))}"
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {shlex.quote(str(self.calls))}\n{queue}\n{text}\n')
        path.chmod(0o755)

    def called(self, name: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.split()[0] == name]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tools]:
    made = Tools(tmp_path / "tools")
    monkeypatch.setenv("PATH", own_path(made.bin))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    yield made


def launched(tmp_path: Path, **section: Any) -> tuple[LaunchRecord, LaunchRequest, Rendered]:
    request = request_for(tmp_path, cluster={"accelerator": "cpu"}, **section)
    made = Slurm().render(request)
    return start(Slurm(), request, made), request, made


def test_a_second_start_finds_the_job_of_the_first(tmp_path: Path, tools: Tools) -> None:
    record, request, made = launched(tmp_path)
    assert record.id == "41"
    assert "--test-only" in tools.called("sbatch")[0] and len(tools.called("sbatch")) == 2
    start(Slurm(), request, made)
    assert len([call for call in tools.called("sbatch") if "--test-only" not in call]) == 1


def test_a_job_of_the_same_name_from_another_launch_is_not_taken(tmp_path: Path, tools: Tools) -> None:
    (tools.queue / "7").write_text("/elsewhere/one/job.sh\n")
    record, _, _ = launched(tmp_path)
    assert record.id == "41"


def test_a_job_that_was_submitted_just_before_a_kill_is_found_and_ended(tmp_path: Path, tools: Tools) -> None:
    launched(tmp_path)
    cut_off = new_record("one", target="slurm", run_dir="x").having(id="").knowing(kind="").save()
    assert Slurm().status(cut_off) == "job 41 is RUNNING node[1-3] 1:05"
    stop("one")
    assert find_record("one") is None and not list(tools.queue.iterdir())
    assert tools.called("scancel") == ["scancel 41"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("then", ["start", "stop"])
def test_a_launch_that_is_killed_around_its_submission_is_finished_or_cleaned_up(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch, when: str, then: str
) -> None:
    class Killed(BaseException):
        pass

    begin = Slurm.begin

    def cut_off(*arguments: Any) -> str:
        if when == "after":
            begin(*arguments)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Slurm, "begin", cut_off)
        launched(tmp_path)
    if then == "start":
        record, _, _ = launched(tmp_path)
        assert record.id == "41"
        assert len([call for call in tools.called("sbatch") if "--test-only" not in call]) == 1
    stop("one")
    assert find_record("one") is None and not list(tools.queue.iterdir())


def test_a_job_that_sbatch_refuses_is_not_submitted_and_nothing_is_kept(tmp_path: Path, tools: Tools) -> None:
    tools.program("sbatch", 'echo "sbatch: error: invalid partition specified: nope" >&2; exit 1')
    with pytest.raises(LaunchError, match="invalid partition"):
        launched(tmp_path)
    assert find_record("one") is None


def test_the_state_after_the_end_is_the_jobs_own_status_or_slurms_account(tmp_path: Path, tools: Tools) -> None:
    record, _, _ = launched(tmp_path)
    (tools.queue / "41").unlink()
    assert Slurm().status(record) == "job 41 is TIMEOUT, exit code 0:0"
    for status, words in (
        (0, "succeeded"),
        (75, "was stopped; its progress is saved, and the same command continues it"),
        (143, "was ended by SIGTERM"),
        (1, "failed"),
    ):
        (record.folder / "status").write_text(f"{status}\n")
        assert Slurm().status(record) == f"it {words} (status {status})"
    Slurm().stop(record)
    assert not tools.called("scancel"), "it has ended already"


def test_following_prints_the_log_to_its_end_and_returns_the_status(
    tmp_path: Path, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    record, _, _ = launched(tmp_path)
    (record.folder / "log").write_text("first\n")

    def go_on() -> None:
        time.sleep(0.3)
        with (record.folder / "log").open("a") as log:
            log.write("last ü\n")
        (record.folder / "status").write_text("3\n")
        (tools.queue / "41").unlink()

    threading.Thread(target=go_on).start()
    assert Slurm().follow(record) == 3
    assert capsys.readouterr().out == "first\nlast ü\n"
    (record.folder / "status").unlink()
    assert Slurm().follow(record) == 1, "cancelled"


def test_a_controller_that_does_not_answer_is_not_the_end_of_a_job(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _, _ = launched(tmp_path)
    (record.folder / "status").write_text("0\n")
    tools.program("squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(LaunchError, match="Unable to contact"):
        Slurm().stop(record)
    threading.Timer(0.5, lambda: tools.program("squeue", "exit 0")).start()
    assert Slurm().follow(record) == 0
    monkeypatch.setattr(module, "AWAY_S", 0.1)
    tools.program("squeue", "exit 1")
    with pytest.raises(LaunchError, match="squeue"):
        Slurm().follow(record)


def test_the_nodes_start_inside_a_job_that_runs(tmp_path: Path, tools: Tools) -> None:
    step = 'echo rollcall-one > "$queue/7.2"; echo "$*" > "$queue/../words"\nwhile [ -e "$queue/7.2" ]; do sleep 0.05; done; exit 143'
    tools.program("srun", step)
    (tools.queue / "7").write_text("salloc")
    record, request, made = launched(tmp_path, attach=7)
    assert (record.facts["kind"], record.id) == ("7", "7.2")
    words = (tools.folder / "words").read_text()
    assert "--jobid=7 --overlap" in words and "--nodes=3" in words
    assert Slurm().status(record) == "step 7.2 is RUNNING"
    start(Slurm(), request, made)
    assert len(tools.called("srun")) == 1
    stop("one")
    assert tools.called("scancel") == ["scancel --signal=TERM 7.2"], "the run may save; the job is its owner's"


def test_a_step_that_does_not_begin_in_time_is_given_up(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_S", 3.0)
    tools.program("srun", "echo $$ > $queue/../srun; exec sleep 600")
    (tools.queue / "7").write_text("salloc")
    with pytest.raises(LaunchError, match="the nodes did not start inside job 7"):
        launched(tmp_path, attach=7)
    started = int((tools.folder / "srun").read_text())
    while psutil.pid_exists(started):
        time.sleep(0.05)


def test_what_srun_says_of_an_allocation_is_told(tmp_path: Path, tools: Tools) -> None:
    tools.program("srun", 'echo "srun: error: Invalid job id specified" >&2; exit 1')
    with pytest.raises(LaunchError, match="(?s)the nodes did not start inside job 9; .*Invalid job id specified"):
        launched(tmp_path, attach=9)


# The scripts


SRUN = """
trap 'kill -USR1 $pids' USR1
for rank in 0 1 2; do SLURM_PROCID=$rank SLURM_GPUS_ON_NODE=$GPUS "${@: -2}" & pids="$pids $!"; done
status=0
for pid in $pids; do wait $pid; wait $pid; code=$?; [ $code -gt $status ] && status=$code; done
exit $status
"""
NODE = """
trap 'told=75' USR1
printf "%s\\n" "$@" > "$SEEN.$SLURM_PROCID"; printf %s "$MINE" > "$SEEN.env.$SLURM_PROCID"
for _ in $(seq $LAST); do [ -n "$told" ] && exit $told; sleep 0.05; done
exit ${ENDS:-0}
"""


def run_job(
    tmp_path: Path, tools: Tools, *, signal_it: bool = False, ends: int = 0, last: int = 1,
    reaches: tuple[Path, str | None] | None = None, **section: Any,
) -> tuple[int, Path]:  # fmt: skip
    request = request_for(tmp_path, **section)
    Slurm().render(request).write(request.folder)
    tools.program("srun", SRUN)
    tools.program("rollcall", NODE)
    env = {
        **os.environ, "SEEN": str(tmp_path / "seen"), "LAST": str(last), "ENDS": str(ends), "GPUS": "2", "SLURM_JOB_ID": "41",
    }  # fmt: skip
    job = subprocess.Popen(["bash", str(request.folder / "job.sh")], env=env, cwd=tmp_path)
    if signal_it:
        give_up = time.monotonic() + 60
        while len(list(tmp_path.glob("seen.env.*"))) < 3 and time.monotonic() < give_up:
            time.sleep(0.05)
        if reaches is not None and reaches[1] is not None:
            reaches[0].write_text(reaches[1])
        job.send_signal(signal.SIGUSR1)
    return job.wait(60), request.folder


def test_every_node_gets_its_rank_the_slots_that_slurm_gave_it_and_the_same_words(tmp_path: Path, tools: Tools) -> None:
    status, folder = run_job(tmp_path, tools, env={"MINE": HOSTILE + "\n!"}, interface="ib0")
    assert status == 0 and (folder / "status").read_text() == "0\n"
    for rank in range(3):
        assert (tmp_path / f"seen.env.{rank}").read_text() == HOSTILE + "\n!"
        assert (tmp_path / f"seen.{rank}").read_text().splitlines() == [
            "node", "--run", str(folder / "run.yaml"), "--cluster", "one", "--interface", "ib0", "--rendezvous",
            str(folder / "rendezvous"), "--rank", str(rank), "--slots", "2",
        ]  # fmt: skip


def test_logical_slots_are_the_run_files(tmp_path: Path, tools: Tools) -> None:
    run_job(tmp_path, tools, cluster={"accelerator": "cpu"})
    assert "--slots" not in (tmp_path / "seen.0").read_text()


def test_the_lines_of_the_run_file_come_first_and_their_variables_reach_the_nodes(tmp_path: Path, tools: Tools) -> None:
    status, _ = run_job(tmp_path, tools, lines=["export MINE='from a line'"])
    assert status == 0 and (tmp_path / "seen.env.2").read_text() == "from a line"


def test_told_before_the_limit_the_run_saves_and_the_job_requeues_itself(tmp_path: Path, tools: Tools) -> None:
    status, folder = run_job(tmp_path, tools, signal_it=True, last=400)
    assert status == 75 and not (folder / "status").exists(), "it is not over"
    assert tools.called("scontrol") == ["scontrol requeue 41"]


def test_a_job_that_comes_no_further_between_two_stops_is_not_requeued_again(tmp_path: Path, tools: Tools) -> None:
    request = request_for(tmp_path)
    reached = request.folder / "rendezvous/one/reached"
    reached.parent.mkdir(parents=True)
    steps = ["step 3", "step 7", "step 7", None, None]
    for number, step in enumerate(steps):
        for path in tmp_path.glob("seen.*"):
            path.unlink()
        status, folder = run_job(tmp_path, tools, signal_it=True, last=400, reaches=(reached, step))
        ends = number in (2, 4)
        assert status == 75 and (folder / "status").exists() == ends, step
    assert len(tools.called("scontrol")) == 3


def test_on_a_machine_of_another_cluster_the_job_is_not_taken_for_ended(tmp_path: Path, tools: Tools) -> None:
    tools.program("scontrol", 'printf "AuthType = munge\\nClusterName             = east\\n"')
    record, request, made = launched(tmp_path)
    tools.program("scontrol", 'echo "ClusterName = west"')
    tools.program("squeue", "exit 0")
    for use in (lambda: stop("one"), lambda: Slurm().status(record), lambda: start(Slurm(), request, made)):
        with pytest.raises(
            LaunchError,
            match="in the Slurm cluster 'east', but the current one is 'west'; run this on a machine in cluster east",
        ):
            use()
    assert find_record("one") is not None and (tools.queue / "41").exists()


def test_launching_it_again_forgets_where_it_stood(tmp_path: Path, tools: Tools) -> None:
    record, request, made = launched(tmp_path)
    (record.folder / "requeued").write_text("step 7\n")
    start(Slurm(), request, made)
    assert (record.folder / "requeued").exists(), "the same job, which goes on"
    (tools.queue / "41").unlink()
    start(Slurm(), request, made)
    assert not (record.folder / "requeued").exists()


def test_a_run_that_was_stopped_by_its_user_or_has_failed_is_not_requeued(tmp_path: Path, tools: Tools) -> None:
    for ends in (75, 1):
        status, folder = run_job(tmp_path, tools, ends=ends)
        assert status == ends and (folder / "status").read_text() == f"{ends}\n"
    assert not tools.called("scontrol")


def test_a_folder_that_nodes_do_not_see_is_said(tmp_path: Path, tools: Tools) -> None:
    made = rendered(tmp_path)
    done = subprocess.run(["bash"], input=made.files["job.sh"], capture_output=True, text=True)
    assert done.returncode == 1 and "set ROLLCALL_LAUNCHES to a folder that all nodes share" in done.stderr


# Containers


def test_a_container_runs_the_nodes_command_with_the_variables_that_it_needs(tmp_path: Path, tools: Tools) -> None:
    tools.program("docker", 'case $1 in run) for word; do printf "%s\\n" "$word"; done > "$SEEN.docker" ;; esac')
    container = {"image": "my/image", "mounts": ["/data"]}
    status, folder = run_job(tmp_path, tools, launch={"container": container}, env={"MINE": "x"})
    assert status == 0
    words = (tmp_path / "seen.docker").read_text().split("\n")
    given = [value for option, value in zip(words, words[1:], strict=False) if option == "--env"]
    assert given[0] == "MINE" and {"SLURM_PROCID", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"} <= set(given)
    assert f"{folder}:{folder}" in words and "/data:/data" in words
    image = words.index("my/image")
    assert words[image + 1 : image + 3] == ["sh", "-c"]
    inside = words[image + 3]
    assert inside.startswith("exec rollcall node --run ") and '--rank "$SLURM_PROCID"' in inside


def test_a_container_of_docker_gets_the_cards_by_the_numbers_of_the_node(tmp_path: Path, tools: Tools) -> None:
    tools.program("docker", 'case $1 in run) printf %s "$CUDA_VISIBLE_DEVICES" > "$SEEN.cards" ;; esac')
    tools.program("apptainer", 'printf %s "$APPTAINERENV_CUDA_VISIBLE_DEVICES" > "$SEEN.cards"')
    lines = ["export CUDA_VISIBLE_DEVICES=0,1 SLURM_STEP_GPUS=4,5"]
    for runtime, cards in (("docker", "4,5"), ("apptainer", "0,1")):
        run_job(tmp_path, tools, launch={"container": {"image": "x", "runtime": runtime}}, lines=lines)
        assert (tmp_path / "seen.cards").read_text() == cards


def test_gpus_are_asked_for_once(tmp_path: Path) -> None:
    for option, is_asked in (("--gres=gpu:h100:8", False), ("--gres=lustre:1,gpu:8", False), ("-G16", False),
                             ("--gpus-per-task=8", False), ("--gres=lustre:1", True), ("--exclusive", True)):  # fmt: skip
        made = Slurm().render(request_for(tmp_path, options=[option]))
        assert ("--gpus-per-node=2" in options(made)) == is_asked, option


def test_enroot_is_an_option_of_srun(tmp_path: Path) -> None:
    request = request_for(
        tmp_path, launch={"container": {"runtime": "enroot", "image": "nvcr.io#a/b:1", "mounts": ["/data"]}}
    )
    made = Slurm().render(request)
    (line,) = [line for line in made.files["job.sh"].splitlines() if line.startswith("nodes() { exec srun ")]
    words = shlex.split(line)
    assert "--container-image=nvcr.io#a/b:1" in words and f"--container-workdir={tmp_path}" in words
    (mounts,) = [word for word in words if word.startswith("--container-mounts=")]
    assert "/data:/data" in mounts and f"{request.folder}:{request.folder}" in mounts
    assert "rollcall node" in made.files["node.sh"]
