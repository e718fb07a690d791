"""What a run did over time, for the page: its timeline, and the marks of faults and recoveries on its curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollcall.observe.events import Mark, MarkKind
from rollcall.observe.timeline import idle_shares, read_timeline
from rollcall.redact import redact
from rollcall.view.metrics_table import MetricsTable

MOST_SPANS = 5000  # in one picture
MOST_LANES = 600
MOST_MARKS = 300


def show_timeline(root: Path, table: MetricsTable, *, first_step: int | None, last_step: int | None) -> dict[str, Any]:
    """The spans of some steps. Where they are too many for a picture, the shortest are left out and counted."""
    table.refresh()
    steps, _, _ = table.column("step")
    newest = int(steps[-1]) if len(steps) else 0
    if first_step is None and last_step is None:
        first_step = max(newest - 6, 0)  # the last eight, where nobody asks for others
    found = read_timeline(root, first_step=first_step, last_step=last_step)
    lanes = dict.fromkeys(found.lanes[:MOST_LANES])
    spans = sorted((span for span in found.spans if span.lane in lanes), key=lambda span: span.start_s - span.end_s)
    left_out = max(len(found.spans) - MOST_SPANS, len(found.spans) - len(spans))
    spans = sorted(spans[:MOST_SPANS], key=lambda span: span.start_s)
    return {
        "lanes": list(lanes),
        "spans": [
            [one.lane, one.name, round(one.start_s, 3), round(one.end_s, 3), one.kind, one.step, redact(one.note)]
            for one in spans
        ],
        "marks": [_show_mark(mark) for mark in found.marks[:MOST_MARKS]],
        "idle": {lane: round(share, 4) for lane, share in idle_shares(found).items() if lane in lanes},
        "left_out": left_out,
        "bytes_left_out": found.num_bytes_left_out,
        "first": first_step,
        "last": last_step,
        "newest": newest,
    }


def _show_mark(mark: Mark) -> dict[str, Any]:
    lane = None if mark.lane is None else redact(mark.lane)
    return {"at_s": mark.at_s, "name": redact(mark.name), "kind": mark.kind, "lane": lane, "note": redact(mark.note)}


def show_marks(marks: Sequence[Mark], table: MetricsTable, *, axis: str) -> list[dict[str, Any]]:
    """Faults and recoveries, each with its place on the axis of curves: its time, or the step that ran at that time."""
    found = [mark for mark in marks if mark.kind != MarkKind.NOTE][-MOST_MARKS:]
    steps, times, _ = table.column("step")
    known = np.isfinite(times)
    steps, times = steps[known], times[known]
    shown = []
    for mark in found:
        at = float(np.interp(mark.at_s, times, steps)) if len(times) else 0.0
        shown.append({**_show_mark(mark), "x": mark.at_s if axis == "time" else round(at, 2)})
    return shown


def recent_marks(marks: Sequence[Mark], *, most: int = 12) -> list[dict[str, Any]]:
    """The newest first."""
    return [_show_mark(mark) for mark in reversed(marks[-most:])]
