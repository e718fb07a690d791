"""Stores a node's record and token for each of its clusters. Only the user who started the node can read them.

The folder is local to the node (``/tmp/rollcall-UID/CLUSTER``, or ``$ROLLCALL_STATE_DIR/CLUSTER``), because nodes often share
a home folder. ``rollcall node`` writes the record; every other command reads it to find the head, the token and the processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rollcall.base.atomic import take_lock, write_atomic
from rollcall.base.errors import ClusterError
from rollcall.base.process_table import Process
from rollcall.base.wait import Wait

Accelerator = Literal["gpu", "cpu"]
DEFAULT_CLUSTER = "default"
STATE_DIR = "ROLLCALL_STATE_DIR"
TOKEN = "ROLLCALL_TOKEN"  # the variable with a token that the user chooses; it is a secret, so no worker sees it
CLUSTER = "ROLLCALL_CLUSTER"  # the cluster that a command uses without --cluster
# A token that the user sets needs at least this many characters, and this many different ones.
TOKEN_LENGTH, TOKEN_LETTERS = 32, 8
OWNER_S = 240.0  # Ray never takes this long to start
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,30}[A-Za-z0-9])?")  # valid as a folder name and as a Ray label's value


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """This node's membership in one cluster."""

    cluster: str  # its name
    cluster_id: str  # rank 0 creates a new id at every start of the cluster
    rank: int
    num_nodes: int
    node_ip: str
    slots: int
    accelerator: Accelerator
    head_address: str  # HOST:PORT of Ray's GCS
    # The URL at which this node reaches the dashboard; `None` if the dashboard listens on the head's loopback only.
    dashboard_url: str | None = None
    temp_dir: str  # Ray's session folder
    rendezvous: str | None
    processes: tuple[Process, ...] = ()  # the processes that `rollcall node` started on this node
    ports: dict[str, int] = field(default_factory=dict)  # ports that Ray listens on, by component


def state_dir(cluster: str) -> Path:
    """Return the cluster's folder on this node. It is created if needed, and only its owner can read it."""
    if not NAME.fullmatch(cluster):
        raise ClusterError(
            f"{cluster!r} is not a valid cluster name; use at most 32 letters, digits, '-' and '_', "
            "beginning and ending with a letter or digit"
        )
    # TMPDIR is not used: a launcher sets a different one for each job, and `down` must find the files of `node`.
    root = Path(os.environ.get(STATE_DIR) or f"/tmp/rollcall-{os.getuid()}").absolute()
    for path in (root, root / cluster):
        make_private(path, advice=f"set {STATE_DIR} to a folder that you own")
    return root / cluster


def make_private(folder: Path, *, advice: str) -> None:
    """Create a folder that only its owner can read, and refuse a folder of another user."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:  # another command removed the folder between pathlib's two checks
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (owner := folder.stat().st_uid) != os.getuid():
        raise ClusterError(f"{folder} belongs to user {owner}, not to you; {advice}")
    folder.chmod(0o700)


def token_path(cluster: str) -> Path:
    return state_dir(cluster) / "token"


def read_token(cluster: str) -> str:
    try:
        return token_path(cluster).read_text().strip()
    except FileNotFoundError:
        raise ClusterError(f"{not_here(cluster)} (its token is missing)") from None


def check_token(token: str) -> None:
    """Refuse a weak token: with the token, anyone who reaches a port can run code on every node."""
    if len(token) < TOKEN_LENGTH or len(set(token)) < TOKEN_LETTERS:
        raise ClusterError(
            f"{TOKEN} has {len(token)} characters, {len(set(token))} of them distinct; it needs at least {TOKEN_LENGTH}, "
            f"{TOKEN_LETTERS} of them distinct, so that nobody can guess it. Create a token with `openssl rand -hex 32`, and set "
            "the same token on every node"
        )


def auth_env(cluster: str) -> dict[str, str]:
    """Return the environment variables that let Ray reach this cluster. They name the token's file and never contain the token."""
    folder = tls_dir(cluster)
    certificates = tls_env(folder) if folder.is_dir() else {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path(cluster)), **certificates}


