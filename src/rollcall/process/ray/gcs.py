"""Sends one query to a Ray head. `head.py` runs this file as a script, in a separate process, and waits for it.

It reads the token from standard input and the address from the first argument, and prints one JSON object. If it gets no token, it
sends the query without one; if the head refuses it, it tries again with the token from Ray's own variables and files. If a rank and the
node's own mark follow the address, this claims the rank for the node, provided that the head lists the node. Ray's client retries a dead
address for minutes and then aborts its process, so it must not run in the process of a command.
"""

import importlib
import json
import os
import sys
from typing import Any

RANKS = b"rollcall-ranks"  # a namespace of the head's key-value store


def claim(client: Any, rank: str, mark: str, *, alive: set[str]) -> str:
    """Return the mark of the node that has the rank: this node, or a living node that claimed it earlier.

    Claims of a rank form a chain: the key of each claim contains the mark of the dead node that held the rank before. Claims are never
    removed. If several nodes claim a rank at the same moment, only one of them can write that key.
    """
    before = ""
    while True:
        key = f"{rank}/{before}".encode()
        if (holder := client.internal_kv_get(key, RANKS, timeout=30)) is None:
            client.internal_kv_put(key, mark.encode(), False, RANKS, timeout=30)
        elif holder.decode() == mark or holder.decode() in alive:
            return holder.decode()
        else:
            before = holder.decode()


def ask(address: str, *, mode: str) -> tuple[Any, Any]:
    """Return a client that uses this authentication mode, and the nodes that the head lists. Return None for both if the head refuses."""
    raylet: Any = importlib.import_module("ray._raylet")
    from ray.exceptions import AuthenticationError

    os.environ["RAY_AUTH_MODE"] = mode
    raylet.Config.initialize("")  # reads the mode
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    try:
        client = raylet.GcsClient(address=address)
        return client, client.get_all_node_info(timeout=30)
    except AuthenticationError:
        return None, None


def token_source() -> str:
    """Return where Ray finds a token, in Ray's own order, or "none"."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    # Ray aborts the process if this file does not exist.
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    return path if os.path.exists(path) and open(path).read().strip() else "none"


def node_rows(nodes: Any) -> list[dict[str, Any]]:
    """Convert the nodes from ``get_all_node_info`` to the input of ``NodeInfo.of``."""
    gcs: Any = importlib.import_module("ray.core.generated.gcs_pb2")
    fields = ("node_manager_port", "object_manager_port", "metrics_export_port", "runtime_env_agent_port")
    agents = ("metrics_agent_port", "dashboard_agent_listen_port")
    return [
        {
            "node_id": node_id.hex(),
            "alive": node.state == gcs.GcsNodeInfo.GcsNodeState.ALIVE,
            "is_head": node.is_head_node,
            "address": node.node_manager_address,
            "host": node.node_manager_hostname,
            "started_ms": node.start_time_ms,
            "ended_ms": node.end_time_ms,
            "temp_dir": node.temp_dir,
            "labels": dict(node.labels),
            "resources": dict(node.resources_total),
            "ports": {name.removesuffix("_port"): getattr(node, name) for name in (*fields, *agents)},
        }
        for node_id, node in nodes.items()
    ]


def main() -> None:
    given, wished, is_open = sys.stdin.read().strip(), os.environ.get("RAY_AUTH_MODE", ""), False
    source = "given" if given else token_source()
    if given:
        os.environ["RAY_AUTH_TOKEN"] = given
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        client, nodes = ask(sys.argv[1], mode="token")
    else:
        client, nodes = ask(sys.argv[1], mode="disabled")
        is_open = client is not None
        mode = wished if wished not in ("", "disabled") else "token"
        if client is None and (source != "none" or mode != "token"):
            client, nodes = ask(sys.argv[1], mode=mode)
    if client is None:
        print(json.dumps({"refused": source}))
        return
    dashboard = client.internal_kv_get(b"dashboard", b"dashboard", timeout=30)
    metadata = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=30) or b"{}")
    versions = {"Ray": metadata.get("ray_version"), "Python": metadata.get("python_version")}
    rows = node_rows(nodes)
    found: dict[str, Any] = {
        "nodes": rows,
        "dashboard": dashboard.decode() if dashboard else None,
        "open": is_open,
        "versions": {what: version for what, version in versions.items() if version},
    }
    if len(sys.argv) > 2:
        rank, mark = sys.argv[2:]
        alive = {row["labels"].get("rollcall.mark") for row in rows if row["alive"]}
        found["holder"] = claim(client, rank, mark, alive=alive) if mark in alive else None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
