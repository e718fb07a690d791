"""Delivers a gang's calls over Ray: one actor per worker, in its slot's bundle; supervise.py watches the nodes."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray._private import state as ray_state  # the pinned Ray has no public call for actor states
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollcall.base.errors import ClusterError, WorkerDiedError
from rollcall.base.wait import Wait
from rollcall.nodes.declared import for_ray
from rollcall.process.groups.backend import Call, Carrier, Member, Recipe, WorkerSpec, whom
from rollcall.process.groups.host import DEBUG_HOST, GROUP_MARK, Host, RemoteFailureError, end_group
from rollcall.process.groups.sightings import SILENT_S
from rollcall.process.ray import zygote
from rollcall.process.ray.each_node import answers_of, pinned
from rollcall.process.ray.supervise import Supervisor

INLINE_BYTES = 100 * 1024  # Ray itself stores a larger argument, once for each call


class OnRay(Carrier):
    peer_s = SILENT_S + 2

    def __init__(self, recipe: Recipe, *, group: PlacementGroup, may_fork: bool) -> None:
        """``may_fork``: `rollcall node` started the nodes, so Rollcall is installed in their Ray's Python."""
        self._target = recipe.target
        self._may_fork = may_fork and isinstance(recipe.target, str) and recipe.target.startswith("rollcall.")
        self._group = group
        self._mark = uuid.uuid4().hex
        self._changing = threading.Lock()
        self._hosts: dict[int, Any] = {}  # by rank
        self._may_have_moved: set[Member] = set()
        self._has_ended = False
        self._supervisor = Supervisor(self._mark, self)
        self._supervisor.start()

    def launch(self, spec: WorkerSpec, *, lost: Member | None, wait: Wait) -> Member:
        if lost is not None:
            self._supervisor.remove(lost)
        with self._changing:
            if self._has_ended:
                raise WorkerDiedError(f"{spec.role} has been shut down", **whom([spec]))
            if lost is not None:
                ray.kill(self._hosts[spec.rank])
            host = self._hosts[spec.rank] = self._create(spec)
        self._supervisor.open(spec.node.node_id)
        member = Member(spec, link=(host, host.call))
        if lost is not None:
            self._may_have_moved.add(member)
        return member

    def _create(self, spec: WorkerSpec) -> Any:
        has_gpu = bool(spec.node.devices)
        strategy = PlacementGroupSchedulingStrategy(
            self._group,
            placement_group_bundle_index=spec.node.bundles[spec.slots[0]],
            placement_group_capture_child_tasks=False,
        )
        variables = {**for_ray(spec.env), GROUP_MARK: self._mark}
        runtime_env: dict[str, Any] = {"env_vars": variables}
        if self._may_fork:
            module = str(self._target).rpartition(".")[0]
            variables |= {zygote.MODULES: f"ray._private.worker {module}", zygote.GROUP: self._mark}
            runtime_env["py_executable"] = zygote.COMMAND
        # Ray counts a process with several slots only on its first slot; the virtual cluster keeps other workers off its other slots.
        return (
            ray.remote(Host)
            .options(
                num_gpus=spec.share if has_gpu else 0,
                num_cpus=0 if has_gpu else spec.share,
                max_restarts=0,
                scheduling_strategy=strategy,
                runtime_env=runtime_env,
            )
            .remote(f"{spec.role} rank {spec.rank}, node {spec.node.node_rank}")
        )

    def watch(self, member: Member) -> None:
        if member in self._may_have_moved:  # it may have moved to a different node, which has taken over the rank
            spec, node_id = member.spec, self._state_of(member).get("Address", {}).get("NodeID")
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            if node_id not in addresses:
                return  # it has died since it answered, so Ray no longer names its node; the next call to it fails and says why
            member.spec = replace(spec, node=replace(spec.node, node_id=node_id, address=addresses[node_id]))
        self._supervisor.add(member)

    def start_env(self, spec: WorkerSpec) -> Mapping[str, str]:
        return {DEBUG_HOST: spec.node.address}  # the process already has the user's variables

    def share(self, value: Any) -> Any:
        return value if is_small(value) else ray.put(value)

    def send(self, call: Call, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        host, cached = call.member.link  # creating a bound method takes longer than calling it
        call.link = (cached if method == "call" else getattr(host, method)).remote(*args, **kwargs)

    def settle(self, calls: Sequence[Call], *, timeout_s: float, through_failures: bool = False) -> None:
        missing = [call for call in calls if not call.is_done]
        if missing and not through_failures:
            try:
                values = ray.get([call.link for call in missing], timeout=timeout_s)
            except RayError as error:
                # Ray's error for a failed task may also be an instance of the worker's exception.
                if isinstance(error, GetTimeoutError) and not isinstance(error, RayTaskError):
                    return
                timeout_s = 0
            else:
                for call, value in zip(missing, values, strict=True):
                    call.finish(value)
                return
        for call in self._ready(missing, timeout_s=timeout_s, count=len(missing)):
            try:
                call.finish(ray.get(call.link, timeout=10))
            except RayTaskError as error:
                cause = getattr(error, "cause", None)  # set if the worker's own code raised
                call.finish(error=cause if isinstance(cause, RemoteFailureError) else error)
            except RayError as error:
                if isinstance(error, RayActorError) or not self.is_alive(call.member):
                    self.lose({call.member: _death(error)})
                call.finish(error=error)

    def answered(self, calls: Sequence[Call], *, timeout_s: float) -> Collection[Call]:
        first = self._ready(calls, timeout_s=timeout_s, count=1)
        return self._ready(calls, timeout_s=0, count=len(calls)) if first else []

    @staticmethod
    def _ready(calls: Sequence[Call], *, timeout_s: float, count: int) -> list[Call]:
        found = [call for call in calls if call.is_done]
        by_ref = {call.link: call for call in calls if not call.is_done}
        if not by_ref or (found and count == 1):
            return found
        count = min(count, len(by_ref))
        ready, _ = ray.wait(list(by_ref), num_returns=count, timeout=timeout_s, fetch_local=False)
        return [*found, *(by_ref[ref] for ref in ready)]

    def is_alive(self, member: Member) -> bool:
        return not self._has_ended and self._state_of(member).get("State") == "ALIVE"

    @staticmethod
    def _state_of(member: Member) -> dict[str, Any]:
        return ray_state.actors(member.link[0]._actor_id.hex())

    def look(self, members: Sequence[Member], *, last: bool) -> Collection[int]:
        return self._supervisor.look(last=last)

    def stop(self, members: Sequence[Member], *, timeout_s: float) -> None:
        """Stop the workers on all nodes at once, without waiting for lost nodes."""
        silent = self._supervisor.look(last=False)
        lost = {one.spec.node.node_id for one in members if one.death and one.spec.rank in silent}
        with self._changing:  # no worker is added from now on
            self._has_ended = True
            for host in self._hosts.values():
                ray.kill(host)
        self._supervisor.stop()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - lost
        used = {one.spec.node.node_rank: one.spec.node for one in members if one.spec.node.node_id in alive}
        ends = {rank: _end.options(**pinned(node.node_id)).remote(self._mark, timeout_s) for rank, node in used.items()}
        left, problems = answers_of(ends, wait=Wait(timeout_s, first_s=timeout_s), to="end its processes")
        problems |= {rank: f"these processes are still running: {pids}" for rank, pids in left.items() if pids}
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # the processes of lost nodes are gone too
        said = [
            f"node {rank} ({used[rank].address}): {why}"
            for rank, why in problems.items()
            if used[rank].node_id in alive
        ]
        if said:
            raise ClusterError(f"the processes of {members[0].spec.role} cannot be stopped: {'; '.join(said)}")


@ray.remote
def _end(mark: str, timeout_s: float) -> list[int]:
    return end_group(mark, timeout_s=timeout_s)


def _death(error: Exception) -> str:
    """Return Ray's reason, without its list of fields and its general advice."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return lines[-1].partition(" Some common causes include")[0].removesuffix(".") if lines else type(error).__name__


def is_small(value: Any) -> bool:
    """Return whether a copy in each worker's call is cheaper than one stored copy, which every node has to fetch. This pickles nothing
    to learn its size, so objects other than plain values and arrays count as large."""
    left, num_bytes = [value], 0
    while left and num_bytes <= INLINE_BYTES:
        one = left.pop()
        if isinstance(one, dict | list | tuple):
            num_bytes += 8 * len(one)
            left += [*one, *one.values()] if isinstance(one, dict) else one
        elif isinstance(one, str | bytes):
            num_bytes += len(one)
        elif isinstance(size := getattr(one, "nbytes", None), int):  # an array or a tensor
            num_bytes += size
        elif one is not None and not isinstance(one, int | float | ray.ObjectRef):  # Ray refuses to store a reference
            return False
    return num_bytes <= INLINE_BYTES
