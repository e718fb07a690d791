"""Computes a run's progress and remaining time, but does not display them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rollcall.observe.headline import headline_of

STEPS_COUNTED = 20  # only recent steps determine the pace, because completion lengths drift


class Doing(NamedTuple):
    """The current phase, and when it began, in seconds since the start."""

    text: str
    since_s: float


class Progress:
    """The numbers to display. ``rows`` are the metrics of steps that earlier processes trained."""

    def __init__(
        self, *, name: str, num_steps: int, start_step: int = 0, rows: Iterable[Mapping[str, float]] = ()
    ) -> None:
        self.name = name
        self.num_steps = num_steps
        self.step = start_step
        self.metrics: dict[str, float] = {}
        self.current: Doing | None = None
        self._started = time.monotonic()
        self._evaluations = {int(row["step"]): dict(row) for row in rows if "eval/accuracy" in row}
        self._marks: deque[tuple[int, float]] = deque(maxlen=STEPS_COUNTED + 1)

    def restart(self, step: int) -> None:
        """Continue from ``step``: repeat later steps and measure the pace again."""
        self.step = step
        self.metrics.clear()
        self._marks.clear()
        self._evaluations = {at: row for at, row in self._evaluations.items() if at <= step}

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        if "time/step_s" in metrics:
            self._marks.append((step, time.monotonic()))
        self.step = step
        self.metrics.update(metrics)
        if "eval/accuracy" in metrics:
            self._evaluations[step] = dict(metrics)

    def phase(self, text: str | None) -> None:
        self.current = None if text is None else Doing(text, self.elapsed_s)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the recent pace, including evaluations and saves. None until a full step has been
        measured. The first step after a start does not count, because it includes loading, compilation and warm-up."""
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return max(0.0, (ended - began) / (last - first) * (self.num_steps - self.step) - (time.monotonic() - ended))

    def fields(self) -> list[tuple[str, str]]:
        """Return the label and value of each available number."""
        found = [("step", f"{self.step}/{self.num_steps}")]
        evaluations = [self._evaluations[at] for at in sorted(self._evaluations)]
        headline = headline_of(evaluations)
        if values := [row[headline.metric] for row in evaluations if row.get(headline.metric) is not None]:
            found.append((headline.label, f"{values[0]:.3f} → {values[-1]:.3f}"))
        if evaluations and (errors := evaluations[-1].get("eval/reward_errors")):
            found.append(("eval reward errors", f"{errors:.0f}/{evaluations[-1]['eval/completions']:.0f}"))
        rates = (
            ("reward", "train/reward_mean", ".3f"),
            ("tok/s", "rollout/tokens_per_s", ",.0f"),
            ("s/step", "time/step_s", ".2f"),
        )
        found += [(label, format(self.metrics[key], form)) for label, key, form in rates if key in self.metrics]
        if errors := self.metrics.get("train/reward_errors"):
            found.append(("reward errors", f"{errors:.0f}/{self.metrics['train/completions']:.0f}"))
        left_s = self.left_s if self.step < self.num_steps else None
        label, seconds = ("elapsed", self.elapsed_s) if left_s is None else ("left", left_s)
        return [*found, (label, format_duration(seconds))]


def format_duration(seconds: float) -> str:
    """Format as 42s, 3m 05s, 2h 10m or 3d 04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"
