"""Episodes that were cut short, took too long or failed: kept, masked or dropped; and the metrics of episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from branching import make_branch, make_episode, make_group, make_turn
from runs import column, finish
from scripted import Scripted, ends, game, play, says, scripted

from rollcall.algo.shaping import compared, group_advantages, has_signal, shaped_rewards, trained
from rollcall.base.types import EndReason, Group, Sample
from rollcall.config import Dapo, DrGrpo, Grpo, ReinforcePlusPlus, StepEnvironment, parse_config
from rollcall.engine.protocol import Stats
from rollcall.environments.protocol import EnvironmentFailed
from rollcall.loop.evaluate import summarize
from rollcall.loop.group_maker import is_finite
from rollcall.loop.samples import make_samples
from rollcall.loop.step_metrics import batch_metrics
from rollcall.loop.supply import Cursor, StepBatch
from rollcall.observe.metrics import check_names
from rollcall.observe.sinks import make_sinks, read_rows
from rollcall.reward.scorer import environment_reward

assert scripted  # a fixture of these tests too
NOTHING = Stats(busy_s=0.0, num_tokens=0, num_preemptions=0)
REASONS = {
    EndReason.TURNS: "truncated", EndReason.TOKENS: "truncated", EndReason.TIMEOUT: "timed_out", EndReason.ERROR: "failed",
}  # fmt: skip


def environment(**treatments: Any) -> StepEnvironment:
    return StepEnvironment(path="m:E", **{"truncated": "keep", "timed_out": "keep", "failed": "keep", **treatments})


def group_of(*ends: EndReason, rewards: list[float], branches: Any = ()) -> Group:
    turns = [make_turn(2, 1), make_turn(1, 0)]
    return make_group(
        [make_episode(turns, seed=seed, ended=end, branches=branches) for seed, end in enumerate(ends)], rewards
    )


def rows(group: Group, section: StepEnvironment | None, algorithm: Any = None) -> list[Sample]:
    return make_samples(
        [group],
        algorithm=algorithm or DrGrpo(),
        max_response_tokens=8,
        reference=None,
        values=None,
        environment=section,
        environment_weight=0.0,
    )


@pytest.mark.parametrize("reason", REASONS)
def test_an_episode_is_kept_masked_or_dropped_by_why_it_ended(reason: EndReason) -> None:
    branch = make_branch([4, 9], [True, False, True], seed=9)
    group = group_of(EndReason.DONE, reason, EndReason.DONE, rewards=[1.0, 0.0, 0.5], branches=[branch])
    kept = rows(group, environment())
    assert [sample.attempt for sample in kept] == [0, 0, 1, 1, 2, 2] and all(sample.mask.any() for sample in kept)
    masked = rows(group, environment(**{REASONS[reason]: "mask"}))
    assert [bool(sample.mask.any()) for sample in masked] == [True, True, False, False, True, True]
    assert masked[0].advantages[0] == kept[0].advantages[0] == 0.5, "the others are compared with it"
    assert not masked[2].advantages.any()
    dropped = rows(group, environment(**{REASONS[reason]: "drop"}))
    assert [sample.attempt for sample in dropped] == [0, 0, 2, 2]
    assert [sample.advantages[0] for sample in dropped] == [0.25, 0.25, -0.25, -0.25]
    others = {name: "drop" for name in ("truncated", "timed_out", "failed") if name != REASONS[reason]}
    assert len(rows(group, environment(**others))) == 6


def test_a_group_with_one_attempt_left_has_no_signal() -> None:
    group, drop = group_of(EndReason.DONE, EndReason.ERROR, rewards=[1.0, 0.0]), environment(failed="drop")
    assert has_signal(group) and not has_signal(trained(group, drop))
    assert len(compared(group, drop).completions) == 1
    (sample,) = rows(group, drop)
    assert not sample.advantages.any()


def test_a_group_without_an_attempt_to_train_on_has_no_signal() -> None:
    group = group_of(EndReason.ERROR, EndReason.TURNS, rewards=[1.0, 0.0])
    assert has_signal(trained(group, environment()))
    for section in (environment(failed="mask", truncated="mask"), environment(failed="drop", truncated="drop")):
        assert not has_signal(trained(group, section))
    assert rows(group, environment(failed="drop", truncated="drop")) == []
    assert rows(group, environment(failed="drop", truncated="drop"), ReinforcePlusPlus()) == []


def test_a_masked_attempt_is_a_baseline_and_a_signal_for_the_others() -> None:
    group = group_of(EndReason.DONE, EndReason.ERROR, rewards=[1.0, 0.0])
    assert has_signal(trained(group, environment(failed="mask")))


def test_masked_attempts_do_not_shift_what_is_normalised_over_the_batch() -> None:
    group = group_of(EndReason.DONE, EndReason.ERROR, EndReason.DONE, rewards=[1.0, -9.0, 0.0])
    masked = rows(group, environment(failed="mask"), ReinforcePlusPlus())
    tokens = np.concatenate([sample.advantages[sample.mask] for sample in masked])
    assert tokens.mean() == pytest.approx(0, abs=1e-6) and not masked[1].advantages.any()


def test_the_overlong_punishment_sees_the_attempts_that_are_compared() -> None:
    algorithm = Dapo(overlong_buffer=4, overlong_penalty=1.0)
    group = group_of(EndReason.DONE, EndReason.DONE, EndReason.TOKENS, rewards=[1.0, 1.0, 0.0])
    assert any(sample.advantages.any() for sample in rows(group, environment(), algorithm))
    dropped = rows(group, environment(truncated="drop"), algorithm)
    assert not any(sample.advantages.any() for sample in dropped), "dynamic sampling would leave the group out"


def test_the_overlong_punishment_counts_the_tokens_of_all_rows() -> None:
    branch = make_branch([4, 9], [True, False, True], seed=9)
    turns = [make_turn(2, 1), make_turn(1, 0)]
    group = make_group([make_episode(turns, seed=0, branches=[branch]), make_episode(turns, seed=1)], [1.0, 1.0])
    algorithm = DrGrpo(overlong_buffer=4, overlong_penalty=1.0)
    assert shaped_rewards(group, algorithm, 8).tolist() == [1 - 3 / 4, 1.0], "7 tokens and 4, of 8"


def test_the_page_shows_the_advantages_that_were_trained_on() -> None:
    group = group_of(EndReason.DONE, EndReason.ERROR, EndReason.DONE, rewards=[1.0, 0.0, 0.5])
    for treatment, expected in (("mask", [0.5, 0.0, 0.0]), ("drop", [0.25, 0.0, -0.25]), ("keep", [0.5, -0.5, 0.0])):
        found = group_advantages(group, DrGrpo(), max_response_tokens=8, environment=environment(failed=treatment))
        assert found is not None and found.tolist() == expected
    assert group_advantages(group, Grpo(advantage="turn"), max_response_tokens=8) is None


def test_plain_completions_are_kept_whatever_the_section_says() -> None:
    episodes = group_of(EndReason.DONE, EndReason.DONE, rewards=[1.0, 0.0])
    section = environment(truncated="drop", timed_out="drop", failed="drop")
    assert compared(episodes, section) is episodes and trained(episodes, None) is episodes


def one_step(group: Group) -> StepBatch:
    return StepBatch(
        step=1, groups=[group], cursor=Cursor.of({"next_draw": 1}, where=""), num_refills=0, num_from_journal=0,
        zero_variance=0.0, wall_s=1.0,
    )  # fmt: skip


def metrics_of(group: Group, samples: list[Sample]) -> dict[str, float]:
    step = one_step(group)
    return batch_metrics(step, samples, stats=NOTHING, reward_s=0.0, threshold=1.0, first_reward="environment")


def test_the_metrics_of_episodes() -> None:
    branch = make_branch([4, 9], [True, False, True], seed=9)
    turns = [make_turn(2, 3, calls=2), make_turn(1, 0)]
    group = make_group(
        [
            make_episode(turns, seed=0, metrics={"found": 1.0}, branches=[branch], ended=EndReason.TOKENS),
            make_episode(turns[:1], seed=1, ended=EndReason.TURNS, metrics={"found": 0.0, "lost": 2.0}),
            make_episode([], seed=2, ended=EndReason.ERROR),
            make_episode(turns, seed=3, ended=EndReason.TIMEOUT),
        ],
        [1.0, 0.0, 0.0, 0.0],
    )
    found = metrics_of(group, [])
    check_names(found)
    assert {name: value for name, value in found.items() if name.startswith(("episode/", "env/"))} == {
        "episode/turns_mean": 5 / 4, "episode/tool_calls_mean": 6 / 4, "episode/failed_fraction": 0.25,
        "episode/truncated_fraction": 0.5, "episode/timed_out_fraction": 0.25, "episode/metrics_dropped": 0, "env/found": 0.5, "env/lost": 2.0,
    }  # fmt: skip
    assert found["rollout/tokens"] == 5 + 2 + 0 + 3, "sampled tokens, branches too; no observations"
    assert found["rollout/response_length_mean"] == 2.5 and found["rollout/staleness_max"] == 0
    assert found["rollout/truncated_fraction"] == 0.25, "the limit of tokens ended it after a turn that was whole"
    evaluated = summarize([group], first_reward="environment", threshold=1.0).metrics()
    assert evaluated["eval/response_length_mean"] == 2.5 and evaluated["eval/truncated_fraction"] == 0.25


@pytest.mark.parametrize("treatment", ["mask", "drop"])
def test_the_staleness_is_that_of_the_tokens_that_are_trained_on(treatment: str) -> None:
    group = group_of(EndReason.DONE, EndReason.DONE, EndReason.TURNS, rewards=[1.0, 0.0, 0.0])
    old = tuple(replace(part, version=-5) for part in group.completions[2].segments)
    group = replace(group, completions=(*group.completions[:2], replace(group.completions[2], segments=old)))
    staleness = {}
    for truncated in ("keep", treatment):
        found = metrics_of(group, rows(group, environment(truncated=truncated)))
        staleness[truncated] = found["rollout/staleness_max"], found["rollout/staleness_mean"]
    assert staleness == {"keep": (5.0, 5 / 3), treatment: (0.0, 0.0)}


def test_names_of_metrics_are_data_and_none_can_end_a_run(tmp_path: Path) -> None:
    names = ["len<100", "<part>", "", " ", "a\x1b", "a\x07", "a  b", "x" * 10**6, "x" * 200, "\ud800", "env/loss"]
    made = play(Scripted(lambda row, texts: ends(reward=1.0, metrics=dict.fromkeys(names, 2.0))))
    assert made.episode is not None and not made.episode.error
    shown = {"len<100", "<part>", "a\ufffd", "a b", "x" * 100, "\ufffd", "env/loss"}
    assert made.episode.metrics == {**dict.fromkeys(shown, 2.0), "metrics_dropped": 4.0}
    many = [replace(made, episode=replace(made.episode, metrics={f"{i}": 1.0})) for i in range(1000)]
    for attempts, dropped in (([made], 4), ([made, *many], 4 + 7 + 1000 - 500)):
        found = metrics_of(make_group(attempts, [1.0] * len(attempts)), [])
        assert found["episode/metrics_dropped"] == dropped
        for sink in make_sinks(parse_config({"trainer": {"loggers": ["tensorboard"]}}), tmp_path, None):
            sink.log(1, found)
            sink.close()
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1


def test_explained_variance_is_that_of_all_loss_tokens_of_the_step() -> None:
    group = make_group([make_episode([make_turn(2, 1), make_turn(1, 0)], seed=seed) for seed in range(2)], [1.0, 0.0])

    def explained(*returns: list[float]) -> float | None:
        values = np.array([1.0, 1.0, 9.0, 0.0], dtype=np.float32)
        samples = [
            Sample.of(one, draw=0, attempt=place, prompt_ids=group.prompt.token_ids).with_(
                returns=np.array(returns[place], dtype=np.float32), values=values
            )
            for place, one in enumerate(group.completions)
        ]
        found = metrics_of(group, samples)
        check_names(found)
        return found.get("train/value_explained_variance")

    assert explained([1.0, 1.0, 5.0, 0.0], [1.0, 1.0, 5.0, 0.0]) == 1.0, "the third token is an observation"
    returns, values = np.array([2.0, 1.0, 0.0, 1.0, 0.0, 0.0]), np.array([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert explained([2.0, 1.0, 5.0, 0.0], [1.0, 0.0, 5.0, 0.0]) == pytest.approx(expected)
    assert explained([0.5] * 4, [0.5] * 4) is None, "there is no variance to explain"


def test_log_probs_of_a_branch_count_when_a_group_is_looked_at_for_divergence() -> None:
    branch = make_branch([4, 9], [True, False, True], seed=9)
    bad = replace(branch, logprobs=branch.logprobs * np.float32("nan"))
    groups = [make_group([make_episode([make_turn(2, 0)], seed=0, branches=[one])], [1.0]) for one in (branch, bad)]
    assert [all(map(is_finite, group.completions)) for group in groups] == [True, False]


@pytest.mark.parametrize("ended", [EndReason.TURNS, EndReason.TOKENS, EndReason.DONE])
def test_an_episode_that_a_limit_ended_before_any_reward_scores_0_and_is_no_error(ended: EndReason) -> None:
    """A game that rewards a win alone: while nobody wins, the run goes on."""
    result = environment_reward(make_episode([make_turn(2, 1), make_turn(1, 0)], seed=0, ended=ended))
    assert result.value == 0 and bool(result.kind) is (ended is EndReason.DONE)


def test_an_environment_without_a_reward_is_told_the_three_ways_to_give_one() -> None:
    result = environment_reward(make_episode([make_turn(2, 0)], seed=0, ended=EndReason.DONE))
    assert result.kind == "nan" and all(way in result.why for way in ("get_reward", "a step", '{"reward": 1.0}'))


def test_an_environment_that_fails_is_counted_and_shown_where_another_reward_scores(
    tmp_path: Path, scripted: Any
) -> None:
    def answer(row: Any, texts: list[str]) -> Any:
        if row["answer"] == "c":
            raise EnvironmentFailed("the door is locked")
        return ends()

    scripted(Scripted(answer))
    config = game(tmp_path, "trainer.steps=1", "data.shuffle=false")
    summary = finish(config)
    (failed,) = column(config, "reward_errors/environment")
    assert failed == summary["reward_errors"] == column(config, "train/reward_errors")[0] > 0
    assert {(one["reward"], one["why"]) for one in summary["reward_failures"]} == {
        ("environment", "the door is locked")
    }


def test_a_group_that_failed_does_not_stand_in_for_a_step_while_others_were_scored(
    tmp_path: Path, scripted: Any
) -> None:
    """Rewards are all 0, so the step has no signal, and only the first group's environment fails."""
    first: list[Any] = []

    def answer(row: Any, texts: list[str]) -> Any:
        first.append(row["prompt"])
        if row["prompt"] == first[0]:
            raise EnvironmentFailed("broken row")
        return ends(reward=0.0)

    scripted(Scripted(answer))
    limits = ("trainer.steps=1", "algorithm.dynamic_sampling=true", "algorithm.max_refills=0")
    config = game(tmp_path, *limits, "data.shuffle=false", "rollout.max_running=1", reward=({"type": "environment"},))
    finish(config)
    assert column(config, "train/skipped_fraction") == [1.0] and column(config, "train/reward_errors") == [0.0]


