"""The run file's rewards: one class per ``type``."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Union

from pydantic import AfterValidator, Field

from rollcall.config.base import LONGEST_S, Section, field

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern[:80]!r} is not a Python regular expression: {error}") from None
    if not pattern:
        raise ValueError("an empty pattern is found in every completion; say what to look for")
    return pattern


class RewardBase(Section):
    weight: float = field(1.0, "Weight in the sum of rewards.")
    timeout_s: float = field(
        10.0,
        "Time limit for one completion, in seconds; for a function that takes `completions`, for a group. After it the score is 0.",
        ge=0.001,
        le=LONGEST_S,
    )


class ExactReward(RewardBase):
    """1 if the completion, stripped, equals the answer."""

    type: Literal["exact"] = "exact"


class NumberReward(RewardBase):
    """1 if the last number in the completion equals the answer's last number."""

    type: Literal["number"] = "number"


class MathReward(RewardBase):
    """1 if math-verify finds that the final answers of completion and row are equal."""

    type: Literal["math"] = "math"


class RegexReward(RewardBase):
    """1 if the pattern is found in the completion (format rewards)."""

    type: Literal["regex"] = "regex"
    pattern: Annotated[str, AfterValidator(_check_pattern)] = Field(
        description="Python regular expression, searched with DOTALL."
    )


class CountdownReward(RewardBase):
    """1 if the expression in the completion uses each of the row's `numbers` once and equals its `target`."""

    type: Literal["countdown"] = "countdown"
    format_score: float = field(0.1, "Score of a well-formed expression with the wrong value.", ge=0, le=1)


class ReasoningGymReward(RewardBase):
    """The score of the reasoning-gym task that made the row."""

    type: Literal["reasoning_gym"] = "reasoning_gym"


class FunctionReward(RewardBase):
    """Your own function, such as `f(completion, answer) -> float`; one that takes `completions` scores a whole group."""

    type: Literal["function"] = "function"
    path: str = Field(description="`module:function`, importable from the working directory.")
    env: list[VariableName] = field(
        [],
        "Names of environment variables that the function gets, such as `OPENAI_API_KEY`, beside `PATH`, `HOME`, the language "
        "and the like. On a cluster their values come from the shell that submits the run.",
    )
    network: bool = field(True, "Whether the function may use the network.")
    memory_mb: int = field(16384, "Memory limit for each of its processes, in MB.", ge=256)
    file_mb: int = field(1024, "Largest file that the function may write, in MB.", ge=1)
    processes: int = field(
        4096,
        "How many processes and threads the function may start; 0: no process. The kernel does not limit root.",
        ge=0,
    )


class SelfCertaintyReward(RewardBase):
    """Mean over tokens of KL(uniform || policy): how sure the policy is of itself (Intuitor)."""

    type: Literal["self_certainty"] = "self_certainty"


class ModelReward(RewardBase):
    """The score of a reward model (`AutoModelForSequenceClassification` with one label)."""

    type: Literal["model"] = "model"
    path: str = Field(description="Directory or hub name of the reward model.")
    max_tokens: int = field(2048, "Cut prompt and completion to this number of tokens, from the left.", ge=1)


class EnvironmentReward(RewardBase):
    """What the environment itself gives: its reward for the episode, or the sum of those along the way."""

    type: Literal["environment"] = "environment"


Reward = Annotated[
    Union[
        ExactReward, NumberReward, MathReward, RegexReward, CountdownReward, ReasoningGymReward, FunctionReward,
        SelfCertaintyReward, ModelReward, EnvironmentReward,
    ],
    Field(discriminator="type"),
]  # fmt: skip
