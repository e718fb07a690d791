"""Prepares curves for a screen: smooths them over all points, and then thins them without losing spikes. Also draws the learning curve of
a finished run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollcall.base.atomic import write_atomic
from rollcall.base.wait import warn
from rollcall.observe.metrics import METRICS
from rollcall.view.growing import MetricsTable, Numbers

# In the page's order. A metric belongs to the best match: an exact name, or the longest prefix.
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Accuracy", ("eval/accuracy", "eval/pass_at_k", "train/accuracy", "eval/graded_fraction")),
    ("Reward", ("train/reward_mean", "eval/reward_mean", "train/reward_std", "reward/", "train/zero_variance_groups",
                "train/advantage_abs_mean", "train/reward_errors", "eval/reward_errors", "reward_errors/")),
    ("Lengths", ("rollout/response_length_mean", "rollout/truncated_fraction", "eval/response_length_mean",
                 "eval/truncated_fraction", "rollout/tokens", "eval/completions", "train/completions")),
    ("Entropy", ("train/entropy",)),
    ("KL", ("train/kl", "train/approx_kl")),
    ("Mismatch", ("rollout/logprob_mismatch", "train/tis_weight_mean", "train/masked_fraction")),
    ("Learning", ("train/loss", "train/grad_norm", "train/lr", "train/clip_fraction", "train/ratio_mean",
                  "train/skipped_fraction", "train/value", "train/refills")),
    ("Speed", ("rollout/tokens_per_s", "perf/train_tokens_per_s", "time/", "train/tokens")),
    ("Memory", ("perf/peak_memory_gib", "rollout/preemptions")),
    ("Staleness", ("rollout/staleness", "rollout/groups_from_journal")),
)  # fmt: skip


def group_of(name: str) -> tuple[int, int]:
    """Return a metric's position on the page: the index of its group and its place in the group.

    >>> GROUPS[group_of("time/step_s")[0]][0], GROUPS[group_of("rollout/tokens_per_s")[0]][0]
    ('Speed', 'Speed')
    """
    found = [
        (name != start, -len(start), group, place)
        for group, (_, starts) in enumerate(GROUPS)
        for place, start in enumerate(starts)
        if name.startswith(start)
    ]
    _, _, group, place = min(found, default=(True, 0, len(GROUPS), 0))
    return group, place


def describe(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return every metric with its group, unit and meaning, in the page's order."""
    shown = []
    for name in sorted(names, key=lambda name: (group_of(name), name)):
        group, _ = group_of(name)
        unit, meaning = METRICS.get(name) or METRICS.get(f"{name.partition('/')[0]}/<part>") or ("", "")
        label = GROUPS[group][0] if group < len(GROUPS) else "Other"
        shown.append({"name": name, "group": label, "unit": unit, "meaning": meaning})
    return shown


def curve(
    table: MetricsTable, name: str, *, axis: str, points: int, smooth: float, low: float | None, high: float | None
) -> dict[str, Any]:
    """Return ``x`` and ``y`` between ``low`` and ``high``. With ``smooth``, also return the smoothed values as ``even``."""
    steps, times, values = table.column(name)
    x = times if axis == "time" else steps
    # Short curves, such as evaluations, are not smoothed.
    even = smoothed(values, smooth) if smooth > 0 and len(values) >= 30 else None
    kept = np.isfinite(x)
    if low is not None:
        kept &= x >= low
    if high is not None:
        kept &= x <= high
    x, values, even = x[kept], values[kept], None if even is None else even[kept]
    chosen = thinned(values, points=points)
    answer: dict[str, Any] = {"num": len(values), "x": x[chosen].tolist(), "y": short(values[chosen])}
    if axis == "time":
        answer["step"] = steps[kept][chosen].astype(int).tolist()
    if even is not None:
        answer["even"] = short(even[chosen])
    return answer


def smoothed(values: Numbers, weight: float) -> Numbers:
    """Return the exponential moving average, which starts at the first value instead of 0.

    >>> smoothed(np.array([1.0, 0.0, 0.0]), 0.5).round(3).tolist()
    [1.0, 0.333, 0.143]
    """
    total = mass = 0.0
    found = []
    for value in values.tolist():
        total = weight * total + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        found.append(total / mass)
    return np.array(found)


def thinned(values: Numbers, *, points: int) -> NDArray[np.intp]:
    """Choose about ``points`` values that keep all extremes: both ends, and the smallest and the largest value in each of ``points / 2``
    parts.

    >>> thinned(np.array([0.0, 9.0, 1.0, 2.0, -5.0, 3.0]), points=4).tolist()
    [0, 1, 4, 5]
    """
    if len(values) <= points:
        return np.arange(len(values))
    cuts = np.linspace(0, len(values), max(points // 2, 1) + 1).astype(int)
    chosen = {0, len(values) - 1}
    for start, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        part = values[start:end]
        chosen |= {start + int(part.argmin()), start + int(part.argmax())}
    return np.array(sorted(chosen))


def short(values: NDArray[np.floating]) -> list[float]:
    """Round to six digits. This is more precise than a screen can show, and it halves the size of an answer."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def learning_curve(metrics: MetricsTable, out: Path, *, name: str) -> Path | None:
    """Draw the PNG ``out`` with ``name`` as its title. Warns and returns None if it cannot be drawn."""
    metrics.refresh()
    headline = metrics.headline
    series = ((headline.words, headline.metric, "#1f5fa8"), ("training reward", "train/reward_mean", "#d9822b"))
    panels = [(label, metrics.column(metric), colour) for label, metric, colour in series if metrics.values(metric)]
    if not panels:
        warn(f"no learning curve: {out.parent} has no evaluation and no reward yet")
        return None
    try:
        import matplotlib
    except ImportError:
        warn("no learning curve: matplotlib is not installed; run: pip install matplotlib")
        return None
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):  # this font comes with matplotlib
        figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (label, (steps, _, values), colour) in zip(all_axes, panels, strict=True):
            is_smoothed = len(values) >= 10
            axes.plot(steps, values, color=colour, marker="o", markersize=3, alpha=0.35 if is_smoothed else 1.0)
            if is_smoothed:
                axes.plot(steps, smoothed(values, 0.8), color=colour, linewidth=2.2)
            axes.set_title(f"{label}: {values[0]:.3f} to {values[-1]:.3f}", loc="left", fontsize=10)
            axes.grid(axis="y", alpha=0.4)
        figure.suptitle(name, fontweight="bold")
        all_axes[-1].set_xlabel("training step")
        all_axes[-1].xaxis.get_major_locator().set_params(integer=True)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, buffer.getvalue())
    return out
