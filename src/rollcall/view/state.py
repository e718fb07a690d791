"""How a run stands, in one row: state, step, accuracy, speed, age. Read from its directory alone."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.checkpoint.run_dir import RUN_FILE
from rollcall.config import Config, load_saved_run, public_dump
from rollcall.durable.append_file import is_count
from rollcall.durable.heartbeat import Heartbeat
from rollcall.durable.lease import WATCH_S, Holder, read_holder
from rollcall.errors import ConfigError
from rollcall.observe.events import EVENTS, Mark, PhaseEvent, last_phase_in
from rollcall.observe.headline import ACCURACY, GRADED, REWARD
from rollcall.observe.progress import STEPS_COUNTED
from rollcall.observe.signal import ADVANTAGE, no_signal
from rollcall.observe.timeline import ATTEMPT_LOST, RUN_FAILED
from rollcall.redact import redact
from rollcall.stored.manifest import MANIFEST, STEP_NAME
from rollcall.view.doing import Marks
from rollcall.view.inside import OutsideError, entries, inside, open_inside, read_json, size_of
from rollcall.view.metrics_table import MetricsTable

END_BYTES = 1 << 16  # of the events: enough for the last phases
SIZES_EVERY_S = 30.0
LONGEST_TEXT = 2000  # characters of a state


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    word: str  # running, waiting, finished, failed, stopped, killed, new
    text: str  # a sentence


class HolderWatch:
    """Whether the holder of a run directory is alive. One on this machine is looked up; of one elsewhere the counter must move."""

    def __init__(self) -> None:
        self._beat = Heartbeat()

    def is_alive(self, holder: Holder | None) -> bool | None:
        """None: not known yet."""
        if holder is None or holder.is_gone:
            return False
        if holder.is_here:
            return True
        self._beat.see(holder.owner, holder.counter)
        if self._beat.silent_s >= WATCH_S:
            return False
        return True if self._beat.has_moved else None


class StateReader:
    """One run directory, looked at again and again."""

    def __init__(self, root: Path, table: MetricsTable, marks: Marks) -> None:
        self._root = root
        self._table = table
        self._marks = marks
        self._pulse = HolderWatch()
        self._lock = threading.Lock()
        self._config: tuple[Any, Config | None, str] = (None, None, "")
        self._sizes: tuple[float, dict[str, int]] = (float("-inf"), {})

    @property
    def config(self) -> Config | None:
        """The settings of the run; None: they cannot be read (``config_problem`` says why)."""
        return self._read_config()[0]

    @property
    def config_problem(self) -> str:
        return self._read_config()[1]

    def _read_config(self) -> tuple[Config | None, str]:
        with self._lock:
            try:
                path = inside(self._root, RUN_FILE)
                about = path.stat()
                mark = (about.st_ino, about.st_mtime_ns, about.st_size)
                if mark != self._config[0]:
                    try:
                        self._config = (mark, load_saved_run(path), "")
                    except ConfigError as error:
                        self._config = (mark, None, redact(str(error)))
            except (OSError, OutsideError) as error:
                self._config = (None, None, redact(str(error)))
            return self._config[1], self._config[2]

    def public_config(self) -> dict[str, Any] | None:
        """The run file without its secrets."""
        config = self.config
        return None if config is None else public_dump(config)

    def sizes(self) -> dict[str, int]:
        """Bytes of the journal and of the checkpoints; looked up now and then, for a large folder takes long to count."""
        with self._lock:
            if time.monotonic() - self._sizes[0] > SIZES_EVERY_S:
                found = {name: size_of(self._root, name) for name in ("journal", "checkpoints", "model")}
                self._sizes = (time.monotonic(), found)
            return self._sizes[1]

    def row(self) -> dict[str, Any]:
        table, config = self._table, self.config
        table.refresh()
        steps, times, seconds = table.column("time/step_s")
        step = int(steps[-1]) if len(steps) else 0
        num_steps = config.trainer.steps if config else None
        headline = REWARD if any(table.column(GRADED)[2]) else ACCURACY
        _, _, scores = table.column(headline.metric)
        state = self._state(step=step, num_steps=num_steps)
        all_times = table.column("step")[1]
        recent = seconds[-STEPS_COUNTED:].tolist()
        advantages = table.column(ADVANTAGE)[2].tolist()
        left_s = None
        if state.word == "running" and recent and num_steps is not None and num_steps > step:
            left_s = statistics.fmean(recent) * (num_steps - step)
        return {
            "state": state.word,
            "text": redact(state.text[:LONGEST_TEXT]),
            "no_signal": no_signal(advantages.count(0), num_steps=len(advantages)),
            "step": step,
            "steps": num_steps,
            "headline": headline.words,
            "first": float(scores[0]) if len(scores) else None,
            "last": float(scores[-1]) if len(scores) else None,
            "best": float(scores.max()) if len(scores) else None,
            "evaluates": config is None or config.data.val is not None,
            "reward": table.last("train/reward_mean"),
            "step_s": statistics.median(recent) if recent else None,
            "tokens_per_s": table.last("rollout/tokens_per_s"),
            "began_s": float(all_times[0]) if len(all_times) else None,
            "moved_s": self._moved_s(),
            "left_s": left_s,
            "model": redact(str(config.model.path)) if config else None,
            "algorithm": config.algorithm.name if config else None,
            "version": table.version,
        }

    def _moved_s(self) -> float | None:
        """When the run last wrote something."""
        moved = []
        for name in (EVENTS, "metrics.jsonl", RUN_FILE):
            try:
                moved.append(inside(self._root, name).stat().st_mtime)
            except (OSError, OutsideError):
                continue
        return max(moved, default=None)

    def last_phase(self) -> PhaseEvent | None:
        """The last that began, with its end where it has one."""
        try:
            with open_inside(self._root, EVENTS) as file:
                file.seek(max(file.seek(0, 2) - END_BYTES, 0))
                lines = file.read().splitlines()
        except (OSError, OutsideError):
            return None
        return last_phase_in(lines)

    def _holder(self) -> Holder | None:
        try:
            return read_holder(self._root)
        except OSError:  # something else has the name of a lease
            return None

    def _state(self, *, step: int, num_steps: int | None) -> RunState:
        holder = self._holder()
        alive, phase = self._pulse.is_alive(holder), self.last_phase()
        mark = next(reversed(self._marks.all()), None)
        if alive and holder is not None and holder.waits:
            return RunState(word="waiting", text=holder.waits)
        if alive and mark is not None and mark.name == ATTEMPT_LOST:
            return RunState(word="waiting", text=f"for the next attempt: {mark.note}")
        if alive or (alive is None and phase is not None and time.time() - (self._moved_s() or 0) < WATCH_S):
            return _at_work(phase)
        if alive is None:
            return RunState(word="waiting", text=f"held by {holder}; looking whether it is alive")
        summary = read_json(self._root, "summary.json")
        trained = summary.get("steps") if isinstance(summary, dict) else None
        if num_steps is not None and is_count(trained) and trained >= num_steps and step >= num_steps:
            return RunState(word="finished", text=f"all {num_steps:,} steps are trained")
        return _ended(phase, mark, step=step)


def _at_work(phase: PhaseEvent | None) -> RunState:
    if phase is None:
        return RunState(word="running", text="starting")
    if phase.end_s is not None:
        return RunState(word="running", text=f"after {phase.phase} of step {phase.step}")
    return RunState(word="running", text=f"{phase.phase} of step {phase.step}")


def _ended(phase: PhaseEvent | None, mark: Mark | None, *, step: int) -> RunState:
    if mark is not None and mark.name == RUN_FAILED:
        return RunState(word="failed", text=mark.note)
    if phase is None:
        return RunState(word="new", text="nothing was trained yet")
    where = f"{phase.phase} of step {phase.step}"
    if phase.end_s is None:
        return RunState(word="killed", text=f"its controller ended in {where}")
    if phase.result is not None and phase.result.startswith("failed: ") and "Cancelled" not in phase.result:
        return RunState(word="failed", text=f"{phase.result.removeprefix('failed: ')} in {where}")
    return RunState(word="stopped", text=f"stopped after step {step}; the same command continues it")


def checkpoints(root: Path) -> list[dict[str, Any]]:
    """Those that are kept, by their manifests; oldest first."""
    found = []
    for entry in sorted(entries(root, "checkpoints"), key=lambda entry: entry.name):
        if (match := STEP_NAME.fullmatch(entry.name)) is None:
            continue
        manifest = read_json(root, "checkpoints", entry.name, MANIFEST)
        score = manifest.get("score") if isinstance(manifest, dict) else None
        found.append(
            {
                "step": int(match[1]),
                "score": score if isinstance(score, int | float) else None,
                "bytes": size_of(root, "checkpoints", entry.name),
                "saved_s": entry.stat().st_mtime,
                "whole": isinstance(manifest, dict),
            }
        )
    return found
