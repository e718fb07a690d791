"""Finds and stops exactly the processes of a cluster on this node.

The processes of a cluster have the cluster's folder in their environment (``MARK``). Ray's workers overwrite their environment when they
set their title, so all processes in the session of a marked or recorded process belong to the cluster too, and so do all descendants.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from rollcall.base.errors import ClusterError
from rollcall.base.process_table import Process, command_of, environment_of, living, session_of

MARK = "ROLLCALL_NODE_DIR"
# Process names. A node is down without a raylet, and a head is down without a GCS server.
RAYLET, GCS = "raylet", "gcs_server"


def find_processes(folder: Path, *, recorded: Iterable[Process] = ()) -> list[Process]:
    """Find all running processes of the cluster with this folder, except this one."""
    table = {process.pid: process for process in living() if process.info["uids"].real == os.getuid()}
    ours = {process.pid for process in recorded if process.is_alive()} & table.keys()
    ours |= {pid for pid in table if (environment_of(pid) or {}).get(MARK) == str(folder)}
    sessions = {session_of(pid) for pid in ours} - {None}
    ours |= {pid for pid in table if session_of(pid) in sessions}
    while more := {pid for pid, process in table.items() if process.info["ppid"] in ours} - ours:
        ours |= more
    found = (Process.of(pid) for pid in sorted(ours - {os.getpid()}))
    return [process for process in found if process is not None]


def stop_processes(folder: Path, *, recorded: Iterable[Process] = ()) -> int:
    """Stop the cluster's processes and return their number. The raylet is stopped first, so that the head notices at once."""
    recorded = tuple(recorded)
    # This keeps every process that was seen, because an orphan can no longer be found through its parent.
    known: dict[int, Process] = {}

    def remaining() -> list[Process]:
        known.update({process.pid: process for process in find_processes(folder, recorded=known.values() or recorded)})
        return [process for process in known.values() if process.is_alive()]

    raylets = [process for process in remaining() if command_names([process]) == {RAYLET}]
    signal_processes(raylets, signal.SIGTERM)
    # A raylet now leaves its cluster and stops its workers, which it never does if the head is gone.
    _wait(lambda: [process for process in raylets if process.is_alive()], seconds=5.0)
    signal_processes(remaining(), signal.SIGTERM)
    _wait(remaining, seconds=2.0)
    deadline = time.monotonic() + 10.0
    while left := remaining():
        signal_processes(left, signal.SIGKILL)
        _wait(remaining, seconds=1.0)
        if time.monotonic() > deadline:
            named = ", ".join(f"{process.pid} ({command_of(process.pid)[:80] or 'gone'})" for process in left)
            raise ClusterError(f"these processes are still running after SIGKILL: {named}")
    return len(known)


def command_names(processes: Iterable[Process]) -> set[str]:
    """Return the names of the processes that are alive."""
    names: set[str] = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has exited in the meantime
            if process.is_alive():
                names.add(psutil.Process(process.pid).name())
    return names


def raylets_here() -> dict[str, str]:
    """Map the id of every Ray node on this machine, including other users' nodes, to its head (HOST:PORT)."""
    found: dict[str, str] = {}
    for process in psutil.process_iter(["cmdline"]):
        name, *words = process.info["cmdline"] or [""]
        options = {option: value for option, _, value in (word.partition("=") for word in words)}
        if os.path.basename(name) == RAYLET and "--gcs-address" in options:
            found[options.get("--node_id", str(process.pid))] = options["--gcs-address"]
    return found


def signal_processes(processes: Iterable[Process], number: int) -> None:
    """Send the signal to the processes that are alive."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):  # it has just exited, or runs as a different user now
            if process.is_alive():
                os.kill(process.pid, number)


def _wait(remaining: Callable[[], list[Process]], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while remaining() and time.monotonic() < deadline:
        time.sleep(0.1)
