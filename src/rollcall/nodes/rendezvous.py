"""The shared folder through which nodes find their head: ``DIR/CLUSTER/head.json``, and next to it the token.

Rank 0 publishes the head once it answers. The other nodes read the file, ask that head for its identity, and join only if the file
describes that head. If the head in the file is gone or was replaced, the file is ignored until rank 0 overwrites it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rollcall.base.atomic import write_atomic
from rollcall.base.errors import ClusterError
from rollcall.base.wait import Wait
from rollcall.nodes.head import HeadAnswer, HeadRefuses, HeadUnreachable, ask_head
from rollcall.nodes.state import TOKEN, make_private

ASK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head as rank 0 publishes it."""

    cluster: str
    cluster_id: str
    address: str  # HOST:PORT of Ray's GCS
    host: str
    dashboard: str | None  # HOST:PORT, as the head binds it
    started_at: str  # ISO 8601
    tls: bool = False  # whether the head accepts only TLS


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A published head that is alive and has the published identity."""

    address: str
    token: str
    tls: bool
    answer: HeadAnswer


class Rendezvous:
    """One cluster's folder under the shared ``root``."""

    def __init__(self, root: Path, cluster: str) -> None:
        self.root = root
        self.folder = root / cluster
        self.head_file = self.folder / "head.json"
        self.token_file = self.folder / "token"
        self.reached_file = self.folder / "reached"  # the progress of a run that was stopped (``launch/whole_run.py``)

    def publish(self, head: Head, *, token: str | None) -> None:
        """Publish the head. The token is written first, so that a node that sees the new address also sees its token. Without
        ``token``, every node reads the token from its environment."""
        self.prepare()
        if token is None:
            self.token_file.unlink(missing_ok=True)
        else:
            write_atomic(self.token_file, token, private=True)
            if stat.S_IMODE(self.token_file.stat().st_mode) & 0o077:
                self.token_file.unlink()
                raise ClusterError(
                    f"the file system of {self.folder} has no file permissions, so others could read the token; "
                    f"set {TOKEN} on every node instead"
                )
        write_atomic(self.head_file, json.dumps(asdict(head), indent=1), private=True)

    def read(self) -> Head | None:
        """Return the published head, or `None` if nothing readable is published. Raise if the file belongs to a different user."""
        try:
            os.listdir(self.folder)  # makes an NFS client check again if it has cached that the file does not exist
            owner = self.head_file.stat().st_uid
            text = self.head_file.read_text()
        except FileNotFoundError:
            return None
        if owner not in (os.getuid(), 0):
            raise ClusterError(
                f"{self.head_file} was written by user {owner}, not by you; use another --rendezvous or --cluster"
            )
        try:
            return Head(**json.loads(text))
        except (TypeError, ValueError):  # half-written, or from a different version; rank 0 replaces it
            return None

    def read_token(self) -> str | None:
        try:
            return self.token_file.read_text().strip()
        except FileNotFoundError:
            return None

    def withdraw(self, cluster_id: str) -> None:
        """Remove the published head, unless a different start of the cluster has published it."""
        head = self.read()
        if head is not None and head.cluster_id == cluster_id:
            self.head_file.unlink(missing_ok=True)
            self.token_file.unlink(missing_ok=True)

    def prepare(self) -> None:
        """Create the folder, readable only by its owner."""
        try:
            make_private(self.folder, advice="use another --rendezvous or --cluster")
        except PermissionError as error:
            raise ClusterError(f"cannot create {self.folder} for the rendezvous: {error.strerror}") from None


def look(rendezvous: Rendezvous, *, token: str | None) -> Found | str:
    """Return the published head if it is alive, or else a text that completes the message "waiting for ..."."""
    head = rendezvous.read()
    if head is None:
        exists = "" if rendezvous.root.is_dir() else f" ({rendezvous.root} does not exist on this node)"
        return f"rank 0 to publish {rendezvous.head_file}{exists}"
    names = f"{rendezvous.head_file} names a head at {head.address} (host {head.host}, started {head.started_at})"
    held = token or rendezvous.read_token()
    if held is None:
        return f"a token: {names}, but that folder has none; if rank 0 uses {TOKEN}, set the same value on this node"
    try:
        answer = ask_head(head.address, token=held, tls=head.tls)
    except HeadUnreachable:
        return f"rank 0 to publish a fresh address: {names}, which does not answer"
    except HeadRefuses:
        whose = f"{TOKEN} of this node" if token else f"token in {rendezvous.folder}"
        return f"rank 0 to publish a fresh address: {names}, which refuses the {whose}"
    if answer.cluster_id != head.cluster_id:
        return f"rank 0 to publish a fresh address: {names}, but a different cluster answers at that address"
    return Found(address=head.address, token=held, tls=head.tls, answer=answer)


def wait_at(address: str, *, token: str, tls: bool, timeout_s: float) -> Found:
    """Wait for the head at an address that the user set."""

    def ask() -> Found | str:
        try:
            answer = ask_head(address, token=token, tls=tls)
        except HeadUnreachable as error:
            return f"rank 0 to start the head at {address} ({error})"
        if answer.head is None:
            return f"the head at {address} to finish starting"
        if answer.cluster_id is None:
            raise ClusterError(
                f"the Ray cluster at {address} was not started by `rollcall node`, so this node cannot join; start its head with "
                "`rollcall node --rank 0`"
            )
        return Found(address=address, token=token, tls=tls, answer=answer)

    return poll(ask, timeout_s=timeout_s)


def poll(look: Callable[[], Found | str], *, timeout_s: float) -> Found:
    """Call ``look`` until it finds the head."""
    wait = Wait(timeout_s, first_s=0, every_s=5)
    while True:
        found = look()
        if isinstance(found, Found):
            return found
        if not wait.again(f"waiting for {found}", after_s=ASK_EVERY_S):
            raise ClusterError(f"rank 0 is missing after {timeout_s:.0f} s (--timeout): still waiting for {found}")
