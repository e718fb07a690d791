"""Draws the learning curve: the run's headline (held-out accuracy or reward) and training reward over steps."""

from __future__ import annotations

import io
from pathlib import Path

from rollcall.base.atomic import write_atomic
from rollcall.base.wait import warn
from rollcall.view.curves import smoothed
from rollcall.view.growing import MetricsTable

_SMOOTH_FROM = 10  # fewer points are not smoothed


def learning_curve(metrics: MetricsTable, out: Path, *, name: str) -> Path | None:
    """Draw the PNG ``out`` with ``name`` as its title; if it cannot be drawn, warn and return None."""
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

    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):  # included in matplotlib
        figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (label, (steps, _, values), colour) in zip(all_axes, panels, strict=True):
            is_smoothed = len(values) >= _SMOOTH_FROM
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
