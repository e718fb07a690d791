"""Turns a group's rewards into advantages: decides which attempts count and which rewards the advantage uses, and how each algorithm
compares them within a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rollcall.algo import advantages as adv
from rollcall.base.types import Completion, Doubles, EndReason, Floats, Group, Longs, rows_of
from rollcall.config import Algorithm, EnvironmentBase, GroupAlgorithm
from rollcall.config.environments import Treatment

# These compute one number per completion from its group. The other algorithms use the full batch.
COMPARE: dict[str, Callable[[Doubles], Floats]] = {
    "grpo": adv.group_normalized,
    "dr_grpo": adv.group_centered,
    "dapo": adv.group_normalized,
    "gspo": adv.group_normalized,
    "cispo": adv.group_normalized,
    "rloo": adv.leave_one_out,
    "intuitor": adv.group_normalized,
}


def treatments_of(group: Group, environment: EnvironmentBase | None) -> list[Treatment]:
    """Return how each attempt is treated. An attempt without a score from any reward is dropped, as in TRL."""
    return [
        _treatment_of(completion, environment) if score.is_given else "drop"
        for completion, score in zip(group.completions, group.scores, strict=True)
    ]


def _treatment_of(completion: Completion, environment: EnvironmentBase | None) -> Treatment:
    """Return the treatment that the run file sets for the reason why the episode ended."""
    if environment is None or completion.episode is None:
        return "keep"
    match completion.episode.ended:
        case EndReason.TURNS | EndReason.TOKENS:
            return environment.truncated
        case EndReason.TIMEOUT:
            return environment.timed_out
        case EndReason.ERROR:
            return environment.failed
        case EndReason.DONE:
            return "keep"


def compared(group: Group, environment: EnvironmentBase | None) -> Group:
    """Return the group without its dropped attempts. The remaining attempts are compared with each other."""
    places = [place for place, treatment in enumerate(treatments_of(group, environment)) if treatment != "drop"]
    if len(places) == len(group.completions):
        return group
    return replace(
        group,
        completions=tuple(group.completions[place] for place in places),
        scores=tuple(group.scores[place] for place in places),
    )


def trained(group: Group, environment: EnvironmentBase | None) -> Group:
    """Like ``compared``, but the group has no attempts if every attempt is masked or dropped."""
    if "keep" not in treatments_of(group, environment):
        return replace(group, completions=(), scores=())
    return compared(group, environment)


def has_signal(group: Group) -> bool:
    """Whether the completions of a group differ in reward, before any length punishment. Only then does the group provide a learning
    signal (DAPO, arXiv:2503.14476, equation 11)."""
    return not adv.all_equal(group.rewards)


def shaped_rewards(group: Group, algorithm: Algorithm, max_response_tokens: int) -> Doubles:
    """Return the rewards that the advantage is computed from, including the soft overlong punishment if the algorithm has one.

    A group that dynamic sampling would leave out is not punished. If no group in a step has a signal, the step still trains on such a
    group, whose gradient must then be zero. The length includes all tokens after the prompts of all rows, even observations, because the
    limit applies to them.
    """
    rewards = group.rewards
    if algorithm.overlong_buffer and (has_signal(group) or not algorithm.dynamic_sampling):
        rewards = rewards + np.array(
            [
                adv.overlong_penalty(
                    sum(len(row.token_ids) for row in rows_of(completion)),
                    max_tokens=max_response_tokens,
                    buffer=algorithm.overlong_buffer,
                    penalty=algorithm.overlong_penalty,
                )
                for completion in group.completions
            ]
        )
    return rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRewards:
    """An attempt's rewards for its turns. The turns cover the sampled tokens of all the attempt's rows, in order."""

    num_sampled: Longs  # [turns]
    rewards: Doubles  # [turns] parts of the attempt's reward; the rest comes at the end of the attempt


def turn_rewards(completion: Completion, *, weight: float) -> TurnRewards:
    """``weight`` is the weight of the environment's rewards in the score. A failed episode scores 0, so its turns have no rewards."""
    num_sampled, episode = completion.num_sampled, completion.episode
    turns = () if episode is None else episode.turns
    ends = np.minimum(np.cumsum([turn.num_sampled for turn in turns], dtype=np.int64), num_sampled)
    counts = np.diff(ends, prepend=0)
    rewards = np.array([turn.reward or 0.0 for turn in turns]) * weight
    if episode is not None and episode.error:
        rewards = np.zeros_like(rewards)
    if not turns or ends[-1] < num_sampled:  # a single turn, or a last turn that the environment did not answer
        counts = np.append(counts, num_sampled - counts.sum())
        rewards = np.append(rewards, 0.0)
    return TurnRewards(num_sampled=counts, rewards=rewards)


def group_advantages(
    group: Group, algorithm: Algorithm, *, max_response_tokens: int, environment: EnvironmentBase | None = None
) -> Floats | None:
    """Return one advantage for each completion of a journaled group. Return None if the advantages depend on more than the group
    (a critic, the full batch, or the KL to the reference), or if each turn has its own advantage."""
    compare = COMPARE.get(algorithm.name)
    if compare is None or (algorithm.kl_in == "reward" and algorithm.kl_coef > 0) or not group.scores:
        return None
    if isinstance(algorithm, GroupAlgorithm) and algorithm.advantage == "turn":
        return None
    treatments = treatments_of(group, environment)
    advantages = np.zeros(len(group.completions), dtype=np.float32)
    kept = [place for place, treatment in enumerate(treatments) if treatment != "drop"]
    advantages[kept] = compare(shaped_rewards(compared(group, environment), algorithm, max_response_tokens))
    return np.where(np.array(treatments) == "keep", advantages, np.float32(0))
