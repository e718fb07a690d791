"""From a group's rewards to its advantages: what the advantage sees, and the comparison of each algorithm within a group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollcall.algo import advantages as adv
from rollcall.config import Algorithm
from rollcall.types import Floats, Group

# One number per completion, from its group alone. The other algorithms look at the whole batch.
COMPARE: dict[str, Callable[[Floats], Floats]] = {
    "grpo": adv.group_normalized,
    "dr_grpo": adv.group_centered,
    "dapo": adv.group_normalized,
    "gspo": adv.group_normalized,
    "cispo": adv.group_normalized,
    "rloo": adv.leave_one_out,
    "intuitor": adv.group_normalized,
}


def has_signal(group: Group) -> bool:
    """Whether the completions of a group differ in reward, before any punishment of their length. Only then can the group
    teach anything (DAPO, arXiv:2503.14476, equation 11)."""
    return bool(np.ptp(group.rewards) > 0)


def shaped_rewards(group: Group, algorithm: Algorithm, max_response_tokens: int) -> Floats:
    """The rewards that the advantage sees: with the soft overlong punishment, when the algorithm has one.

    A group that dynamic sampling would leave out is not punished: it may stand in for a step without any signal.
    """
    rewards = group.rewards
    if algorithm.overlong_buffer and (has_signal(group) or not algorithm.dynamic_sampling):
        rewards = rewards + np.array(
            [
                adv.overlong_penalty(
                    len(completion.token_ids),
                    max_tokens=max_response_tokens,
                    buffer=algorithm.overlong_buffer,
                    penalty=algorithm.overlong_penalty,
                )
                for completion in group.completions
            ],
            dtype=np.float32,
        )
    return rewards


def group_advantages(group: Group, algorithm: Algorithm, *, max_response_tokens: int) -> Floats | None:
    """One advantage for each completion of a journaled group; None: it depends on more than the group (a critic, the whole batch, or
    the KL to the reference)."""
    compare = COMPARE.get(algorithm.name)
    if compare is None or (algorithm.kl_in == "reward" and algorithm.kl_coef > 0) or not group.scores:
        return None
    return compare(shaped_rewards(group, algorithm, max_response_tokens))
