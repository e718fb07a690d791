"""The porter of a process that may stop: it listens for terminals while something is stopped, and takes them to it.

A thread of its own. It reads the line of the process that stopped; at the first prompt it opens a door (net/door.py) with a new
secret and tells ``told`` where that is. One terminal at a time gets through; a second one hears that the first is there. A
terminal that is lost, or leaves, changes nothing for the thread that stopped. If nobody is attached for ``UNATTENDED_S``, the
porter says `continue` in their place, and at once to all that stop in this process afterwards: a forgotten breakpoint, or one
that a model has put into code that a reward or an environment runs, must not hold a cluster for ever.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollcall.debug.inbox import FrameReader, readable
from rollcall.net.door import Door, listen_at, new_secret, watch_peer
from rollcall.process.framing import json_frame
from rollcall.wait import warn

UNATTENDED_S = 3600.0
LOOK_S = 0.1  # between two looks at the door
SEND_S = 5.0  # a terminal that takes nothing for this long is lost

_alone_since: float | None = None  # something was stopped, and nobody has been attached since; by the monotonic clock
_has_given_up = False

OnStop = Callable[[Mapping[str, Any] | None], None]


class Porter:
    """``told`` hears where something is stopped and how to reach it, and None when that goes on."""

    def __init__(self, line: socket.socket, *, host: str, told: OnStop) -> None:
        self._line = FrameReader(line)
        self._host = host
        self._told = told
        self._door: Door | None = None
        self._caller: FrameReader | None = None
        self._is_heard = False  # the caller: what was said before it came is not for it
        self._thread = threading.Thread(target=self._run, name="debugger's porter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except OSError:
            pass  # the line is closed: the process has ended, or its owner has ended it; or what came is not ours
        finally:
            self._goes()
            self._line.connection.close()  # without a porter, what is stopped goes on

    def _turn(self) -> None:
        sources = [one for one in (self._line, self._caller, self._door) if one is not None]
        ready = readable(sources, timeout_s=LOOK_S if self._door else None)
        if self._line.fileno() in ready:
            for message in self._line.take():
                self._pass_out(message)
        if self._caller is not None and self._caller.fileno() in ready:
            self._hear(self._caller)
        if self._door is None:
            return
        if (caller := self._door.accept(0)) is not None:
            self._welcome(caller)
        if self._caller is None and _left_s() <= 0:
            self._give_up()

    def _pass_out(self, message: Mapping[str, Any]) -> None:
        if "stopped" in message:
            self._stopped(message["stopped"])
            return
        self._is_heard = self._is_heard or "here" in message
        if self._is_heard:
            self._to_caller(message)
        if "left" in message:
            self._drop()
        if "goes" in message:
            self._goes()

    def _stopped(self, place: Any) -> None:
        """A prompt is open. While somebody steps from line to line, the door stays as it is."""
        if _has_given_up and self._caller is None:
            self._give_up()
            return
        if self._door is None:
            self._open()
        left_s = _left_s() if self._caller is None else UNATTENDED_S
        self._told({**_checked(place), **self._reach, "until": time.time() + left_s})

    def _open(self) -> None:
        try:
            listener = listen_at(self._host)
        except OSError as error:
            warn(
                f"no terminal can come to what has stopped in process {os.getpid()}: cannot listen at {self._host} ({error})"
            )
            raise
        secret = new_secret()
        self._door = Door(listener, secret=secret)
        self._reach = {"address": self._host, "port": listener.getsockname()[1], "secret": secret}

    def _give_up(self) -> None:
        """The run's limits count again from here on, whatever the process makes of it."""
        global _has_given_up
        if not _has_given_up:
            warn(
                f"nobody has come to the debugger for {UNATTENDED_S:g} s; what stops in process {os.getpid()} goes on by itself now"
            )
        _has_given_up = True
        self._goes()
        self._to_line({"line": "continue"})

    def _goes(self) -> None:
        global _alone_since
        if self._caller is not None:
            self._drop()
            _alone_since = None
        if self._door is not None:
            self._door.close()
            self._door = None
            self._told(None)

    def _welcome(self, connection: socket.socket) -> None:
        global _alone_since
        watch_peer(connection)
        connection.settimeout(SEND_S)
        caller = FrameReader(connection)
        if self._caller is not None:
            self._send(caller, {"busy": True})
            connection.close()
            return
        self._caller, self._is_heard, _alone_since = caller, False, None
        self._to_line({"attach": True})

    def _hear(self, caller: FrameReader) -> None:
        try:
            for message in caller.take():
                if isinstance(message.get("line"), str):
                    self._to_line({"line": message["line"]})
        except OSError:
            self._drop()

    def _to_line(self, message: Mapping[str, Any]) -> None:
        self._line.connection.sendall(json_frame(message))

    def _to_caller(self, message: Mapping[str, Any]) -> None:
        if self._caller is not None and not self._send(self._caller, message):
            self._drop()

    def _send(self, caller: FrameReader, message: Mapping[str, Any]) -> bool:
        try:
            caller.connection.sendall(json_frame(message))
            return True
        except OSError:
            return False

    def _drop(self) -> None:
        """Nobody is attached any more."""
        global _alone_since
        if self._caller is not None:
            self._caller.connection.close()
            self._caller, _alone_since = None, time.monotonic()


def _left_s() -> float:
    """Until what is stopped goes on by itself. It does not begin again with the next stop, unless somebody has come."""
    global _alone_since
    _alone_since = _alone_since or time.monotonic()
    return _alone_since + UNATTENDED_S - time.monotonic()


def _checked(place: Any) -> dict[str, Any]:
    """Where it stopped, as its process says: a reward's or an environment's may say anything."""
    place = place if isinstance(place, dict) else {}
    found = {name: place.get(name) for name in ("file", "function", "why")}
    texts = {name: text[:1000] if isinstance(text, str) else "" for name, text in found.items()}
    line = place.get("line")
    return {**texts, "line": line if isinstance(line, int) else 0}
