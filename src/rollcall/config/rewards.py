"""The run file's rewards: one class per ``type``."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Union
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, model_validator

from rollcall.base.redact import is_secret, redact_urls
from rollcall.config.base import LONGEST_S, KeyProblem, Seconds, Section, field

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern[:80]!r} is not a Python regular expression: {error}") from None
    if not pattern:
        raise ValueError("an empty pattern matches every completion; write what to look for")
    return pattern


def _check_url(url: str) -> str:
    if redact_urls(url) != url:
        raise ValueError(
            f"{redact_urls(url)[:200]!r} contains a password or a key; put it in an environment variable, and set key_env to its name"
        )
    problem = f"{url[:200]!r} is not the address of a service; write for example http://node7:8000/v1"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(problem) from None
    if not is_address or parts.fragment or "@" in parts.netloc or not url.isprintable() or " " in url:
        raise ValueError(problem)
    return url


def _check_rubric(rubric: str) -> str:
    if "{completion}" not in rubric:
        raise ValueError(
            "has no {completion}, so the judge would not see the text that it grades; put {completion} where that text belongs"
        )
    return rubric


def _check_options(options: dict[str, JsonValue]) -> dict[str, JsonValue]:
    ours = [name for name in ("model", "messages", "stream", "n") if name in options]
    if ours:
        raise ValueError(
            f"{ours[0]} is not an option, because Rollcall sets it: a judge gets one question and gives one complete answer; remove it"
        )
    if secret := [name for name in options if is_secret(name)]:
        raise ValueError(
            f"{secret[0]} looks like a secret; put it in an environment variable, and set key_env to its name"
        )
    return options


class RewardBase(Section):
    weight: float = field(1.0, "Weight in the sum of rewards.")
    timeout_s: Seconds = field(
        10.0,
        "Time limit in seconds for one completion, or for a whole group if the function takes `completions`. After that, the score is 0.",
    )

    @property
    def variables(self) -> list[str]:
        """Names of the environment variables that the reward needs where it runs."""
        return []


class ExactReward(RewardBase):
    """1 if the completion, stripped, equals the answer."""

    type: Literal["exact"] = "exact"


class NumberReward(RewardBase):
    """1 if the last number in the completion equals the answer's last number."""

    type: Literal["number"] = "number"


class MathReward(RewardBase):
    """1 if the completion's final answer equals the row's answer, according to math-verify."""

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
    """The score from the reasoning-gym task that generated the row."""

    type: Literal["reasoning_gym"] = "reasoning_gym"


class FunctionReward(RewardBase):
    """Your own function, such as `f(completion, answer) -> float`; one that takes `completions` scores a whole group."""

    type: Literal["function"] = "function"
    path: str = Field(description="`module:function`, importable from the working directory.")
    env: list[VariableName] = field(
        [],
        "Names of environment variables that the function gets, such as `OPENAI_API_KEY`, in addition to basic ones such as `PATH`, "
        "`HOME` and the language. On a cluster their values come from the shell that submits the run.",
    )
    network: bool = field(True, "Whether the function may use the network.")
    memory_mb: int = field(16384, "Memory limit for each of the reward's processes, in MB.", ge=256)
    file_mb: int = field(1024, "Largest file that the function may write, in MB.", ge=1)
    processes: int = field(
        4096,
        "Number of processes and threads that the function may start; 0: none. The kernel does not apply this limit to root.",
        ge=0,
    )

    @property
    def variables(self) -> list[str]:
        return self.env


class SelfCertaintyReward(RewardBase):
    """Mean over tokens of KL(uniform || policy): how confident the policy is (Intuitor)."""

    type: Literal["self_certainty"] = "self_certainty"


class ModelReward(RewardBase):
    """The score of a reward model (`AutoModelForSequenceClassification` with one label)."""

    type: Literal["model"] = "model"
    path: str = Field(description="Directory or hub name of the reward model.")
    max_tokens: int = field(2048, "Truncate prompt and completion on the left to this number of tokens.", ge=1)


class EnvironmentReward(RewardBase):
    """The environment's own reward: either one for the whole episode, or the sum of the rewards for its turns."""

    type: Literal["environment"] = "environment"


class AskedReward(RewardBase):
    """A reward whose score comes from a service."""

    url: Annotated[str, AfterValidator(_check_url)] = Field(description="Address of the service.")
    key_env: VariableName | None = field(
        None,
        "Name of the environment variable that contains the service's key, such as `OPENAI_API_KEY`. The key itself is never "
        "in the run file. On a cluster its value comes from the shell that submits the run.",
    )
    timeout_s: Seconds = field(
        60.0, "Time limit for one request, in seconds. After that, the request is tried again, up to `retries` times."
    )
    concurrency: int = field(32, "Maximum number of requests at the same time.", ge=1, le=4096)
    retries: int = field(
        4, "How many times a request is tried again after a broken connection, status 429 or 5xx, or a timeout.", ge=0
    )
    outage_s: float = field(
        3600.0,
        "How long the run waits for a service that does not answer any request, in seconds. After that, the run ends with an error; the "
        "same command resumes it.",
        ge=0,
        le=LONGEST_S,
    )

    @property
    def variables(self) -> list[str]:
        return [] if self.key_env is None else [self.key_env]


class JudgeReward(AskedReward):
    """The score that a language model gives according to a rubric. `url` is any OpenAI-compatible address, such as `http://node7:8000/v1`."""

    type: Literal["judge"] = "judge"
    model: str = Field(description="The judge's model name at that address.", min_length=1)
    rubric: Annotated[str, AfterValidator(_check_rubric)] = Field(
        description="The question for the judge: text with `{completion}`, and with `{prompt}` and `{answer}` if you need them."
    )
    min: float = field(0.0, "The lowest score.")
    max: float = field(1.0, "The highest score.")
    options: Annotated[dict[str, JsonValue], AfterValidator(_check_options)] = field(
        {}, "Additional fields of the request, such as `{temperature: 0, max_tokens: 1000}`."
    )

    @model_validator(mode="after")
    def _has_a_range(self) -> JudgeReward:
        if self.min >= self.max:
            raise KeyProblem(f"min={self.min:g} is not below max={self.max:g}; scores lie between them")
        return self


class HttpReward(AskedReward):
    """The score that your own service returns for a POST request with JSON (see [rewards.md](rewards.md))."""

    type: Literal["http"] = "http"
    whole_group: bool = field(False, "Send all completions of a group in one request, as `completions`.")


Reward = Annotated[
    Union[
        ExactReward, NumberReward, MathReward, RegexReward, CountdownReward, ReasoningGymReward, FunctionReward,
        SelfCertaintyReward, ModelReward, EnvironmentReward, JudgeReward, HttpReward,
    ],
    Field(discriminator="type"),
]  # fmt: skip
