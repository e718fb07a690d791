"""The user's functions that a run calls after each step, each evaluation and each checkpoint.

The training thread calls them and waits. If a callback raises, the run ends with an error that names the callback. The files on disk stay
intact, and the same call continues the run. If a resumed run trains a step again, its callbacks are called again.
"""

# pyright: strict
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollcall.base.errors import ConfigError

if TYPE_CHECKING:
    from rollcall.base.types import Group
    from rollcall.loop.evaluate import Evaluation


class CallbackError(RuntimeError):
    """A callback raised an exception, which is the ``__cause__``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    step: int
    num_steps: int  # trainer.steps
    metrics: Mapping[str, float]  # the step's row; names as in docs/metrics.md
    groups: tuple[Group, ...]  # the groups that the step was trained on

    @property
    def reward_mean(self) -> float:
        return self.metrics["train/reward_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    step: int  # 0: before training
    num_steps: int
    metrics: Mapping[str, float]
    evaluation: Evaluation

    @property
    def accuracy(self) -> float:
        return self.evaluation.accuracy

    @property
    def reward_mean(self) -> float:
        return self.evaluation.reward_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    step: int
    num_steps: int
    path: Path  # transformers can open its model/ folder, unless the model is saved in parts (`rollcall merge`)


_NAMES = {StepDone: "on_step", EvaluationDone: "on_evaluation", CheckpointSaved: "on_save"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    on_step: Callable[[StepDone], None] | None = None
    on_evaluation: Callable[[EvaluationDone], None] | None = None
    on_save: Callable[[CheckpointSaved], None] | None = None

    def __post_init__(self) -> None:
        for name in _NAMES.values():
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise ConfigError(
                    f"{name}={given!r} is not callable; pass a function with one parameter, or leave it out"
                )
            if inspect.iscoroutinefunction(given):
                raise ConfigError(
                    f"{name}={getattr(given, '__qualname__', given)} is async, but the run does not await callbacks; pass a regular "
                    "function"
                )

    def tell(self, what: StepDone | EvaluationDone | CheckpointSaved) -> None:
        name = _NAMES[type(what)]
        callback = getattr(self, name)
        if callback is None:
            return
        try:
            callback(what)
        except Exception as error:
            given = getattr(callback, "__qualname__", repr(callback))
            raise CallbackError(
                f"{name}={given} raised at step {what.step}: {type(error).__name__}: {error}\nThe run has ended; fix the function, "
                "then train again: the run continues from the newest checkpoint"
            ) from error
