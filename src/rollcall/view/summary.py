"""Builds ``summary.json``, the results of a whole run including earlier processes; the messages at a run's end; and its progress: step,
reward, headline and time left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from rollcall.base.atomic import write_atomic
from rollcall.base.lease import Holder
from rollcall.base.wait import say, warn
from rollcall.base.words import all_of, are, counted
from rollcall.checkpoint.run_dir import newest_step
from rollcall.model.stored.find import ADAPTER_CONFIG
from rollcall.observe.headline import ACCURACY, BY_METRIC, REWARD
from rollcall.observe.progress import STEPS_COUNTED, format_duration
from rollcall.view.growing import MetricsTable

ADVANTAGE = "train/advantage_abs_mean"
WORTH_SAYING = 0.1  # the fraction of steps without signal that is worth a message
ADVICE = (
    "In such a step, all completions of each group got the same score or were left out of the loss, so the model had nothing to "
    "learn. Use prompts that the model solves sometimes but not always, raise rollout.samples_per_prompt, or use a reward with more "
    "values than right and wrong"
)


def build_summary(
    metrics: MetricsTable, *, seconds: float = 0.0, resume_step: int | None = None, peak_gib: float = 0.0, **extra: Any
) -> dict[str, Any]:
    """Build the summary. ``seconds`` and ``peak_gib`` are the training process's wall time and memory. Steps up to
    ``resume_step`` add the time that they took in earlier processes.

    ``extra`` values (run name, model directory, ...) are copied to the result. A number is None if no row contains it.
    """
    metrics.refresh()
    before_s = 0.0
    for name in ("time/step_s", "time/eval_s", "time/save_s"):
        steps, _, values = metrics.column(name)
        before_s += 0.0 if resume_step is None else float(values[steps <= resume_step].sum())
    rewards, advantages = metrics.values("train/reward_mean"), metrics.values(ADVANTAGE)
    errors = sum(sum(metrics.values(name)) for name in metrics.names() if name.startswith("reward_errors/"))
    return {
        "steps": metrics.step,
        "seconds": round(before_s + seconds, 3),
        "headline": metrics.headline.metric,
        "eval": {one.key: _course(metrics.values(one.metric)) for one in (ACCURACY, REWARD)},
        "reward_mean": {"first": next(iter(rewards), None), "last": next(reversed(rewards), None)},
        "tokens_generated": int(sum(metrics.values("rollout/tokens"))),
        "tokens_trained": int(sum(metrics.values("train/tokens"))),
        "rollout_tokens_per_s": _median_generated(metrics, "rollout/tokens_per_s"),
        "train_tokens_per_s": _or_none(median, metrics.values("perf/train_tokens_per_s")),
        "step_s": _median_generated(metrics, "time/step_s"),
        "logprob_mismatch": _or_none(fmean, metrics.values("rollout/logprob_mismatch")),
        "logprob_mismatch_max": max(metrics.values("rollout/logprob_mismatch_max"), default=None),
        "peak_memory_gib": round(max([*metrics.values("perf/peak_memory_gib"), peak_gib]), 3),
        "reward_errors": int(errors),
        "no_signal": {"steps": advantages.count(0), "of": len(advantages)},
        **extra,
    }


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(summary, indent=2, default=str) + "\n")


def _course(values: list[float]) -> dict[str, float | None]:
    first, last, best = (values[0], values[-1], max(values)) if values else (None, None, None)
    return {"first": first, "last": last, "best": best}


def _or_none(of: Callable[[list[float]], float], values: list[float]) -> float | None:
    return of(values) if values else None


def _median_generated(metrics: MetricsTable, name: str) -> float | None:
    """Return the median without replayed steps, because those generate little or nothing."""
    replayed, _, groups = metrics.column("rollout/groups_from_journal")
    steps, _, values = metrics.column(name)
    return _or_none(median, values[~np.isin(steps, replayed[groups > 0])].tolist())


def trained(num_steps: int) -> str:
    return f"{all_of(num_steps, 'step')} {are(num_steps)} trained"


def no_signal(counts: Mapping[str, int]) -> str | None:
    """Say in how many steps every advantage was 0, so the model learned nothing from them. Returns None if there are few such steps.

    >>> no_signal({"steps": 11, "of": 12}), no_signal({"steps": 12, "of": 12}), no_signal({"steps": 1, "of": 12})
    ('11 of 12 steps had no signal', 'no step had a signal, so nothing was learned in 12 steps', None)
    """
    num, num_steps = counts["steps"], counts["of"]
    if num == 0 or num < WORTH_SAYING * num_steps:
        return None
    if num == num_steps:
        return f"no step had a signal, so nothing was learned in {counted(num, 'step')}"
    return f"{num} of {num_steps} steps had no signal"


def _headline_course(summary: dict[str, Any]) -> str | None:
    """Return the headline's first and last value as text, or None if the run has no evaluation."""
    headline = BY_METRIC[summary["headline"]]
    course = summary["eval"][headline.key]
    if course["first"] is None:
        return None
    return f"{headline.words} {course['first']:.3f} -> {course['last']:.3f}"


def _no_signal(run_dir: Path, summary: dict[str, Any]) -> str | None:
    words = no_signal(summary["no_signal"])
    if words is None:
        return None
    answers = f"{run_dir / 'samples'} contains answers with their rewards"
    return f"{words}. {ADVICE}. {answers}, and `rollcall reward test {run_dir / 'run.yaml'}` tries the reward"


