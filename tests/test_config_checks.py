"""Settings that do nothing in a run: named once, never refused, and never told of a default."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollcall.cli.main import app
from rollcall.config import dump_config, load_config
from rollcall.config.checks import unused

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))
CLUSTER = "cluster={num_gpus_per_node: 2, accelerator: cpu}"


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (
            ["critic.lr=1", "critic.epochs=2"],
            "critic.lr, critic.epochs are set but not used: algorithm.name=grpo has no critic (only ppo does)",
        ),
        (["rollout.vllm.sleep=true"], "rollout.vllm.sleep is set but not used: rollout.engine is native, not vllm"),
        (
            ["rollout.weights=file"],
            "rollout.weights is set but not used: engine and learner are in one process and share the weights",
        ),
        (
            ["trainer.elastic={min_nodes: 1}"],
            "trainer.elastic is set but not used: the run has only one node",
        ),
        (
            ["cluster={ray_address: 'head:6379'}"],
            "cluster.ray_address is set but not used: the run has one slot, so everything runs in this process",
        ),
        (
            ["algorithm.kl_in=reward", "algorithm.kl_estimator=k1"],
            "algorithm.kl_estimator, algorithm.kl_in are set but not used: algorithm.kl_coef=0",
        ),
        (["algorithm.max_refills=2"], "algorithm.max_refills is set but not used: algorithm.dynamic_sampling=false"),
        (
            ["algorithm.overlong_penalty=2"],
            "algorithm.overlong_penalty is set but not used: algorithm.overlong_buffer=0",
        ),
    ],
)
def test_settings_that_cannot_act_are_named_with_the_reason(overrides: list[str], note: str) -> None:
    assert unused(load_config(None, overrides)) == [note]
    shown = CliRunner().invoke(app, ["config", *overrides])
    assert shown.exit_code == 0 and shown.stderr == f"note: {note}\n" and "note:" not in shown.stdout


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=ppo", "critic.lr=1"],
        ["rollout.engine=vllm", "rollout.vllm.sleep=true"],
        ["rollout.weights=delta", CLUSTER],
        ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
        ["algorithm.name=dapo", "algorithm.max_refills=2"],
    ],
)
def test_settings_that_act_are_not_named(overrides: list[str]) -> None:
    assert not unused(load_config(None, overrides))


@pytest.mark.parametrize("path", [None, *EXAMPLES], ids=lambda path: path.stem if path else "default")
def test_a_resolved_run_file_has_every_key_and_nothing_to_name(tmp_path: Path, path: Path | None) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(load_config(path)))
    assert not unused(load_config(tmp_path / "run.yaml"))


def test_nodes_that_share_a_folder_use_the_transport() -> None:
    assert not unused(load_config(None, ["rollout.weights=file"]), in_folder=True)
