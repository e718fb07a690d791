"""The process that runs reward functions: ``python -m rollcall.reward.worker READ WRITE LIFELINE CRASH``.

The four numbers are inherited file descriptors, so whatever user code prints cannot get between the messages:
READ brings the setup once and then lists of items with their limits, WRITE takes ``Ready`` or ``Refused`` and then one answer per item
in their order, LIFELINE is the read end of a pipe that only closes when the parent dies, CRASH is a file for stack
dumps. A message is its length and its bytes: a pickle from the parent, JSON to it, because what a worker says may be the
work of whatever text it was given, and the parent must be able to read it without running it.

The worker confines itself (confine.py) before it loads anything.

This module imports the standard library only: a worker is replaced whenever a reward hangs, so it starts fast.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from rollcall.reward.confine import Confinement, confine, limit_cpu
from rollcall.reward.functions import RewardFunction, build_function, check_score

LENGTH = struct.Struct("<Q")
STACK_SIGNAL = signal.SIGUSR1
MAX_ANSWER_BYTES = 1 << 20
_MAX_WHY = 20_000


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a worker."""

    specs: dict[int, dict[str, Any]]  # place in the run file's list -> the reward's fields
    sys_path: list[str]  # the parent's, so that what it can import the worker can too
    confinement: Confinement
    folder: str  # private to this worker


@dataclass(frozen=True, slots=True)
class Item:
    """One completion for one reward."""

    reward: int
    prompt: str
    completion: str
    answer: str
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ready:
    in_force: dict[str, str]  # what confines this process, by thing


@dataclass(frozen=True, slots=True)
class Refused:
    """A reward cannot be made ready."""

    refused: str


@dataclass(frozen=True, slots=True)
class Answer:
    value: float
    kind: str  # "": scored; "raised" or "nan": not, and `why` says what happened
    why: str
    elapsed_s: float


Said = Ready | Refused | Answer


def frame(message: Any) -> bytes:
    """A message to a worker."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def read_said(body: bytes) -> Said:
    """What a worker says; ValueError if it is none of its messages."""
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    match fields:
        case {"in_force": dict(told), **rest} if not rest:
            return Ready({str(thing): str(state) for thing, state in told.items()})
        case {"refused": str(why), **rest} if not rest:
            return Refused(visible(why))
        case {
            "value": float(value),
            "kind": "" | "raised" | "nan" as kind,
            "why": str(why),
            "elapsed_s": float(elapsed_s),
            **rest,
        } if not rest:
            return Answer(check_score(value), kind, visible(why), elapsed_s)
    raise ValueError("not a message of a worker")


def visible(text: str) -> str:
    """An error may quote a model's text, which must not steer the terminal that shows it."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def main(arguments: list[str]) -> None:
    read_fd, write_fd, lifeline_fd, crash_fd = map(int, arguments)
    _end_with_parent(lifeline_fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what is held back is lost with a worker that is ended
    faulthandler.enable(crash_fd)
    faulthandler.register(STACK_SIGNAL, crash_fd)
    # A stop that is sent to every process of a run is the controller's to heed: it still needs this one's scores.
    # A handler, since what user code starts would inherit an ignored signal.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    # What the user's functions start themselves must not hold these open.
    for fd in (read_fd, write_fd, lifeline_fd, crash_fd):
        os.set_inheritable(fd, False)
    source, sink = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb", buffering=0)
    setup = _receive(source)
    if setup is None:
        return
    sys.path.extend(entry for entry in setup.sys_path if entry not in sys.path)
    in_force = confine(setup.confinement, folder=setup.folder, readable=sys.path)
    functions: dict[int, RewardFunction] = {}
    for index, spec in setup.specs.items():
        try:
            functions[index] = build_function(spec)
        except ValueError as error:
            _send(sink, Refused(f"reward.{index}.{error}"[:_MAX_WHY]))
            return
    _send(sink, Ready(in_force))
    own_pid = os.getpid()
    while (items := _receive(source)) is not None:
        for item, timeout_s in items:
            limit_cpu(timeout_s)
            answer = _score(functions[item.reward], item, memory_mb=setup.confinement.memory_mb)
            if os.getpid() != own_pid:
                os._exit(
                    1
                )  # a fork of the function's own that came back here: its answer would be taken for another item's
            _send(sink, answer)


def _score(function: RewardFunction, item: Item, *, memory_mb: int) -> Answer:
    started_s = time.monotonic()
    try:
        returned = function(item.prompt, item.completion, item.answer, item.metadata)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        if isinstance(error, MemoryError):
            error = MemoryError(f"{error} (this process may use memory_mb={memory_mb})".strip())
        why = "".join(traceback.format_exception(type(error), error, frames))
        return Answer(0.0, "raised", _cut(why), time.monotonic() - started_s)
    elapsed_s = time.monotonic() - started_s
    try:
        return Answer(check_score(returned), "", "", elapsed_s)
    except Exception as error:  # noqa: BLE001 - a __float__ of the user's may raise anything
        return Answer(0.0, "nan", _cut(str(error) or repr(error)), elapsed_s)


def _cut(why: str) -> str:
    """Both ends of a long text: a traceback begins with where and ends with what."""
    return why if len(why) <= _MAX_WHY else f"{why[: _MAX_WHY // 2]}\n...\n{why[-_MAX_WHY // 2 :]}"


def _send(sink: Any, message: Said) -> None:
    body = json.dumps(asdict(message)).encode()
    data = memoryview(LENGTH.pack(len(body)) + body)
    while data:
        data = data[sink.write(data) :]


def _receive(source: BinaryIO) -> Any:
    """The next message; None when the parent has closed its end."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = source.read(size)
    return pickle.loads(body) if len(body) == size else None


def _end_with_parent(lifeline_fd: int) -> None:
    """Have the kernel kill this process when the lifeline closes.

    A reward that hangs inside C code (a runaway regular expression) runs no Python thread or handler, and a parent
    death signal would follow the parent's thread instead of its process. Where the kernel lacks this (macOS), a worker
    ends at its next read.
    """
    import fcntl

    set_signal = getattr(fcntl, "F_SETSIG", None)
    if set_signal is None:
        return
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, set_signal, signal.SIGKILL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:  # it closed before the signal was asked for
        os._exit(1)


if __name__ == "__main__":
    # Run as a module this file is `__main__`; messages are pickled under the importable name.
    importlib.import_module("rollcall.reward.worker").main(sys.argv[1:])
