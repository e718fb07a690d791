"""Reward functions that Python code passes as objects.

A function that a worker process can import is named by its path, as in a run file. Any other function (a lambda, or one defined in a
notebook cell, a script or another function) is pickled by value with everything that it uses, and sent to the same confined processes.
The run file calls such a function ``<python>:name``. It exists only in this process, so pass it again to continue the run in a new
process.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollcall.base.errors import ConfigError

PREFIX = "<python>:"
_pickled: dict[str, bytes] = {}
# Also keyed by run directory, because two runs may use one name for different functions.
_of_runs: dict[tuple[Path, str], bytes] = {}


def name_functions(rewards: Any) -> Any:
    """Convert rewards to the form used in run files, with each function replaced by its path."""
    if callable(rewards) or isinstance(rewards, Mapping):
        rewards = [rewards]
    if not isinstance(rewards, Sequence) or isinstance(rewards, str):
        return rewards  # the run file's validation reports the problem
    taken: set[str] = set()
    return [_named(reward, taken) for reward in rewards]


def settle_functions(run_dir: Path, rewards: Sequence[Any], *, are_given: bool) -> None:
    """Decide which functions a run's names refer to: those passed in this call, or else those passed earlier for this run."""
    for path in (reward.path for reward in rewards if reward.type == "function" and reward.path.startswith(PREFIX)):
        key = (run_dir.resolve(), path)
        if are_given and path in _pickled:
            _of_runs[key] = _pickled[path]
        elif not are_given and key in _of_runs:
            _pickled[path] = _of_runs[key]


def with_pickled(spec: dict[str, Any], *, index: int) -> dict[str, Any]:
    """Return a reward's fields. If the path names a function that was passed as an object, add the pickled function."""
    path = spec.get("path", "")
    if spec["type"] != "function" or not path.startswith(PREFIX):
        return spec
    if path not in _pickled:
        raise ConfigError(
            f"reward.{index}.path={path} is a function that was passed as an object, but this process does not have it; pass it "
            f"again (rollcall.train(..., reward=[{path.removeprefix(PREFIX)}]), or rollcall.evaluate), or put it in a module"
        )
    return {**spec, "pickled": _pickled[path]}


def _named(reward: Any, taken: set[str]) -> Any:
    if callable(reward):
        reward = {"type": "function", "path": reward}
    if not isinstance(reward, Mapping) or not callable(reward.get("path")):
        return reward
    function = called = reward["path"]
    path = _import_path(function)
    if path is None:
        while isinstance(called, functools.partial):
            called = called.func
        name = getattr(called, "__name__", type(called).__name__).replace("<lambda>", "lambda")
        numbered = (f"{PREFIX}{name}{f'_{number}' if number > 1 else ''}" for number in itertools.count(1))
        path = next(each for each in numbered if each not in taken)
        taken.add(path)
        import cloudpickle

        try:
            _pickled[path] = cloudpickle.dumps(function)
        except Exception as error:  # noqa: BLE001 - pickling can fail with many kinds of errors
            raise ConfigError(
                f"the reward {name} cannot be sent to the processes that run rewards: {type(error).__name__}: {error}; create the "
                "objects that it uses inside the function, or put it in a module and pass module:name"
            ) from None
    return {"type": "function", **reward, "path": path}


def _import_path(function: Any) -> str | None:
    """Return ``module:name`` if importing that yields this very function, or None if only this process has it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<" in name or not name:
        return None
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is function else None
