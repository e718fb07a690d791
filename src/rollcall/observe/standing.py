"""How far a run is, read from its directory: step, reward, headline, time left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollcall.durable.lease import Holder
from rollcall.observe.headline import Headline, headline_of
from rollcall.observe.progress import STEPS_COUNTED, format_duration
from rollcall.observe.signal import ADVANTAGE, no_signal
from rollcall.observe.sinks import read_rows
from rollcall.words import counted

# Metrics under ``episode/``, and what they are called in a line.
EPISODE_COUNTS = {"turns_mean": "turns", "tool_calls_mean": "tool calls"}
EPISODE_ENDS = {
    "failed_fraction": "failed", "truncated_fraction": "reached a limit", "timed_out_fraction": "took too long",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    step: int  # the last that was trained
    num_steps: int | None  # None: the run file does not say
    reward: float | None  # of that step
    headline: Headline
    first: float | None
    last: float | None
    left_s: float | None  # None: nothing runs, it waits, or no whole step of this process has been measured
    without_signal: tuple[int, int]  # how many steps taught nothing, of how many
    episodes: Mapping[str, float] | None  # what their turns were in that step, by metric; None: it had none

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


def standing(run_dir: Path, *, num_steps: int | None, holder: Holder | None) -> Standing:
    """``holder`` is the process that has the run directory; without one the run makes no progress."""
    rows = read_rows(run_dir / "metrics.jsonl")
    steps = [row for row in rows if row.get("time/step_s") is not None]
    headline = headline_of(rows)
    values = headline.values(rows)
    step = steps[-1]["step"] if steps else 0
    advantages = [row.get(ADVANTAGE) for row in steps]
    since = None if holder is None or holder.is_gone or holder.waits else _since(holder)
    return Standing(
        step=step,
        num_steps=num_steps,
        reward=steps[-1].get("train/reward_mean") if steps else None,
        headline=headline,
        first=values[0] if values else None,
        last=values[-1] if values else None,
        left_s=None if since is None else _left_s(steps, num_steps=num_steps, since=since),
        without_signal=(advantages.count(0), len(advantages)),
        episodes=_episodes(steps[-1]) if steps else None,
    )


def _episodes(row: Mapping[str, Any]) -> dict[str, float] | None:
    names = (*EPISODE_COUNTS, *EPISODE_ENDS)
    found = {name: row[f"episode/{name}"] for name in names if row.get(f"episode/{name}") is not None}
    return found or None


def _in_words(episodes: Mapping[str, float]) -> str:
    """
    >>> _in_words({"turns_mean": 3.25, "tool_calls_mean": 2.0, "failed_fraction": 0.125, "timed_out_fraction": 0.0})
    '3.2 turns, 2.0 tool calls each; 12 % failed, 0 % took too long'
    """
    counts = [f"{episodes[name]:.1f} {words}" for name, words in EPISODE_COUNTS.items() if name in episodes]
    ends = [f"{100 * episodes[name]:.0f} % {words}" for name, words in EPISODE_ENDS.items() if name in episodes]
    return f"{', '.join(counts)} each; {', '.join(ends)}"


def _left_s(steps: Sequence[Mapping[str, Any]], *, num_steps: int | None, since: float) -> float | None:
    """At the pace of the recent steps that the present process has trained, without its first, which also warms up."""
    recent = [row for row in steps if row.get("time", 0.0) >= since][1:][-STEPS_COUNTED:]
    if not recent or num_steps is None or recent[-1]["step"] >= num_steps:
        return None
    pace = statistics.fmean(
        sum(row.get(f"time/{part}_s") or 0.0 for part in ("step", "eval", "save")) for row in recent
    )
    return max(0.0, pace * (num_steps - recent[-1]["step"]) - (time.time() - recent[-1]["time"]))


def _since(holder: Holder) -> float:
    """When the holder took the directory, by the clock that its rows have too; 0 if it does not say."""
    try:
        return datetime.strptime(holder.since, "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
