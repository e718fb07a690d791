"""A reward function of the user's: found, and called as its signature says.

Its arguments are taken by name: ``completion`` or, for a whole group, ``completions``; ``prompt``, ``answer``, ``metadata``. It may
be ``async``. One with other names gets the four of a plain reward in their order. Only the standard library is imported here,
because the worker process has to start fast.
"""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollcall.importing import load_named

ARGUMENTS = ("prompt", "completion", "answer", "metadata")
_EXPECTED = (
    "f(completion, answer) -> float, or f(completions, answer) -> list[float] for a group, each with prompt and metadata too if "
    "you like, each async if you like"
)


class RewardLoadError(ValueError):
    """A reward cannot be made ready; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's and how it is called."""

    call: Callable[..., Any]
    names: tuple[str, ...]  # the arguments that it takes by name; empty: the four in their order
    is_batched: bool  # called once for all completions of a group
    is_async: bool

    @property
    def kind(self) -> str:
        """Empty: it gets one completion. "batched" or "async": all completions of a group, an async one so that its calls
        wait together."""
        return "async" if self.is_async else "batched" if self.is_batched else ""

    def __call__(self, prompt: str, completion: str | list[str], answer: str, metadata: dict[str, Any]) -> Any:
        if not self.names:
            return self.call(prompt, completion, answer, metadata)
        given = {
            "prompt": prompt,
            "completion": completion,
            "completions": completion,
            "answer": answer,
            "metadata": metadata,
        }
        return self.call(**{name: given[name] for name in self.names})


def load_function(path: str, *, pickled: bytes | None = None) -> UserFunction:
    """The user's function at ``module:function``, or the one that ``rollcall.train`` was given as an object (given.py)."""
    return _import(path) if pickled is None else _unpickle(path, pickled)


def _unpickle(path: str, pickled: bytes) -> UserFunction:
    try:
        return user_function(path, pickle.loads(pickled))
    except RewardLoadError:
        raise
    except BaseException:  # noqa: BLE001 - it imports what the function uses, which may raise anything
        raise RewardLoadError(f"path={path!r}: it cannot be made again here\n{traceback.format_exc()}") from None


def _import(path: str) -> UserFunction:
    try:
        target = load_named(path, key="path", what="function", example="my_rewards:score")
    except ValueError as error:
        raise RewardLoadError(str(error)) from None
    if not callable(target):
        raise RewardLoadError(f"path={path!r} is {type(target).__name__}, not a function; give {_EXPECTED}")
    return user_function(path, target)


def user_function(path: str, target: Any) -> UserFunction:
    """How to call it, by its signature; refuses what could never be called as a reward, or never return a number."""
    if inspect.isclass(target):
        raise RewardLoadError(f"path={path!r} is a class; give {_EXPECTED}, or a method of one of its objects")
    called = target
    while isinstance(called, partial):
        called = called.func
    called = called if inspect.isroutine(called) else getattr(type(called), "__call__", called)  # noqa: B004
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise RewardLoadError(
            f"path={path!r} is a generator, which returns no number when it is called; give {_EXPECTED}"
        )
    is_async = inspect.iscoroutinefunction(called)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # written in C, and says nothing of itself
        return UserFunction(target, (), is_batched=False, is_async=is_async)
    names = _named(signature)
    if names is not None:
        if ("completion" in names) == ("completions" in names):
            raise RewardLoadError(
                f"path={path!r} takes {signature}, and a reward takes either completion or completions; give {_EXPECTED}"
            )
        return UserFunction(target, names, is_batched="completions" in names, is_async=is_async)
    try:
        signature.bind("", "", "", {})
    except TypeError as error:
        raise RewardLoadError(
            f"path={path!r} takes {signature}, whose names are not among {', '.join(ARGUMENTS)} and completions, and it cannot "
            f"be called with four arguments either ({error}); give {_EXPECTED}"
        ) from None
    return UserFunction(target, (), is_batched=False, is_async=is_async)


def needed_columns(function: UserFunction) -> list[str]:
    """The columns of a row without which it cannot be called: arguments by name that have no default."""
    ours = ("prompt", "completion", "completions", "metadata")
    parameters = inspect.signature(function.call).parameters if function.names else {}
    return [name for name in function.names if name not in ours and parameters[name].default is inspect.Parameter.empty]


def _named(signature: inspect.Signature) -> tuple[str, ...] | None:
    """The arguments to give by name; None: some that must be given have other names, or no name decides."""
    known: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return None
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name in (*ARGUMENTS, "completions") and parameter.kind is not parameter.POSITIONAL_ONLY:
            known.append(name)
        elif parameter.default is parameter.empty:
            return None
    return tuple(known) if known else None


def check_scores(values: Any, *, count: int) -> list[Any]:
    """What a function that takes ``completions`` returned, a value for each; ValueError if it is not."""
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
        raise ValueError(
            f"returned {repr(values)[:80]} ({type(values).__name__}); a reward of completions returns a list of numbers"
        )
    found = list(values)
    if len(found) != count:
        raise ValueError(f"returned {len(found)} scores for {count} completions")
    return found
