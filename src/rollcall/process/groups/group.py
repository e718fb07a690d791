"""Worker groups: one class in many processes, called together.

A WorkerBuilder describes a worker. A WorkerGroup creates one in each of its seats and calls them. A MultiWorkerFuture contains
the pending answers. Run methods return at once; ``get_all_worker_results`` waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from rollcall.base.errors import ClusterError
from rollcall.base.wait import Wait
from rollcall.nodes.declared import GROUP_VARIABLES
from rollcall.process.groups.backend import Recipe, Seat, WorkerSpec
from rollcall.process.groups.cluster import VirtualCluster
from rollcall.process.groups.dispatch import NamedSharding, check_fields, leaders, routes, split_arguments
from rollcall.process.groups.gang import STOP_DEADLINE_S, Gang
from rollcall.process.groups.sightings import Sightings

START_DEADLINE_S = 900.0


class WorkerMetadata(TypedDict):
    """Identifies and locates a worker."""

    name: str  # role and rank, such as policy-3
    global_rank: int
    local_rank: int  # among the group's workers on its node
    node_idx: int  # its node's index among the cluster's nodes
    node_rank: int
    address: str
    bundle_indices: tuple[int, ...]  # its slots
    devices: tuple[str, ...]  # its accelerators
    dp_shard_idx: int  # which part of the data it gets
    pid: int


class WorkerBuilder:
    """A worker class and its arguments. The class is a name (``"module.Class"``, imported only in the worker) or the class itself."""

    def __init__(self, ray_actor_class_fqn: str | type, *args: Any, **kwargs: Any) -> None:
        if isinstance(ray_actor_class_fqn, str):
            parts = ray_actor_class_fqn.split(".")
            if len(parts) < 2 or not all(part.isidentifier() for part in parts):
                raise ValueError(f"{ray_actor_class_fqn!r} does not name a worker class; write 'module.Class'")
        self.recipe = Recipe(target=ray_actor_class_fqn, args=args, kwargs=kwargs, purposes={})


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiWorkerFuture:
    """The pending answers of several workers."""

    futures: Sequence[Any]
    called_workers: Sequence[int] | None = None  # the rank behind each future
    return_from_workers: Sequence[int] | None = None  # the ranks whose answers count; None: all
    replicated_fields: Sequence[str] = ()  # fields that only the first answer contains

    def select(self, results: list[Any], *, axes: Sequence[str]) -> list[Any]:
        """Select the results to return; ``results`` contains one per future."""
        if self.return_from_workers is not None and self.called_workers is not None:
            by_rank = dict(zip(self.called_workers, results, strict=True))
            results = [by_rank[rank] for rank in self.return_from_workers]
        if results:
            check_fields(results[0], self.replicated_fields, axes=axes)
        return results


class Worker:
    """One worker as the group's owner sees it."""

    def __init__(self, gang: Gang, metadata: WorkerMetadata) -> None:
        self._gang = gang
        self.metadata = metadata

    def is_alive(self) -> bool:
        return self._gang.is_alive(self.metadata["global_rank"])

    def __repr__(self) -> str:
        return f"Worker({self.metadata['name']} on node {self.metadata['node_rank']})"


