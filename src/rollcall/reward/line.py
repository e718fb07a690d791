"""The parent's end of a reward process's line to a debugger (debug/stopped.py).

The process has no terminal and perhaps no network, so the parent brings one: its own, or those that come to a porter. The text
that travels is only shown. While somebody debugs the process, its time limits stand still (``is_held``).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from rollcall.debug.attach import End, converse
from rollcall.debug.board import BOARD, Seat
from rollcall.debug.here import host_here, node_here
from rollcall.debug.pause import paused
from rollcall.debug.porter import Porter
from rollcall.debug.stopped import borrowed_terminal, has_terminal
from rollcall.net.frames import frame
from rollcall.wait import warn


class DebugLine:
    """``theirs`` is for the process; ``pid`` is set once it has started."""

    def __init__(self, *, number: int) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._number = number
        self.pid = 0
        self.is_held = False
        self._has_warned = False

    @property
    def fd(self) -> int:
        return self._ours.fileno()

    def answer(self) -> bool:
        """The process has stopped: talk to it at this terminal, until it goes on. False: this process has none, and from now on
        a porter reads the line. Of a command without a run directory, nobody could find the porter: it goes on at once."""
        if self._ours.recv(1, socket.MSG_PEEK) == b"":
            return False  # it has ended, which others notice
        if not has_terminal() and not BOARD.is_public:
            self._pass_over()
            return True
        if not has_terminal():
            Porter(self._ours, host=host_here(), told=self._note)
            return False
        with paused(), borrowed_terminal():
            end = converse(self._ours, again=True)
        if end is End.LEFT:
            raise KeyboardInterrupt
        return True

    def _pass_over(self) -> None:
        if not self._has_warned:
            warn("a breakpoint() in a reward is passed over: this command has neither a terminal nor a run directory")
        self._has_warned = True
        self._ours.recv(1 << 16)
        self._ours.sendall(frame({"line": "continue"}))

    def _note(self, place: Mapping[str, Any] | None) -> None:
        self.is_held = place is not None
        seat = Seat(
            role="reward",
            rank=self._number,
            node=node_here(),
            title=f"reward process {self._number} on node {node_here()}",
        )
        BOARD.post(f"reward {os.getpid()} {self.pid}", seat, place)

    def close(self) -> None:
        try:
            self._ours.shutdown(socket.SHUT_RDWR)  # wakes the porter, whose thread then ends
        except OSError:
            pass  # the process has ended, and its end with it
        self._ours.close()
