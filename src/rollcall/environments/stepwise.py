"""The step-by-step interface: a class with ``reset(row)`` and ``step(text, token_ids)``. The class itself decides what the model reads,
how each turn is rewarded and when the episode ends.

    from rollcall import Observation, StepResult

    class Guess:
        async def reset(self, row: dict) -> Observation:
            self.number = int(row["answer"])
            return Observation("Guess a number from 1 to 9.")

        async def step(self, text: str, token_ids: list[int]) -> StepResult:
            if text.strip() == str(self.number):
                return StepResult(reward=1.0, done=True)
            return StepResult("No. Guess again.", metrics={"wrong": 1})

Both methods may also be synchronous. ``reset`` may return a string or None. ``step`` may return a string as the observation, or a tuple
``(observation, reward, done)`` or ``(observation, reward, done, metrics)``. This module imports only the standard library, because
environment processes import it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rollcall.base.importing import load_named


@dataclass(frozen=True, slots=True)
class Observation:
    """Text for the model to read."""

    text: str
    role: Literal["user", "tool", "system"] = "user"  # the message's role in the chat template
    name: str = ""  # the tool's name, for the role `tool`


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a turn."""

    observation: Observation | str | None = None  # what the model reads next; None only if `done`
    reward: float | None = None  # for this turn
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class WrongResult(ValueError):  # noqa: N818 - an outcome of the user's code
    """A method returned an invalid value. The message says what it may return."""


def result_of(returned: Any) -> StepResult:
    """Check each field of the value returned by ``step``. The observation becomes an ``Observation`` or None."""
    match returned:
        case StepResult():
            result = returned
        case str() | Observation():
            result = StepResult(returned)
        case tuple() if len(returned) in (3, 4):
            result = StepResult(*returned)
        case _:
            raise WrongResult(
                f"step returned {_shown(returned)}; return a StepResult, a string, or (observation, reward, done, metrics)"
            )
    observation = result.observation
    if isinstance(observation, str):
        observation = Observation(observation)
    match observation:
        case None | Observation(text=str(), role="user" | "tool" | "system", name=str()):
            pass
        case _:
            raise WrongResult(
                f"step returned the observation {_shown(result.observation)}; return text, optionally with the role user, tool or system"
            )
    if not isinstance(result.done, bool | int) or result.done not in (0, 1):
        raise WrongResult(f"step returned done={_shown(result.done)}; return True or False")
    if observation is None and not result.done:
        raise WrongResult(
            "step returned no observation and is not done; return the text that the model reads next, or done=True"
        )
    reward = None if result.reward is None else number(result.reward, what="step returned the reward")
    found = result.metrics
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise WrongResult(f"step returned metrics={_shown(found)}; return a dict of names and numbers")
    metrics = {key: number(value, what=f"step returned the metric {key[:80]} as") for key, value in found.items()}
    return StepResult(observation, reward, bool(result.done), metrics)


def number(value: Any, *, what: str) -> float:
    """Convert a value to a finite float. Types that support float(), such as numpy's and torch's, are accepted too."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise WrongResult(f"{what} {_shown(value)}; return a number")
    if not math.isfinite(found := float(value)):
        raise WrongResult(f"{what} {found}; return a finite number")
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else f'{text[:80]}...'} ({type(value).__name__})"


# Runs in the environment's process


@dataclass(slots=True, kw_only=True)
class StepPlayer:
    """A class and, in a forked process, one instance of it that is reset for each episode."""

    schemas: ClassVar[list[dict[str, Any]]] = []  # step-by-step classes declare no tools
    cls: type
    kwargs: Mapping[str, Any]
    instance: Any = None
    examine: Callable[[BaseException], None] = lambda error: None

    def reset(self, row: Mapping[str, Any], run: Callable[[Any], Any]) -> str | None:
        if self.instance is None:
            self.instance = self.cls(**self.kwargs)
        returned = run(self.instance.reset(dict(row)))
        text = returned.text if isinstance(returned, Observation) else returned
        if text is not None and not isinstance(text, str):
            raise WrongResult(f"reset returned {_shown(returned)}; return an Observation, a string or None")
        return text

    def step(self, text: str, token_ids: list[int], run: Callable[[Any], Any]) -> dict[str, Any]:
        result = result_of(run(self.instance.step(text, token_ids)))
        seen = result.observation
        messages: list[dict[str, str]] = []
        if isinstance(seen, Observation) and not result.done:
            messages = [{"role": seen.role, "content": seen.text, "name": seen.name}]
        metrics = dict(result.metrics)
        return {"messages": messages, "done": result.done, "reward": result.reward, "metrics": metrics, "calls": []}

    def reward(self, run: Callable[[Any], Any]) -> float | None:
        return None


def load_stepwise(path: str, *, key: str, kwargs: Mapping[str, Any]) -> StepPlayer:
    """Load a class. Raise a ValueError that says why it cannot be used and what to do."""
    wanted = "use a class with reset(self, row) and step(self, text, token_ids)"
    methods = {"reset": ("a row", [{}]), "step": ("text and token_ids", ["", []])}
    cls = class_at(path, key=key, kwargs=kwargs, methods=methods, wanted=wanted)
    for name, (told, arguments) in methods.items():
        try:
            inspect.signature(getattr(cls, name)).bind(None, *arguments)
        except TypeError as error:
            raise ValueError(f"{key}={path!r}: {name} cannot be called with {told} ({error}); {wanted}") from None
        except ValueError:
            continue  # it has no signature to check
    return StepPlayer(cls=cls, kwargs=kwargs)


def class_at(path: str, *, key: str, kwargs: Mapping[str, Any], methods: Iterable[str], wanted: str) -> type:
    """Load the class at ``module:Class``, and check that it accepts these arguments and has the methods."""
    cls = load_named(path, key=key, what="Class", example="my_env:Game")
    if not inspect.isclass(cls):
        raise ValueError(f"{key}={path!r} is {type(cls).__name__}, not a class; {wanted}")
    for name in methods:
        if not callable(getattr(cls, name, None)):
            raise ValueError(f"{key}={path!r} has no {name}; {wanted}")
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        given = f"environment.kwargs={dict(kwargs)}" if kwargs else "no arguments"
        raise ValueError(
            f"{key}={path!r} cannot be instantiated with {given} ({error}); set environment.kwargs to the arguments of its __init__"
        ) from None
    except ValueError:
        pass  # its constructor has no signature to check
    return cls
