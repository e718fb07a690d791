"""The process of one environment: it answers the calls of its parent (process/child.py), and is reset between episodes.

What it says may be controlled by the text that it was given, so it is JSON, and the parent reads it as data. A method returns what its
parent reads (children.py), or ``{"failed": why}``.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from rollcall.debug.child import ChildLine
from rollcall.environments import class_env, stepwise
from rollcall.environments.stepwise import WrongResult
from rollcall.process.child import cut, end_with, serve
from rollcall.process.framing import JSON, Body
from rollcall.process.pause import patient_loop

MAX_ANSWER_BYTES = 32 << 20
_MAX_OPENING_CHARS = 1_000_000
_MB = 1 << 20
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

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


Examine = Callable[[BaseException], None]
"""Called with what user code has raised, before anything is made of it."""


def run_child(
    connection_fd: int, make: Callable[[Examine], Player], *, line: ChildLine, lifeline_fd: int, limits: Limits
) -> None:
    """The life of a child after its fork; returns when the parent has hung up."""
    # Its own session: killing its group ends what user code started.
    os.setsid()
    _end_with_parent(lifeline_fd)
    adopt_orphans()
    sys.breakpointhook = line.stop
    _limit(limits)
    _reseed()

    def examine(error: BaseException) -> None:
        frames = _frames_of_user(error)
        if limits.post_mortem and frames is not None and not isinstance(error, WrongResult):
            line.examine(error.with_traceback(frames))

    serve(connection_fd, EnvironmentChild(make(examine), limits=limits, examine=examine))


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


def _encoded(answer: Any) -> bytes:
    body = JSON.dumps(answer)
    if len(body) <= MAX_ANSWER_BYTES:
        return body
    most = MAX_ANSWER_BYTES / _MB
    return JSON.dumps({"failed": f"it answered with {len(body) / _MB:.1f} MB; at most {most:g} MB can be read"})


class EnvironmentChild:
    hears, says = JSON, Body(_encoded, json.loads)

    def __init__(self, player: Player, *, limits: Limits, examine: Examine) -> None:
        self._player = player
        self._limits = limits
        self._examine = examine
        self._runner: Any = None

    def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        return self._tried(lambda: {"text": _readable(self._player.reset(row, self._run))})

    def step(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        return self._tried(lambda: self._player.step(text, token_ids, self._run))

    def reward(self) -> dict[str, Any]:
        return self._tried(lambda: {"worth": self._player.reward(self._run)})

    def attributes(self) -> dict[str, Any]:
        return self._tried(lambda: {"attributes": _attributes(self._player.instance)})

    def _tried(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return work()
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
            self._examine(error)
            return {"failed": self._why(error)}
        finally:
            flush()

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
        return cut("".join(traceback.format_exception(type(error), error, frames)).rstrip())


def _readable(text: str | None) -> str | None:
    if text is not None and len(text) > _MAX_OPENING_CHARS:
        raise WrongResult(f"reset returned {len(text):,} characters; at most {_MAX_OPENING_CHARS:,} can be read")
    return text


def _attributes(instance: Any) -> dict[str, Any]:
    """Its data, properties too, as far as JSON can hold it."""
    found: dict[str, Any] = {}
    for name in dir(instance):
        if name.startswith("__"):
            continue
        try:
            value = getattr(instance, name)
            text = json.dumps(value, default=lambda held: held.tolist(), allow_nan=False)  # of numpy and torch
            if len(text) <= _MAX_OPENING_CHARS and _depth(plain := json.loads(text)) <= 50:
                found[name] = plain
        except Exception:  # noqa: BLE001 - a method, a client, a property of the user's that raises, or far too deep
            continue
    return found


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


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
