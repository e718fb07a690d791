"""`rollcall simulate`: a run's own placement on nodes of this machine, with a tiny model."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import rollcall

from rollcall.base.errors import ClusterError, ConfigError, PlacementError
from rollcall.base.wait import speaking
from rollcall.config import Config, parse_config
from rollcall.config.environments import StepEnvironment
from rollcall.run import simulate as module
from rollcall.run.simulate import make_tiny_model, rehearsed, simulate


@pytest.fixture
def alone() -> Iterator[None]:
    """One rehearsal at a time on this machine: two would see each other's processes, and take each other's memory."""
    with (Path(tempfile.gettempdir()) / "rollcall-one-rehearsal.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other has a time limit
        yield


def make_config(placement: dict[str, str], **sections: Any) -> Config:
    cluster = {"num_nodes": 2, "num_gpus_per_node": 2, "component_placement": placement}
    return parse_config({"cluster": cluster, **sections})


def run_simulate(tmp_path: Path, config: Config) -> subprocess.CompletedProcess[str]:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps(config.model_dump(mode="json")))
    return rollcall("simulate", str(run_file), "--json", cwd=tmp_path)


def simulated_processes() -> list[str]:
    """Processes whose environment names a rehearsal's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if b"/rc-sim-" in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_run_is_rehearsed_on_a_node_of_this_machine_which_leaves_nothing(tmp_path: Path) -> None:
    cluster = {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": "all"}}
    result = run_simulate(tmp_path, parse_config({"cluster": cluster}))
    assert result.returncode == 0, result.stderr
    verdict = json.loads(result.stdout.splitlines()[-1])
    assert verdict["ok"] and verdict["steps"] == 2 and verdict["why"] is None
    assert (verdict["num_nodes"], verdict["num_slots"], verdict["num_processes"]) == (1, 1, 1)
    assert simulated_processes() == [] and list(Path("/tmp").glob("rc-sim-*")) == []


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_hybrid_ppo_runs_on_two_nodes_of_this_machine_and_leaves_nothing(tmp_path: Path) -> None:
    placement = {"rollout": "0-3", "actor": "0-1", "critic,reference": "2", "inference": "3"}
    config = make_config(placement, algorithm={"name": "ppo", "kl_coef": 0.01}, actor={"minibatches": 2})
    result = run_simulate(tmp_path, config)
    assert result.returncode == 0, result.stderr
    verdict = json.loads(result.stdout.splitlines()[-1])
    assert verdict["ok"] and verdict["steps"] == 2 and verdict["why"] is None
    assert (verdict["num_nodes"], verdict["num_slots"], verdict["num_processes"]) == (2, 4, 4)
    assert verdict["roles"] == {"actor": 2, "critic": 1, "reference": 1, "rollout": 4, "inference": 1}
    assert 0 <= verdict["logprob_mismatch"] < 1e-5
    assert simulated_processes() == [] and list(Path("/tmp").glob("rc-sim-*")) == []


def test_the_rehearsed_run_keeps_placement_algorithm_and_loop(tmp_path: Path) -> None:
    config = make_config(
        {"rollout": "0-1", "actor": "2-3"}, algorithm={"name": "dapo"}, actor={"minibatches": 4, "lr": 0.5}, critic={"minibatches": 3},
        trainer={"staleness": 2, "steps": 900}, data={"prompts_per_step": 504}, rollout={"samples_per_prompt": 2},
        model={"lora": {"rank": 4, "path": "adapter"}},
    )  # fmt: skip
    small = rehearsed(config, tmp_path, model=tmp_path / "model", reward_model=None)
    assert small.cluster is not None and config.cluster is not None
    assert small.cluster.component_placement == config.cluster.component_placement
    assert small.algorithm == config.algorithm
    assert small.model.lora is not None and (small.model.lora.rank, small.model.lora.path) == (4, None)
    assert small.actor == config.actor.model_copy(update={"compile": False})
    assert (small.trainer.staleness, small.trainer.steps) == (2, 2)
    assert (small.data.prompts_per_step, small.rollout.samples_per_prompt) == (12, 2)


def test_an_environment_is_rehearsed_where_it_is_placed(tmp_path: Path) -> None:
    placement = {"actor,rollout": "0-2", "environment": "3"}
    config = make_config(
        placement, environment={"type": "step", "path": "no_such:Game"}, algorithm={"name": "grpo", "advantage": "turn"}
    )
    small = rehearsed(config, tmp_path, model=tmp_path / "model", reward_model=None)
    assert small.cluster is not None and small.cluster.component_placement == placement
    assert isinstance(small.environment, StepEnvironment) and "packages:Echo" in small.environment.path


def test_what_belongs_to_gpus_is_not_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(
        {"rollout": "0-1:0", "actor": "2-3"}, actor={"compile": True},
        rollout={"engine": "vllm", "vllm": {"tensor_parallel_size": 2}, "compile": True},
    )  # fmt: skip
    small = rehearsed(config, tmp_path, model=tmp_path / "model", reward_model=None)
    assert small.rollout.engine == "native" and not small.rollout.compile and not small.actor.compile
    said: list[str] = []
    monkeypatch.setattr(module, "start_node", lambda request: None)
    monkeypatch.setattr(module, "stop_node", lambda name: None)
    monkeypatch.setattr(module, "_run", lambda config, root: {"steps": 2, "logprob_mismatch": 0.0})
    with speaking(said.append):
        assert simulate(config).ok
    assert "rollout.engine=vllm is replaced by the native engine in the rehearsal" in said


def test_a_run_that_fails_is_a_verdict_with_the_reason_and_the_nodes_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(module, "start_node", lambda request: started.append(request.rank))
    monkeypatch.setattr(module, "stop_node", lambda name: started.pop())

    def fail(config: Config, root: Path) -> dict[str, Any]:
        assert started == [0, 1]
        raise ClusterError("rank 1 ran out of patience")

    monkeypatch.setattr(module, "_run", fail)
    verdict = simulate(make_config({"actor,rollout": "all"}))
    assert not verdict.ok and verdict.why == "rank 1 ran out of patience" and verdict.steps == 0
    assert started == []


def test_what_cannot_be_placed_or_held_is_refused_before_a_node_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a node was started")

    monkeypatch.setattr(module, "start_node", start)
    with pytest.raises(ConfigError, match="no cluster section"):
        simulate(parse_config({}))
    with pytest.raises(PlacementError, match="they share only 2"):
        simulate(make_config({"rollout": "all", "actor": "0-3", "critic": "0-1"}, algorithm={"name": "ppo"}))
    with pytest.raises(PlacementError, match="the native engine uses one slot per process"):
        simulate(make_config({"rollout": "0-1:0", "actor": "2-3"}))
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    with pytest.raises(ClusterError, match="2 nodes with 4 processes need about 2 GiB .* but only 1 GiB are free"):
        simulate(make_config({"actor,rollout": "all"}))


def test_the_tiny_models_open(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    assert AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "a")).config.num_key_value_heads == 8
    reward = AutoModelForSequenceClassification.from_pretrained(make_tiny_model(tmp_path / "b", is_reward=True))
    assert reward.config.num_labels == 1


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_the_example_of_four_nodes_with_eight_slots_runs() -> None:
    command = [sys.executable, "-m", "rollcall", "simulate", "examples/cluster_disaggregated.yaml", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["num_slots"] == 32
