"""The run file's environment: one class per ``type``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Field, model_validator

from rollcall.config.base import KeyProblem, OptionalCount, Seconds, Section, field
from rollcall.config.rewards import FunctionReward, Reward, VariableName

Treatment = Literal["keep", "mask", "drop"]
_TREATMENTS = "`keep`: train on them. `mask`: do not train on them, but compare the rest of their group with them. `drop`: ignore them."


class EnvironmentBase(Section):
    """The keys that all environments share. An environment runs in separate processes, one for each running episode."""

    max_turns: int = field(8, "Maximum number of turns in an episode.", ge=1)
    max_turn_tokens: OptionalCount = field(
        None,
        "Maximum number of tokens that the model may write in one turn. `null`: as many as are left of `rollout.max_response_tokens`, "
        "which limits all tokens of an episode after its prompt.",
    )
    call_timeout_s: Seconds = field(30.0, "Time limit for one call of the environment, in seconds.")
    episode_timeout_s: Seconds = field(
        3600.0, "Time limit for one episode, in seconds, including the time that it waits for the engine."
    )
    max_running: int = field(256, "Maximum number of episodes that run at the same time.", ge=1)
    truncated: Treatment = field(
        "keep", f"What to do with episodes that ended at the limit on turns or tokens. {_TREATMENTS}"
    )
    timed_out: Treatment = field("mask", "The same setting for episodes that took too long.")
    failed: Treatment = field(
        "mask", "The same setting for episodes whose environment raised, died or returned something invalid."
    )
    env: list[VariableName] = field(
        [],
        "Names of environment variables that the environment gets, in addition to basic ones such as `PATH`, `HOME` and the language.",
    )
    memory_mb: int = field(
        4096, "Memory limit for each of the environment's processes, in MB.", ge=64, le=1_000_000_000
    )


_KWARGS = "Arguments for the class. With several classes: a map from each class's name to its arguments."
_PYTHON = (
    "The Python that runs the class, if the class needs its own Python environment (3.11 or newer; Rollcall need not be installed "
    "there). `null`: the Python that runs Rollcall."
)


def _check_paths(kwargs: dict[str, Any], path: Any) -> None:
    if path is not None and not (path and all(name.strip() for name in kinds_of(path).values())):
        raise KeyProblem("path is empty; write module:Class")
    if isinstance(path, dict) and not all(path):
        raise KeyProblem("path has a class without a name; give it the name that rows use in their environment column")
    if path is None and kwargs:
        raise KeyProblem("kwargs has no effect without a class; set path too")
    if not isinstance(path, dict):
        return
    for name, arguments in kwargs.items():
        if name not in path:
            raise KeyProblem(f"kwargs.{name} is not a class in path; the names in path are {', '.join(path)}")
        if not isinstance(arguments, dict):
            raise KeyProblem(f"kwargs.{name} is not a map; write the arguments of {path[name]} as name: value")


class ClassEnvironment(EnvironmentBase):
    """Your class: `reset(**row)` opens an episode, its public methods are tools, `get_reward()` scores it."""

    type: Literal["class"] = "class"
    path: str | dict[str, str] | None = field(
        None,
        "`module:Class`, importable from the working directory; or a map from names to classes: each row then names one in its "
        "`environment` column.",
    )
    kwargs: dict[str, Any] = field({}, _KWARGS)
    python: str | None = field(None, _PYTHON)
    tools: list[str] = field([], "Functions that the model can use as additional tools, each as `module:function`.")
    call_format: Literal["auto", "hermes", "llama", "text"] = field(
        "auto",
        "How the model writes tool calls: `hermes` (`<tool_call>` JSON, as Qwen does), `llama` (JSON), `text` (`name(argument=1)` "
        "on a separate line). `auto`: as its chat template does.",
    )

    @model_validator(mode="after")
    def _has_something(self) -> ClassEnvironment:
        if self.path is None and not self.tools:
            raise KeyProblem("path is missing; set it to module:Class, or list functions in tools")
        _check_paths(self.kwargs, self.path)
        return self


class StepEnvironment(EnvironmentBase):
    """Your class with `async reset(row)` and `async step(text, token_ids)`. It decides what the model reads and when the episode ends."""

    type: Literal["step"] = "step"
    path: str | dict[str, str] = Field(
        description="`module:Class`, or a map from names to classes: each row then names one in its `environment` column."
    )
    kwargs: dict[str, Any] = field({}, _KWARGS)
    python: str | None = field(None, _PYTHON)

    @model_validator(mode="after")
    def _has_arguments(self) -> StepEnvironment:
        _check_paths(self.kwargs, self.path)
        return self


def _refuse_call_timeout(section: EnvironmentBase) -> None:
    given, default = section.call_timeout_s, EnvironmentBase.model_fields["call_timeout_s"].default
    if given != default:
        raise KeyProblem(
            f"call_timeout_s={given:g} has no effect here, because the program makes no calls that could be limited; set episode_timeout_s"
        )


class AgentEnvironment(EnvironmentBase):
    """A program that uses the OpenAI API and contains no code for training."""

    type: Literal["agent"] = "agent"
    run: str = Field(
        description="The command that plays one episode. It gets the API's address in OPENAI_BASE_URL, its key in OPENAI_API_KEY, and the row "
        "as JSON in ROLLCALL_ROW."
    )

    @model_validator(mode="after")
    def _has_a_command(self) -> AgentEnvironment:
        if not self.run.strip():
            raise KeyProblem("run is empty; write the command that starts your program")
        _refuse_call_timeout(self)
        return self


class VerifiersEnvironment(EnvironmentBase):
    """A taskset of verifiers v1. Its environment server plays the episodes and queries the run's model over the OpenAI API."""

    type: Literal["verifiers"] = "verifiers"
    config: dict[str, Any] = Field(
        description="The `[env]` block of verifiers, such as `{taskset: {id: textarena, game: Hangman-v0}}`. By default, a role is "
        "played in a plain chat (harness `null`) on this machine, with `max_turns` turns."
    )
    python: str = Field(description="A Python in which verifiers and the taskset are installed.")

    @model_validator(mode="after")
    def _names_a_taskset(self) -> VerifiersEnvironment:
        taskset = self.config.get("taskset")
        if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
            raise KeyProblem("config names no taskset; write for example {taskset: {id: textarena, game: Hangman-v0}}")
        _refuse_call_timeout(self)
        return self


EnvironmentSection = Annotated[
    Union[ClassEnvironment, StepEnvironment, AgentEnvironment, VerifiersEnvironment], Field(discriminator="type")
]


def kinds_of(path: Any) -> dict[str, str]:
    """Return a map from class names to paths. A single class has an empty name."""
    return dict(path) if isinstance(path, dict) else {"": path} if path else {}


def named_code(rewards: Sequence[Reward], environment: EnvironmentBase | None) -> dict[str, str]:
    """Return a map from the run file's keys that name code to their ``module:name``."""
    found = {f"reward.{place}.path": one.path for place, one in enumerate(rewards) if isinstance(one, FunctionReward)}
    if isinstance(environment, ClassEnvironment | StepEnvironment):
        kinds = kinds_of(environment.path)
        found |= {f"environment.path.{name}" if name else "environment.path": path for name, path in kinds.items()}
    if isinstance(environment, ClassEnvironment):
        found |= {f"environment.tools.{place}": path for place, path in enumerate(environment.tools)}
    return found
