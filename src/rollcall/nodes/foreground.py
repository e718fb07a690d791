"""`rollcall node --block`: stays in the foreground while Ray runs on this node, and stops Ray on a signal.

A supervisor that stops a job (Slurm, Kubernetes) often signals only this command. The command passes the signal on to the drivers of
the runs on this node and keeps Ray running until no run is left, for at most ``save_s`` seconds, because a run saves through Ray's
processes. A second signal stops Ray at once. SIGUSR1, which Slurm's `--signal` sends before the time limit, is only passed on to
the drivers: Ray keeps running.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from rollcall.base.errors import ClusterError
from rollcall.base.process_table import Process, command_of
from rollcall.base.stop import SAME_S, heeded_signals, status_words
from rollcall.base.wait import Wait, say
from rollcall.nodes.bootstrap import is_running, stop_node
from rollcall.nodes.processes import find_processes, signal_processes
from rollcall.nodes.state import NodeRecord, noted_drivers, read_record, state_dir

LOOK_EVERY_S = 1.0
DRIVER = "rollcall.launch.jobs.driver"
# Titles of Ray processes that are not working for any run: an idle worker, and the two helpers of each raylet (2.60).
FOR_NOBODY = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


class Signals:
    """Remembers which signals have arrived."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.hurry = threading.Event()
        self.ahead = threading.Event()
        self._since = 0.0

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        if number == signal.SIGUSR1:
            self.ahead.set()
        elif not self.end.is_set():
            self._since = time.monotonic()
            self.end.set()
        elif time.monotonic() - self._since >= SAME_S:
            self.hurry.set()


def hold(
    record: NodeRecord,
    *,
    save_s: float = 25.0,  # Slurm (KillWait) and Kubernetes kill after 30 s; stopping Ray takes part of that
    until: Callable[[], int | None] | None = None,
    too_early: int | None = None,
) -> int | None:
    """Wait until a signal or `rollcall down` has stopped the node. Raise if Ray exits by itself.

    ``until`` is called every second and returns the run's exit status, or None while the run goes on. Once it returns a status, stop the
    node and return that status. ``too_early`` is the status to return if SIGUSR1 arrives before there is a run.
    """
    signals = Signals()
    before = {number: signal.signal(number, signals.hear) for number in (*heeded_signals(), signal.SIGINT)}
    try:
        while not signals.end.wait(LOOK_EVERY_S):
            if os.getpid() == 1:
                _reap()
            if signals.ahead.is_set():
                signals.ahead.clear()
                found = drivers(record)
                signal_processes(found, signal.SIGUSR1)
                if not found and too_early is not None:
                    say("received SIGUSR1 before the run began; stopping Ray on this node")
                    stop_node(record.cluster)
                    return too_early
            if until is not None and (status := until()) is not None:
                say(f"the run {status_words(status)}; stopping Ray on this node")
                stop_node(record.cluster)
                return status
            if is_running(record):
                continue
            now = read_record(record.cluster)
            if now is None or now.cluster_id != record.cluster_id:
                say("this node was taken down by another command")
                return None
            stop_node(record.cluster, keep_logs=True)
            raise ClusterError(
                f"Ray on this node ({record.node_ip}, rank {record.rank} of cluster {record.cluster!r}) has exited by itself; "
                f"its logs are in {record.temp_dir}/session_latest/logs; start it again with `rollcall node`"
            )
        status = _let_save(record, signals, save_s=save_s, until=until)
        how = "" if status is None else f"the run {status_words(status)}; "
        say(f"{how}stopping Ray on this node (rank {record.rank} of cluster {record.cluster!r})")
        stop_node(record.cluster)
        return status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def drivers(record: NodeRecord) -> list[Process]:
    """Return the drivers of this cluster's runs on this node: those of submitted jobs, and those that a user started."""
    found = find_processes(state_dir(record.cluster), recorded=record.processes)
    return [process for process in found if DRIVER in command_of(process.pid)] + noted_drivers(record.cluster)


def has_run(record: NodeRecord) -> bool:
    """Return whether any Ray process on this node is working for a run."""
    found = find_processes(state_dir(record.cluster), recorded=record.processes)
    titles = (command_of(process.pid) for process in found)
    return any(title.startswith("ray::") and not title.startswith(FOR_NOBODY) for title in titles)


def _let_save(
    record: NodeRecord, signals: Signals, *, save_s: float, until: Callable[[], int | None] | None
) -> int | None:
    """Give the run time to save. Return the run's exit status if ``until`` returns one in time, which it does only after the run's last
    output has been printed."""
    signal_processes(drivers(record), signal.SIGTERM)
    wait, status = Wait(save_s), None
    if not has_run(record):
        return None
    say(f"waiting at most {save_s:g} s for the run on this node to save; a second signal stops Ray at once")
    while not wait.is_over and not signals.hurry.wait(0.3):
        status = until() if until is not None else None
        if status is not None or (until is None and not has_run(record)):
            break
    return status


def _reap() -> None:
    """Reap orphans: in a container, this process may be PID 1 and therefore the parent of every orphan."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
