"""The progress of a run, by its metrics: step, reward, headline, time left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rollcall.base.lease import Holder
from rollcall.base.words import counted
from rollcall.observe.headline import Headline
from rollcall.observe.progress import STEPS_COUNTED, format_duration
from rollcall.view.growing import MetricsTable

# Metrics under ``episode/``, and what they are called in a line.
EPISODE_COUNTS = {"turns_mean": "turns", "tool_calls_mean": "tool calls"}
EPISODE_ENDS = {
    "failed_fraction": "failed", "truncated_fraction": "reached a limit", "timed_out_fraction": "took too long",
}  # fmt: skip

ADVANTAGE = "train/advantage_abs_mean"
WORTH_SAYING = 0.1  # of the steps
ADVICE = (
    "In such a step all completions of each group scored alike or were left out of the loss, so there was nothing to prefer. Use "
    "prompts that the model solves sometimes but not always, raise rollout.samples_per_prompt, or let the reward give more than "
    "right and wrong"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    step: int  # the last that was trained
    num_steps: int | None  # None if the run file does not say
    reward: float | None  # of that step
    headline: Headline
    first: float | None
    last: float | None
    best: float | None
    step_s: float | None  # the median of the recent ones
    left_s: float | None  # None if nothing runs, it waits, or no whole step of this process has been measured
    without_signal: tuple[int, int]  # how many steps taught nothing, of how many
    episodes: Mapping[str, float] | None  # metrics of that step's episodes, if it had any

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each number there is."""
        of = "" if self.num_steps is None else f" of {self.num_steps}"
        found = [("step", f"{self.step}{of}")]
        if self.reward is not None:
            found.append(("reward", f"{self.reward:.3f}"))
        if self.episodes is not None:
            found.append(("episodes", _in_words(self.episodes)))
        if self.first is not None and self.last is not None:
            found.append((self.headline.words, f"{self.first:.3f} -> {self.last:.3f}"))
        num, num_steps = self.without_signal
        if no_signal(num, num_steps=num_steps):
            found.append(
                ("no signal in", f"{num} of {counted(num_steps, 'step')} (all completions of each group scored alike)")
            )
        if self.left_s is not None:
            found.append(("left", format_duration(self.left_s)))
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "steps": self.num_steps,
            "reward": self.reward,
            "headline": {"metric": self.headline.metric, "first": self.first, "last": self.last},
            "left_s": None if self.left_s is None else round(self.left_s),
            "no_signal": dict(zip(("steps", "of"), self.without_signal, strict=True)),
            "episodes": self.episodes,
        }


def standing(metrics: MetricsTable, *, num_steps: int | None, holder: Holder | None) -> Standing:
    """``holder`` is the process that works on the run; without one there is no time left."""
    step, scores, seconds = metrics.step, metrics.values(metrics.headline.metric), metrics.values("time/step_s")
    advantages = metrics.values(ADVANTAGE)
    return Standing(
        step=step,
        num_steps=num_steps,
        reward=metrics.last("train/reward_mean"),
        headline=metrics.headline,
        first=scores[0] if scores else None,
        last=scores[-1] if scores else None,
        best=max(scores, default=None),
        step_s=statistics.median(seconds[-STEPS_COUNTED:]) if seconds else None,
        left_s=None if holder is None else _left_s(metrics, num_steps=num_steps, since=_since(holder)),
        without_signal=(advantages.count(0), len(advantages)),
        episodes=_episodes(metrics),
    )


def _episodes(metrics: MetricsTable) -> dict[str, float] | None:
    """Of the last step."""
    found = {}
    for name in (*EPISODE_COUNTS, *EPISODE_ENDS):
        steps, _, values = metrics.column(f"episode/{name}")
        if len(steps) and steps[-1] == metrics.step:
            found[name] = float(values[-1])
    return found or None


def _in_words(episodes: Mapping[str, float]) -> str:
    """
    >>> _in_words({"turns_mean": 3.25, "tool_calls_mean": 2.0, "failed_fraction": 0.125, "timed_out_fraction": 0.0})
    '3.2 turns, 2.0 tool calls each; 12 % failed, 0 % took too long'
    """
    counts = [f"{episodes[name]:.1f} {words}" for name, words in EPISODE_COUNTS.items() if name in episodes]
    ends = [f"{100 * episodes[name]:.0f} % {words}" for name, words in EPISODE_ENDS.items() if name in episodes]
    return f"{', '.join(counts)} each; {', '.join(ends)}"


def _left_s(metrics: MetricsTable, *, num_steps: int | None, since: float) -> float | None:
    """At the pace of the recent steps that the present process has trained, except its first, which also warms up."""
    steps, times, _ = metrics.column("time/step_s")
    recent = set(steps[times >= since][1:][-STEPS_COUNTED:].tolist())
    if not recent or num_steps is None or steps[-1] >= num_steps:
        return None
    spent_s = 0.0
    for part in ("step", "eval", "save"):
        at, _, seconds = metrics.column(f"time/{part}_s")
        spent_s += sum(value for step, value in zip(at.tolist(), seconds.tolist(), strict=True) if step in recent)
    return max(0.0, spent_s / len(recent) * (num_steps - float(steps[-1])) - (time.time() - float(times[-1])))


def _since(holder: Holder) -> float:
    """When the holder took the directory, by the clock of its metrics too; 0 if it does not say."""
    try:
        return datetime.strptime(holder.since, "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def no_signal(num: int, *, num_steps: int) -> str | None:
    """In words, that steps taught nothing because every advantage was 0. None if these are few.

    >>> no_signal(11, num_steps=12), no_signal(12, num_steps=12), no_signal(1, num_steps=12)
    ('11 of 12 steps had no signal', 'no step had a signal: nothing was learned in 12 steps', None)
    """
    if num == 0 or num < WORTH_SAYING * num_steps:
        return None
    if num == num_steps:
        return f"no step had a signal: nothing was learned in {counted(num, 'step')}"
    return f"{num} of {num_steps} steps had no signal"
