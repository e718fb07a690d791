"""The doctor: facts are gathered without Ray, judged by pure functions, and a sick node of a real cluster is found."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.cluster import LabCluster, rollcall
from typer.testing import CliRunner

from rollcall.cli.main import app
from rollcall.config import load_config, parse_config
from rollcall.launch.doctor import checks
from rollcall.launch.doctor import probe as doctor_facts
from rollcall.launch.doctor.checks import (
    GIB,
    Disk,
    Finding,
    Gpu,
    NodeFacts,
    firewall_rule,
    judge_fit,
    judge_plan,
    judge_slots,
    judge_torch,
)
from rollcall.launch.doctor.examine import Diagnosis, checkpoint_bytes, examine_machine, partners, show
from rollcall.launch.doctor.probe import Probe
from rollcall.nodes.check import Roster
from rollcall.nodes.cluster import OurCluster, PlainRay
from rollcall.nodes.head import NodeInfo
from rollcall.reward.confine import available

VERSIONS = {"rollcall-rl": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0"}


def make_node(rank: int, **changes: Any) -> NodeFacts:
    """A node with nothing wrong."""
    healthy = NodeFacts(
        rank=rank, host=f"node{rank}", address=f"10.0.0.{rank + 1}", slots=8, accelerator="cpu", is_head=rank == 0,
        python="3.11.7", executable="/env/bin/python", packages=VERSIONS, torch_build="the CPU",
        disks=(Disk(purpose="Ray's temporary folder", path="/tmp/ray", free=100 * GIB, total=200 * GIB),),
        memory_total=64 * GIB, memory_available=60 * GIB, shm_total=32 * GIB, gpus=(), gpu_error=None, missing_paths=(),
    )  # fmt: skip
    return replace(healthy, **changes)


def make_gpu(index: int = 0, **changes: Any) -> Gpu:
    card = Gpu(index=index, name="H200", memory_total=140 * GIB, memory_used=0)
    return replace(card, **changes)


def make_info(rank: int, *, slots: int = 8) -> NodeInfo:
    return NodeInfo(
        rank=rank, host=f"node{rank}", address=f"10.0.0.{rank + 1}", slots=slots, accelerator="cpu", memory_gib=1.0,
        alive=True, is_head=rank == 0, cluster="default", cluster_id="x", num_nodes=2, node_id=f"id{rank}", started_ms=0,
        temp_dir="/tmp/ray", ports={},
    )  # fmt: skip


def make_roster(*slots: int, num_nodes: int | None = None) -> Roster:
    nodes = tuple(make_info(rank, slots=size) for rank, size in enumerate(slots))
    return Roster(
        cluster="default", title="cluster 'default'", cluster_id="x", has_token=True, head_address="10.0.0.1:6379", dashboard_url=None,
        num_nodes=num_nodes or len(nodes), nodes=nodes,
    )  # fmt: skip


def cluster_of(*nodes: NodeFacts) -> list[NodeFacts]:
    """These beside enough healthy ones that they are the odd ones out."""
    taken = {node.rank for node in nodes}
    return sorted([*nodes, *(make_node(rank) for rank in range(4) if rank not in taken)], key=lambda node: node.rank)


def judged(*nodes: NodeFacts) -> list[Finding]:
    return checks.judge_nodes(cluster_of(*nodes), checkpoint_bytes=None)


def test_healthy_nodes_have_no_findings() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        ({"packages": {**VERSIONS, "transformers": "4.9"}}, "transformers is version 4.9, but the other nodes have 5.19.0",
         "/env/bin/python -m pip install 'transformers==5.19.0'"),
        ({"packages": {**VERSIONS, "torch": None}}, "torch is not installed", "'torch==2.13.0'"),
        ({"torch_build": "CUDA 13.0"}, "torch is built for CUDA 13.0 here, but for the CPU on the other nodes", "reinstall it"),
        ({"disks": (Disk(purpose="run.dir", path="/x", free=GIB // 2, total=GIB),)}, "0.5 GiB free", "free some"),
        ({"memory_available": 2 * GIB}, "only 2.0 of 64.0 GiB of memory is available", "ps aux"),
        ({"missing_paths": ("/models/x",)}, "/models/x does not exist on this node", "rsync -a /models/x/ node2"),
        ({"gpu_error": "nvidia-smi failed: no devices"}, "nvidia-smi failed", "dmesg"),
    ],
)  # fmt: skip
def test_the_odd_node_out_is_named_with_a_command_that_mends_it(changes: dict[str, Any], what: str, fix: str) -> None:
    (finding,) = judged(make_node(2, **changes))
    assert (finding.node, finding.host, finding.severity) == (2, "node2", "breaks")
    assert what in finding.what and fix in finding.what.partition(";")[2]


@pytest.mark.parametrize(
    ("card", "severity", "what"),
    [
        ({"memory_used": 20 * GIB}, "warns", "GPU 1 (H200) has 20.0 GiB in use"),
    ],
)
def test_a_sick_card_is_named(card: dict[str, Any], severity: str, what: str) -> None:
    node = make_node(0, accelerator="gpu", slots=2, gpus=(make_gpu(0), make_gpu(1, **card)))
    (finding,) = checks.judge_gpus(node)
    assert finding.severity == severity and what in finding.what


def test_a_container_without_shared_memory_breaks_a_run_on_cards() -> None:
    small = make_node(0, shm_total=64 << 20)
    assert not list(checks.judge_memory(small))
    (finding,) = checks.judge_memory(replace(small, gpus=(make_gpu(),)))
    assert "/dev/shm is only 64 MiB" in finding.what and "--shm-size" in finding.what


def test_fewer_cards_than_slots_break_the_run() -> None:
    (finding,) = checks.judge_gpus(make_node(1, accelerator="gpu", slots=8, gpus=(make_gpu(),)))
    assert finding.severity == "breaks" and "the node offers 8 slots, but nvidia-smi lists 1 GPUs" in finding.what


def test_in_a_tie_the_head_is_right() -> None:
    nodes = [make_node(0), make_node(1, torch_build="CUDA 13.0")]
    (finding,) = checks.judge_versions(nodes)
    assert finding.node == 1
    nodes = [make_node(1, is_head=True), make_node(0, torch_build="CUDA 13.0", is_head=False)]
    assert [finding.node for finding in checks.judge_versions(nodes)] == [0]


def test_a_disk_without_room_for_one_checkpoint_breaks_the_run() -> None:
    node = make_node(0, disks=(Disk(purpose="run.dir", path="/x", free=5 * GIB, total=100 * GIB),))
    (finding,) = checks.judge_disks(node, checkpoint_bytes=7 * GIB)
    assert finding.severity == "breaks" and "one checkpoint of this run takes 7.0 GiB" in finding.what
    assert not list(checks.judge_disks(node, checkpoint_bytes=4 * GIB))


def test_the_size_of_a_checkpoint_is_counted_from_the_model() -> None:
    run = {"cluster": {"accelerator": "cpu"}, "model": {"path": "builtin:arithmetic"}}
    grpo, ppo = parse_config(run), parse_config({**run, "algorithm": {"name": "ppo"}})
    one = checkpoint_bytes(grpo)
    both, adapter = (
        checkpoint_bytes(ppo),
        checkpoint_bytes(parse_config({**run, "model": {**run["model"], "lora": {}}})),
    )
    assert one and both and adapter and one % 12 == 0  # float32 and AdamW's two numbers
    assert one < both <= 2 * one and adapter < one
    assert checkpoint_bytes(parse_config({"model": {"path": "not/here"}})) is None


def test_a_closed_port_names_both_ends() -> None:
    (finding,) = checks.judge_reach([make_node(0), make_node(1)], failed={0: [(1, 10001, "timed out")], 1: []})
    assert finding.node == 0 and "cannot connect to rank 1 (10.0.0.2) at port 10001: timed out" in finding.what
    assert "on node1 run `sudo ufw allow proto tcp from 10.0.0.1" in finding.what


def test_what_is_wrong_with_a_shared_folder_is_told_apart() -> None:
    nodes = [make_node(rank) for rank in range(4)]
    wrote = {0: None, 1: "Read-only file system (EROFS)", 2: None, 3: None}
    found = checks.judge_shared(nodes, "/shared", wrote=wrote, unseen={1: {0: "No such file"}, 2: {0: "No such file"}})
    by_node = {finding.node: finding for finding in found}
    assert "cannot write to the shared folder /shared: Read-only" in by_node[1].what and "findmnt" in by_node[1].what
    assert "does not see the files in /shared that rank 0 wrote" in by_node[2].what
    assert by_node.keys() == {1, 2}


def test_the_report_says_how_rewards_are_confined_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.reward.landlock.version", lambda: 0)
    monkeypatch.setattr("rollcall.reward.seccomp.why_missing", lambda: "")
    report = Diagnosis(cluster="default", nodes=(make_node(0),), findings=())
    show(report)
    files = "not restricted (the kernel has no landlock)"
    said = (
        f"built-in rewards on this machine run with processes: none (seccomp), files: {files}, network: off (seccomp)"
    )
    assert said in capsys.readouterr().out and report.as_json()["rewards"]["files"] == files


def test_what_a_system_lacks_is_said_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    seccomp, landlock = "not restricted (darwin has no seccomp)", "not restricted (darwin has no landlock)"
    assert available() == {"processes": seccomp, "files": landlock, "network": seccomp}


def test_a_slow_all_reduce_is_a_warning() -> None:
    (finding,) = checks.judge_bandwidth(backend="gloo", bytes_per_s=1e6)
    assert finding.severity == "warns" and "0.00 GB/s over gloo" in finding.what
    assert not list(checks.judge_bandwidth(backend="gloo", bytes_per_s=1e9))


def test_the_run_files_slots_are_held_against_the_nodes() -> None:
    config = parse_config({"cluster": {"nodes": [{"gpus": 8}, {"gpus": 4}, {"gpus": 4}]}})
    ours, plain = OurCluster("default"), PlainRay("10.0.0.1:6379")
    found = list(judge_slots(config, make_roster(8, 2), plain))
    assert [(finding.node, finding.severity) for finding in found] == [(1, "breaks"), (None, "breaks")]
    assert "offers 2 slots, but the run file has 4 for node 1" in found[0].what and "--num-gpus 4" in found[0].what
    assert "asks for 3 nodes, but the cluster has 2" in found[1].what
    for slots in (8, 4):
        fewer = parse_config({"cluster": {"num_nodes": 2, "num_gpus_per_node": slots}})
        assert not list(judge_slots(fewer, make_roster(8, 8), ours))


def test_a_placement_that_cannot_work_is_a_finding() -> None:
    config = parse_config({"cluster": {"num_gpus_per_node": 2, "component_placement": {"actor": 0, "rollout": 0}}})
    (finding,) = judge_plan(config, [make_node(0)])
    assert finding.severity == "breaks" and "leaves slot 1 without a role" in finding.what


def test_in_a_large_cluster_a_node_connects_to_a_few() -> None:
    assert partners(0, [0]) == partners(0, []) == []
    assert len(partners(9, range(16))) == 15
    assert partners(1, range(4)) == [0, 2, 3]
    assert partners(98, range(100)) == [0, 1, 2, 99]
    assert all(len(partners(rank, range(100))) <= 5 for rank in range(100))


# The probe, in this process


def test_a_probe_says_what_this_machine_has(tmp_path: Path) -> None:
    ask = {
        "packages": ["torch", "no-such-package"], "disks": {"run.dir": str(tmp_path / "not/yet")},
        "paths": [str(tmp_path), str(tmp_path / "absent")],
    }  # fmt: skip
    facts = Probe().facts(ask)
    assert facts["packages"] == {"torch": importlib.metadata.version("torch"), "no-such-package": None}
    assert facts["python"] == sys.version.split()[0]
    assert facts["missing_paths"] == [str(tmp_path / "absent")]
    assert 0 < facts["memory_available"] <= facts["memory_total"] and facts["disks"][0]["free"] > 0
    json.dumps(facts)


def test_torchs_build_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    assert doctor_facts.torch_build() == ("the CPU" if built == "ROCm None" else built)


def test_a_row_of_nvidia_smi_is_read() -> None:
    row = ["3", " NVIDIA H200", "143771", "512"]
    gpu = doctor_facts.parse_gpu(row)
    assert (gpu["index"], gpu["name"], gpu["memory_used"]) == (3, "NVIDIA H200", 512 << 20)
    assert doctor_facts.parse_gpu([*row[:3], "[N/A]"])["memory_used"] == 0


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_cards_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, 'echo "0, NVIDIA H200, 143771, 0"', monkeypatch)
    (gpu,), complaint = doctor_facts.read_gpus()
    assert complaint is None and gpu["memory_total"] == 143771 << 20


def test_an_nvidia_smi_that_fails_is_a_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "echo 'Unable to determine the device handle: GPU is lost'; exit 15", monkeypatch)
    gpus, complaint = doctor_facts.read_gpus()
    assert gpus == [] and complaint == "nvidia-smi failed: Unable to determine the device handle: GPU is lost"


def test_probes_reach_each_other_and_say_what_they_cannot_reach() -> None:
    listening = Probe().listen("127.0.0.1")
    assert len(listening) == 2 and 10_000 <= listening[0] < 32_000
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        targets = [(1, "127.0.0.1", listening[0]), (1, "127.0.0.1", listening[1]), (2, "127.0.0.1", port)]
        failed = Probe().reach(targets, 2.0)
    assert [(rank, number) for rank, number, _ in failed] == [(2, port)] and "refused" in failed[0][2]


def test_a_file_is_written_seen_and_removed(tmp_path: Path) -> None:
    probe = Probe()
    assert probe.write(str(tmp_path), "a") is None
    assert probe.see(str(tmp_path), ["a"], 1.0) == {}
    (tmp_path / "a").write_text("other")
    missing = probe.see(str(tmp_path), ["a", "b"], 0.05)
    assert missing == {"a": "its content differs", "b": "No such file or directory (ENOENT)"}
    probe.remove(str(tmp_path), "a")
    probe.remove(str(tmp_path), "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Probe().write(str(tmp_path / "file"), "a") == "Not a directory (ENOTDIR)"


# On four hosts


@pytest.mark.slow
def test_a_healthy_cluster_is_well(lab_cluster: LabCluster) -> None:
    result = rollcall(lab_cluster.head, "doctor", timeout_s=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all-reduce between nodes (gloo): " in result.stdout
    assert f"shared folder {lab_cluster.rendezvous}: every node sees the other nodes' files" in result.stdout
    assert "breaks" not in result.stdout and all(host.name in result.stdout for host in lab_cluster.hosts)
    assert not list(lab_cluster.rendezvous.glob("*doctor*"))


@pytest.mark.slow
def test_a_quick_look_measures_no_bandwidth(lab_cluster: LabCluster) -> None:
    result = rollcall(lab_cluster.head, "doctor", "--quick", "--json", timeout_s=240)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["backend"] is None and report["bytes_per_s"] is None
    assert len(report["nodes"]) == 4 and report["shared"] == str(lab_cluster.rendezvous)


@pytest.mark.slow
def test_a_wrong_version_and_an_unwritable_folder_are_found_on_the_node_that_has_them(lab_cluster: LabCluster) -> None:
    sick = lab_cluster.hosts[2]
    runs = lab_cluster.lab.shared / "doctor-runs"
    fake = lab_cluster.lab.shared / "doctor-fake"
    runs.mkdir()
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    installed = importlib.metadata.distribution("transformers")._path  # type: ignore[attr-defined]
    where = {"num_nodes": 4, "num_gpus_per_node": 8, "accelerator": "cpu"}
    run_file = runs / "run.yaml"
    run_file.write_text(yaml.safe_dump({"run": {"dir": str(runs / "x")}, "cluster": where}))
    mounts = [
        ["mount", "--bind", str(fake), str(installed)],
        ["mount", "--bind", str(runs), str(runs)],
        ["mount", "-o", "remount,bind,ro", str(runs)],
    ]
    try:
        for command in mounts:
            assert sick.run(command).returncode == 0
        result = rollcall(lab_cluster.head, "doctor", str(run_file), "--json", timeout_s=240)
    finally:
        for path in (runs, installed):
            sick.run(["umount", str(path)])
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    breaking = [finding for finding in found["findings"] if finding["severity"] == "breaks"]
    assert [finding["host"] for finding in breaking] == ["node2", "node2"], breaking
    version = importlib.metadata.version("transformers")
    assert breaking[0]["what"].startswith(f"transformers is version 4.0.0, but the other nodes have {version}; run `")
    assert f"-m pip install 'transformers=={version}'" in breaking[0]["what"]
    assert f"cannot write to the shared folder {runs}: Read-only file system (EROFS)" in breaking[1]["what"]
    assert found["shared"] == str(runs)


def test_the_firewall_rule_lets_in_the_nodes_alone() -> None:
    nodes = [make_node(rank, address=f"10.0.0.{rank + 1}") for rank in range(2)]
    rule = firewall_rule(nodes, head_port=20000)
    assert 'iif != "lo" ip saddr != { 10.0.0.1, 10.0.0.2 } tcp dport 10000-65535 ct state new drop' in rule
    assert "meta nfproto ipv6 tcp dport" in rule, "a cluster on IPv4 takes nothing from IPv6"
    assert "tcp dport { 6380, 10000-65535 }" in firewall_rule(nodes, head_port=6380)


# Without a cluster


def test_a_machine_without_a_cluster_is_examined_with_the_parts_of_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rollcall.launch.doctor.probe.read_gpus", lambda: ([], None))
    good = load_config(None, [f"run.dir={tmp_path / 'run'}"])
    report = examine_machine(good)
    assert not report.findings and report.cluster is None
    show(report)
    assert "this machine: Python 3" in capsys.readouterr().out
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    reward = 'reward=[{type: function, path: "no_such_module:f"}]'
    (wrong_reward,) = examine_machine(load_config(None, [f"run.dir={tmp_path / 'run'}", reward])).findings
    assert "there is no module 'no_such_module'" in wrong_reward.what and wrong_reward.severity == "breaks"
    environment = "environment={type: step, path: 'no_such_game:Game'}"
    game = [f"run.dir={tmp_path / 'run'}", environment, "reward=[{type: environment}]"]
    (wrong_game,) = examine_machine(load_config(None, game)).findings
    assert "there is no module 'no_such_game'" in wrong_game.what
    wrong_model = examine_machine(load_config(None, [f"model.path={tmp_path / 'model'}"])).findings[0]
    assert "cannot run architecture 'gpt2'" in wrong_model.what
    none = [f"model.path={tmp_path / 'none'}", f"data.train={tmp_path / 'none.jsonl'}"]
    no_model, no_data = examine_machine(load_config(None, none)).findings
    assert "none is not a directory" in no_model.what and "none.jsonl does not exist" in no_data.what


def test_the_demo_is_examined_with_overrides_and_a_place_that_keeps_no_files_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollcall.nodes.cluster.wished_cluster", lambda *args, **kwargs: None)
    monkeypatch.setattr("rollcall.launch.doctor.probe.read_gpus", lambda: ([], None))
    result = CliRunner().invoke(app, ["doctor", "run.dir=/proc/x", "--json"])
    (finding,) = json.loads(result.stdout)["findings"]
    assert result.exit_code == 1 and "/proc/x (run.dir) has 0.0 GiB free" in finding["what"]


def test_a_torch_without_cuda_and_a_model_larger_than_memory_break_a_run_on_this_machine() -> None:
    (blind,) = judge_torch(make_node(0, gpus=(make_gpu(),)))
    assert "is a CPU build" in blind.what
    assert not list(judge_torch(make_node(0))) and not list(judge_fit(make_node(0), 25 * GIB))
    (large,) = judge_fit(make_node(0), 48 * GIB)
    assert "take 112.0 GiB, but only 60.0 GiB of memory is available" in large.what


def test_on_a_gpu_only_the_copy_for_a_checkpoint_is_in_host_memory() -> None:
    node = make_node(0, gpus=(make_gpu(),))
    assert not list(judge_fit(node, 48 * GIB))
    (large,) = judge_fit(node, 64 * GIB)
    assert "the copy for a checkpoint takes 64.0 GiB, but only 60.0 GiB" in large.what
