"""The parent's end of the line of a child process that runs user code: a reward's, an environment's (debug/child.py has the other end).

The child has no terminal and perhaps no network, so the parent brings one: its own, or those that come to a porter. The text
that travels is only shown. While somebody debugs the child, its time limits are paused (``is_held``, ``Board.is_held``).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any

from rollcall.debug.attach import End, converse
from rollcall.debug.board import BOARD, DebugSeat
from rollcall.debug.here import host_here, is_watched, node_here, tell
from rollcall.debug.porter import Porter
from rollcall.debug.stopped import borrowed_terminal, has_terminal
from rollcall.process.pause import paused
from rollcall.stop import heeded
from rollcall.wait import warn

PROMPT_S = 10.0  # from the first byte of a process that has stopped to its prompt
_serials = count()  # of the lines of this process


class DebugLine:
    """``theirs`` is for the child. ``role`` and ``number`` say which one that is."""

    def __init__(self, *, role: str, number: int) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._role = role
        self._number = number
        self._key = f"{role} {os.getpid()} {next(_serials)}"
        self.is_held = False
        self._is_closed = False

    @property
    def fd(self) -> int:
        return self._ours.fileno()

    def answer(self) -> bool:
        """The process has stopped: talk to it at this terminal, until it goes on. False: this process has none, and from now on
        a porter reads the line. Or nobody does, and what is stopped there goes on: what came is not from a debugger, or the command
        has no run directory, so that nobody could find the porter."""
        try:
            if self._ours.recv(1, socket.MSG_PEEK) == b"":
                return False  # it has ended, which others notice
        except OSError:
            return False  # the same, with something of ours unread
        if not (has_terminal() or BOARD.is_public or is_watched()):
            warn_passed_over(self._role)
            self.close()
            return False
        if not has_terminal():
            Porter(self._ours, host=host_here(), told=self._note)
            return False
        with paused(), borrowed_terminal():
            end = converse(self._ours, again=True, opens_within_s=PROMPT_S)
        if end is End.LEFT:
            heeded().check()  # a terminal that was closed: SIGHUP, and the end of what is typed
            raise KeyboardInterrupt
        if end is End.LOST:
            self.close()
        return end is not End.LOST

    def _note(self, place: Mapping[str, Any] | None) -> None:
        if self._is_closed:
            place = None  # a process that is being ended holds nothing
        self.is_held = place is not None
        if not BOARD.is_public and is_watched():
            tell(self._key, place)
            return
        title = f"{self._role} process {self._number} on node {node_here()}"
        seat = DebugSeat(role=self._role, rank=self._number, node=node_here(), title=title)
        BOARD.post(self._key, seat, place)

    def close(self) -> None:
        self._is_closed = True
        try:
            self._ours.shutdown(socket.SHUT_RDWR)  # wakes the porter, whose thread then ends
        except OSError:
            pass  # the process has ended, and its end with it
        self._ours.close()


@cache
def warn_passed_over(role: str) -> None:
    """Once: hundreds of processes may come to the same line."""
    article = "an" if role[0] in "aeiou" else "a"
    warn(f"a breakpoint() in {article} {role} is passed over: this command has neither a terminal nor a run directory")
