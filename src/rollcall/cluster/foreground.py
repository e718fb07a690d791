"""`rollcall node --block`: stay for as long as Ray runs on this node, and take it along when told to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from rollcall.cluster.bootstrap import is_running, stop_node
from rollcall.cluster.state import ClusterError, NodeRecord, read_record

LOOK_EVERY_S = 1.0


def hold(record: NodeRecord, *, say: Callable[[str], None]) -> None:
    """Return when SIGTERM or Ctrl-C has stopped the node, or `rollcall down` has; an error if Ray died by itself."""
    told = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        told.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not told.wait(LOOK_EVERY_S):
            if os.getpid() == 1:
                _reap()
            if is_running(record):
                continue
            now = read_record(record.cluster)
            if now is None or now.cluster_id != record.cluster_id:
                say("this node was taken down by another command")
                return
            stop_node(record.cluster)
            raise ClusterError(
                f"Ray on this node ({record.node_ip}, rank {record.rank} of cluster {record.cluster!r}) has ended by itself; "
                f"its logs are in {record.temp_dir}/session_latest/logs; start it again with `rollcall node`"
            )
        say(f"stopping Ray on this node (rank {record.rank} of cluster {record.cluster!r})")
        stop_node(record.cluster)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reap() -> None:
    """In a container this process may be the first one, and every orphan's parent."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
