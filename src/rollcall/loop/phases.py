"""The part of the loop that a command runs: everything, only rollout, or only update.

``rollout`` starts from the newest checkpoint, generates all the groups that ``trainer.staleness`` allows, writes them to the journal, and
stops. ``update`` trains the steps whose groups are in the journal, saves, and stops. It can run later and on another cluster. Alternating
these two has the same effect as ``both``. Every phase uses the same loop (``loop/controller.py``); the phase only decides which part of
the loop runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollcall.base.errors import ConfigError


class Phase(StrEnum):
    BOTH = "both"
    ROLLOUT = "rollout"
    UPDATE = "update"


class Split(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The part of the run that this command executes."""

    phase: Phase = Phase.BOTH
    split: Split = Split.TRAIN  # eval: only evaluate the newest checkpoint

    def __post_init__(self) -> None:
        if self.split is Split.EVAL and self.phase is not Phase.ROLLOUT:
            raise ConfigError(
                f"--split eval works only with --phase rollout, not with --phase {self.phase}; add --phase rollout"
            )

    @property
    def trains(self) -> bool:
        return self.phase is not Phase.ROLLOUT


def steps_ahead(staleness: int, *, order: str) -> int:
    """Return the number of steps whose groups may be sampled from the same weight version."""
    return max(staleness, min(staleness + 1, 2)) if order == "as_completed" else staleness + 1


def is_due(step: int, *, every: int, last: int) -> bool:
    """Whether an action is due after this step. It is due every ``every`` steps (0: never) and after the last step."""
    return step == last or (every > 0 and step % every == 0)