def tls_dir(cluster: str) -> Path:
    """Return the folder of this node's certificates, which exists if the cluster uses TLS."""
    return state_dir(cluster) / "tls"


def tls_env(folder: Path) -> dict[str, str]:
    """Return environment variables that make Ray use the certificates in ``folder`` (``tls.py``)."""
    files = {"SERVER_CERT": "node.pem", "SERVER_KEY": "node.key", "CA_CERT": "authority.pem"}
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": str(folder / file) for name, file in files.items()}}


def write_record(record: NodeRecord) -> None:
    write_atomic(state_dir(record.cluster) / "node.json", json.dumps(asdict(record), indent=1), private=True)


def read_record(cluster: str) -> NodeRecord | None:
    """Return this node's record, or `None` if it is not part of a cluster with this name."""
    try:
        fields = json.loads((state_dir(cluster) / "node.json").read_text())
    except FileNotFoundError:
        return None
    fields["processes"] = tuple(Process(**process) for process in fields["processes"])
    return NodeRecord(**fields)


def current_cluster(cluster: str | None) -> str:
    """Return the requested cluster, or else the cluster that the environment names, or else the default."""
    return cluster or os.environ.get(CLUSTER) or DEFAULT_CLUSTER


def require_record(cluster: str) -> NodeRecord:
    record = read_record(cluster)
    if record is None:
        raise ClusterError(not_here(cluster))
    return record


def not_here(cluster: str) -> str:
    found = sorted(path.parent.name for path in state_dir(cluster).parent.glob("*/node.json"))
    others = f"; it is part of {', '.join(found)} (--cluster NAME)" if found else ""
    return (
        f"this node is not part of a cluster {cluster!r}{others}; to add it, run `rollcall node`. A run on one machine needs no "
        "cluster: `rollcall status RUN_DIR` shows the run"
    )


@contextmanager
def sole_owner(cluster: str) -> Iterator[None]:
    """Let only one command at a time start or stop this cluster on this node; a second command waits."""
    wait = Wait(OWNER_S)
    while True:
        with suppress(FileNotFoundError):  # another command has just removed the folder
            if (file := take_lock(state_dir(cluster) / "lock")) is not None:
                break
        if wait.is_over:
            raise ClusterError(
                f"another `rollcall node` or `rollcall down` of cluster {cluster!r} has been running on this node "
                f"for {OWNER_S:.0f} s; end it, then try again"
            )
        time.sleep(0.2)
    with file:
        try:
            yield
        finally:
            _leave_nothing(cluster)


def _leave_nothing(cluster: str) -> None:
    """Remove the lock, which this process holds, and empty folders, unless this node is part of the cluster."""
    folder = state_dir(cluster)
    if (folder / "node.json").exists():
        return
    (folder / "lock").unlink(missing_ok=True)
    for path in (folder, folder.parent):
        with suppress(OSError):  # it is not empty, or another command has just written to it
            path.rmdir()


def forget(cluster: str) -> None:
    """Remove the node's record, token, certificates and list of drivers."""
    for name in ("node.json", "token"):
        (state_dir(cluster) / name).unlink(missing_ok=True)
    for folder in (tls_dir(cluster), state_dir(cluster) / "drivers"):
        shutil.rmtree(folder, ignore_errors=True)


def note_driver(cluster: str) -> None:
    """Record that this process drives a run from this node, so that `rollcall node --block` can tell it to save."""
    own = Process.of(os.getpid())
    assert own is not None
    note = state_dir(cluster) / "drivers" / str(own.pid)
    note.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(note, str(own.started), private=True)


def noted_drivers(cluster: str) -> list[Process]:
    """Return the recorded drivers that are still alive."""
    noted: list[Process] = []
    for note in sorted((state_dir(cluster) / "drivers").glob("[0-9]*")):
        with suppress(FileNotFoundError):  # `rollcall down` has just removed it
            noted.append(Process(pid=int(note.name), started=int(note.read_text())))
    return [process for process in noted if process.is_alive()]
