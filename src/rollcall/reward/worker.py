"""The process that runs reward functions. Its parent process calls the methods of ``RewardWorker`` (process/child.py).

``load`` is called once and confines this process (confine.py) before it loads anything. ``score`` gets a list of items with their time
limits and yields each item's results in order. The parent does not trust the results, because the
scored text might find a way to control what the worker sends, so they are sent as JSON. ``line_fd`` is a socket to whoever is debugging
this process (process/debug/stopped.py).

This module imports only the standard library, because a worker is replaced whenever a reward hangs, so it has to start fast.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from rollcall.base.redact import guard_streams, remember
from rollcall.process.child import MAX_WHY, cut, user_error
from rollcall.process.debug.child import ChildLine
from rollcall.process.pause import patient_loop, running_s
from rollcall.reward import user_function
from rollcall.reward.confine import Confinement, confine, limit_cpu
from rollcall.reward.functions import RewardFunction, build_function, check_score
from rollcall.reward.user_function import UserFunction, check_scores

MAX_ANSWER_BYTES = 1 << 20
ASYNC_GRACE_S = 1.0  # an async call stops at its own limit; after this extra time, its process is killed
# Tracebacks leave out frames in these files, because they do not help the author of a reward.
_OWN_FILES = (__file__, user_function.__file__)


@dataclass(frozen=True, slots=True)
class Item:
    """One completion for one reward, or all completions in a group for a reward that takes groups or cannot hang."""

    reward: int
    prompt: str
    completion: str | list[str]
    answer: str
    metadata: dict[str, Any]
    lists: dict[str, Any] | None = None  # the named arguments for a TRL-style function


@dataclass(frozen=True, slots=True)
class Ready:
    in_force: dict[str, str]  # what confines this process; the keys are kinds of restriction
    functions: dict[int, About]  # the user's functions, by index


@dataclass(frozen=True, slots=True)
class About:
    """How a user's function is called."""

    kind: str  # empty if it gets one completion at a time; "batched" or "async" (called concurrently) if it gets a whole group
    needs: list[str]  # required columns
    trl: list[str]  # for a TRL-style function, the arguments that it names


