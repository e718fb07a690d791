"""The present state of every process of a run: ``run_dir/live.json``, replaced by the controller every couple of seconds.

It is small and holds nothing that matters after the run: who is where, busy with what, since when, with how much memory. Times are
unix time by the clock of the controller's host. A file that is older than ``STALE_S`` belongs to a controller that has ended or is
stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from rollcall.base.atomic import write_atomic
from rollcall.observe.calls import RecordedCall
from rollcall.observe.events import Mark

LIVE = "live.json"
CONTROLLER = "controller"  # its lane
REWARDS = "rewards"  # the lane of the processes that run reward functions
STALE_S = 15.0


class WorkState(StrEnum):
    BUSY = "busy"
    IDLE = "idle"  # waits to be called
    STOPPED = "stopped"  # by a signal, or held by a debugger
    SILENT = "silent"  # its node does not answer
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    lane: str  # as in the timeline
    roles: Mapping[str, int] = field(default_factory=dict)  # its rank in each role; none: it is not a worker
    node: int = 0  # its rank
    address: str = ""  # of its node
    slots: tuple[int, ...] = ()  # on its node
    pid: int = 0
    state: str = WorkState.IDLE
    doing: str = ""  # a method, or a phase of the controller; empty: nothing
    since_s: float | None = None  # when it began with that; if idle, when the last call ended. None if not known
    num_calls: int = 0
    memory_bytes: int = 0  # resident
    device_bytes: int = 0  # that torch has taken of its accelerators
    why: str = ""  # it is lost or silent
    log: str = ""  # where its output goes, on its node; empty: not to a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    time_s: float  # when this was written
    host: str  # of the controller
    is_over: bool  # the controller has ended, or is between two attempts
    processes: tuple[ProcessState, ...]  # the controller and its reward functions first
    missing_nodes: tuple[int, ...] = ()  # that the run goes without
    on_ray: bool = False  # its workers are processes of a Ray cluster

    @property
    def under_way(self) -> list[tuple[str, RecordedCall]]:
        """The calls that workers had not ended when the controller last looked, each with its lane."""
        return [
            (one.lane, RecordedCall(one.doing, one.since_s, max(self.time_s, one.since_s)))
            for one in self.processes
            if one.lane != CONTROLLER and one.doing and one.since_s is not None and one.state != WorkState.LOST
        ]

    @property
    def is_stale(self) -> bool:
        return time.time() - self.time_s > STALE_S


_READER = TypeAdapter(Live)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state of a run's workers, and what has happened since the last look."""

    processes: Sequence[ProcessState] = ()
    calls: Mapping[str, Sequence[RecordedCall]] = field(default_factory=dict)  # that have ended, by lane
    marks: Sequence[Mark] = ()
    logs: Mapping[str, bytes] = field(default_factory=dict)  # what was added to their logs, by lane
    missing_nodes: Sequence[int] = ()
    on_ray: bool = False


def write_live(run_dir: Path, live: Live) -> None:
    write_atomic(Path(run_dir) / LIVE, json.dumps(asdict(live)), durable=False)


def read_live(run_dir: Path) -> Live | None:
    """None if there is none, or an earlier version has written it."""
    try:
        return _READER.validate_json((Path(run_dir) / LIVE).read_bytes())
    except (OSError, ValueError):
        return None
