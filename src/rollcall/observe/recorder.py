"""The controller's thread that records a run's processes: ``live.json``, ``calls.jsonl``, marks and logs.

It asks the roles for a ``Look`` every ``EVERY_S``. The roles answer with what they already know, so a ``Look`` sends no messages to
workers and delays no step. Only the last ``Look`` of an attempt queries the workers.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rollcall.base.wait import warn
from rollcall.observe.calls import BusySpans, CallFile, RecordedCall
from rollcall.observe.events import Events, Mark, MarkKind, read_marks, read_phases
from rollcall.observe.live import CONTROLLER, REWARDS, Live, Look, ProcessState, WorkState, read_live, write_live
from rollcall.observe.logs import keep_logs
from rollcall.observe.timeline import CONTROLLER_ENDED
from rollcall.process.groups.pulse import device_bytes

EVERY_S = 2.0


class Recorder:
    """Starts recording immediately. ``look`` has the keyword argument ``last``, which is true for an attempt's last ``Look``. ``rewards``
    records when this process's reward functions are busy."""

    def __init__(self, run_dir: Path, *, events: Events, look: Callable[..., Look], rewards: BusySpans) -> None:
        self._run_dir = Path(run_dir)
        self._events = events
        self._look = look
        self._rewards = rewards
        self._calls = CallFile(run_dir)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._has_warned = False
        self._finish_the_last()
        self._record(is_over=False)
        self._thread.start()

    def close(self) -> None:
        """Record the last ``Look`` while the workers are still alive."""
        self._ended.set()
        self._thread.join()
        self._record(is_over=True)
        self._calls.close()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._record(is_over=False)

    def _finish_the_last(self) -> None:
        """If an earlier controller was killed, record that the calls in its last ``Look`` ended with the controller."""
        last = read_live(self._run_dir)
        if last is None or last.is_over:
            return
        calls: dict[str, list[RecordedCall]] = {}
        for lane, call in last.under_way:
            calls.setdefault(lane, []).append(call)
        with self._noting_faults():
            self._calls.append(calls, time_s=last.time_s)
        doing = next((one.doing for one in last.processes if one.lane == CONTROLLER), "")
        ended_s = last.time_s
        # The earlier controller's events may be a few short phases ahead of its last ``Look``.
        for phase in read_phases(self._run_dir)[-1:]:
            if (phase.end_s or phase.start_s) >= ended_s:
                doing = f"{phase.phase} of step {phase.step}" if phase.end_s is None else ""
                ended_s = phase.end_s or phase.start_s
        ended_s = max([ended_s, *(mark.at_s for mark in read_marks(self._run_dir)[-1:])])
        self._events.mark(Mark(ended_s, CONTROLLER_ENDED, MarkKind.FAULT, CONTROLLER, f"in {doing}" if doing else ""))

    def _record(self, *, is_over: bool) -> None:
        look, now = self._look(last=is_over), time.time()
        calls = {**look.calls, REWARDS: self._rewards.take()}
        since_s = self._rewards.since_s
        state, doing = (WorkState.IDLE, "") if since_s is None else (WorkState.BUSY, REWARDS)
        rewards = ProcessState(lane=REWARDS, state=state, doing=doing, since_s=since_s)
        phase = self._events.current
        controller = ProcessState(
            lane=CONTROLLER,
            pid=os.getpid(),
            state=WorkState.BUSY if phase else WorkState.IDLE,
            doing=f"{phase[0]} of step {phase[1]}" if phase else "",
            since_s=phase[2] if phase else None,
            memory_bytes=psutil.Process().memory_info().rss,
            device_bytes=device_bytes(),
        )
        live = Live(
            time_s=round(now, 3),
            host=socket.gethostname(),
            is_over=is_over,
            processes=(controller, rewards, *look.processes),
            missing_nodes=tuple(look.missing_nodes),
            on_ray=look.on_ray,
        )
        with self._noting_faults():
            for mark in look.marks:
                self._events.mark(mark)
            self._calls.append(calls, time_s=now)
            write_live(self._run_dir, live)
            keep_logs(self._run_dir, look.logs)

    @contextmanager
    def _noting_faults(self) -> Iterator[None]:
        """Let the run continue if the disk is full or lost. Warns once. The next recording tries again."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                what = "the state of the run's processes"
                warn(f"{self._run_dir}: cannot write {what}: {error.strerror}; the run continues")
