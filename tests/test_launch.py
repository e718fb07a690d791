"""What all targets of `rollcall launch` share: rendered files, the record of what was started, names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

from rollcall.base.atomic import take_lock
from rollcall.cli.main import app
from rollcall.launch.launch import read_profile
from rollcall.launch.record import (
    LaunchError,
    LaunchRecord,
    all_records,
    find_record,
    forget,
    get_record,
    held,
    named_record,
    new_record,
)
from rollcall.launch.rendered import Command, Rendered, exports, yaml_text
from rollcall.launch.ssh.machines import Site, choose_hosts
from rollcall.launch.ssh.shell import Login


@pytest.fixture(autouse=True)
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCALL_LAUNCHES", str(tmp_path / "launches"))
    return tmp_path / "launches"


def test_a_record_is_read_back_and_forgotten() -> None:
    record = new_record("one", target="ssh", run_dir="/shared/runs/one").knowing(hosts=["a", "b"]).save()
    assert record.id is None
    record = record.having(id="7").knowing(up=["a"]).save()
    assert find_record("one") == record and record.facts == {"hosts": ["a", "b"], "up": ["a"]}
    assert [each.name for each in all_records()] == ["one"]
    forget(record)
    assert find_record("one") is None
    with pytest.raises(LaunchError, match="its launches are: none"):
        get_record("one")


def test_a_damaged_record_is_named(launches: Path) -> None:
    new_record("one", target="ssh", run_dir="/r").save()
    for text in ("{", "[]", "null", '{"name": "one"}'):
        (launches / "one/launch.json").write_text(text)
        with pytest.raises(LaunchError, match="launch.json is not a valid launch record"):
            find_record("one")


def test_a_record_of_another_version_is_read(launches: Path) -> None:
    record = new_record("one", target="ssh", run_dir="/r").save()
    path = launches / "one/launch.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "by": "rollcall 0.1"}))
    assert all_records() == [record]


def test_one_command_at_a_time_works_on_a_launch() -> None:
    with held("one"), pytest.raises(LaunchError, match="another command"), held("one"):
        pass


def test_a_launch_that_is_ended_just_before_it_is_locked_gets_its_folder_again(
    launches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path) -> IO[bytes] | None:
        path.parent.rmdir()  # as `rollcall launch down` does
        monkeypatch.setattr("rollcall.launch.record.take_lock", take_lock)
        return take_lock(path)

    monkeypatch.setattr("rollcall.launch.record.take_lock", late)
    with held("one"):
        assert (launches / "one/lock").is_file()


@pytest.mark.parametrize("name", ["", "a b", "../x", "a" * 33, "-a"])
def test_names_that_are_not_folders_are_refused(name: str) -> None:
    with pytest.raises(LaunchError, match="cannot be a launch's name"):
        new_record(name, target="ssh", run_dir="/r")


def test_any_value_survives_the_shell() -> None:
    value = "a b'c\"d$HOME`date`\\\n\tü✓ *"
    script = "\n".join([*exports({"VALUE": value}), 'printf %s "$VALUE"'])
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == value
    with pytest.raises(LaunchError, match="name for a shell variable"):
        exports({"A;rm": "1"})


def test_rendered_files_are_private_and_yaml_is_read_back(tmp_path: Path) -> None:
    import yaml

    value = {"run": "line one\n  two\n", "list": [1, "yes", "0x1"], "empty": ""}
    assert yaml.safe_load(yaml_text(value)) == value
    rendered = Rendered(
        files={"go.sh": "exit 0\n"},
        commands=(Command(words=("sh", "a b"), what="start"),),
    )
    rendered.write(tmp_path / "folder")
    assert (tmp_path / "folder/go.sh").stat().st_mode & 0o777 == 0o600
    assert str(rendered.commands[0]) == "sh 'a b'"


def test_a_profile_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "net.env"
    path.write_text("# fabric\n\nNCCL_IB_HCA=mlx5_0,mlx5_1\nexport GLOO_SOCKET_IFNAME='eth 0'\nEMPTY=\n")
    assert read_profile(path) == {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "GLOO_SOCKET_IFNAME": "eth 0", "EMPTY": ""}
    for text in ("NCCL_DEBUG", "A B=1", "A=one two", "A='one", "1A=2"):
        path.write_text(f"X=1\n{text}\n")
        with pytest.raises(LaunchError, match="line 2 of launch.profile"):
            read_profile(path)
    with pytest.raises(LaunchError, match="cannot be read"):
        read_profile(tmp_path / "none")


def claim(record: LaunchRecord, hosts: Sequence[str]) -> LaunchRecord:
    return Site(cluster=record.name, hosts=tuple(hosts), login=Login()).claim(record)


def test_hosts_of_a_file_are_the_first_that_no_other_launch_uses(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\nb # in the corner\n\n# c is broken\nd\ne\n")
    first = choose_hosts(file, count=2, name="one", cwd=tmp_path)
    assert first == ("a", "b")
    claim(new_record("one", target="ssh", run_dir="/r").save(), first)
    assert choose_hosts(Path("hosts"), count=2, name="two", cwd=tmp_path) == ("d", "e")
    assert choose_hosts(file, count=2, name="one", cwd=tmp_path) == first
    with pytest.raises(LaunchError, match="2 free hosts, but cluster.num_nodes=3.*\n  a is used by launch 'one'"):
        choose_hosts(file, count=3, name="two", cwd=tmp_path)


def test_hosts_that_another_launch_uses_are_refused_by_its_name(tmp_path: Path) -> None:
    claim(new_record("one", target="ssh", run_dir="/r").save(), ["a", "b"])
    with pytest.raises(LaunchError, match="already in use: b \\(launch 'one'\\)"):
        choose_hosts(["b", "c"], count=2, name="two", cwd=tmp_path)
    two = new_record("two", target="ssh", run_dir="/r").save()
    with pytest.raises(LaunchError, match="already in use: b"):
        claim(two, ["c", "b"])
    assert choose_hosts(["a", "b"], count=2, name="one", cwd=tmp_path) == ("a", "b")
    with pytest.raises(LaunchError, match="'one' was launched on a, b, not on a, c"):
        choose_hosts(["a", "c"], count=2, name="one", cwd=tmp_path)


def test_one_host_for_each_node(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="lists a twice"):
        choose_hosts(["a", "a"], count=2, name="one", cwd=tmp_path)
    with pytest.raises(LaunchError, match="lists 2 hosts, but cluster.num_nodes=3"):
        choose_hosts(["a", "b"], count=3, name="one", cwd=tmp_path)


def answered(*words: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `rollcall launch`."""
    ended = CliRunner().invoke(app, ["launch", *words])
    return ended.exit_code, ended.stdout, ended.stderr


