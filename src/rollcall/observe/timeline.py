"""A run's timeline, read from its directory: what the controller and every worker did.

The controller's lane shows the phases of its steps (``events.jsonl``). A worker's lane shows its calls (``calls.jsonl``) and, between
them, its waits, with the worker that the controller waited for. Running calls come from ``live.json``. All times are unix times on the
controller host's clock.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcall.base.words import counted
from rollcall.observe.calls import RecordedCall, read_calls
from rollcall.observe.events import Mark, MarkKind, PhaseEvent, StepPhase, read_marks, read_phases
from rollcall.observe.live import CONTROLLER, REWARDS, read_live

SHORTEST_WAIT_S = 0.05  # shorter pauses between two calls are not shown
HERE = "local"  # the name of the controller's own process in events
CONTROLLER_ENDED = "controller ended"  # a mark
ATTEMPT_LOST = "attempt lost"  # a mark: all workers are stopped
RUN_FAILED = "run failed"  # a mark: no further attempt follows
WORKER_LOST, WORKER_BACK = "worker lost", "worker back"  # marks with a lane
_PHASE_KINDS = {
    StepPhase.SYNC: "sync",
    StepPhase.FINAL_SYNC: "sync",
    StepPhase.ENGINE_RESTORE: "sync",
    StepPhase.ROLLOUT: "rollout",
    StepPhase.EVALUATION: "evaluate",
    StepPhase.ENGINE_RELEASE: "wait",
    StepPhase.UPDATE: "update",
    StepPhase.CHECKPOINT: "save",
    StepPhase.EXPORT: "save",
}
_CALL_KINDS = {
    "exchange": "rollout",
    **dict.fromkeys(("reward", REWARDS), "reward"),
    **dict.fromkeys(("update", "update_critic", "score", "score_reference", "values"), "update"),
    **dict.fromkeys(("invite", "send_weights", "use_weights"), "sync"),
    **dict.fromkeys(("copy_parts", "write_parts", "parts_written", "export"), "save"),
    **dict.fromkeys(("parts_here", "bring_parts", "tidy_parts"), "save"),
}


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """``kind`` is rollout, reward, update, sync, save, evaluate, wait or other. ``step`` is the controller's step at that time."""

    lane: str
    name: str
    start_s: float
    end_s: float
    kind: str
    step: int | None
    about: str = ""
    waited_for: str = ""  # a worker's lane

    @property
    def note(self) -> str:
        return "; ".join(filter(None, (f"waited for {self.waited_for}" if self.waited_for else "", self.about)))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans are sorted by lane and then by start; marks by time."""

    lanes: tuple[str, ...]
    spans: tuple[TimeSpan, ...]
    marks: tuple[Mark, ...]


def read_timeline(run_dir: Path, *, first_step: int | None = None, last_step: int | None = None) -> Timeline:
    """Read the timeline. ``first_step`` and ``last_step`` limit it to the time between the first and last phase of these steps."""
    live, marks = read_live(run_dir), read_marks(run_dir)
    ends = [mark.at_s for mark in marks if mark.name == CONTROLLER_ENDED]
    ends += [live.time_s] if live is not None else []  # when a controller was last known to be alive
    phases = _phases(read_phases(run_dir, first_step=first_step, last_step=last_step), ends=sorted(ends))
    first_s, last_s = -math.inf, math.inf
    if first_step is not None or last_step is not None:
        if not phases:
            return Timeline((CONTROLLER,), (), ())
        first_s = min(span.start_s for span in phases) if first_step is not None else first_s
        last_s = max(span.end_s for span in phases) if last_step is not None else last_s
    calls = read_calls(run_dir, first_s=first_s, last_s=last_s)
    for lane, call in [] if live is None or live.is_over else live.under_way:
        if call.start_s <= last_s and call.end_s > first_s:
            calls.setdefault(lane, []).append(call)
    marks = sorted((mark for mark in marks if first_s <= mark.at_s <= last_s), key=lambda mark: mark.at_s)
    places = _Places(phases)
    own = {lane: _spans(lane, found, places) for lane, found in calls.items()}
    workers = {lane: spans for lane, spans in own.items() if lane != REWARDS}
    lanes = sorted(own, key=_order)
    phases = _name_the_last([_with_lane(span, lanes) for span in phases], workers.values())
    places = _Places(phases)
    spans = [*phases]
    for lane in lanes:
        waits = _waits(lane, own[lane], places, marks=marks) if lane in workers else []
        spans += sorted([*own[lane], *waits], key=lambda span: span.start_s)
    return Timeline((CONTROLLER, *lanes), tuple(spans), tuple(marks))


def idle_shares(timeline: Timeline) -> dict[str, float]:
    """Return each worker's idle share of the time between the first and the last span."""
    if not timeline.spans:
        return {}
    first = min(span.start_s for span in timeline.spans)
    last = max(span.end_s for span in timeline.spans)
    busy: dict[str, float] = defaultdict(float)
    reached: dict[str, float] = {}
    for span in timeline.spans:  # sorted by start within a lane
        if span.kind != "wait":
            busy[span.lane] += max(span.end_s - max(span.start_s, reached.get(span.lane, first)), 0.0)
            reached[span.lane] = max(reached.get(span.lane, first), span.end_s)
    whole = max(last - first, 1e-9)
    return {lane: max(1.0 - busy[lane] / whole, 0.0) for lane in timeline.lanes if lane != CONTROLLER}


