"""The process of one environment: it answers the parent over its socket, one request after the other, and is reset between episodes.

A message is its length and JSON, in both directions: what a child says may be controlled by the text that it was given, and the
parent must be able to read it without running it. Requests are ``{"do": "reset", "row": ...}``, ``{"do": "step", "text": ..., "token_ids":
...}``, ``{"do": "reward"}`` and ``{"do": "attributes"}``. Answers are ``{"text": ...}``, a step's result, ``{"worth": ...}``,
``{"attributes": ...}``, or ``{"failed": why}``.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from rollcall.debug.child import ChildLine
from rollcall.environments import class_env, stepwise
from rollcall.environments.stepwise import WrongResult
from rollcall.process.child import end_with
from rollcall.process.pause import patient_loop

LENGTH = struct.Struct("<Q")
MAX_ANSWER_BYTES = 32 << 20
_MAX_WHY = 20_000
_MAX_OPENING_CHARS = 1_000_000
_MAX_DEPTH = 50  # of lists and maps in an attribute
_MB = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
# Frames that say nothing to the author of an environment.
_OWN_FILES = (__file__, class_env.__file__, stepwise.__file__)


class Player(Protocol):
    instance: Any  # of the user's class

    def reset(self, row: Mapping[str, Any], run: Any) -> str | None: ...
    def step(self, text: str, token_ids: list[int], run: Any) -> dict[str, Any]: ...
    def reward(self, run: Any) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    memory_mb: int
    post_mortem: bool  # what user code raises opens the debugger


def adopt_orphans() -> None:
    """What this process's children leave behind becomes its own child, so that it can be found and ended."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


Examine = Callable[[BaseException], None]
"""Called with what user code has raised, before anything is made of it."""


def run_child(
    connection: socket.socket, make: Callable[[Examine], Player], *, line: ChildLine, lifeline_fd: int, limits: Limits
) -> None:
    """The life of a child after its fork; returns when the parent has hung up."""
    # Its own session: killing its group ends what user code started.
    os.setsid()
    _end_with_parent(lifeline_fd)
    adopt_orphans()
    sys.breakpointhook = line.stop
    _limit(limits)
    _reseed()
    examine = _examine_by(line) if limits.post_mortem else _let_be
    _Child(connection, make(examine), limits=limits, examine=examine).serve()


def _examine_by(line: ChildLine) -> Examine:
    def examine(error: BaseException) -> None:
        frames = _frames_of_user(error)
        if frames is not None and not isinstance(error, WrongResult):
            line.examine(error.with_traceback(frames))

    return examine


def _let_be(error: BaseException) -> None:
    return None


def _end_with_parent(lifeline_fd: int) -> None:
    """Opened again: the signal is a property of an open file, and children share the one that they inherit."""
    try:
        own_fd = os.open(f"/proc/self/fd/{lifeline_fd}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # no /proc: it ends when its socket closes
        return
    os.close(lifeline_fd)
    end_with(own_fd)


def _limit(limits: Limits) -> None:
    """The memory that it writes to: address space includes what browsers and GPU libraries reserve and never use."""
    for kind, most in ((resource.RLIMIT_DATA, limits.memory_mb * _MB), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _reseed() -> None:
    """Python's own random numbers differ after a fork; those of numpy would be the same in every child."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "seed"):
        torch.seed()


class _Child:
    def __init__(self, connection: socket.socket, player: Player, *, limits: Limits, examine: Examine) -> None:
        self._connection = connection
        self._player = player
        self._limits = limits
        self._examine = examine
        self._runner: Any = None
        self._pid = os.getpid()

    def serve(self) -> None:
        while (request := self._receive()) is not None:
            body = self._answer(request)
            if os.getpid() != self._pid:
                # User code forked and the copy came back here: its answer would be taken for the next one's.
                os._exit(1)
            flush()
            self._connection.sendall(LENGTH.pack(len(body)) + body)

    def _receive(self) -> dict[str, Any] | None:
        head = self._read(LENGTH.size)
        body = self._read(LENGTH.unpack(head)[0]) if head else None
        return json.loads(body) if body else None

    def _read(self, count: int) -> bytes | None:
        found = bytearray()
        while len(found) < count:
            data = self._connection.recv(min(count - len(found), 1 << 20))
            if not data:
                return None
            found += data
        return bytes(found)

    def _answer(self, request: dict[str, Any]) -> bytes:
        try:
            body = _encode(self._do(request))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
            self._examine(error)
            return _encode({"failed": self._why(error)})
        if len(body) > MAX_ANSWER_BYTES:
            most = MAX_ANSWER_BYTES / _MB
            return _encode({"failed": f"it answered with {len(body) / _MB:.1f} MB; at most {most:g} MB can be read"})
        return body

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "reset":
                text = self._player.reset(request["row"], self._run)
                if text is not None and len(text) > _MAX_OPENING_CHARS:
                    raise WrongResult(
                        f"reset returned {len(text):,} characters; at most {_MAX_OPENING_CHARS:,} can be read"
                    )
                return {"text": text}
            case "step":
                return self._player.step(request["text"], request["token_ids"], self._run)
            case "reward":
                return {"worth": self._player.reward(self._run)}
            case "attributes":
                return {"attributes": _attributes(self._player.instance)}
            case other:
                raise AssertionError(f"the parent asked for {other!r}")

    def _run(self, returned: Any) -> Any:
        """What a method returned; if it is async, once that is done. One loop for the process, so that clients stay open."""
        if not inspect.isawaitable(returned):
            return returned
        import asyncio

        self._runner = self._runner or asyncio.Runner(loop_factory=patient_loop)
        return self._runner.run(_await(returned))

    def _why(self, error: BaseException) -> str:
        if isinstance(error, WrongResult):
            return str(error)
        frames = _frames_of_user(error)
        if isinstance(error, MemoryError):
            error = MemoryError(f"{error} (this process may use memory_mb={self._limits.memory_mb})".strip())
        why = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        return why if len(why) <= _MAX_WHY else f"{why[: _MAX_WHY // 2]}\n...\n{why[-_MAX_WHY // 2 :]}"


def _attributes(instance: Any) -> dict[str, Any]:
    """Its data, properties too, as far as JSON can hold it."""
    found: dict[str, Any] = {}
    for name in dir(instance):
        if name.startswith("__"):
            continue
        try:
            value = getattr(instance, name)
            text = json.dumps(value, default=_plain, allow_nan=False)
            if len(text) <= _MAX_OPENING_CHARS and _depth(plain := json.loads(text)) <= _MAX_DEPTH:
                found[name] = plain
        except Exception:  # noqa: BLE001 - a method, a client, a property of the user's that raises, or far too deep
            continue
    return found


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _plain(value: Any) -> Any:
    """Of numpy and torch."""
    return value.tolist()


def flush() -> None:
    """What user code has printed is shown before its answer is read."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # user code took it away or closed it


async def _await(returned: Any) -> Any:
    return await returned


def _frames_of_user(error: BaseException) -> TracebackType | None:
    frames = error.__traceback__
    while frames is not None and _is_own(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def _is_own(file: str) -> bool:
    return file in _OWN_FILES or os.sep + "asyncio" + os.sep in file


def _encode(answer: dict[str, Any]) -> bytes:
    # Half of a surrogate pair, which Python's text may hold, is no text for anybody else.
    return json.dumps(answer, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
