"""The learning curve as a picture: the run's headline (held-out accuracy or reward) and training reward over steps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rollcall.base.atomic import write_atomic
from rollcall.base.wait import warn
from rollcall.observe.headline import headline_of
from rollcall.observe.sinks import read_rows

_SMOOTH_FROM = 10  # fewer points are shown as they are
_HELD_OUT, _REWARD, _INK, _GRID = "#1f5fa8", "#d9822b", "#333333", "#e4e4e4"


def learning_curve(metrics_path: Path, out: Path, *, name: str | None = None) -> Path | None:
    """Draw ``metrics_path`` to the PNG ``out``; None, with a warning, if it cannot be drawn.

    ``name`` is the run's name in the title; the run directory's by default.
    """
    rows = read_rows(metrics_path)
    headline = headline_of(rows)
    held_out, reward = _series(rows, headline.metric), _series(rows, "train/reward_mean")
    if not held_out[0] and not reward[0]:
        warn(f"no learning curve: {metrics_path} has no evaluation and no reward yet")
        return None
    try:
        import matplotlib
    except ImportError:
        warn("no learning curve: matplotlib is not installed; run: pip install matplotlib")
        return None
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 11, "font.family": "DejaVu Sans", "text.color": _INK}):
        figure = Figure(figsize=(9, 5), dpi=150, facecolor="white", layout="constrained")
        title = name or metrics_path.resolve().parent.name
        _draw(figure, held_out=held_out, reward=reward, name=title, words=headline.words)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, buffer.getvalue())
    return out


Series = tuple[list[int], list[float]]


def _draw(figure: Any, *, held_out: Series, reward: Series, name: str, words: str) -> None:
    figure.get_layout_engine().set(w_pad=0.16, h_pad=0.12, hspace=0.04)
    # Rewards on another scale would flatten values between 0 and 1, so they get their own panel.
    apart = bool(held_out[0] and reward[0]) and _within_unit(held_out[1]) != _within_unit(reward[1])
    panels = figure.subplots(2 if apart else 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes in panels:
        _style(axes)
    top, bottom = panels[0], panels[-1]
    if held_out[0]:
        _draw_held_out(top, held_out, words=words)
    if reward[0]:
        _draw_reward(bottom, reward)
    for axes, values in ((top, held_out[1]), (bottom, reward[1])):
        if values and _within_unit(values):
            axes.set_ylim(0, 1.03)
    steps = [*held_out[0], *reward[0]]
    span = max(max(steps) - min(steps), 1)
    bottom.set_xlim(min(steps) - (0.09 if held_out[0] else 0.015) * span, max(steps) + 0.015 * span)
    top.set_title(name, loc="left", fontsize=15, fontweight="bold", color=_INK, pad=30)
    bottom.set_xlabel("training step", color=_INK)
    for axes in panels:
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.012, 1.0), ncols=3, frameon=False, borderaxespad=0.2,
            labelcolor=_INK, handlelength=1.6, columnspacing=1.6,
        )  # fmt: skip


def _style(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    axes.tick_params(colors=_INK, length=0)


def _draw_held_out(axes: Any, series: Series, *, words: str) -> None:
    from matplotlib.patheffects import withStroke

    axes.plot(*series, color=_HELD_OUT, linewidth=2.2, marker="o", markersize=5, label=words, zorder=4)
    # The first and the last value as numbers: readers look for them first.
    for index, place in (
        (0, {"xytext": (-9, 0), "va": "center", "ha": "right"}),
        (-1, {"xytext": (9, 0), "va": "center"}),
    ):
        if index == 0 and len(series[0]) == 1:
            continue
        axes.annotate(
            f"{series[1][index]:.3f}", (series[0][index], series[1][index]), textcoords="offset points",
            color=_HELD_OUT, fontweight="bold", fontsize=10.5, zorder=5,
            path_effects=[withStroke(linewidth=3, foreground="white")], **place,
        )  # fmt: skip


def _draw_reward(axes: Any, series: Series) -> None:
    smoothed = len(series[0]) >= _SMOOTH_FROM
    thin = {"alpha": 0.35, "linewidth": 1.0} if smoothed else {"linewidth": 2.0, "marker": "o", "markersize": 4}
    axes.plot(*series, color=_REWARD, label="training reward, each step", zorder=2, **thin)
    if smoothed:
        axes.plot(series[0], smooth(series[1]), color=_REWARD, linewidth=2.2, label="smoothed", zorder=3)


def _within_unit(values: list[float]) -> bool:
    return min(values) >= 0 and max(values) <= 1


def smooth(values: list[float]) -> list[float]:
    """Mean over a window of about a twentieth of the run around each point."""
    half = max(1, len(values) // 40)
    return [
        sum(values[max(0, at - half) : at + half + 1]) / len(values[max(0, at - half) : at + half + 1])
        for at in range(len(values))
    ]


def _series(rows: list[dict[str, Any]], name: str) -> Series:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
