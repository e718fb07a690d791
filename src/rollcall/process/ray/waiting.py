"""Who waits in a debugger, in the head's store: for nodes of the cluster that do not see the run directory.

One entry for each controller, with what its board has (process/debug/board.py). Those who may read the store may run code on every node
anyway. Ray is imported in here: it reads variables while it is imported, which ``connect`` sets before.
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
    """Lets terminals on all nodes of the cluster reach what stops in this process."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    labels = next((node["Labels"] for node in ray.nodes() if node["NodeID"] == own), {})
    serve(host=ray.util.get_node_ip_address(), node=int(labels.get(RANK_LABEL, 0)))
    if publish not in BOARD.copies:
        BOARD.copies.append(publish)


def publish(run_dir: Path | None, waiting: Sequence[Waiting]) -> None:
    """Writes the copy of this process's board; removes it while nobody waits."""
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
    except Exception as error:  # noqa: BLE001 - Ray has many for a head that is away; the run directory has the list too
        warn(f"`rollcall debug` cannot list this run by its cluster: {error}")


def read_waiting() -> list[Waiting]:
    """Reads who waits in any run of the cluster that this process is connected to."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    found: list[Waiting] = []
    for key in _internal_kv_list("", namespace=NAMESPACE):
        if (text := _internal_kv_get(key, namespace=NAMESPACE)) is not None:
            found += parse_board(text.decode())
    return found
