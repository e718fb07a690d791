"""Reads a run directory, for `rollcall status`, recover and compare, for the page, and for the Python API.

It never writes, so it can be used while the run is running. A caller that asks repeatedly, as the page does, keeps a ``RunReader``,
which reads only what was added to the files. Thread-safe.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollcall.base.append_file import is_count
from rollcall.base.errors import ConfigError
from rollcall.base.lease import WATCH_S, Heartbeat, Holder, read_holder
from rollcall.base.redact import redact
from rollcall.checkpoint.run_dir import RUN_FILE, is_run, read_summary
from rollcall.config import Config, load_saved_run
from rollcall.config.yaml import read_yaml
from rollcall.observe.events import EVENTS, Mark, PhaseEvent
from rollcall.observe.timeline import ATTEMPT_LOST, RUN_FAILED
from rollcall.view.growing import EventLog, MetricsTable
from rollcall.view.summary import build_summary, standing, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    word: str  # running, waiting, finished, failed, stopped, killed, new
    text: str  # a sentence
    since_s: float | None = None  # unix time at which this state began; None if not known

    @property
    def is_over(self) -> bool:
        return self.word not in ("running", "waiting")


class RunReader:
    """Reads a run directory. ``read_s`` bounds the time of one call; the next call reads the rest of a long file."""

    def __init__(self, run_dir: Path, *, read_s: float = math.inf) -> None:
        self.dir = Path(run_dir)
        self.metrics = MetricsTable(self.dir, read_s=read_s)
        self.events = EventLog(self.dir, read_s=read_s)
        self._beat = Heartbeat()
        self._lock = threading.Lock()
        self._config: tuple[Any, Config | None, str] = (None, None, "")

    @property
    def config(self) -> Config | None:
        """The settings of the run's last start, or None if they cannot be read."""
        return self.saved_config()[0]

    def read_config(self) -> Config:
        """Return the settings, or raise an error that says why they cannot be read."""
        config, problem = self.saved_config()
        if config is None:
            raise ConfigError(f"{problem}\nOnly this file contains the settings of the run, so restore the file first")
        return config

    def saved_config(self) -> tuple[Config | None, str]:
        """Return the settings, or None and the reason why they cannot be read."""
        path = self.dir / RUN_FILE
        with self._lock:
            try:
                about = path.stat()
                mark = (about.st_ino, about.st_mtime_ns, about.st_size)
            except OSError:
                mark = None
            if mark is None or mark != self._config[0]:
                try:
                    self._config = (mark, load_saved_run(path), "")
                except ConfigError as error:
                    self._config = (mark, None, redact(str(error)))
            return self._config[1], self._config[2]

    @property
    def step(self) -> int:
        """The last trained step."""
        self.metrics.refresh()
        return self.metrics.step

    @property
    def num_steps(self) -> int | None:
        """The run's number of steps, or None if the run file cannot be read."""
        steps = self.setting("trainer", "steps")
        return steps if is_count(steps) else None

    def setting(self, section: str, key: str) -> Any:
        """Return one key of the saved run file, or None if it cannot be read. Other parts of the file may be damaged."""
        if (config := self.config) is not None:
            return getattr(getattr(config, section), key, None)
        try:
            return read_yaml(self.dir / RUN_FILE, what="saved run file")[section][key]
        except (ConfigError, KeyError, TypeError):
            return None

    def holder(self) -> Holder | None:
        """Return the process that holds the run directory, or the last one that held it."""
        try:
            return read_holder(self.dir)
        except OSError:  # the file belongs to another user and cannot be read
            return None

    def _is_alive(self, holder: Holder | None) -> bool | None:
        """Whether the holder is alive. On this machine, look up the process; on another, see whether its counter moves. None if not known
        yet."""
        if holder is None or holder.is_gone:
            return False
        if holder.is_here:
            return True
        self._beat.see(holder.owner, holder.counter)
        if self._beat.silent_s >= WATCH_S:
            return False
        return True if self._beat.has_moved else None

    def state(self) -> RunState:
        holder, phase = self.holder(), self.events.last_phase()
        alive = self._is_alive(holder)
        mark = next(reversed(self.events.marks()), None)
        if alive is not False and holder is not None and holder.waits:
            unsure = "" if alive else f"; held by {holder}; checking whether it is alive"
            return RunState(word="waiting", text=holder.waits + unsure, since_s=holder.waits_since)
        if alive and mark is not None and mark.name == ATTEMPT_LOST:
            return RunState(word="waiting", text=f"for the next attempt: {mark.note}", since_s=mark.at_s)
        if alive or (alive is None and phase is not None and time.time() - (self.moved_s() or 0) < WATCH_S):
            return _at_work(phase)
        if alive is None:
            doing = _at_work(phase)
            return replace(doing, word="waiting", text=f"{doing.text}; held by {holder}; checking whether it is alive")
        return self._ended(phase, mark)

    def _ended(self, phase: PhaseEvent | None, mark: Mark | None) -> RunState:
        step, num_steps = self.step, self.num_steps
        at_s = None if phase is None else phase.end_s
        summary = read_summary(self.dir)
        if num_steps is not None and summary is not None and min(summary["steps"], step) >= num_steps:
            return RunState(word="finished", text=trained(num_steps), since_s=at_s)
        if mark is not None and mark.name == RUN_FAILED:
            return RunState(word="failed", text=mark.note, since_s=mark.at_s)
        if phase is None:
            return RunState(word="new", text="nothing has been trained yet")
        where = f"{phase.phase} of step {phase.step}"
        if phase.end_s is None:
            return RunState(word="killed", text=f"its controller ended during {where}", since_s=phase.start_s)
        if phase.result is not None and phase.result.startswith("failed: ") and "Cancelled" not in phase.result:
            return RunState(word="failed", text=f"{phase.result.removeprefix('failed: ')} during {where}", since_s=at_s)
        text = f"stopped after step {step}; the same command continues the run"
        return RunState(word="stopped", text=text, since_s=at_s)

    def standing(self, state: RunState) -> dict[str, Any]:
        """Return the run's progress. The time left is only known while ``state`` is running."""
        holder = self.holder() if state.word == "running" else None
        return standing(self.metrics, num_steps=self.num_steps, holder=holder)

    def summary(self) -> dict[str, Any]:
        """Return the results of the whole run, from ``summary.json``, or from the metrics so far if the run has not finished."""
        summary, step = read_summary(self.dir), self.step
        if summary is not None and summary["steps"] >= step:  # otherwise the run was trained further after it finished
            return summary
        return build_summary(self.metrics, resume_step=step, run=None if self.config is None else self.config.run.name)

    def moved_s(self) -> float | None:
        """Return the time of the run's last write."""
        moved = []
        for name in (EVENTS, "metrics.jsonl", RUN_FILE):
            with suppress(OSError):
                moved.append((self.dir / name).stat().st_mtime)
        return max(moved, default=None)


