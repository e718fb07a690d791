"""Where things are in a folder that nodes share, and what a master and its workers say about themselves.

FOLDER/messages/
  master/presence.json      who is master, which of its worker groups is current (``epoch``), how the run ended
  node-0001/presence.json   who is worker 1
  node-0001/inbox/          calls to it, removed as it takes them
  answers/                  from all workers, removed as the master takes them
"""

from __future__ import annotations

import os
import platform
import socket
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollcall.errors import ClusterError
from rollcall.groups.folder.mailbox import BEAT_S, Peer
from rollcall.version import __version__


class State(StrEnum):
    """What a process says of itself: a master the first three, a worker the last two."""

    RUNNING = "running"
    ENDED = "ended"
    BROKE_OFF = "broke off"
    HERE = "here"
    LEFT = "left"


class Messages:
    """The folders below FOLDER."""

    def __init__(self, shared: Path) -> None:
        self.root = shared / "messages"
        self.master = self.root / "master"
        self.answers = self.root / "answers"

    def node(self, rank: int) -> Path:
        return self.root / f"node-{rank:04d}"

    def inbox(self, rank: int) -> Path:
        return self.node(rank) / "inbox"


def label_of(*, master: str, worker: str, epoch: int) -> str:
    return f"{master}-{worker}-{epoch:05d}"


def about_this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rollcall": __version__,
        "python": platform.python_version(),
    }


def refuse_second(folder: Path, *, who: str) -> None:
    """Refuse a second process under this name: the counter of the first moves while we look."""
    peer = Peer(folder)
    peer.look()
    if not peer.facts or peer.facts.get("state") not in (State.RUNNING, State.HERE):
        return
    until = time.monotonic() + 3 * BEAT_S
    while time.monotonic() < until:
        time.sleep(0.2)
        peer.look()
        if peer.is_moving:
            raise ClusterError(
                f"{who} runs already, as process {peer.facts['pid']} on {peer.facts['host']}, in {folder.parent.parent}; end it "
                "first, or give another --log-path"
            )