def test_a_list_of_nothing_says_so_and_a_list_has_names_for_its_columns() -> None:
    status, printed, told = answered("list")
    assert (status, printed) == (0, "") and "nothing was launched from this machine" in told
    new_record("one", target="slurm", run_dir="/r").save()
    first, second = answered("list")[1].splitlines()
    assert first.split() == ["NAME", "TARGET", "SINCE", "RUN", "DIR", "NOW"]
    assert second.split()[:2] == ["one", "slurm"] and second.endswith("starting")


def test_a_list_says_what_has_ended_and_what_cannot_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("squeue", "scontrol"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = new_record("ended", target="slurm", run_dir="/r").having(state="started", id="7").knowing(kind="").save()
    (ended.folder / "status").write_text("75\n")
    new_record("lost", target="ssh", run_dir="/r").having(state="started").save()
    rows = {line.split()[0]: line for line in answered("list")[1].splitlines()}
    assert rows["ended"].endswith(
        "it was stopped; its progress is saved, and the same command continues it (status 75)"
    )
    assert "not known: 'lost' has not started anything yet" in rows["lost"]


def test_the_only_launch_needs_no_name() -> None:
    with pytest.raises(LaunchError, match="nothing was launched"):
        named_record(None)
    new_record("one", target="slurm", run_dir="/r").save()
    assert named_record(None).name == "one"
    with pytest.raises(LaunchError, match="with ssh"):
        named_record(None, target="ssh")
    new_record("two", target="ssh", run_dir="/r").save()
    assert named_record(None, target="ssh").name == "two"
    with pytest.raises(LaunchError, match="several launches"):
        named_record(None)


def test_a_target_that_does_not_exist_is_answered_with_those_that_do() -> None:
    status, _, told = answered("kubernetes", "run.yaml")
    assert status == 2
    assert "'kubernetes' is not a target; use one of ssh, slurm, skypilot, dstack, kuberay" in " ".join(told.split())


@pytest.mark.slow
def test_a_start_with_json_prints_one_object_and_nothing_of_the_tool(tmp_path: Path) -> None:
    tool = tmp_path / "bin/dstack"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\ncase "$1" in ps) echo \'{"runs": []}\' ;; *) echo chatter ;; esac\n')
    tool.chmod(0o700)
    run = tmp_path / "run.yaml"
    run.write_text("run: {dir: /shared/r}\ncluster: {num_nodes: 2}\nlaunch: {dstack: {}}\n")
    script = "from rollcall.cli.main import main; main()"
    words = [sys.executable, "-c", script, "launch", "dstack", str(run), "--name", "one", "--json"]
    env = {**os.environ, "PATH": str(tool.parent)}
    ended = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert json.loads(ended.stdout)["name"] == "one", ended.stderr
    assert "chatter" in ended.stderr