def _phases(events: Sequence[PhaseEvent], *, ends: Sequence[float]) -> list[TimeSpan]:
    """Build the controller's lane. A phase without an end is still running, or its controller exited during the phase."""
    events = sorted(events, key=lambda event: event.start_s)
    spans: list[TimeSpan] = []
    for index, event in enumerate(events):
        if event.phase == StepPhase.EVALUATION_DECISION:
            continue
        end_s, notes = event.end_s, [event.result] if event.result else []
        if end_s is None:
            place = bisect.bisect_left(ends, event.start_s)
            following = [one.start_s for one in events[index + 1 : index + 2]]
            end_s = min([*ends[place : place + 1], *following], default=event.start_s)
            notes.append("not ended")
        kind = _PHASE_KINDS.get(event.phase, "other")  # type: ignore[arg-type]
        end_s = max(end_s, event.start_s)
        whom = event.waited_for if event.waited_for and event.waited_for != HERE else ""
        spans.append(TimeSpan(CONTROLLER, event.phase, event.start_s, end_s, kind, event.step, "; ".join(notes), whom))
    return spans


class _Places:
    """The controller's phases by time."""

    def __init__(self, phases: Sequence[TimeSpan]) -> None:
        self.phases = [span for span in phases if span.end_s > span.start_s] or list(phases)
        self._starts = [span.start_s for span in self.phases]

    def at(self, time_s: float) -> TimeSpan | None:
        """Return the phase that began last before this time."""
        index = bisect.bisect_right(self._starts, time_s) - 1
        return self.phases[index] if index >= 0 else None

    def longest(self, start_s: float, end_s: float) -> TimeSpan | None:
        """Return the phase that covers most of this interval."""
        index = max(bisect.bisect_right(self._starts, start_s) - 1, 0)
        best, most = None, 0.0
        for place in range(index, len(self.phases)):
            span = self.phases[place]
            if span.start_s >= end_s:
                break
            shared = min(span.end_s, end_s) - max(span.start_s, start_s)
            if shared > most:
                best, most = span, shared
        return best


def _spans(lane: str, calls: Sequence[RecordedCall], places: _Places) -> list[TimeSpan]:
    """Build a worker's spans. A worker handles one call at a time, so if two calls overlap because of clock errors, cut the first one."""
    spans: list[TimeSpan] = []
    for call in sorted(calls, key=lambda call: (call.start_s, -call.end_s)):
        if spans and spans[-1].name == call.name and call.end_s <= spans[-1].end_s + 0.02:
            continue  # a lost worker's last call may be reported twice
        if spans and spans[-1].end_s > call.start_s:
            spans[-1] = replace(spans[-1], end_s=call.start_s)
        phase = places.at(call.start_s)
        kind = _CALL_KINDS.get(call.name, "other")
        if kind in ("rollout", "reward") and phase is not None and phase.kind == "evaluate":
            kind = "evaluate"
        note = counted(call.count, "call") if call.count > 1 else ""
        step = None if phase is None else phase.step
        spans.append(TimeSpan(lane, call.name, call.start_s, max(call.end_s, call.start_s), kind, step, note))
    return spans


def _with_lane(phase: TimeSpan, lanes: Sequence[str]) -> TimeSpan:
    """Translate the worker's name from the format of events and journal to its timeline lane."""
    match = re.fullmatch(r"(\w+)-(\d+) on node (\d+)\b.*", phase.waited_for)
    if match is None:
        return phase
    role, node = f"{match[1]} {match[2]}", f"@ node {match[3]}"
    lane = next((lane for lane in lanes if lane.endswith(node) and role in re.split(r" [+@] ", lane)), phase.waited_for)
    return replace(phase, waited_for=lane)


