"""Runs calls on a chosen node, each with a deadline.

``run_on`` runs a function on a node, and ``Pinned`` keeps an object there. Calls to either return a pending call immediately;
``answer_of`` waits for one call, ``answers_of`` for one call on each node. Ray reads environment
variables when it is imported, so the functions import it only after ``connect`` has set them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from rollcall.base.errors import ClusterError
from rollcall.base.wait import Wait

Pending = Any  # Ray's reference to a result


class NoAnswerError(ClusterError):
    """The process on the node failed, died, or did not answer in time. The message contains only the reason."""


def run_on(node_id: str, function: Callable[[], Any], *, env: Mapping[str, str]) -> Pending:
    """Run the function in its own process on that node, with these variables."""
    import ray

    options = pinned(node_id) | {"max_retries": 0, "runtime_env": {"env_vars": dict(env)}}
    return ray.remote(function).options(**options).remote()


class Pinned:
    """Keeps an object of this class in a process of its own on one node, until this process disconnects."""

    def __init__(self, node_id: str, target: type, *args: Any, by_value: Iterable[ModuleType] = ()) -> None:
        """``by_value``: modules that are sent with the class because the node may have a different version of them, or none."""
        import ray
        from ray import cloudpickle

        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
        self._actor: Any = ray.remote(target).options(**pinned(node_id), max_restarts=0).remote(*args)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        return getattr(self._actor, method).remote(*args, **kwargs)


def pinned(node_id: str) -> dict[str, Any]:
    """Return Ray's options for running a task or an actor on this node without taking any of its CPUs."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def answer_of(call: Pending, *, timeout_s: float) -> Any:
    """Wait for the answer, or raise ``NoAnswerError``."""
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(call, timeout=timeout_s)
    except RayError as error:
        raise NoAnswerError(str(error).strip().splitlines()[0]) from error


def answers_of(calls: Mapping[int, Pending], *, wait: Wait, to: str) -> tuple[dict[int, Any], dict[int, str]]:
    """Return the answers by rank, and the reasons why other nodes did not answer. ``to`` names the task in progress messages."""
    import ray

    waiting = {call: rank for rank, call in calls.items()}
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while waiting and not wait.is_over:
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(wait.left_s, 1.0))
        for call in ready:
            rank = waiting.pop(call)
            try:
                answers[rank] = ray.get(call)
            except Exception as error:  # the code on the node may raise anything, and the error arrives unchanged
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                failures[rank] = f"it failed: {[type(error).__name__, *lines][-1]}"
        if waiting:
            wait.tell(f"waiting for rank {', '.join(map(str, sorted(waiting.values())))} to {to}")
    return answers, failures | dict.fromkeys(waiting.values(), f"no answer after {wait.timeout_s:.0f} s")
