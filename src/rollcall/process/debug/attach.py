"""Connects a stopped process with a terminal.

A Porter runs on the stopped process's side, in a thread that reads the line. At the first prompt, it opens a door (nodes/door.py)
with a new secret and passes the door's address to ``on_stop``. It admits one terminal at a time and tells a second terminal that
the process is busy. If a terminal is lost or leaves, the stopped thread keeps waiting. If nobody is attached for ``UNATTENDED_S``,
the porter sends `continue`, and does so at once for all later stops in this process. So a forgotten breakpoint, or one that a model
wrote into code for a reward or an environment, cannot block a cluster forever.
``reach`` and ``converse`` are the terminal's side: `rollcall debug`, or the parent of a reward's or an environment's process.
Either side may be slow, or send invalid data, so reading a message (nodes/framing.py) never waits for the rest of it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from multiprocessing.connection import wait  # unlike select.select, it accepts descriptors from 1024 on
from typing import Any

from rollcall.base.errors import ClusterError
from rollcall.base.stop import Stopped
from rollcall.base.wait import warn
from rollcall.base.words import visible
from rollcall.nodes.door import Door, StrangerError, enter, listen_at, new_secret, watch_peer
from rollcall.nodes.framing import Frames, json_frame
from rollcall.process.debug.board import Waiting

CONNECT_S = 10.0
UNATTENDED_S = 3600.0
LOOK_S = 0.1  # between two checks of the door

_alone_since: float | None = None  # since this time, a thread has been stopped without a terminal; monotonic clock
_has_given_up = False

OnStop = Callable[[Mapping[str, Any] | None], None]


class Connection:
    """A socket that carries messages in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = Frames(4 << 20)  # bytes; the debugger's own messages are never that long
        self.fileno, self.close = connection.fileno, connection.close

    def send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json_frame(message))

    def take(self) -> list[dict[str, Any]]:
        """Return the complete messages; call this when there is something to read. Raise ConnectionError at the end of the stream."""
        if not (data := self._socket.recv(1 << 16)):
            raise ConnectionError("the connection was closed")
        try:
            found = [json.loads(body) for body in self._frames.feed(data)]
        except (ValueError, RecursionError):
            raise ConnectionError("a message is not JSON, or is nested too deeply") from None
        if not all(isinstance(message, dict) for message in found):
            raise ConnectionError("a message is not a JSON object")
        return found


# The process that stopped


