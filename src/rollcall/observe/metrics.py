"""All metric names with their units and meanings. A name that is not listed here cannot be logged. ``scripts/write_metrics.py`` writes
docs/metrics.md from this table."""

from __future__ import annotations

from collections.abc import Iterable

METRICS: dict[str, tuple[str, str]] = {  # the unit and the meaning of each
    "train/loss": ("", "Policy loss of the step with its KL and entropy terms, averaged over the updates."),
    "train/reward_mean": ("", "Mean reward of the step's completions, including those of masked and dropped episodes."),
    "train/reward_std": ("", "Standard deviation of the reward over the same completions."),
    "train/accuracy": ("share", "Completions whose first reward is at least `eval.threshold`."),
    "train/kl": ("nats/token", "KL to the frozen reference, computed with `algorithm.kl_estimator`."),
    "train/entropy": ("nats/token", "Entropy of the policy over the tokens trained on."),
    "train/clip_fraction": ("share", "Tokens (GSPO: sequences) whose ratio is clipped."),
    "train/ratio_mean": ("", "Mean probability ratio of the policy to the old policy."),
    "train/approx_kl": ("nats/token", "Mean of old log-prob minus new log-prob: how far the updates moved the policy."),
    "train/grad_norm": ("", "Global gradient norm before clipping, averaged over the updates."),
    "train/lr": ("", "Learning rate of the step's last update."),
    "train/skipped_fraction": ("share", "Updates with a zero gradient; they change no weights, momentum or schedule."),
    "train/tis_weight_mean": ("", "Mean truncated importance weight (old / behaviour)."),
    "train/masked_fraction": ("share", "Response tokens left out of the loss by `algorithm.mismatch_mask`."),
    "train/advantage_abs_mean": ("", "Mean absolute advantage. Near 0, the step teaches the model almost nothing."),
    "train/zero_variance_groups": ("share", "Groups without a signal: equal rewards, or masked or dropped episodes."),
    "train/completions": ("count", "Completions of the step, including those of masked and dropped episodes."),
    "train/reward_errors": ("count", "Completions of the step that at least one reward could not score."),
    "train/refills": ("count", "How many times the step drew more prompts for dynamic sampling."),
    "train/tokens": (
        "tokens",
        "Tokens that the updates ran through the policy. Tokens that several rows of a micro-batch share count "
        "once. Rows that cannot change the weights do not count.",
    ),
    "train/value_loss": ("", "Loss of the critic (PPO)."),
    "train/value_explained_variance": (
        "",
        "Share of the returns' variance that the critic's values before the update explain; 1 is best (PPO).",
    ),
    "rollout/tokens": (
        "tokens",
        "Sampled tokens in the step's groups, including groups from the journal. Tokens from an environment do not count.",
    ),
    "rollout/tokens_per_s": ("tokens/s", "Response tokens that this process generated, per second of generation."),
    "rollout/response_length_mean": (
        "tokens",
        "Mean number of sampled tokens per completion. For an episode, the tokens of all its turns and branches count.",
    ),
    "rollout/truncated_fraction": ("share", "Completions that hit the token limit."),
    "rollout/logprob_mismatch": (
        "nats",
        "Mean absolute difference between the learner's log-prob and the engine's, over the tokens that the "
        "step's first update learns from, before that update. It includes the renormalisation of top-p and "
        "top-k, and the effect of `model.lora.dropout`.",
    ),
    "rollout/logprob_mismatch_max": ("nats", "Largest such difference."),
    "rollout/staleness_mean": (
        "versions",
        "Mean number of versions by which the trained tokens lag behind the policy.",
    ),
    "rollout/staleness_max": ("versions", "The same number for the oldest trained token; at most `trainer.staleness`."),
    "rollout/preemptions": (
        "count",
        "Completions evicted from the KV cache; their keys and values are computed again.",
    ),
    "rollout/groups_from_journal": ("count", "Groups of the step that came from the journal, not from the engine."),
    "reward/<part>": ("", "Mean score of one reward, without its weight."),
    "reward_errors/<part>": (
        "count",
        "Completions that this reward failed to score (error, hang or NaN); they score 0.",
    ),
    "episode/turns_mean": (
        "count",
        "Mean number of turns per episode. If the agent's program has several conversations in an episode, only the "
        "first one counts.",
    ),
    "episode/tool_calls_mean": ("count", "Mean number of tool calls per episode, counted as in `episode/turns_mean`."),
    "episode/failed_fraction": ("share", "Episodes whose environment raised, died or returned something invalid."),
    "episode/truncated_fraction": ("share", "Episodes that ended at the turn limit or the token limit."),
    "episode/timed_out_fraction": ("share", "Episodes that took too long, or had a call to the environment that did."),
    "episode/metrics_dropped": (
        "count",
        "Environment metrics that were left out: those without a name, with a name that looks like another "
        "metric's name, beyond 100 per episode, or beyond 500 per step.",
    ),
    "env/<part>": ("", "Mean of a metric from the environment, over the episodes that have it."),
    "eval/accuracy": ("share", "Held-out completions whose first reward is at least `eval.threshold`."),
    "eval/graded_fraction": (
        "share",
        "Held-out completions whose reward is neither 0 nor 1. If an evaluation has any such completion, the "
        "run's headline is `eval/reward_mean`, otherwise `eval/accuracy`.",
    ),
    "eval/pass_at_k": ("share", "Held-out prompts with a correct completion among `eval.samples_per_prompt`."),
    "eval/reward_mean": ("", "Mean reward on the held-out prompts."),
    "eval/response_length_mean": ("tokens", "Like `rollout/response_length_mean`, on the held-out prompts."),
    "eval/truncated_fraction": ("share", "Held-out completions that hit the token limit."),
    "eval/completions": ("count", "Held-out completions."),
    "eval/reward_errors": ("count", "Held-out completions that at least one reward could not score. They count as 0."),
    "time/step_s": (
        "s",
        "The whole training step: rollout, reward, scoring, update and sync; no evaluation or saving.",
    ),
    "time/rollout_s": ("s", "Generating the step's groups."),
    "time/reward_s": ("s", "Waiting for rewards, after generation."),
    "time/score_s": ("s", "The learner's and the reference's log-probs and the critic's values, before the update."),
    "time/update_s": ("s", "Forward pass, backward pass and optimizer."),
    "time/sync_s": ("s", "Sending the new weights to the engines."),
    "time/save_s": ("s", "How long training waited while a checkpoint was copied to host memory."),
    "time/eval_s": ("s", "Evaluation."),
    "perf/train_tokens_per_s": ("tokens/s", "`train/tokens` per second of scoring and update."),
    "perf/peak_memory_gib": ("GiB", "Peak memory so far: of the CUDA allocator or, on a CPU, of the process."),
}


def check_names(metrics: Iterable[str]) -> None:
    """Raise ValueError if METRICS does not document a name."""
    for name in metrics:
        group, _, rest = name.partition("/")
        if name not in METRICS and not (rest and f"{group}/<part>" in METRICS):
            raise ValueError(f"metric {name!r} is not documented; add it to rollcall.observe.metrics.METRICS")
