"""The single number that says how good a run is: held-out accuracy, or the mean held-out reward.

Accuracy counts the completions whose first reward reaches ``eval.threshold``. This makes sense only if rewards are
binary. Once an evaluation in a run has a reward other than 0 or 1, the run's headline is the mean reward.
The choice depends only on the rows in metrics.jsonl, so the console, the curve, the summary, ``keep_best`` and `rollcall status`
agree, even after a resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcall.base.types import Score

GRADED = "eval/graded_fraction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    metric: str  # its name in metrics.jsonl
    label: str  # a short name, for tight spaces
    words: str

    @property
    def key(self) -> str:
        """The metric's name in a summary."""
        return self.metric.removeprefix("eval/")


ACCURACY = Headline(metric="eval/accuracy", label="accuracy", words="held-out accuracy")
REWARD = Headline(metric="eval/reward_mean", label="held-out reward", words="held-out reward")
BY_METRIC = {one.metric: one for one in (ACCURACY, REWARD)}


def headline_of(rows: Iterable[Mapping[str, Any]]) -> Headline:
    """Return the headline for a run with these rows. Partial rows are fine if they contain the ``eval/`` metrics.

    >>> headline_of([{"step": 0, GRADED: 0.0}, {"step": 20, GRADED: 0.1}]).label
    'held-out reward'
    """
    return REWARD if any(row.get(GRADED) for row in rows) else ACCURACY


def is_graded(score: Score) -> bool:
    """Whether a completion's reward is neither 0 nor 1. If there is a single reward, its weight is ignored."""
    value = next(iter(score.parts.values())) if len(score.parts) == 1 else score.value
    return value not in (0.0, 1.0)