class Porter:
    """Connects a stopped process to terminals. ``on_stop`` is called with each stop's place and door, and with None when the process
    continues."""

    def __init__(self, line: socket.socket, *, host: str, on_stop: OnStop) -> None:
        self._line = Connection(line)
        self._host = host
        self._on_stop = on_stop
        self._door: Door | None = None
        self._caller: Connection | None = None
        self._is_heard = False  # whether to send output to the caller: only after "here"
        threading.Thread(target=self._run, name="debugger's porter", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except (OSError, ValueError):
            pass  # the line is closed, because the process has exited or its owner has stopped it, or the data is invalid
        finally:
            self._goes()
            self._line.close()  # without a porter, the stopped thread continues

    def _turn(self) -> None:
        sources = [one.fileno() for one in (self._line, self._caller, self._door) if one is not None]
        ready = wait(sources, LOOK_S if self._door else None)
        if self._line.fileno() in ready:
            for message in self._line.take():
                self._pass_out(message)
        if self._caller is not None and self._caller.fileno() in ready:
            try:
                typed = [message.get("line") for message in self._caller.take()]
            except OSError:
                self._drop()
            else:
                for line in typed:
                    if isinstance(line, str):
                        self._line.send({"line": line})
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
        if self._is_heard and self._caller is not None:
            try:
                self._caller.send(message)
            except OSError:
                self._drop()
        if "left" in message:
            self._drop()
        if "goes" in message:
            self._goes()

    def _stopped(self, place: Any) -> None:
        """Open the door for a prompt. The door is not closed while a user steps from line to line."""
        if _has_given_up and self._caller is None:
            self._give_up()
            return
        if self._door is None:
            try:
                listener = listen_at(self._host)
            except OSError as error:
                warn(
                    f"no terminal can attach to process {os.getpid()}, which has stopped: cannot listen at {self._host} ({error})"
                )
                raise
            secret = new_secret()
            self._door = Door(listener, secret=secret)
            self._reach = {"address": self._host, "port": listener.getsockname()[1], "secret": secret}
        left_s = _left_s() if self._caller is None else UNATTENDED_S
        self._on_stop({**_checked(place), **self._reach, "until": time.time() + left_s})

    def _give_up(self) -> None:
        """Continue, because no terminal has attached. From now on, the run's time limits count again."""
        global _has_given_up
        if not _has_given_up:
            warn(
                f"no terminal has attached to the debugger for {UNATTENDED_S:g} s; process {os.getpid()} will not stop in it again"
            )
        _has_given_up = True
        self._goes()
        self._line.send({"line": "continue"})

    def _goes(self) -> None:
        global _alone_since
        if self._caller is not None:
            self._drop()
            _alone_since = None
        if self._door is not None:
            self._door.close()
            self._door = None
            self._on_stop(None)

    def _welcome(self, connection: socket.socket) -> None:
        global _alone_since
        watch_peer(connection)
        connection.settimeout(5.0)  # a terminal that accepts no data for this long is considered lost
        caller = Connection(connection)
        if self._caller is None:
            self._caller, self._is_heard, _alone_since = caller, False, None
            self._line.send({"attach": True})
            return
        with suppress(OSError):  # the caller has left
            caller.send({"busy": True})
        caller.close()

    def _drop(self) -> None:
        """Close the connection to the terminal."""
        global _alone_since
        if self._caller is not None:
            self._caller.close()
            self._caller, _alone_since = None, time.monotonic()


def _left_s() -> float:
    """Return the seconds until a stopped thread continues by itself. This time starts over only after somebody has attached."""
    global _alone_since
    _alone_since = _alone_since or time.monotonic()
    return _alone_since + UNATTENDED_S - time.monotonic()


def _checked(place: Any) -> dict[str, Any]:
    """Validate the place of a stop: a reward's or an environment's process may send anything."""
    place = place if isinstance(place, dict) else {}
    texts = {name: place.get(name) for name in ("file", "function", "why")}
    line = place.get("line")
    shown = {name: text[:1000] if isinstance(text, str) else "" for name, text in texts.items()}
    return {**shown, "line": line if isinstance(line, int) else 0}


# The terminal


class End(Enum):
    """How a conversation ended."""

    GOES = "it continues"
    LEFT = "the terminal left, and the process keeps waiting"
    LOST = "the connection was lost"
    BUSY = "another terminal is attached"


def reach(waits: Waiting) -> socket.socket:
    """Connect to a stopped process through its door."""
    try:
        return enter(waits.address, waits.port, secret=waits.secret, timeout_s=CONNECT_S)
    except StrangerError as error:
        raise ClusterError(f"the program at {waits.address} port {waits.port} is not {waits.who}: {error}") from None
    except OSError as error:
        raise ClusterError(
            f"{waits.who} does not answer at {waits.address} port {waits.port} ({error}): it has continued or ended, or this "
            "machine cannot reach its node; `rollcall debug` lists the processes that are waiting"
        ) from None


def is_there(waits: Waiting) -> bool:
    """Return whether the process is still listening. A killed run leaves its list behind, so a process in the list may be gone."""
    try:
        socket.create_connection((waits.address, waits.port), timeout=CONNECT_S).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)  # if this machine cannot reach it, it may still be waiting
    return True


def converse(
    line: socket.socket,
    *,
    ask: Callable[[str], str] = input,
    typed: Sequence[str] = (),
    again: bool = False,
    opens_within_s: float | None = None,
) -> End:
    """Show the other side's output and send it the typed lines, until it continues or this side leaves.

    ``typed``: lines to send first. ``again``: Ctrl-C at the prompt shows a new prompt, as in plain pdb; otherwise Ctrl-C leaves the
    debugger. ``opens_within_s``: if no prompt arrives within this time, the other side is not a Rollcall debugger.
    """
    other, left = Connection(line), list(typed)
    ends = None if opens_within_s is None else time.monotonic() + opens_within_s
    try:
        while True:
            if not wait([other.fileno()], None if ends is None else ends - time.monotonic()):
                return End.LOST
            for message in other.take():
                if "prompt" in message:
                    ends = None
                    if left:
                        print(f"{message['prompt']}{left[0]}")
                    typed_now = left.pop(0) if left else _ask(str(message["prompt"]), ask, again=again)
                    if typed_now is None:
                        return End.LEFT
                    other.send({"line": typed_now})
                    continue
                if "text" in message:
                    print(visible(str(message["text"])), end="", flush=True)
                for name, end in (("goes", End.GOES), ("left", End.LEFT), ("busy", End.BUSY)):
                    if name in message:
                        return end if ends is None else End.LOST
    except Stopped:
        raise  # a signal that stops this command, not a Ctrl-C for the prompt
    except KeyboardInterrupt:
        return End.LEFT
    except (OSError, ValueError, RecursionError):  # the other side's message may be nested too deeply to show
        return End.LOST


def _ask(prompt: str, ask: Callable[[str], str], *, again: bool) -> str | None:
    """Ask for a line; return None if the user leaves."""
    while True:
        try:
            return ask(visible(prompt))
        except EOFError:
            print()
            return None
        except Stopped:
            raise
        except KeyboardInterrupt:
            if not again:
                print()
                return None
            print("\n--KeyboardInterrupt--")