def open_run(run_dir: Path) -> RunReader:
    """Open a run directory. Raises ConfigError if it is not one. The directory may be missing if the run has just started."""
    run = RunReader(run_dir)
    holder = run.holder()
    if not run_dir.is_dir() and (holder is None or holder.is_gone):
        problem = "is a file" if run_dir.exists() else "does not exist. A run creates it a few seconds after it starts"
        raise ConfigError(f"{run_dir} {problem}; pass the directory of a run (run.dir)")
    if holder is None and not is_run(run_dir):
        raise ConfigError(f"{run_dir} is not a run directory; pass the directory of a run (run.dir)")
    return run


def describe_holder(holder: Holder | None) -> str:
    """Describe the process that holds the run directory, as far as this host can tell at once."""
    if holder is None or holder.released:
        return "nobody"
    if holder.is_here:
        return f"{holder}, which {'has ended' if holder.is_gone else 'is running'}"
    return f"{holder}; this host cannot tell at once whether it is alive"


def holder_as_json(holder: Holder | None) -> dict[str, Any] | None:
    if holder is None:
        return None
    state = "released" if holder.released else "gone" if holder.is_gone else "alive" if holder.is_here else "unknown"
    waits = {"for": holder.waits, "since_s": holder.waits_since} if holder.waits and not holder.is_gone else None
    about = {"host": holder.host, "pid": holder.pid, "since": holder.since, "counter": holder.counter}
    return {**about, "state": state, "waiting": waits}


def _at_work(phase: PhaseEvent | None) -> RunState:
    if phase is None:
        return RunState(word="running", text="starting; no phase has begun yet")
    where = f"{phase.phase} of step {phase.step}"
    if phase.end_s is not None:
        return RunState(word="running", text=f"after {where}", since_s=phase.end_s)
    return RunState(word="running", text=where, since_s=phase.start_s)