def _name_the_last(phases: Sequence[TimeSpan], lanes: Iterable[Sequence[TimeSpan]]) -> list[TimeSpan]:
    """If a controller phase does not record which worker it waited for, fill in the worker that finished last."""
    starts = [span.start_s for span in phases]
    last: dict[int, TimeSpan] = {}
    for span in (span for own in lanes for span in own):
        middle_s = (span.start_s + span.end_s) / 2  # its end may appear to be in the next phase due to clock error
        index = bisect.bisect_right(starts, middle_s) - 1
        if index >= 0 and phases[index].kind == span.kind and (index not in last or span.end_s > last[index].end_s):
            last[index] = span
    return [
        replace(span, waited_for=last[index].lane) if index in last and not span.waited_for else span
        for index, span in enumerate(phases)
    ]


def _waits(lane: str, spans: Sequence[TimeSpan], places: _Places, *, marks: Sequence[Mark]) -> list[TimeSpan]:
    """Return a worker's pauses, including the times when it was lost and had not been replaced yet."""
    ends = (ATTEMPT_LOST, CONTROLLER_ENDED)
    lost = [one.at_s for one in marks if one.name in ends or (one.lane == lane and one.name == WORKER_LOST)]
    found = []
    reached = spans[0].end_s if spans else 0.0
    for span in spans[1:]:
        start_s, end_s = reached, span.start_s
        reached = max(reached, span.end_s)
        if end_s - start_s < SHORTEST_WAIT_S:
            continue
        phase = places.longest(start_s, end_s)
        step = None if phase is None else phase.step
        if any(start_s - SHORTEST_WAIT_S <= at_s <= end_s for at_s in lost):
            found.append(TimeSpan(lane, "lost", start_s, end_s, "wait", step, "no process is running here"))
            continue
        note = "" if phase is None else f"during {phase.name} of step {phase.step}"
        if phase is not None and phase.waited_for not in ("", lane):
            note += f", which waited for {phase.waited_for}"
        found.append(TimeSpan(lane, "wait", start_s, end_s, "wait", step, note))
    return found


def _order(lane: str) -> tuple[bool, list[tuple[int, str]]]:
    """Sort key for lanes: numbers in numeric order (2 before 10), rewards last.

    >>> sorted(["rollout 10 @ node 1", "rewards", "rollout 2 @ node 0", "actor 0 @ node 0"], key=_order)
    ['actor 0 @ node 0', 'rollout 2 @ node 0', 'rollout 10 @ node 1', 'rewards']
    """
    parts = lane.split()
    return lane == REWARDS, [(int(part), "") if part.isdecimal() and len(part) < 10 else (-1, part) for part in parts]


# Export as a Chrome trace

_CONTROLLER = 1  # the controller's process id in the trace; a node's process id is its rank + 2


def chrome_trace(timeline: Timeline, *, name: str) -> dict[str, Any]:
    """Convert a timeline for Perfetto (ui.perfetto.dev) and chrome://tracing. ``name`` is the run's name.

    Each node is a process in the trace, and each worker a thread of its node. The controller and its rewards share another process. Times
    are microseconds since the first event. A fault is drawn as a line across the full trace. The events that name processes and threads
    come first; the others are sorted by time.
    """
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
    # If two spans begin together, put the longer one first, so that it is drawn around the other.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": [*_names(places, name), *events],
        "displayTimeUnit": "ms",
        "otherData": {"run": name, "first_event_unix_s": round(first_s, 6)},
    }


def _micros(seconds: float) -> int:
    return round(max(seconds, 0.0) * 1e6)


def _place(lane: str, number: int) -> tuple[int, int, str]:
    """Return process id, thread id and thread name."""
    match = re.fullmatch(r"(?P<worker>.+) @ node (?P<node>\d{1,9})", lane)
    return (_CONTROLLER, number, lane) if match is None else (int(match["node"]) + 2, number, match["worker"])


def _names(places: dict[str, tuple[int, int, str]], name: str) -> list[dict[str, Any]]:
    processes = {pid: name if pid == _CONTROLLER else f"node {pid - 2}" for pid, _, _ in places.values()}
    named = [(pid, 0, "process", title, pid) for pid, title in sorted(processes.items())]
    named += [(pid, tid, "thread", title, tid) for pid, tid, title in places.values()]
    return [
        {"name": f"{what}_{key}", "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {key: value}}
        for pid, tid, what, title, place in named
        for key, value in (("name", title), ("sort_index", place))
    ]