class WorkerGroup:
    """One worker per seat, with ranks in (node rank, slot) order.

    ``workers_per_node`` is one number, or a number for each node: each node gets that many workers, one per slot. A multiple of the
    number of slots puts several workers on each slot. ``seats`` has one entry per worker; the worker sees the accelerators of all slots
    in its entry. If neither is given, each slot gets a worker.
    ``env_vars`` are set for every worker, ``node_env_vars`` (by node rank) for the workers of one node. ``titles`` are the workers'
    names in messages, by rank, instead of the prefix and the rank; workers of the same kind (``kinds``) are about equally fast;
    ``purposes`` describes, by method, what a caller is waiting for.
    Without ``takes_slots`` the seats only determine the workers' nodes: other groups may use all of their slots.
    """

    def __init__(
        self,
        *,
        cluster: VirtualCluster,
        remote_worker_builder: WorkerBuilder,
        workers_per_node: int | Sequence[int] | None = None,
        name_prefix: str = "worker",
        seats: Sequence[Seat] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        node_env_vars: Mapping[int, Mapping[str, str]] | None = None,
        titles: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
        purposes: Mapping[str, str] | None = None,
        takes_slots: bool = True,
        timeout_s: float = START_DEADLINE_S,
    ) -> None:
        if workers_per_node is not None and seats is not None:
            raise ValueError("workers_per_node and seats both determine where the workers run; give only one of them")
        seats = _seats_per_node(cluster, workers_per_node) if seats is None else seats
        seats = sorted(seats, key=lambda seat: (seat.node_rank, seat.slots))
        if not seats:
            raise ValueError("a worker group needs at least one worker")
        self.takes_slots = takes_slots
        if takes_slots:
            cluster.check_room(seats)
        self.name_prefix = name_prefix or "worker"
        self.cluster = cluster
        self.sharding = sharding_annotations or NamedSharding.default(len(seats))
        if self.sharding.ranks != list(range(len(seats))):
            raise ValueError(
                f"the sharding has ranks {self.sharding.ranks}, but the group has ranks 0 to {len(seats) - 1}"
            )
        for node_rank in node_env_vars or {}:
            cluster.node(node_rank)
        variables = [{**(env_vars or {}), **(node_env_vars or {}).get(seat.node_rank, {})} for seat in seats]
        titles, kinds = titles or [""] * len(seats), kinds or [self.name_prefix] * len(seats)
        self.specs = self._specs(seats, variables=variables, titles=titles, kinds=kinds)
        self._one_call = threading.Lock()
        recipe = replace(remote_worker_builder.recipe, purposes=purposes or {})
        self._gang: Gang | None = cluster.launch(self, self.specs, recipe, timeout_s=timeout_s)
        self.workers = [Worker(self._gang, self._metadata(spec)) for spec in self.specs]

    def _specs(
        self,
        seats: Sequence[Seat],
        *,
        variables: Sequence[Mapping[str, str]],
        titles: Sequence[str],
        kinds: Sequence[str],
    ) -> list[WorkerSpec]:
        """Return the spec of each process, in rank order."""
        for name in GROUP_VARIABLES:
            if any(name in own for own in variables):
                raise ValueError(
                    f"{name} is set by the worker group, differently for each worker; leave it out of env_vars"
                )
        per_slot = Counter((seat.node_rank, slot) for seat in seats for slot in seat.slots)
        on_node = [seat.node_rank for seat in seats]
        specs = []
        for rank, seat in enumerate(seats):
            num_sharing = max(per_slot[seat.node_rank, slot] for slot in seat.slots)
            spec = WorkerSpec(
                role=self.name_prefix,
                rank=rank,
                world_size=len(seats),
                local_rank=on_node[:rank].count(seat.node_rank),
                local_world_size=on_node.count(seat.node_rank),
                node=self.cluster.node(seat.node_rank),
                slots=seat.slots,
                # Rounded down to Ray's resolution, because several shares rounded up would exceed the slot.
                share=int(10_000 / num_sharing) / 10_000 if self.takes_slots else 0.0,
                env=variables[rank],
                title=titles[rank],
                kind=kinds[rank],
            )
            specs.append(spec)
        return specs

    @property
    def worker_metadata(self) -> list[WorkerMetadata]:
        return [worker.metadata for worker in self.workers]

    @property
    def world_size(self) -> int:
        return len(self.specs)

    @property
    def dp_size(self) -> int:
        """The number of parts into which sharded data is split."""
        axis = self._data_axis()
        return self.world_size if axis is None else self.sharding.get_axis_size(axis)

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Call one worker."""
        if not 0 <= worker_idx < self.world_size:
            raise ValueError(
                f"worker_idx={worker_idx} is out of range; {self.name_prefix} has workers 0 to {self.world_size - 1}"
            )
        return self._running.call(worker_idx, method_name, (), args, kwargs)

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call all workers with the same arguments; along ``run_rank_0_only_axes`` call only the first worker."""
        ranks = leaders(self.sharding, run_rank_0_only_axes or ())
        return self.run_some_workers_single_data(method_name, ranks, *args, **kwargs)

    def run_some_workers_single_data(
        self, method_name: str, workers: Sequence[int], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call these workers with the same arguments."""
        if len(workers) > 1:
            args, kwargs = self._shared(args, kwargs)
        # Calls from two threads must reach all workers in the same order, because the workers may wait for each other during a call.
        with self._one_call:
            return [self._running.call(rank, method_name, (), args, kwargs) for rank in workers]

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: Sequence[str] | None = None,
        replicate_on_axes: Sequence[str] | None = None,
        output_is_replicated: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Split each argument's rows over ``in_sharded_axes`` and call the workers with their parts.

        Workers along ``replicate_on_axes`` get the same part. On any other axis, only the first worker is called.
        ``output_is_replicated`` names axes where only the first worker answers, or result fields that are taken only
        from the first worker. ``common_kwargs`` are passed unsplit to every worker.
        """
        gang, axes = self._running, tuple(in_sharded_axes or ())
        called = routes(
            self.sharding,
            in_sharded_axes=axes,
            replicate_on_axes=tuple(replicate_on_axes or ()),
            output_is_replicated=tuple(output_is_replicated or ()),
        )
        if both := sorted(set(kwargs) & set(common_kwargs or ())):
            raise ValueError(f"{both[0]} is an argument to split and also in common_kwargs; give it once")
        parts = split_arguments(args, kwargs, num_parts=self.sharding.num_shards(axes))
        readers = Counter(route.shard for route in called)
        parts = [self._shared(*part) if readers[index] > 1 else part for index, part in enumerate(parts)]
        _, shared = self._shared((), common_kwargs or {})
        parts = [(part, {**named, **shared}) for part, named in parts]
        return MultiWorkerFuture(
            futures=[gang.call(route.rank, method_name, route.drop, *parts[route.shard]) for route in called],
            called_workers=[route.rank for route in called],
            return_from_workers=[route.rank for route in called if route.drop is not None],
            replicated_fields=[name for name in output_is_replicated or () if name not in self.sharding.names],
        )

    def get_all_worker_results(self, futures: Any, *, timeout_s: float = 3600.0) -> list[Any]:
        """Wait for the result of one run method, or for those of a list of run methods. Raises as soon as one worker fails or dies.

        For one future, this returns the list of its results. For a list, it returns one entry per element: a result or a list of results.
        """
        entries = list(futures) if isinstance(futures, list | tuple) else [futures]
        flat = [future for entry in entries for future in _futures(entry)]
        results = iter(self._running.gather(flat, wait=Wait(timeout_s, first_s=30, every_s=30, stalls=False)))
        found: list[Any] = []
        for entry in entries:
            own = [next(results) for _ in _futures(entry)]
            if isinstance(entry, MultiWorkerFuture):
                own = entry.select(own, axes=self.sharding.names)
            found.append(own if isinstance(entry, MultiWorkerFuture | list | tuple) else own[0])
        return found[0] if isinstance(futures, MultiWorkerFuture) else found

    def wait_for_some(self, futures: Sequence[Any], *, timeout_s: float) -> list[Any]:
        """Wait at most ``timeout_s`` for the first future that is done or has failed; return all such futures."""
        return self._running.ready(futures, timeout_s=timeout_s)

    def tolerate(self, ranks: Collection[int]) -> None:
        """Let the group continue without these workers. If any other worker is lost, every wait fails, even waits for living workers."""
        self._running.tolerate(ranks)

    def replace(self, rank: int, *, timeout_s: float = START_DEADLINE_S) -> None:
        """Put a new process into the seat of a lost worker. Waits for the worker's node if that is lost too."""
        self.specs[rank] = self._running.replace(rank, timeout_s=timeout_s)
        self.workers[rank] = Worker(self._running, self._metadata(self.specs[rank]))

    def sightings(self, *, last: bool = False) -> Sightings:
        """Return what the workers are doing and what they have done since this was last called; empty after a shutdown."""
        gang = self._gang
        return Sightings() if gang is None else gang.sightings(last=last)

    def shutdown(self, *, timeout_s: float = STOP_DEADLINE_S) -> None:
        """Stop every worker on every node, and all processes that they started. Calling this again has no effect."""
        gang, self._gang = self._gang, None
        if gang is None:
            return
        try:
            gang.stop(timeout_s=timeout_s)
        finally:
            self.cluster.forget(self)

    def _shared(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments in a form that is cheap to send to several workers."""
        share = self._running.share
        return tuple(map(share, args)), {name: share(value) for name, value in kwargs.items()}

    @property
    def _running(self) -> Gang:
        if self._gang is None:
            raise ClusterError(f"{self.name_prefix} has been shut down; create a new group")
        return self._gang

    def _data_axis(self) -> str | None:
        """Return the axis that ``dp_size`` counts, if the layout has one."""
        return next((axis for axis in ("batch", "data_parallel") if axis in self.sharding.names), None)

    def _metadata(self, spec: WorkerSpec) -> WorkerMetadata:
        axis, nodes = self._data_axis(), [node.node_rank for node in self.cluster.nodes]
        return WorkerMetadata(
            name=f"{spec.role}-{spec.rank}",
            global_rank=spec.rank,
            local_rank=spec.local_rank,
            node_idx=nodes.index(spec.node.node_rank),
            node_rank=spec.node.node_rank,
            address=spec.node.address,
            bundle_indices=spec.slots,
            devices=spec.devices,
            dp_shard_idx=spec.rank if axis is None else self.sharding.get_worker_coords(spec.rank)[axis],
            pid=self._running.members[spec.rank].pid,
        )


def _futures(entry: Any) -> list[Any]:
    if isinstance(entry, MultiWorkerFuture):
        return list(entry.futures)
    return list(entry) if isinstance(entry, list | tuple) else [entry]


def _seats_per_node(cluster: VirtualCluster, workers_per_node: int | Sequence[int] | None) -> list[Seat]:
    nodes = cluster.nodes
    if workers_per_node is None:
        counts = [len(node.bundles) for node in nodes]
    elif isinstance(workers_per_node, int):
        counts = [workers_per_node] * len(nodes)
    else:
        counts = list(workers_per_node)
    if len(counts) != len(nodes) or min(counts) < 0:
        raise ValueError(f"workers_per_node={counts} needs one number for each of the cluster's {len(nodes)} nodes")
    seats = []
    for node, count in zip(nodes, counts, strict=True):
        slots = len(node.bundles)
        if count > slots and count % slots:
            raise ValueError(
                f"{count} workers on the {slots} slots of node {node.node_rank} do not share them evenly; use up to {slots}, "
                f"or a multiple of {slots}"
            )
        each = max(count // slots, 1)
        seats += [Seat(node_rank=node.node_rank, slots=(number // each,)) for number in range(count)]
    return seats


RayWorkerBuilder = WorkerBuilder
RayWorkerGroup = WorkerGroup
