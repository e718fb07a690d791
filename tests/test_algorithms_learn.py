"""Every algorithm, as a run: a short training raises the reward of a tiny model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import column, finish, groups, letter_rows, make_run, metric_rows
from safetensors.torch import load_file
from tiny import needs_bfloat16, save_model

from rollcall.base.journal import Journal
from rollcall.config import Config

Rewards = Sequence[Mapping[str, Any]]

STEPS, PROMPTS, SAMPLES = 12, 16, 8
SIZES = (
    f"trainer.steps={STEPS}", f"data.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
    "rollout.max_response_tokens=2", "trainer.save_every=0", "actor.lr=1e-2",
)  # fmt: skip
CHANCE = 0.05  # of the answer's letter under the untrained model it is about 1/36


def learning_run(folder: Path, *overrides: str, name: str = "run", reward: Rewards | None = None) -> Config:
    return make_run(folder, *SIZES, *overrides, name=name, reward=reward)


def trained(folder: Path, *overrides: str, name: str = "run", reward: Rewards | None = None) -> Config:
    config = learning_run(folder, *overrides, name=name, reward=reward)
    finish(config)
    return config


def first_and_last(config: Config, metric: str = "train/reward_mean", *, window: int = 3) -> tuple[float, float]:
    values = column(config, metric)
    assert len(values) == STEPS
    return float(np.mean(values[:window])), float(np.mean(values[-window:]))


def assert_learns(config: Config, *, at_least: float = 0.4) -> None:
    before, after = first_and_last(config)
    assert before < 2 * CHANCE, "the untrained model already knows the task, so the test shows nothing"
    assert after > at_least


def assert_engine_and_learner_agree(config: Config) -> None:
    """What was sampled is what is trained: the learner's log-probs before the update are the engine's."""
    assert max(column(config, "rollout/logprob_mismatch")) < 1e-4
    assert max(column(config, "rollout/logprob_mismatch_max")) < 1e-3


def assert_on_policy(config: Config) -> None:
    """One update a step: it starts from the very policy that was sampled from."""
    assert column(config, "train/ratio_mean") == pytest.approx([1.0] * STEPS, abs=1e-5)
    assert column(config, "train/approx_kl") == pytest.approx([0.0] * STEPS, abs=1e-5)
    assert column(config, "train/clip_fraction") == [0.0] * STEPS


# Of every algorithm test_learner.py has the gradient, and test_algo.py the advantages.
@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cispo", "dr_grpo", "gspo", "reinforce_pp", "rloo")),
    ],
)
def test_a_short_training_raises_the_reward(tmp_path: Path, name: str) -> None:
    config = trained(tmp_path, f"algorithm.name={name}")
    assert_learns(config)
    assert_engine_and_learner_agree(config)
    assert_on_policy(config)


@needs_bfloat16
def test_a_short_training_in_bfloat16_raises_the_reward(tmp_path: Path) -> None:
    config = trained(tmp_path, "model.dtype=bf16")
    assert_learns(config)
    assert max(column(config, "rollout/logprob_mismatch")) < 0.02
    weights = load_file(config.run.dir / "model/model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.bfloat16"}


@pytest.mark.slow
def test_dapo_raises_the_reward_and_refills_steps_with_groups_that_differ(tmp_path: Path) -> None:
    options = ("algorithm.name=dapo", "algorithm.overlong_buffer=0", "algorithm.max_refills=8")
    config = trained(tmp_path, *options, "rollout.max_response_tokens=4")
    assert_learns(config)
    assert_engine_and_learner_agree(config)
    refills = column(config, "train/refills")
    assert refills[0] > 0 and refills[0] < 8
    with Journal(config.run.dir / "journal") as journal:
        draws = journal.trained()[1].draws
    made = groups(config, 1)
    assert len(draws) == PROMPTS < len(made)
    assert all((np.ptp(group.rewards) > 0) == (draw in draws) for draw, group in made.items())


@pytest.mark.slow
def test_dapo_punishes_overlong_completions_softly(tmp_path: Path) -> None:
    def ended(config: Config) -> float:
        return float(np.mean(column(config, "rollout/truncated_fraction")[-3:]))

    # Without the filter, which looks at rewards before the penalty and would leave out every group.
    common = ("algorithm.name=dapo", "algorithm.dynamic_sampling=false")
    common += ("rollout.max_response_tokens=6", "algorithm.overlong_buffer=3")
    reward = [{"type": "function", "path": "rewards_bad:always_equal"}]
    punished = trained(tmp_path, *common, name="punished", reward=reward)
    assert column(punished, "rollout/truncated_fraction")[0] > 0.7
    assert ended(punished) < 0.2, "the penalty is the only thing to learn from"


def test_ppo_with_a_critic_raises_the_reward_and_its_critic_learns(tmp_path: Path) -> None:
    config = trained(tmp_path, "algorithm.name=ppo", "critic.lr=3e-3", "critic.epochs=2")
    assert_learns(config)
    assert_engine_and_learner_agree(config)
    assert_on_policy(config)
    explained = column(config, "train/value_explained_variance")
    assert max(explained) <= 1 and np.mean(explained[-3:]) > np.mean(explained[:3])
    losses = column(config, "train/value_loss")
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    # A critic that stayed at zero would have half the mean square of the rewards, which end above 0.4, as its loss.
    rewards = [row["train/reward_mean"] for row in metric_rows(config) if "train/loss" in row]
    assert np.mean(losses[-3:]) < 0.5 * 0.5 * np.mean(np.square(rewards[-3:]))


@pytest.mark.slow
def test_intuitor_raises_self_certainty(tmp_path: Path) -> None:
    config = trained(tmp_path, "algorithm.name=intuitor", reward=[{"type": "self_certainty"}])
    before, after = first_and_last(config, "reward/self_certainty")
    assert after > before + 0.3
    assert_engine_and_learner_agree(config)
    assert column(config, "train/kl")[0] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_large_kl_coefficient_keeps_the_policy_near_the_reference(tmp_path: Path, kl_in: str) -> None:
    free, held = (
        trained(tmp_path, f"algorithm.kl_in={kl_in}", f"algorithm.kl_coef={coefficient}", name=name)
        for name, coefficient in (("free", 1e-6), ("held", 2.0))
    )
    for config in (free, held):
        divergence = column(config, "train/kl")
        assert len(divergence) == STEPS and all(math.isfinite(kl) for kl in divergence)
        assert divergence[0] == pytest.approx(0, abs=1e-5), "the first step is sampled from the reference itself"
        assert_engine_and_learner_agree(config)
    assert_learns(free)
    assert first_and_last(held, "train/kl")[1] < 0.5 * first_and_last(free, "train/kl")[1]


@pytest.mark.slow
def test_several_updates_a_step_raise_the_reward_and_move_off_the_old_policy(tmp_path: Path) -> None:
    config = trained(tmp_path, "actor.minibatches=2", "actor.epochs=2")
    assert_learns(config, at_least=0.8)
    assert_engine_and_learner_agree(config)
    assert max(column(config, "train/clip_fraction")) > 0
    assert max(abs(ratio - 1) for ratio in column(config, "train/ratio_mean")) > 1e-3


@pytest.mark.slow
def test_top_p_sampling_raises_the_reward_and_its_log_probs_are_those_of_the_nucleus(tmp_path: Path) -> None:
    config = trained(tmp_path, "rollout.top_p=0.8")
    assert_learns(config)
    # The engine's log-probs are of the renormalised nucleus, which holds at least 0.8 of the policy's probability.
    assert max(column(config, "rollout/logprob_mismatch_max")) <= -math.log(0.8) + 1e-4


@pytest.mark.slow
def test_rewards_add_up_by_their_weights_and_both_are_learnt(tmp_path: Path) -> None:
    reward = [
        {"type": "function", "path": "rewards_bad:share_of_digits", "weight": 1.0},
        {"type": "function", "path": "rewards_bad:short", "weight": 0.5},
    ]
    config = trained(tmp_path, reward=reward)
    digits, short, total = (
        column(config, name) for name in ("reward/share_of_digits", "reward/short", "train/reward_mean")
    )
    assert total == pytest.approx([one + 0.5 * other for one, other in zip(digits, short, strict=True)], abs=1e-5)
    assert np.mean(digits[-3:]) > np.mean(digits[:3]) + 0.2
    assert np.mean(total[-3:]) > np.mean(total[:3]) + 0.2


@pytest.mark.slow
def test_a_negative_weight_turns_a_reward_into_a_penalty(tmp_path: Path) -> None:
    reward = [{"type": "function", "path": "rewards_bad:share_of_digits", "weight": -1.0}]
    config = trained(tmp_path, reward=reward)
    before, after = first_and_last(config, "reward/share_of_digits")
    assert after < before / 2


@pytest.mark.slow
def test_training_on_stale_groups_raises_the_reward(tmp_path: Path) -> None:
    # In one process rollout runs ahead only while something else is awaited, here an evaluation after each step.
    config = make_run(tmp_path, *SIZES, "trainer.staleness=2", "trainer.eval_every=1", val=letter_rows(8))
    finish(config)
    assert_learns(config, at_least=0.3)
    weights = column(config, "train/tis_weight_mean")
    assert weights[0] == pytest.approx(1, abs=1e-4)
    assert max(abs(weight - 1) for weight in weights) > 1e-3, "every group was sampled from the newest weights"


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("algorithm.old_logprobs=engine",), ("algorithm.mismatch_mask=[0.5, 2.0]",)])
def test_other_bases_of_the_ratio_learn_too(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = trained(tmp_path, *overrides)
    assert_learns(config)
    assert_engine_and_learner_agree(config)


@pytest.mark.slow  # what engine and learner compute for each of them is compared in their own tests
@pytest.mark.parametrize("architecture", ["llama-tied", "qwen3-untied", "mistral-sliding"])
def test_every_architecture_learns(tmp_path: Path, architecture: str) -> None:
    save_model(tmp_path / "model", architecture)
    config = trained(tmp_path)
    assert_learns(config, at_least=0.3)
    assert_engine_and_learner_agree(config)


@pytest.mark.slow
def test_packing_into_small_micro_batches_trains_the_same(tmp_path: Path) -> None:
    whole, packed = (
        trained(tmp_path, f"actor.tokens_per_microbatch={tokens}", f"trainer.steps={steps}", name=name)
        for name, tokens, steps in (("whole", 16384, 5), ("packed", 64, STEPS))
    )
    assert column(packed, "train/reward_mean")[:5] == pytest.approx(column(whole, "train/reward_mean"), abs=1e-5)
    assert_learns(packed)