def finished(run_dir: Path, summary: dict[str, Any]) -> str:
    course = _headline_course(summary)
    return (
        f"{run_dir} is finished: {trained(summary['steps'])}{f', {course}' if course else ''}, and the model is in "
        f"{run_dir / 'model'}\nto train further: rollcall train {run_dir} trainer.steps={2 * summary['steps']}; to start over: "
        "the same command with --fresh" + (f"\n{told}" if (told := _no_signal(run_dir, summary)) else "")
    )


def interrupted(run_dir: Path, *, num_steps: int, by: str, fresh: bool) -> str:
    """Describe an interrupted run's state, and how to continue it."""
    if not run_dir.exists():
        return f"stopped by {by} before anything was trained; {run_dir} was not created"
    metrics, saved = MetricsTable(run_dir), newest_step(run_dir)
    metrics.refresh()
    same = "the same command without --fresh continues the run" if fresh else "the same command continues the run"
    if metrics.step == saved:
        return f"stopped by {by} after step {saved} of {num_steps}, which is saved; {same}"
    kept = "every finished group"
    if saved is not None:
        kept = f"a checkpoint of step {saved} and every group finished since then"
    how = f"{same}, and so does `rollcall train {run_dir}`"
    return f"stopped by {by} after step {metrics.step} of {num_steps}; {run_dir} contains {kept}; {how}"


def say_result(run_dir: Path, summary: dict[str, Any], curve: Path | None) -> None:
    if course := _headline_course(summary):
        say(f"{course} in {summary['seconds']:.0f} s")
    if summary["reward_errors"]:
        say(f"{counted(summary['reward_errors'], 'completion')} could not be scored and count as 0; the first are:")
        for failure in summary["reward_failures"][:3]:
            say(f"  {failure['reward']} {failure['kind']} on {failure['prompt']}: {failure['why'].splitlines()[-1]}")
    if told := _no_signal(run_dir, summary):
        warn(told)
    if not (run_dir / "model").exists():
        say(f"trained to step {summary['steps']}; continue with --phase rollout, or with --phase both")
        return
    opens = "peft's PeftModel" if (run_dir / "model" / ADAPTER_CONFIG).exists() else "AutoModelForCausalLM"
    say(f"model          {run_dir / 'model'}   (for {opens}.from_pretrained)")
    if curve is not None:
        say(f"learning curve {curve}")
    say(f"metrics        {run_dir / 'metrics.jsonl'}\nsummary        {run_dir / 'summary.json'}")


# Metrics under ``episode/``, with their names in the printed line.
EPISODE_COUNTS = {"turns_mean": "turns", "tool_calls_mean": "tool calls"}
EPISODE_ENDS = {
    "failed_fraction": "failed", "truncated_fraction": "reached a limit", "timed_out_fraction": "took too long",
}  # fmt: skip


def standing(metrics: MetricsTable, *, num_steps: int | None, holder: Holder | None) -> dict[str, Any]:
    """Return the run's progress. ``holder`` is the process that runs it; without a holder, the time left is None."""
    so_far, headline = build_summary(metrics), metrics.headline
    return {
        "step": so_far["steps"],
        "steps": num_steps,
        "reward": so_far["reward_mean"]["last"],
        "headline": {"metric": headline.metric, "words": headline.words, **so_far["eval"][headline.key]},
        "step_s": so_far["step_s"],
        "left_s": None if holder is None else _left_s(metrics, num_steps=num_steps, holder=holder),
        "no_signal": so_far["no_signal"],
        "episodes": _episodes(metrics),
    }


def standing_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a label and a text for each known number."""
    rows = [("step", f"{found['step']}" if found["steps"] is None else f"{found['step']} of {found['steps']}")]
    headline, words = found["headline"], no_signal(found["no_signal"])
    if found["reward"] is not None:
        rows.append(("reward", f"{found['reward']:.3f}"))
    if found["episodes"] is not None:
        rows.append(("episodes", _in_words(found["episodes"])))
    if headline["first"] is not None:
        rows.append((headline["words"], f"{headline['first']:.3f} -> {headline['last']:.3f}"))
    if words is not None:
        rows.append(("", f"{words} (all completions of each group got the same score)"))
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


def _left_s(metrics: MetricsTable, *, num_steps: int | None, holder: Holder) -> float | None:
    """Estimate the time left from recent steps of the current process. Ignores its first step, which includes the warm-up."""
    try:  # the start of the process, on the same clock as its metrics
        since = datetime.strptime(holder.since, "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC).timestamp()
    except ValueError:
        since = 0.0
    steps, times, _ = metrics.column("time/step_s")
    recent = set(steps[times >= since][1:][-STEPS_COUNTED:].tolist())
    if not recent or num_steps is None or steps[-1] >= num_steps:
        return None
    spent_s = 0.0
    for part in ("step", "eval", "save"):
        at, _, seconds = metrics.column(f"time/{part}_s")
        spent_s += sum(value for step, value in zip(at.tolist(), seconds.tolist(), strict=True) if step in recent)
    return max(0.0, spent_s / len(recent) * (num_steps - float(steps[-1])) - (time.time() - float(times[-1])))
