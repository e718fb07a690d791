"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Each node is a process of the trace, each worker a thread of its node; the controller and its rewards are on their own. Times are
microseconds since the first event. A fault is a line across the whole trace.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rollcall.durable.atomic import write_atomic
from rollcall.observe.events import MarkKind
from rollcall.observe.timeline import Timeline

_NODE = re.compile(r"(?P<worker>.+) @ node (?P<node>\d{1,9})")
_CONTROLLER = 1  # its process in the trace; a node has its rank + 2


def chrome_trace(timeline: Timeline, *, name: str) -> dict[str, Any]:
    """``name``: of the run. Events are in the order of their times; what names processes and threads comes first."""
    places = {lane: _place(lane, number) for number, lane in enumerate(timeline.lanes)}
    times = [*(span.start_s for span in timeline.spans), *(mark.at_s for mark in timeline.marks)]
    first_s = min(times, default=0.0)
    events: list[dict[str, Any]] = []
    for span in timeline.spans:
        pid, tid, _ = places[span.lane]
        arguments = {key: value for key, value in (("step", span.step), ("note", span.note)) if value not in (None, "")}
        events.append(
            {"name": span.name, "cat": span.kind, "ph": "X", "ts": _micros(span.start_s - first_s),
             "dur": _micros(span.end_s - span.start_s), "pid": pid, "tid": tid, "args": arguments}
        )  # fmt: skip
    for mark in timeline.marks:
        pid, tid, _ = places.get(mark.lane or "", (_CONTROLLER, 0, ""))
        scope = "g" if mark.kind == MarkKind.FAULT else "t"
        events.append(
            {"name": mark.name, "cat": mark.kind, "ph": "i", "s": scope, "ts": _micros(mark.at_s - first_s),
             "pid": pid, "tid": tid, "args": {"note": mark.note}}
        )  # fmt: skip
    # Of two that begin together, the longer one first: it is drawn around the other.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": [*_names(places, name), *events],
        "displayTimeUnit": "ms",
        "otherData": {"run": name, "first_event_unix_s": round(first_s, 6)},
    }


def write_trace(path: Path, timeline: Timeline, *, name: str) -> int:
    """Returns how many spans it holds."""
    write_atomic(path, json.dumps(chrome_trace(timeline, name=name)))
    return len(timeline.spans)


def _micros(seconds: float) -> int:
    return round(max(seconds, 0.0) * 1e6)


def _place(lane: str, number: int) -> tuple[int, int, str]:
    """Process, thread and the thread's name."""
    match = _NODE.fullmatch(lane)
    return (_CONTROLLER, number, lane) if match is None else (int(match["node"]) + 2, number, match["worker"])


def _names(places: dict[str, tuple[int, int, str]], name: str) -> list[dict[str, Any]]:
    processes = {pid: name if pid == _CONTROLLER else f"node {pid - 2}" for pid, _, _ in places.values()}
    found: list[dict[str, Any]] = []
    for pid, title in sorted(processes.items()):
        found.append({"name": "process_name", "ph": "M", "ts": 0, "pid": pid, "tid": 0, "args": {"name": title}})
        found.append(
            {"name": "process_sort_index", "ph": "M", "ts": 0, "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        )
    for pid, tid, title in places.values():
        found.append({"name": "thread_name", "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": title}})
        found.append(
            {"name": "thread_sort_index", "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        )
    return found
