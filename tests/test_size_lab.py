"""Models in parts on two lab hosts: an adapter trained by ranks that share sequences and sampled by one vLLM over two slots, with
workers that die; and a run that goes on with fewer actors."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lab.cluster import ENV, bring_up, rollcall
from lab.command import Command
from lab.lab import Host, Lab, needs_lab
from safetensors.torch import load_file

from rollcall.engine.vllm.setup import VllmUnavailable, find_python
from rollcall.observe.live import read_live
from rollcall.view.audit import audit

pytestmark = [needs_lab, pytest.mark.slow]
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "RAY_worker_niceness": "0"}
RUN_S, STRIKE_S = 600.0, 300.0
STEPS = 6


@dataclass(kw_only=True)
class Nodes:
    """Two, with two slots each."""

    lab: Lab

    def write(self, name: str, placement: dict[str, str], *, slots: int = 2, **sections: Any) -> Path:
        folder = self.lab.shared / name
        folder.mkdir(exist_ok=True)
        trainer = {
            "steps": STEPS,
            "save_every": 1,
            "eval_every": 0,
            "num_threads": 1,
            "loggers": [],
            "max_restarts": 10,
        }
        run = {
            "run": {"name": name, "dir": str(folder / "run"), "seed": 0},
            "cluster": {
                "num_nodes": 2, "num_gpus_per_node": slots, "accelerator": "cpu", "component_placement": placement,
            },
            "model": {"path": "builtin:arithmetic", "device": "cpu", **sections.pop("model", {})},
            "data": {"train": "builtin:arithmetic", "val": None, "prompts_per_step": 8, "max_prompt_tokens": 16},
            "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4, **sections.pop("rollout", {})},
            "reward": [{"type": "exact"}],
            "trainer": trainer | sections.pop("trainer", {}),
            **sections,
        }  # fmt: skip
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(run))
        return path

    def train(self, path: Path) -> None:
        done = rollcall(self.lab.hosts[0], "train", str(path), env=NO_GPU, timeout_s=RUN_S)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with Lab(hosts=2, shared=tmp_path_factory.mktemp("lab") / "shared") as lab:
        bring_up(dict(enumerate(lab.hosts)), "--rendezvous", str(lab.shared), "--slots", "2", env=NO_GPU)
        yield Nodes(lab=lab)


def wait_for_step(run_dir: Path, step: int, command: Command) -> None:
    path, give_up = run_dir / "metrics.jsonl", time.monotonic() + STRIKE_S
    while not (path.exists() and any(json.loads(line)["step"] >= step for line in path.read_text().splitlines())):
        assert command.poll() is None, f"the run ended before step {step}:\n{command.output}"
        assert time.monotonic() < give_up, f"step {step} did not come:\n{command.output}"
        time.sleep(0.1)


def kill(host: Host, run_dir: Path, *, role: str, node: int) -> None:
    live = read_live(run_dir)
    assert live is not None
    worker = next(one for one in live.processes if role in one.roles and one.node == node and one.state != "lost")
    done = host.run(["kill", "-KILL", str(worker.pid)])
    assert done.returncode == 0, done.stderr


@pytest.mark.vllm
def test_an_adapter_is_trained_by_ranks_that_share_sequences_and_sampled_by_vllm_over_two_slots(nodes: Nodes) -> None:
    try:
        python = find_python(None)
    except VllmUnavailable as error:
        pytest.skip(str(error))
    path = nodes.write(
        "adapter",
        {"rollout": "0-1:0", "actor": "2-3"},
        model={"lora": {"rank": 4, "alpha": 8}},
        rollout={"engine": "vllm", "vllm": {"python": python, "tensor_parallel_size": 2}},
        actor={"context_parallel_size": 2, "lr": 1.0e-3},
    )
    run_dir, hosts = path.parent / "run", nodes.lab.hosts
    command = hosts[0].start([sys.executable, "-m", "rollcall", "train", str(path)], env={**ENV, **NO_GPU})
    wait_for_step(run_dir, 1, command)
    kill(hosts[1], run_dir, role="actor", node=1)
    wait_for_step(run_dir, 3, command)
    kill(hosts[0], run_dir, role="rollout", node=0)
    status = command.wait(timeout_s=RUN_S)
    assert status == 0, command.output
    found = audit(run_dir)
    assert found.is_clean and found.steps == STEPS, f"{found}\n{command.output}"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    mismatches = [row["rollout/logprob_mismatch"] for row in rows if "rollout/logprob_mismatch" in row]
    assert len(mismatches) >= STEPS and max(mismatches) < 1e-4, mismatches
    adapter = load_file(run_dir / "model/adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name), "it was trained"


def test_a_run_of_four_actors_goes_on_with_two(nodes: Nodes) -> None:
    """The same samples and the same weights as with four to the end, but for the order of sums."""
    everywhere, sharded = {"actor,rollout": "all"}, {"sharding": "fsdp", "lr": 1.0e-4}
    nodes.train(nodes.write("four", everywhere, actor=sharded))
    nodes.train(nodes.write("four-then-two", everywhere, actor=sharded, trainer={"steps": STEPS // 2}))
    path = nodes.write("four-then-two", everywhere, slots=1, actor=sharded)
    nodes.train(path)
    found = audit(path.parent / "run")
    assert found.is_clean and found.steps == STEPS, str(found)
    whole, changed = (
        load_file(nodes.lab.shared / name / "run/model/model.safetensors") for name in ("four", "four-then-two")
    )
    assert whole.keys() == changed.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(
            changed[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
