"""The run file's algorithms: one class per ``name``, each with its own defaults and its paper."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, Field

from rollcall.config.base import Section, field


def _around_one(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if not 0 <= low < 1 < high:
        raise ValueError(
            f"[{low:g}, {high:g}] does not contain 1, the ratio of an unchanged policy; use [low, high] with low below 1 and high "
            "above 1, such as [0.5, 2]"
        )
    return bounds


class AlgorithmBase(Section):
    """The keys that all algorithms share. Each class below has its own defaults and names its paper."""

    clip_low: float = field(0.2, "The ratio is clipped to at least 1 - clip_low.", ge=0)
    clip_high: float = field(0.2, "The ratio is clipped to at most 1 + clip_high.", ge=0)
    dual_clip: float | None = field(
        None, "Upper bound on the loss of tokens with a negative advantage (dual-clip PPO); `null`: off.", gt=1
    )
    kl_coef: float = field(0.0, "Weight of the KL to the frozen reference; 0: no reference is loaded.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = field("k3", "Per-token estimator of the KL.")
    kl_in: Literal["loss", "reward"] = field("loss", "Add the KL to the loss, or subtract it from the token rewards.")
    entropy_coef: float = field(0.0, "Weight of the entropy bonus.", ge=0)
    old_logprobs: Literal["learner", "engine"] = field(
        "learner",
        "Which old log-probs the ratio uses. `learner`: the learner recomputes them (decoupled). `engine`: those from sampling (bypass).",
    )
    tis_cap: float | None = field(
        2.0, "Truncated importance sampling: the loss is multiplied by min(old / behaviour, cap); `null`: off.", gt=0
    )
    mismatch_mask: Annotated[tuple[float, float], AfterValidator(_around_one)] | None = field(
        None,
        "Leave out of the loss all tokens whose old / behaviour ratio is outside [low, high]; `null`: leave out none.",
    )
    dynamic_sampling: bool = field(
        False, "Leave out groups whose rewards (before `overlong_penalty`) are all equal, and draw more prompts."
    )
    max_refills: int = field(4, "How many times a step may draw more prompts for dynamic sampling.", ge=0)
    overlong_buffer: int = field(
        0,
        "Within this many tokens of the limit, a length penalty grows from 0 to `overlong_penalty`; 0: no penalty.",
        ge=0,
    )
    overlong_penalty: float = field(1.0, "Length penalty at the token limit (soft overlong punishment).", ge=0)

    def rescores(self, actor: Any) -> bool:
        """Whether log-probs must be computed before the step's first update, because later updates see changed weights."""
        return actor.minibatches * actor.epochs > 1 and self.old_logprobs == "learner"


class GroupAlgorithm(AlgorithmBase):
    """Algorithms that compare the attempts in a group with each other."""

    advantage: Literal["episode", "turn"] = field(
        "episode",
        "What is compared within a group. `episode`: the rewards of whole attempts. `turn`: for each turn, the rewards from that turn on "
        "are compared with those from the same turn on in the other attempts. Use it for environments that reward turns.",
    )
    gamma: float = field(1.0, "Discount of rewards per turn, with `advantage: turn`.", ge=0, le=1)


class Grpo(GroupAlgorithm):
    """GRPO, arXiv:2402.03300: group-normalised rewards, clipped ratio, mean over each response, then over responses."""

    name: Literal["grpo"] = "grpo"


class DrGrpo(GroupAlgorithm):
    """Dr. GRPO, arXiv:2503.20783: no division by the group's deviation or the response's length."""

    name: Literal["dr_grpo"] = "dr_grpo"


class Dapo(GroupAlgorithm):
    """DAPO, arXiv:2503.14476: clip-higher, dynamic sampling, token-level loss, soft overlong punishment."""

    name: Literal["dapo"] = "dapo"
    clip_high: float = field(0.28, "The ratio is clipped to at most 1 + clip_high.", ge=0)
    dynamic_sampling: bool = field(
        True, "Leave out groups whose rewards (before `overlong_penalty`) are all equal, and draw more prompts."
    )


class Gspo(GroupAlgorithm):
    """GSPO, arXiv:2507.18071: one length-normalised ratio per sequence."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = field(3e-4, "The sequence ratio is clipped to at least 1 - clip_low.", ge=0)
    clip_high: float = field(4e-4, "The sequence ratio is clipped to at most 1 + clip_high.", ge=0)


class Cispo(GroupAlgorithm):
    """CISPO, arXiv:2506.13585: the clipped ratio is a constant weight on the policy gradient; no token is dropped."""

    name: Literal["cispo"] = "cispo"
    clip_low: float = field(1.0, "The weight is clipped to at least 1 - clip_low.", ge=0)
    clip_high: float = field(4.0, "The weight is clipped to at most 1 + clip_high.", ge=0)


class Rloo(GroupAlgorithm):
    """RLOO, arXiv:2402.14740: each reward minus the mean of the other rewards in its group."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(AlgorithmBase):
    """REINFORCE++, arXiv:2501.03262: token returns (KL inside the reward), normalised over the whole batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    kl_in: Literal["loss", "reward"] = field("reward", "Add the KL to the loss, or subtract it from the token rewards.")
    kl_estimator: Literal["k1", "k2", "k3"] = field("k1", "Per-token estimator of the KL.")
    gamma: float = field(1.0, "Discount of token rewards.", ge=0, le=1)


class Ppo(AlgorithmBase):
    """PPO, arXiv:1707.06347, with a critic and GAE (arXiv:1506.02438)."""

    name: Literal["ppo"] = "ppo"
    gamma: float = field(1.0, "Discount of token rewards.", ge=0, le=1)
    lam: float = field(0.95, "GAE lambda.", ge=0, le=1)
    value_clip: float | None = field(0.2, "How far values may move from the old ones in the loss; `null`: off.", gt=0)


class Intuitor(AlgorithmBase):
    """Intuitor, arXiv:2505.19590: GRPO with self-certainty as the only reward."""

    name: Literal["intuitor"] = "intuitor"
    kl_coef: float = field(0.005, "Weight of the KL to the frozen reference; 0: no reference is loaded.", ge=0)


Algorithm = Annotated[
    Union[Grpo, DrGrpo, Dapo, Gspo, Cispo, Rloo, ReinforcePlusPlus, Ppo, Intuitor], Field(discriminator="name")
]
