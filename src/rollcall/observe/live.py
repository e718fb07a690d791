"""The current state of every process in a run, in ``run_dir/live.json``. The controller replaces the file every two seconds.

For each process, the file says where it runs, what it is doing and since when, and how much memory it uses. The file is small, and it is
not needed after the run. Times are unix times on the controller host's clock. If the file is older than ``STALE_S``, its controller has
exited or is stopped.
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
REWARDS = "rewards"  # the lane of reward functions
STALE_S = 15.0


class WorkState(StrEnum):
    BUSY = "busy"
    IDLE = "idle"  # waiting for a call
    STOPPED = "stopped"  # by a signal or a debugger
    SILENT = "silent"  # its node does not respond
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    lane: str  # as in the timeline
    roles: Mapping[str, int] = field(default_factory=dict)  # its rank in each role; empty if it is not a worker
    node: int = 0  # the node's rank
    address: str = ""  # of its node
    slots: tuple[int, ...] = ()  # on its node
    pid: int = 0
    state: str = WorkState.IDLE
    doing: str = ""  # a method, or a phase of the controller; empty if idle
    since_s: float | None = None  # when this call began or, if idle, when the last one ended; None if unknown
    num_calls: int = 0
    memory_bytes: int = 0  # resident
    device_bytes: int = 0  # accelerator memory that torch has reserved
    why: str = ""  # the reason why it is lost or silent
    log: str = ""  # its output file on its node; empty if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    time_s: float  # when this was written
    host: str  # of the controller
    is_over: bool  # the controller has finished, or is between two attempts
    processes: tuple[ProcessState, ...]  # the controller and its reward functions first
    missing_nodes: tuple[int, ...] = ()  # nodes that the run continues without
    on_ray: bool = False  # its workers are Ray processes

    @property
    def under_way(self) -> list[tuple[str, RecordedCall]]:
        """The calls that were still running when the controller last checked, each with its lane."""
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
    """The state of a run's workers at one moment, and what has happened since the previous ``Look``."""

    processes: Sequence[ProcessState] = ()
    calls: Mapping[str, Sequence[RecordedCall]] = field(default_factory=dict)  # finished calls, by lane
    marks: Sequence[Mark] = ()
    logs: Mapping[str, bytes] = field(default_factory=dict)  # new log output, by lane
    missing_nodes: Sequence[int] = ()
    on_ray: bool = False


def write_live(run_dir: Path, live: Live) -> None:
    write_atomic(Path(run_dir) / LIVE, json.dumps(asdict(live)), durable=False)


def read_live(run_dir: Path) -> Live | None:
    """Read the state; None if there is no file or an earlier version wrote it."""
    try:
        return _READER.validate_json((Path(run_dir) / LIVE).read_bytes())
    except (OSError, ValueError):
        return None
