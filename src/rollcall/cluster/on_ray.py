"""Slots and workers on Ray.

Slots are the bundles of one placement group, so a virtual cluster has all of its slots or none. Each bundle is tied to its
node, and a task in each tells which accelerator Ray gave it: slots are then in (node rank, accelerator) order, whatever
order Ray chose. A worker is an actor in its slot's bundle.

Who waits for whom: ``reserve`` waits for nodes with room; ``launch`` for rank 0's process, which leases the group's port,
and then for every worker to be made; ``gather`` for results. Each wait has a deadline and says who is missing.
"""

from __future__ import annotations

import ipaddress
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray._private import state as ray_state  # the pinned Ray has no public call for free resources and actor states
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rollcall.cluster.actor import MARK, Host, end_group
from rollcall.cluster.backend import Ask, NodeSeats, Recipe, WorkerSpec
from rollcall.cluster.dispatch import Drop, is_large
from rollcall.cluster.environment import for_ray
from rollcall.cluster.failures import (
    Progress,
    RemoteFailureError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rollcall.cluster.state import ClusterError

RANK_LABEL = "rollcall.rank"  # what `rollcall node` labels its node with
RANK_RESOURCE = "rollcall_node_"  # and the resource it offers, followed by the rank
NODE_ID_LABEL = "ray.io/node-id"
PLACE_TRY_S = 10.0  # a placement group that found room is placed in milliseconds; later, someone else took it
POLL_S = 0.25
STUMBLE_S = 0.5  # when one worker dies in a collective, the others raise within moments, or before it is known
STOP_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A live node, its rank, and what it has."""

    rank: int
    node_id: str
    address: str
    is_labelled: bool
    total: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def selector(self) -> dict[str, str]:
        """By rank where there is one: a node that replaces a dead one then takes over its slots."""
        return {RANK_LABEL: str(self.rank)} if self.is_labelled else {NODE_ID_LABEL: self.node_id}


def ranked_nodes() -> list[RayNode]:
    """The live nodes by rank. Those without a rank of their own follow by address."""
    free = ray_state.available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    ranked: dict[int, dict[str, Any]] = {}
    for node in alive:
        rank = _own_rank(node)
        if rank is None:
            continue
        if rank in ranked:
            raise ClusterError(
                f"two live nodes have rank {rank}: {ranked[rank]['NodeManagerAddress']} and {node['NodeManagerAddress']}; "
                "take one of them down"
            )
        ranked[rank] = node
    others = sorted((node for node in alive if _own_rank(node) is None), key=_by_address)
    next_rank = max(ranked, default=-1) + 1
    ranked |= {next_rank + number: node for number, node in enumerate(others)}
    return [
        RayNode(
            rank=rank,
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            is_labelled=RANK_LABEL in node["Labels"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for rank, node in sorted(ranked.items())
    ]


def _own_rank(node: dict[str, Any]) -> int | None:
    label = node["Labels"].get(RANK_LABEL)
    if label is not None:
        return int(label)
    for name in node["Resources"]:
        if name.startswith(RANK_RESOURCE):
            return int(name.removeprefix(RANK_RESOURCE))
    return None


def _by_address(node: dict[str, Any]) -> tuple[Any, ...]:
    try:
        address = ipaddress.ip_address(node["NodeManagerAddress"])
        return (address.version, int(address), node["NodeManagerPort"])
    except ValueError:  # a name
        return (9, node["NodeManagerAddress"], node["NodeManagerPort"])


class RayBackend:
    def reserve(self, ask: Ask, *, timeout_s: float) -> RayReservation:
        deadline = time.monotonic() + timeout_s
        progress = Progress()
        while True:
            nodes = ranked_nodes()
            chosen = choose_nodes(ask, nodes)
            if chosen is not None:
                group = _place(ask, chosen, timeout_s=min(PLACE_TRY_S, max(deadline - time.monotonic(), 0.1)))
                if group is not None:
                    return RayReservation(group, seats=_seats(ask, chosen, group, deadline=deadline))
            if time.monotonic() >= deadline:
                raise ClusterError(_cannot_place(ask, nodes, timeout_s=timeout_s))
            progress.tell(f"waiting for slots: {_asked(ask)}; {_has(ask, nodes)}")
            time.sleep(POLL_S)


def choose_nodes(ask: Ask, nodes: Sequence[RayNode]) -> list[RayNode] | None:
    """A node for each entry: those that are named, else in rank order the first with room; None while there are none."""
    if ask.node_ranks is not None:
        by_rank = {node.rank: node for node in nodes}
        named = [by_rank.get(rank) for rank in ask.node_ranks]
        return [node for node in named if node is not None] if all(named) else None
    chosen: list[RayNode] = []
    left = iter(nodes)
    for count in ask.slots_per_node:
        need = count * _per_slot(ask)
        node = next((node for node in left if node.free.get(ask.resource, 0) >= need), None)
        if node is None:
            return None
        chosen.append(node)
    return chosen


def _per_slot(ask: Ask) -> int:
    # A GPU is shared by fractions; workers without one are each counted as a CPU.
    return 1 if ask.use_gpus else ask.num_colocated


def _place(ask: Ask, chosen: Sequence[RayNode], *, timeout_s: float) -> PlacementGroup | None:
    bundles, selectors = [], []
    for count, node in zip(ask.slots_per_node, chosen, strict=True):
        bundles += [{ask.resource: _per_slot(ask)} for _ in range(count)]
        selectors += [node.selector for _ in range(count)]
    name = f"{ask.name}-{uuid.uuid4().hex[:8]}"  # Ray takes each name once
    group = placement_group(bundles, strategy="PACK", name=name, bundle_label_selector=selectors)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    return None


def _asked(ask: Ask) -> str:
    kind = "GPU slots" if ask.use_gpus else "CPUs"
    counts = [count * _per_slot(ask) for count in ask.slots_per_node]
    where = f" (nodes {', '.join(map(str, ask.node_ranks))})" if ask.node_ranks is not None else ""
    return f"{sum(counts)} {kind} were asked for, {counts} by node{where}"


def _has(ask: Ask, nodes: Sequence[RayNode]) -> str:
    found = [
        f"node {node.rank} ({node.address}) has {node.total.get(ask.resource, 0):g}, "
        f"{node.free.get(ask.resource, 0):g} of them free"
        for node in nodes
    ]
    return "; ".join(found) or "there is no node"


def _cannot_place(ask: Ask, nodes: Sequence[RayNode], *, timeout_s: float) -> str:
    return (
        f"no room after {timeout_s:g} s: {_asked(ask)}; {_has(ask, nodes)}. Entries take nodes in rank order; ask for less, "
        "end what holds the rest, or let more nodes join (`rollcall status` lists them)"
    )


@ray.remote(num_cpus=0, max_calls=0)  # the process stays for the next bundle of its node
def _look() -> tuple[int, str, str | None]:
    """This bundle's accelerator: its place on the node, its name, and the variable that makes it visible."""
    from ray._private.accelerators import get_accelerator_manager_for_resource
    from ray._private.worker import global_worker

    device = str(ray.get_gpu_ids()[0])
    # On a node started with some accelerators visible, Ray counts those, in the order of the variable.
    visible = global_worker.original_visible_accelerator_ids.get("GPU")
    place = visible.index(device) if visible else int(device)
    manager = get_accelerator_manager_for_resource("GPU")
    return place, device, None if manager is None else manager.get_visible_accelerator_ids_env_var()


def _seats(ask: Ask, chosen: Sequence[RayNode], group: PlacementGroup, *, deadline: float) -> list[NodeSeats]:
    starts = [sum(ask.slots_per_node[:entry]) for entry in range(len(chosen))]
    bundles = [range(start, start + count) for start, count in zip(starts, ask.slots_per_node, strict=True)]
    looks: dict[int, tuple[int, str, str | None]] = {}
    if ask.use_gpus:
        try:
            looks = _look_around(bundles, group, deadline=deadline)
        except (RayError, ClusterError):
            remove_placement_group(group)
            raise
    seats = []
    for node, own in zip(chosen, bundles, strict=True):
        ordered = sorted(own, key=lambda bundle: looks[bundle][0]) if looks else list(own)
        if not ordered:
            continue
        seats.append(
            NodeSeats(
                node_rank=node.rank,
                node_id=node.node_id,
                address=node.address,
                bundles=tuple(ordered),
                devices=tuple(looks[bundle][1] for bundle in ordered) if looks else (),
                visible_variable=looks[ordered[0]][2] if looks else None,
            )
        )
    return sorted(seats, key=lambda seat: seat.node_rank)


def _look_around(
    bundles: Sequence[range], group: PlacementGroup, *, deadline: float
) -> dict[int, tuple[int, str, str | None]]:
    """All nodes at once, the bundles of a node one after the other: one process each does it."""
    found: dict[int, tuple[int, str, str | None]] = {}
    for turn in range(max(map(len, bundles))):
        asked = {
            own[turn]: _look.options(
                num_gpus=0.001,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=own[turn]),
            ).remote()
            for own in bundles
            if turn < len(own)
        }
        try:
            answers = ray.get(list(asked.values()), timeout=max(deadline - time.monotonic(), 30))
        except GetTimeoutError:
            raise ClusterError("a node has its slots but starts no process on them; see its Ray logs") from None
        found |= dict(zip(asked, answers, strict=True))
    return found


