"""Reports a run's progress from its metrics: step, reward, headline, time left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rollcall.base.lease import Holder
from rollcall.observe.progress import STEPS_COUNTED, format_duration
from rollcall.view.growing import MetricsTable
from rollcall.view.summary import build_summary, no_signal

# Metrics under ``episode/`` and their names in the printed line.
EPISODE_COUNTS = {"turns_mean": "turns", "tool_calls_mean": "tool calls"}
EPISODE_ENDS = {
    "failed_fraction": "failed", "truncated_fraction": "reached a limit", "timed_out_fraction": "took too long",
}  # fmt: skip


def standing(metrics: MetricsTable, *, num_steps: int | None, holder: Holder | None) -> dict[str, Any]:
    """Return the last step and the run so far. ``holder`` is the process that runs it; without a holder there is no time left."""
    so_far, headline = build_summary(metrics), metrics.headline
    return {
        "step": so_far["steps"],
        "steps": num_steps,
        "reward": so_far["reward_mean"]["last"],
        "headline": {"metric": headline.metric, "words": headline.words, **so_far["eval"][headline.key]},
        "step_s": so_far["step_s"],
        "left_s": None if holder is None else _left_s(metrics, num_steps=num_steps, since=_since(holder)),
        "no_signal": so_far["no_signal"],
        "episodes": _episodes(metrics),
    }


def standing_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return label and text for each number that is known."""
    rows = [("step", f"{found['step']}" if found["steps"] is None else f"{found['step']} of {found['steps']}")]
    headline, words = found["headline"], no_signal(found["no_signal"])
    if found["reward"] is not None:
        rows.append(("reward", f"{found['reward']:.3f}"))
    if found["episodes"] is not None:
        rows.append(("episodes", _in_words(found["episodes"])))
    if headline["first"] is not None:
        rows.append((headline["words"], f"{headline['first']:.3f} -> {headline['last']:.3f}"))
    if words is not None:
        rows.append(("", f"{words} (all completions of each group scored alike)"))
    if found["left_s"] is not None:
        rows.append(("left", format_duration(found["left_s"])))
    return rows


def _episodes(metrics: MetricsTable) -> dict[str, float] | None:
    """Return the last step's episode metrics."""
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
    """Estimate the time left from the current process's recent steps, without its first, which includes the warm-up."""
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
    """Return when the holder took the directory, on the same clock as its metrics, or 0 if it does not say."""
    try:
        return datetime.strptime(holder.since, "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