TURNS = {"environment": {"type": "step", "path": "m:E"}}


def test_advantages_of_turns_need_rewards_of_turns() -> None:
    assert parse_config({"algorithm": {"name": "grpo", "advantage": "turn", "gamma": 0.9}, **TURNS})
    with pytest.raises(Exception, match="compares the environment's rewards for turns"):
        parse_config({"algorithm": {"name": "grpo", "advantage": "turn"}, "reward": [{"type": "exact"}], **TURNS})
    with pytest.raises(Exception, match="add advantage: turn, or remove gamma"):
        parse_config({"algorithm": {"name": "grpo", "gamma": 0.9}})


def test_a_step_without_an_episode_to_train_on_is_skipped_and_the_run_goes_on(tmp_path: Path, scripted: Any) -> None:
    scripted(Scripted(lambda row, texts: says("1=")))
    limits = (
        "environment.max_turns=1",
        "environment.truncated=drop",
        "trainer.steps=2",
        "algorithm.dynamic_sampling=true",
    )
    config = game(tmp_path, *limits, "algorithm.max_refills=1")
    finish(config)
    assert column(config, "train/skipped_fraction") == [1.0, 1.0] and column(config, "train/tokens") == [0.0, 0.0]
    assert column(config, "episode/truncated_fraction") == [1.0, 1.0]
    assert column(config, "train/zero_variance_groups") == [1.0, 1.0]
