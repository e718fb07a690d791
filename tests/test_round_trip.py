"""Models that were trained in parts, saved in parts and merged compute what the live model computed, however they were divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked import ForkedBackend
from learners import make_samples, section, trainable
from ranks import Ranks
from runs import finish as train
from runs import sharded_run
from saved import save

from rollcall.checkpoint.merge.merge import merge
from rollcall.checkpoint.verify import verify
from rollcall.config import Grpo
from rollcall.launch.finish.finish import finish
from rollcall.launch.finish.nodes_of import ThisNode
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Learner

SHAPE: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=8, hidden_size=128)


def train_and_save(gang: Gang, architecture: str, changes: dict[str, Any], directory: Path) -> None:
    learner = Learner(
        trainable(architecture, **SHAPE), section(lr=0.01, **changes), algorithm=Grpo(), temperature=0.8, max_response_tokens=12,
        total_updates=4, gang=gang,
    )  # fmt: skip
    learner.update(make_samples(learner.model, seed=1))
    save(gang, directory, learner=learner)


FSDP, TENSOR = dict(sharding="fsdp"), dict(sharding="fsdp", tensor_parallel_size=2)
LARGE = pytest.mark.slow  # eight processes of torch on few cores


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {}),
        (2, FSDP),
        (2, dict(tensor_parallel_size=2)),
        pytest.param(4, FSDP, marks=LARGE),
        pytest.param(4, TENSOR, marks=LARGE),
        pytest.param(8, FSDP, marks=LARGE),
        pytest.param(8, TENSOR, marks=LARGE),
        pytest.param(8, dict(tensor_parallel_size=4, sharding="fsdp"), marks=LARGE),
    ],
)
@pytest.mark.parametrize("architecture", [pytest.param("qwen2-tied", marks=pytest.mark.slow), "qwen3-untied"])
def test_a_merged_model_has_the_log_probs_of_the_live_one(
    ranks: Ranks, tmp_path: Path, architecture: str, size: int, changes: dict[str, Any]
) -> None:
    ranks.run(train_and_save, architecture, changes, tmp_path / "step-000001", size=size)
    parts = sorted((tmp_path / "step-000001/model").glob("part-*"))
    assert len(parts) == (size if size > 1 else 0)
    source = tmp_path / "step-000001" if parts else tmp_path / "step-000001/model"  # a whole one is a model directory
    merge(source, tmp_path / "merged", max_shard_size="100KB")
    result = verify(tmp_path / "merged")
    assert result.difference < result.tolerance


@pytest.mark.slow
def test_a_run_whose_parts_stayed_on_its_nodes_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = sharded_run(tmp_path, "checkpoint.place=local", "trainer.steps=2", "trainer.save_every=2")
    train(config, backend=ForkedBackend(tmp_path / "nodes"))
    monkeypatch.setattr("rollcall.launch.finish.finish.find_nodes", lambda run_dir, hosts: [ThisNode()])
    done = finish(config.run.dir)
    assert [step.state for step in done.steps] == ["done", "done", "done", "not asked for"]
    assert "2 parts" in done.steps[0].words and "node 0" in done.steps[0].words
    assert [step.state for step in finish(config.run.dir).steps][:3] == ["was done"] * 3