FailureKind = Literal["", "raised", "hung", "nan", "died"]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The outcome for one completion."""

    value: float | None  # None if the function declines to score it, as TRL's functions may
    kind: FailureKind = ""  # "" if scored; otherwise `why` says what happened
    why: str = ""
    elapsed_s: float = 0.0
    note: str = ""  # a service's comment on the completion, shown to people


class RewardWorker:
    def __init__(self, line_fd: int) -> None:
        self._cpu_s = math.inf  # CPU limit for the current item
        self._line = ChildLine(line_fd, of="reward", around=self._without_cpu_limit)
        self._loaded: dict[int, RewardFunction | UserFunction] = {}
        self._runner: Any = None  # keeps one event loop for async functions, so that their open connections stay usable

    def load(
        self, specs: dict[int, dict[str, Any]], limits: Confinement, sys_path: list[str], folder: str, post_mortem: bool
    ) -> dict[str, Any]:
        """Load the rewards in ``specs`` (index in the run file's list -> the reward's fields). Return ``Ready``. Raise ValueError if a reward
        cannot be loaded. ``sys_path`` is the parent's, so the worker can import the same modules. ``folder`` is private to this worker.
        With ``post_mortem``, an exception in the user's function opens the debugger."""
        # User code may print its environment variables, and its output does not pass through the parent's streams.
        remember(os.environ.get(name, "") for name in limits.env)
        guard_streams()
        sys.path.extend(entry for entry in sys_path if entry not in sys.path)
        self._memory_mb, self._post_mortem = limits.memory_mb, post_mortem
        in_force = confine(limits, folder=folder, readable=sys.path)
        sys.breakpointhook = self._line.stop
        functions: dict[int, About] = {}
        for index, spec in specs.items():
            try:
                self._loaded[index] = one = build_function(spec)
            except ValueError as error:
                raise ValueError(f"reward.{index}.{error}") from None
            if isinstance(one, UserFunction):
                kind = "async" if one.is_async else "batched" if one.is_batched else ""
                functions[index] = About(kind, sorted(one.needs), list(one.names) if one.is_trl else [])
        return asdict(Ready(in_force, functions))

    def score(self, items: list[tuple[Item, float]]) -> Iterator[list[dict[str, Any]]]:
        for item, timeout_s in items:
            self._cpu_s = timeout_s
            limit_cpu(timeout_s)
            yield [asdict(one) for one in self._score(self._loaded[item.reward], item, timeout_s=timeout_s)]

    def _score(self, function: Any, item: Item, *, timeout_s: float) -> list[RewardResult]:
        given, limit_s = item.completion, timeout_s - ASYNC_GRACE_S
        if isinstance(given, str):
            return self._batch(lambda: [_call(function, item, given)], 1)
        if not isinstance(function, UserFunction):
            results = [self._batch(lambda text=text: [_call(function, item, text)], 1)[0] for text in given]
        elif not function.is_async:
            results = self._batch(lambda: _call(function, item, given), len(given), is_trl=function.is_trl)
        elif function.is_batched:
            work = partial(_within, function, item, given, limit_s)
            results = self._batch(lambda: self._run(work()), len(given), is_trl=function.is_trl)
        else:
            results = self._run(self._together(function, item, limit_s=limit_s))
        longest = max(100, MAX_WHY // max(len(given), 1))  # a message stays readable, however large the group is
        return [replace(one, why=cut(one.why, longest)) for one in results]

    def _batch(self, call: Callable[[], Any], count: int, *, is_trl: bool = False) -> list[RewardResult]:
        """Call the function once for all completions. If the call fails, it fails for all of them; otherwise each gets its own result."""
        started_s = running_s()
        try:
            returned = call()
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, even SystemExit
            return [self._failed(error, since_s=started_s)] * count
        elapsed_s = running_s() - started_s
        try:
            values = check_scores(returned, count=count)
        except Exception as error:  # noqa: BLE001 - the user's __iter__ may raise anything
            return [_not_a_number(error, elapsed_s)] * count
        return [
            RewardResult(None, elapsed_s=elapsed_s) if is_trl and value is None else checked(value, elapsed_s=elapsed_s)
            for value in values
        ]

    async def _together(self, function: UserFunction, item: Item, *, limit_s: float) -> list[RewardResult]:
        """Call the function for all completions concurrently."""
        import asyncio

        async def one(completion: str) -> RewardResult:
            started_s = running_s()
            try:
                returned = await _within(function, item, completion, limit_s)
            except BaseException as error:  # noqa: BLE001 - user code may raise anything, even SystemExit
                return self._failed(error, since_s=started_s)
            return checked(returned, elapsed_s=running_s() - started_s)

        return list(await asyncio.gather(*map(one, item.completion)))

    def _failed(self, error: BaseException, *, since_s: float) -> RewardResult:
        elapsed_s = running_s() - since_s
        if isinstance(error, _LateError):
            return RewardResult(0.0, "hung", str(error), elapsed_s)
        frames, why = user_error(error, own_files=_OWN_FILES, memory_mb=self._memory_mb)
        if self._post_mortem and frames is not None:
            self._line.examine(error.with_traceback(frames))
        return RewardResult(0.0, "raised", cut(why), elapsed_s)

    @contextmanager
    def _without_cpu_limit(self) -> Iterator[None]:
        """Suspend the CPU limit while the debugger prompt is open."""
        limit_cpu(math.inf)
        try:
            yield
        finally:
            limit_cpu(self._cpu_s)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        import asyncio

        self._runner = self._runner or asyncio.Runner(loop_factory=patient_loop)
        return self._runner.run(work)


class _LateError(Exception):
    """An async function took longer than its limit."""


def _call(function: UserFunction, item: Item, completion: str | list[str]) -> Any:
    if item.lists is not None:
        return function.call_with_lists(item.lists)
    return function(item.prompt, completion, item.answer, item.metadata)


async def _within(function: UserFunction, item: Item, completion: str | list[str], limit_s: float) -> Any:
    import asyncio

    try:
        async with asyncio.timeout(limit_s) as limit:
            return await _call(function, item, completion)
    except TimeoutError:
        if limit.expired():
            raise _LateError(f"no score within timeout_s={limit_s:g}") from None
        raise


def checked(returned: Any, *, elapsed_s: float = 0.0) -> RewardResult:
    """Build a result from a function's return value for one completion."""
    try:
        return RewardResult(check_score(returned), elapsed_s=elapsed_s)
    except Exception as error:  # noqa: BLE001 - the user's __float__ may raise anything
        return _not_a_number(error, elapsed_s)


def _not_a_number(error: Exception, elapsed_s: float) -> RewardResult:
    return RewardResult(0.0, "nan", cut(str(error) or repr(error)), elapsed_s)
