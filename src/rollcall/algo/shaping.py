"""From a group's rewards to its advantages: which attempts count, what the advantage sees of them, and the comparison of each
algorithm within a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rollcall.algo import advantages as adv
from rollcall.base.types import Completion, Doubles, EndReason, Floats, Group, Longs, rows_of
from rollcall.config import Algorithm, EnvironmentBase, GroupAlgorithm
from rollcall.config.environments import Treatment

# One number per completion, which depends only on its group. The other algorithms look at the whole batch.
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
    """The treatment of each attempt. One that no reward scored is dropped, as TRL leaves it out."""
    return [
        _treatment_of(completion, environment) if score.is_given else "drop"
        for completion, score in zip(group.completions, group.scores, strict=True)
    ]


def _treatment_of(completion: Completion, environment: EnvironmentBase | None) -> Treatment:
    """The run file's treatment of an episode that ended this way."""
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
    """The attempts that are compared with each other: without those that are dropped."""
    places = [place for place, treatment in enumerate(treatments_of(group, environment)) if treatment != "drop"]
    if len(places) == len(group.completions):
        return group
    return replace(
        group,
        completions=tuple(group.completions[place] for place in places),
        scores=tuple(group.scores[place] for place in places),
    )


def trained(group: Group, environment: EnvironmentBase | None) -> Group:
    """``compared``, or no attempt at all if each is masked or dropped."""
    if "keep" not in treatments_of(group, environment):
        return replace(group, completions=(), scores=())
    return compared(group, environment)


def has_signal(group: Group) -> bool:
    """Whether the completions of a group differ in reward, before any punishment of their length. Only then can the group
    teach anything (DAPO, arXiv:2503.14476, equation 11)."""
    return not adv.all_equal(group.rewards)


def shaped_rewards(group: Group, algorithm: Algorithm, max_response_tokens: int) -> Doubles:
    """The rewards that the advantage sees: with the soft overlong punishment, when the algorithm has one.

    A group that dynamic sampling would leave out is not punished: it may fill a step that has no signal. The length is
    that of all tokens behind the prompts of all rows, observations too, because that is what the limit bounds.
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
    """An attempt's rewards along the way. Its turns follow each other over the sampled tokens of all its rows."""

    num_sampled: Longs  # [turns]
    rewards: Doubles  # [turns] a part of the attempt's reward; the rest comes at its end


def turn_rewards(completion: Completion, *, weight: float) -> TurnRewards:
    """``weight`` is that of the environment's rewards in the score. A failed episode scores 0, so its turns have no rewards."""
    num_sampled = completion.num_sampled
    episode = completion.episode
    if episode is None:
        return TurnRewards(num_sampled=np.array([num_sampled]), rewards=np.zeros(1))
    turns = episode.turns
    ends = np.minimum(np.cumsum([turn.num_sampled for turn in turns], dtype=np.int64), num_sampled)
    counts = np.diff(ends, prepend=0)
    rewards = np.array([turn.reward or 0.0 for turn in turns]) * weight
    if episode.error:
        rewards = np.zeros_like(rewards)
    if not turns or ends[-1] < num_sampled:  # one turn, or one that the environment did not answer
        counts = np.append(counts, num_sampled - counts.sum())
        rewards = np.append(rewards, 0.0)
    return TurnRewards(num_sampled=counts, rewards=rewards)


def group_advantages(
    group: Group, algorithm: Algorithm, *, max_response_tokens: int, environment: EnvironmentBase | None = None
) -> Floats | None:
    """One advantage for each completion of a journaled group. None if it depends on more than the group (a critic, the whole batch,
    or the KL to the reference), or if each turn has its own."""
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
