"""Lists the processes that wait in a debugger in the head's store, for cluster nodes that do not see the run directory.

Each controller has one entry with the content of its board (process/debug/board.py). Anyone who can read the store can run code on
every node anyway. Ray is imported inside the functions because it reads variables during the import, which ``connect`` sets first.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from rollcall.base.wait import warn
from rollcall.process.debug.board import BOARD, Waiting, dump_board, parse_board
from rollcall.process.debug.here import serve
from rollcall.process.ray.members import RANK_LABEL

NAMESPACE = "rollcall-debugger"


def serve_driver() -> None:
    """Let terminals on all nodes of the cluster reach a stop in this process."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    labels = next((node["Labels"] for node in ray.nodes() if node["NodeID"] == own), {})
    serve(host=ray.util.get_node_ip_address(), node=int(labels.get(RANK_LABEL, 0)))
    if publish not in BOARD.copies:
        BOARD.copies.append(publish)


def publish(run_dir: Path | None, waiting: Sequence[Waiting]) -> None:
    """Write the copy of this process's board, or remove it if nothing waits."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

    if not ray.is_initialized():
        return
    key = f"{socket.gethostname()}/{os.getpid()}"
    try:
        if waiting:
            _internal_kv_put(key, dump_board(waiting), overwrite=True, namespace=NAMESPACE)
        else:
            _internal_kv_del(key, namespace=NAMESPACE)
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds for an unreachable head; the run directory has the list too
        warn(f"`rollcall debug` cannot list this run by its cluster: {error}")


def read_waiting() -> list[Waiting]:
    """Read which processes wait in any run of this process's cluster."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    found: list[Waiting] = []
    for key in _internal_kv_list("", namespace=NAMESPACE):
        if (text := _internal_kv_get(key, namespace=NAMESPACE)) is not None:
            found += parse_board(text.decode())
    return found