class RayReservation:
    def __init__(self, group: PlacementGroup, *, seats: list[NodeSeats]) -> None:
        self._group = group
        self.nodes: Sequence[NodeSeats] = seats

    def launch(self, specs: Sequence[WorkerSpec], recipe: Recipe, *, timeout_s: float) -> RayCrew:
        crew = RayCrew(specs, group=self._group)
        try:
            crew.start(recipe, timeout_s=timeout_s)
        except BaseException:  # an interrupt too: nothing may be left behind
            crew.stop(timeout_s=STOP_DEADLINE_S)
            raise
        return crew

    def release(self) -> None:
        remove_placement_group(self._group)


class RayCrew:
    def __init__(self, specs: Sequence[WorkerSpec], *, group: PlacementGroup) -> None:
        self._specs = list(specs)
        self._mark = uuid.uuid4().hex
        self._hosts = [self._create(spec, group) for spec in specs]
        self._calls = [host.call for host in self._hosts]
        self._rank_of = {host._actor_id.hex(): rank for rank, host in enumerate(self._hosts)}
        self.pids: Sequence[int] = []
        self.master_address = specs[0].node.address
        self.master_port = 0

    def _create(self, spec: WorkerSpec, group: PlacementGroup) -> Any:
        has_gpu = bool(spec.node.devices)
        strategy = PlacementGroupSchedulingStrategy(
            group,
            placement_group_bundle_index=spec.node.bundles[spec.slots[0]],
            placement_group_capture_child_tasks=False,
        )
        # A process on several slots is counted on its first; its virtual cluster lets nobody else on the others.
        return (
            ray.remote(Host)
            .options(
                num_gpus=spec.share if has_gpu else 0,
                num_cpus=0 if has_gpu else spec.share,
                max_restarts=0,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {**for_ray(spec.env), MARK: self._mark}},
            )
            .remote(f"{spec.role} rank {spec.rank}, node {spec.node.node_rank}")
        )

    def start(self, recipe: Recipe, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        progress = Progress()
        (self.master_port,) = self.gather([self._hosts[0].lease_port.remote()], timeout_s=timeout_s, progress=progress)
        args = [self.share(value) for value in recipe.args]
        kwargs = {name: self.share(value) for name, value in recipe.kwargs.items()}
        target = recipe.target if isinstance(recipe.target, str) else ray.put(recipe.target)
        started = [
            host.start.remote(
                spec.group_env(master_address=self.master_address, master_port=self.master_port),
                target,
                *args,
                **kwargs,
            )
            for spec, host in zip(self._specs, self._hosts, strict=True)
        ]
        self.pids = self.gather(started, timeout_s=max(deadline - time.monotonic(), 0), progress=progress)

    def share(self, value: Any) -> Any:
        return ray.put(value) if is_large(value) else value

    def call(self, rank: int, method: str, drop: Drop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._calls[rank].remote(method, drop, *args, **kwargs)

    def ready(self, futures: Sequence[Any], *, timeout_s: float) -> list[Any]:
        first, _ = ray.wait(list(futures), timeout=timeout_s, fetch_local=False)
        return ray.wait(list(futures), num_returns=len(futures), timeout=0, fetch_local=False)[0] if first else []

    def gather(self, futures: Sequence[Any], *, timeout_s: float, progress: Progress | None = None) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        progress = progress or Progress(first_s=30, every_s=30)
        futures = list(futures)
        while True:
            left = deadline - time.monotonic()
            try:
                return ray.get(futures, timeout=max(min(left, progress.due_in_s), 0.001))
            except RayTaskError as error:
                self._explain(futures, error)
            except GetTimeoutError:
                missing = self._missing(futures)
                if missing and time.monotonic() >= deadline:
                    raise self._timeout(missing, total=len(futures), timeout_s=timeout_s) from None
                if missing:
                    progress.tell(f"waiting for {_listed([spec.where for spec in missing])}")
            except RayError as error:
                self._explain(futures, error)

    def _missing(self, futures: list[Any]) -> list[WorkerSpec]:
        _, pending = ray.wait(futures, num_returns=len(futures), timeout=0, fetch_local=False)
        return [spec for spec in map(self._spec_of, pending) if spec is not None]

    def _spec_of(self, future: Any) -> WorkerSpec | None:
        """The worker that owes this result; None: it is none of this group's."""
        rank = self._rank_of.get(future.task_id().actor_id().hex())
        return None if rank is None else self._specs[rank]

    def _timeout(self, missing: list[WorkerSpec], *, total: int, timeout_s: float) -> WorkerTimeoutError:
        return WorkerTimeoutError(
            f"no answer after {timeout_s:g} s from {len(missing)} of {total} workers: "
            f"{_listed([spec.where for spec in missing])}",
            **_named(missing),
        )

    def _explain(self, futures: list[Any], error: Exception) -> NoReturn:
        """Raise what the failed call means: the dead before those that stumbled over their death."""
        ready, _ = ray.wait(futures, num_returns=len(futures), timeout=STUMBLE_S, fetch_local=False)
        failed: list[tuple[WorkerSpec, Exception]] = []
        for future in ready:
            spec = self._spec_of(future)
            try:
                ray.get(future, timeout=10)
            except RayError as found:
                if spec is not None:
                    failed.append((spec, found))
        if not failed:
            raise error
        dead = [(spec, found) for spec, found in failed if isinstance(found, RayActorError)]
        dead += [(spec, found) for spec, found in failed if (spec, found) not in dead and not self.is_alive(spec.rank)]
        spec, found = (dead or failed)[0]
        others = [other for other, _ in failed if other is not spec]
        also = f"\nAlso failed: {_listed([other.where for other in others])}" if others else ""
        named = _named([spec, *others])
        if dead:
            raise WorkerDiedError(f"{spec.where} is dead: {_death(found)}{also}", **named) from found
        cause = getattr(found, "cause", None)  # of what the worker's own code raised
        if isinstance(cause, RemoteFailureError):
            raise WorkerError(f"{spec.where} raised\n{cause}{also}", **named) from cause.original
        raise WorkerError(f"{spec.where} gave no result: {found}{also}", **named) from found

    def is_alive(self, rank: int) -> bool:
        return self._actor(rank).get("State") == "ALIVE"

    def _actor(self, rank: int) -> dict[str, Any]:
        return ray_state.actors(self._hosts[rank]._actor_id.hex())

    def stop(self, *, timeout_s: float) -> None:
        for host in self._hosts:
            ray.kill(host)
        alive = {node.node_id: node for node in ranked_nodes()}
        used = {spec.node.node_id for spec in self._specs} & set(alive)
        ends = {
            node_id: _end.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
                self._mark, timeout_s
            )
            for node_id in used
        }
        ready, _ = ray.wait(list(ends.values()), num_returns=len(ends), timeout=timeout_s) if ends else ([], [])
        problems = []
        for node_id, end in ends.items():
            where = f"node {alive[node_id].rank} ({alive[node_id].address})"
            if end not in ready:
                problems.append(f"{where} has not said within {timeout_s:g} s that they ended")
                continue
            try:
                if left := ray.get(end):
                    problems.append(f"{where} still has processes {left}")
            except RayError:
                continue  # the node left the cluster meanwhile, and its processes with it
        if problems:
            raise ClusterError(f"the processes of {self._specs[0].role} cannot be ended: {'; '.join(problems)}")


@ray.remote(num_cpus=0)
def _end(mark: str, timeout_s: float) -> list[int]:
    return end_group(mark, timeout_s=timeout_s)


def _named(specs: Sequence[WorkerSpec]) -> dict[str, Any]:
    return dict(
        role=specs[0].role,
        ranks=[spec.rank for spec in specs],
        node_ranks=sorted({spec.node.node_rank for spec in specs}),
    )


def _death(error: Exception) -> str:
    """Ray's reason, without its field list and its general advice."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return lines[-1].partition(" Some common causes include")[0] if lines else type(error).__name__


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
