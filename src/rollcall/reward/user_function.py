"""Finds a user's reward function and calls it according to its signature.

The function may take these arguments by name: ``completion`` or, for a full group, ``completions``; ``prompt``, ``answer``,
``metadata``. It may be ``async``. A function with other argument names gets the four arguments of a plain reward in order. A function
with ``**kwargs`` and TRL's names is called as in TRL 1.16, with lists that trl.py builds. This module imports only the standard library,
because workers have to start fast.
"""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollcall.base.importing import load_named

ARGUMENTS = ("prompt", "completion", "answer", "metadata")
_TRL_LISTS = ("prompts", "completions", "completion_ids", "environments")
_TRL_OTHERS = ("log_extra", "log_metric", "trainer_state")
_EXPECTED = (
    "f(completion, answer) -> float, or f(completions, answer) -> list[float] for a group, optionally also with prompt and metadata, "
    "and optionally async; or f(completions, **kwargs) as in TRL, with a list for each column that it names"
)


@dataclass(frozen=True, slots=True)
class UserFunction:
    call: Callable[..., Any]
    names: tuple[str, ...]  # the arguments that it takes by name; if empty, it gets the four arguments in order
    is_batched: bool  # called once for all completions in a group
    is_async: bool
    needs: frozenset[str] = frozenset()  # the row's columns that it requires
    is_trl: bool = False  # called with lists, as in TRL

    def call_with_lists(self, lists: dict[str, Any]) -> Any:
        """Call the function as TRL does. Discard what the function passes to ``log_extra`` and ``log_metric``."""
        if missing := [name for name in self.needs if name not in lists]:
            there_are = ", ".join(name for name in lists if name not in _TRL_LISTS)
            raise ValueError(
                f"the row has no column {missing[0]!r}, which the function requires; its columns are {there_are}. "
                "data.columns can rename one of them"
            )
        others: dict[str, Any] = {
            "log_extra": lambda name, value: None,
            "log_metric": lambda name, value: None,
            "trainer_state": None,
        }
        if "environments" in lists:
            others["environments"] = [LeftEnvironment(left) for left in lists["environments"]]
        return self.call(**lists | others)

    def __call__(self, prompt: str, completion: str | list[str], answer: str, metadata: dict[str, Any]) -> Any:
        if not self.names:
            return self.call(prompt, completion, answer, metadata)
        given: dict[str, Any] = {"prompt": prompt, "answer": answer, "metadata": metadata}
        given |= {"completion": completion, "completions": completion}
        return self.call(**{name: given[name] for name in self.names})


class LeftEnvironment:
    """The attributes of an environment after its episode."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the environment left no attribute {name!r} that JSON can represent; it left {', '.join(self.__dict__) or 'none'}. A reward "
            "sees only an environment's numbers, strings, lists and dicts, not its methods"
        )


def load_function(path: str, *, pickled: bytes | None = None) -> UserFunction:
    """Load the user's function at ``module:function``, or a function passed to ``rollcall.train`` as an object (given.py). If that fails,
    raise a ValueError that names the function and says what to do."""
    if pickled is None:
        target = load_named(path, key="path", what="function", example="my_rewards:score")
    else:
        try:
            target = pickle.loads(pickled)
        except BaseException:  # noqa: BLE001 - unpickling imports the function's modules, which may raise anything
            raise ValueError(
                f"path={path!r}: it cannot be unpickled in the reward process\n{traceback.format_exc()}"
            ) from None
    if not callable(target):
        raise ValueError(f"path={path!r} is {type(target).__name__}, not a function; use {_EXPECTED}")
    return user_function(path, target)


def user_function(path: str, target: Any) -> UserFunction:
    """Decide from a function's signature how to call it. Raise ValueError if it cannot be a reward."""
    if inspect.isclass(target):
        raise ValueError(f"path={path!r} is a class; use {_EXPECTED}, or a method of an instance")
    called = target
    while isinstance(called, partial):
        called = called.func
    called = called if inspect.isroutine(called) else getattr(type(called), "__call__", called)  # noqa: B004
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise ValueError(f"path={path!r} is a generator, which does not return a number; use {_EXPECTED}")
    is_async = inspect.iscoroutinefunction(called)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # written in C without a signature
        return UserFunction(target, (), is_batched=False, is_async=is_async)
    given = f"path={path!r} has the signature {signature}"
    is_trl = _is_trl(given, signature)
    names = tuple(signature.parameters) if is_trl else _named(signature)
    if names is not None:
        is_batched = is_trl or "completions" in names
        needs = frozenset(_required(signature) - {"prompt", "completion", "metadata", *_TRL_LISTS, *_TRL_OTHERS})
        if not is_trl and is_batched == ("completion" in names):
            raise ValueError(f"{given}, but a reward takes either completion or completions; use {_EXPECTED}")
        return UserFunction(target, names, is_batched=is_batched, is_async=is_async, needs=needs, is_trl=is_trl)
    try:
        signature.bind("", "", "", {})
    except TypeError as error:
        raise ValueError(
            f"{given}, but its argument names are not among {', '.join(ARGUMENTS)} and completions, and it cannot be called with four "
            f"arguments either ({error}); use {_EXPECTED}"
        ) from None
    third = [each for each in signature.parameters.values() if each.kind is not each.VAR_POSITIONAL][2:3]
    needs = frozenset({"answer"} if third and third[0].default is inspect.Parameter.empty else ())
    return UserFunction(target, (), is_batched=False, is_async=is_async, needs=needs)


def _is_trl(given: str, signature: inspect.Signature) -> bool:
    """Return whether to call the function as TRL does. Refuse an ambiguous signature, which ``given`` names."""
    parameters = signature.parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = set(signature.parameters)
    trl_only = sorted(names & {*_TRL_LISTS} - {"completions"})
    if trl_only and not takes_all:
        raise ValueError(
            f"{given}: {trl_only[0]} is an argument of TRL, and TRL passes further arguments by name; add **kwargs, or use {_EXPECTED}"
        )
    if not takes_all or not (names & {*_TRL_LISTS} or len(names) == 1):
        return False
    if native := sorted(names & {"prompt", "completion", "metadata"}):
        raise ValueError(
            f"{given}, which is ambiguous: a function with **kwargs is called with lists, as in TRL, but TRL has no {native[0]}. Remove "
            f"**kwargs, or remove {native[0]} (each column of the row is a separate list)"
        )
    if positional := [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]:
        raise ValueError(f"{given}: {positional[0]} is before a /, but TRL passes arguments by name; remove the /")
    if "trainer_state" in _required(signature):
        raise ValueError(
            f"{given} with a required argument trainer_state, but rewards are not told the run's progress, "
            "because they also score stored completions again and the completions of evaluations; remove the argument"
        )
    return True


def _required(signature: inspect.Signature) -> set[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = signature.parameters.values()
    return {each.name for each in parameters if each.default is each.empty and each.kind not in variable}


def _named(signature: inspect.Signature) -> tuple[str, ...] | None:
    """Return the arguments to pass by name. Return None if a required argument has another name or if no argument has a known name."""
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
    """Check that a function that takes ``completions`` returned one value per completion."""
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
        raise ValueError(
            f"returned {repr(values)[:80]} ({type(values).__name__}); a reward that takes completions must return a list of numbers"
        )
    found = list(values)
    if len(found) != count:
        raise ValueError(f"returned {len(found)} scores for {count} completions")
    return found
