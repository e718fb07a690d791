"""Calls that are pinned to a node by its rank, each with a deadline.

``run_on`` runs a function there, ``Pinned`` keeps an object there. Both start at once and return a pending call;
``answer_of`` waits for one of them, ``answers_of`` for one of each node. Ray is imported in here: it reads variables while it
is imported, which ``connect`` sets before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rollcall.errors import ClusterError
from rollcall.nodes.rank import RANK_RESOURCE, rank_offered

TELL_EVERY_S = 5.0
_LITTLE = 0.001  # a node has 1,000 of its resource: who takes this much is pinned, and leaves room for all others

Pending = Any  # Ray's reference to a result


class NoAnswerError(ClusterError):
    """The process on the node has failed, has died or does not answer in time; the message is the reason alone."""


def node_addresses() -> dict[int, str]:
    """The address of each live node that `rollcall node` has started, by rank."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    ranks = {rank_offered(node["Resources"]): node["NodeManagerAddress"] for node in alive}
    return {rank: ranks[rank] for rank in sorted(rank for rank in ranks if rank is not None)}


def run_on(rank: int, function: Callable[[], Any], *, env: Mapping[str, str]) -> Pending:
    """Run the function in a process of its own on that node, with these variables."""
    import ray

    options = _pinned(rank) | {"max_retries": 0, "runtime_env": {"env_vars": dict(env)}}
    return ray.remote(function).options(**options).remote()


class Pinned:
    """An object of this class in a process on one node, until this process disconnects."""

    def __init__(self, rank: int, target: type, *args: Any, by_value: ModuleType | None = None) -> None:
        """``by_value``: the class's module, where the node may have another version of it, or none."""
        import ray
        from ray import cloudpickle

        if by_value is not None:
            cloudpickle.register_pickle_by_value(by_value)
        self._actor: Any = ray.remote(target).options(**_pinned(rank), max_restarts=0).remote(*args)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        return getattr(self._actor, method).remote(*args, **kwargs)


def _pinned(rank: int) -> dict[str, Any]:
    return {"num_cpus": 0, "resources": {f"{RANK_RESOURCE}{rank}": _LITTLE}}


def answer_of(call: Pending, *, timeout_s: float) -> Any:
    """Raises ``NoAnswerError``."""
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(call, timeout=timeout_s)
    except RayError as error:
        raise NoAnswerError(str(error).strip().splitlines()[0]) from error


def answers_of(
    calls: Mapping[int, Pending], *, timeout_s: float, tell: Callable[[list[int], float], None] | None = None
) -> tuple[dict[int, Any], dict[int, str]]:
    """The answers by rank, and why the others have none. ``tell`` hears every few seconds which ranks are waited for."""
    import ray

    began = told = time.monotonic()
    waiting = {call: rank for rank, call in calls.items()}
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while waiting and (left := timeout_s - (time.monotonic() - began)) > 0:
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(left, 1.0))
        for call in ready:
            rank = waiting.pop(call)
            try:
                answers[rank] = ray.get(call)
            except Exception as error:  # whatever the code there has raised arrives as itself
                failures[rank] = f"it failed: {_last_line(error)}"
        if tell is not None and waiting and time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            tell(sorted(waiting.values()), told - began)
    return answers, failures | dict.fromkeys(waiting.values(), f"no answer after {timeout_s:.0f} s")


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
