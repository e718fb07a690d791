"""Values, files, records and tools that mean harm: `rollcall launch` refuses them in one sentence, and waits for none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollcall.config import load_config
from rollcall.errors import ConfigError
from rollcall.launch.errors import LaunchError
from rollcall.launch.hosts import HOSTS, choose_hosts, claim, hosts_of
from rollcall.launch.launch import make_request, stop
from rollcall.launch.profile import read_profile
from rollcall.launch.record import RECORD, all_records, find_record, get_record, held, new_record, own_folder
from rollcall.launch.rendered import Rendered
from rollcall.launch.targets import get_target, target_names
from rollcall.launch.token import launch_token

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
        "name": "one", "target": "ssh", "state": "started", "run_dir": "r", "started": "2026", "by": "me@here", "parts": [],
        "facts": {},
    }  # fmt: skip
    (folder / RECORD).write_text(json.dumps({**good, **changes}))
    return folder


@pytest.mark.parametrize("changes", [
    {"name": "../../victim"}, {"name": "two"}, {"facts": []}, {"facts": {"a": 1}}, {"started": 5}, {"state": "x"}, {"more": 1},
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


@pytest.mark.parametrize("hosts", ["5", '"ab"', "[1]", '["-oProxyCommand=x"]'])
def test_forged_hosts_of_a_record_are_refused(hosts: str, launches: Path) -> None:
    forged(launches, facts={HOSTS: hosts})
    with pytest.raises(LaunchError, match="hosts"):
        hosts_of(get_record("one"))


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
