"""What a worker group asks of the place its workers run in: Ray (``on_ray``), this process (``inprocess``) or nodes that
share a folder alone (``folder``).

A virtual cluster reserves slots through a Backend and gets a Reservation; a worker group launches its processes on it and
gets a Crew, which it calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollcall.groups.dispatch import Drop

# Set for every worker by its group; a user's env_vars may not name them.
GROUP_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The slots that a virtual cluster wants."""

    name: str
    slots_per_node: tuple[int, ...]
    use_gpus: bool
    num_colocated: int
    node_ranks: tuple[int, ...] | None  # of each entry; None: nodes with room, in rank order

    @property
    def resource(self) -> str:
        return "GPU" if self.use_gpus else "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeats:
    """The slots of one node that a virtual cluster holds, in slot order."""

    node_rank: int
    node_id: str
    address: str  # empty: it has none, and is called by its node_id
    bundles: tuple[int, ...]  # the placement group's bundle of each slot
    devices: tuple[str, ...]  # the accelerator of each slot; empty: slots are CPUs
    visible_variable: str | None  # what names a process's accelerators here, such as CUDA_VISIBLE_DEVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one process sits."""

    node_rank: int
    slots: tuple[int, ...]  # on its node, as the virtual cluster counts them


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One process of a group."""

    role: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: NodeSeats
    slots: tuple[int, ...]
    share: float  # of its slot; the rest is for workers that live there as well
    env: Mapping[str, str]  # as the user wants it
    title: str = ""  # what messages call it, where that is not its role and rank

    @property
    def where(self) -> str:
        who = self.title or f"{self.role} rank {self.rank}"
        return f"{who} on node {self.node.node_rank} ({self.node.address or self.node.node_id})"

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.node.devices[slot] for slot in self.slots) if self.node.devices else ()

    def group_env(self, *, master_address: str, master_port: int) -> dict[str, str]:
        env = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node.node_rank),
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
        }
        if self.node.visible_variable is not None:
            env[self.node.visible_variable] = ",".join(self.devices)
        return env


def whom(specs: Sequence[WorkerSpec]) -> dict[str, Any]:
    """Of whom a WorkerError tells; the first is the one that it is about."""
    return dict(
        role=specs[0].role,
        ranks=list(dict.fromkeys(spec.rank for spec in specs)),
        node_ranks=sorted({spec.node.node_rank for spec in specs}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a worker is made of."""

    target: str | type  # "module.Class", or the class
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Crew(Protocol):
    """The running workers of one group."""

    pids: Sequence[int]
    master_address: str
    master_port: int

    def share(self, value: Any) -> Any:
        """The value in a form that is cheap to give to several workers."""
        ...

    def call(self, rank: int, method: str, drop: Drop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...

    def gather(self, futures: Sequence[Any], *, timeout_s: float) -> list[Any]: ...

    def ready(self, futures: Sequence[Any], *, timeout_s: float) -> list[Any]:
        """Those that have an answer, or a failure to tell; waits for the first, at most ``timeout_s``."""
        ...

    def is_alive(self, rank: int) -> bool: ...

    def tolerate(self, ranks: Collection[int]) -> None:
        """The loss of any other worker ends every wait, also for those that live; before this is called, of none."""
        ...

    def replace(self, rank: int, *, timeout_s: float) -> WorkerSpec:
        """Put another process into the seat of a worker that is lost, and say where it is now."""
        ...

    def stop(self, *, timeout_s: float) -> None:
        """End every process of the group, and the processes that those have started."""
        ...


class Reservation(Protocol):
    nodes: Sequence[NodeSeats]  # by node rank; nodes without slots are left out

    def launch(self, specs: Sequence[WorkerSpec], recipe: Recipe, *, timeout_s: float) -> Crew: ...

    def release(self) -> None: ...


class Backend(Protocol):
    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation: ...
