"""A terminal's part in a conversation with something that has stopped: `rollcall debug`, and the parent of a process of a reward or an environment."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

from rollcall.debug.board import Waiting
from rollcall.debug.inbox import FrameReader, readable
from rollcall.errors import ClusterError
from rollcall.net.door import PROOF_S, prove, watch_peer
from rollcall.process.framing import json_frame, read_exactly
from rollcall.stop import Stopped
from rollcall.words import visible

CONNECT_S = 10.0


class End(Enum):
    """How a conversation ended."""

    GOES = "it goes on"
    LEFT = "the terminal left, it waits"
    LOST = "the connection was lost"
    BUSY = "another terminal is attached"


def reach(waits: Waiting) -> socket.socket:
    """Through its door."""
    try:
        connection = socket.create_connection((waits.address, waits.port), timeout=CONNECT_S)
    except OSError as error:
        raise ClusterError(
            f"{waits.who} does not answer at {waits.address} port {waits.port} ({error}): it has gone on or ended since, or this "
            "machine cannot reach its node; `rollcall debug` lists who waits"
        ) from None
    try:
        connection.settimeout(PROOF_S)
        if not prove(partial(read_exactly, connection.recv), connection.sendall, secret=waits.secret):
            raise ConnectionError("it does not know the secret")
    except OSError as error:
        connection.close()
        raise ClusterError(f"what listens at {waits.address} port {waits.port} is not {waits.who}: {error}") from None
    connection.settimeout(None)
    watch_peer(connection)
    return connection


def is_there(waits: Waiting) -> bool:
    """Whether something still listens where it was. A run that was killed leaves its list behind."""
    try:
        socket.create_connection((waits.address, waits.port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # out of reach from here, which is something else
    return True


def converse(
    line: socket.socket,
    *,
    ask: Callable[[str], str] = input,
    typed: Sequence[str] = (),
    again: bool = False,
    opens_within_s: float | None = None,
) -> End:
    """Show what the other side prints and give it what is typed, until it goes on or this side leaves.

    ``typed``: lines that are given first. ``again``: Ctrl-C at the prompt is a new prompt, as in plain pdb; else it leaves.
    ``opens_within_s``: without a prompt for this long at the beginning the other side is none of ours.
    """
    inbox, left = FrameReader(line), list(typed)
    ends = None if opens_within_s is None else time.monotonic() + opens_within_s
    try:
        while True:
            if not readable([inbox], timeout_s=None if ends is None else ends - time.monotonic()):
                return End.LOST
            for message in inbox.take():
                if "prompt" in message:
                    ends = None
                    if left:
                        print(f"{message['prompt']}{left[0]}")
                    typed_now = left.pop(0) if left else _ask(str(message["prompt"]), ask, again=again)
                    if typed_now is None:
                        return End.LEFT
                    line.sendall(json_frame({"line": typed_now}))
                elif (end := _shown(message)) is not None:
                    return end if ends is None else End.LOST
    except Stopped:
        raise  # a signal that ends this command, not a Ctrl-C for the prompt
    except KeyboardInterrupt:
        return End.LEFT
    except (OSError, RecursionError):  # what the other side says may be nested deeper than it can be shown
        return End.LOST


def _shown(message: Mapping[str, Any]) -> End | None:
    if "text" in message:
        print(visible(str(message["text"])), end="", flush=True)
    for name, end in (("goes", End.GOES), ("left", End.LEFT), ("busy", End.BUSY)):
        if name in message:
            return end
    return None


def _ask(prompt: str, ask: Callable[[str], str], *, again: bool) -> str | None:
    """None: the person leaves."""
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
