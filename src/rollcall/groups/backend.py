"""What a worker group needs from a backend: Ray (``on_ray``), this process (``inprocess``), or nodes that share only a folder
(``folder``).

A virtual cluster reserves slots through a Backend and gets a Reservation. A worker group launches its processes on it and
gets a Crew, which it calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollcall.debug.here import POST_MORTEM
from rollcall.groups.dispatch import Drop
from rollcall.groups.sightings import Sightings
from rollcall.wait import Wait

STOP_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The slots that a virtual cluster asks for."""

    name: str
    slots_per_node: tuple[int, ...]
    use_gpus: bool
    num_colocated: int
    node_ranks: tuple[int, ...] | None  # the node of each entry; None: nodes with room, in rank order

    @property
    def resource(self) -> str:
        return "GPU" if self.use_gpus else "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeats:
    """The slots of one node that a virtual cluster holds, in slot order."""

    node_rank: int
    node_id: str
    address: str  # empty: it has none, and messages use its node_id
    bundles: tuple[int, ...]  # the placement group's bundle of each slot
    devices: tuple[str, ...] = ()  # the accelerator of each slot; empty: slots are CPUs
    visible_variable: str | None = None  # what names a process's accelerators, such as CUDA_VISIBLE_DEVICES


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
    share: float  # of its slot; the rest is for other workers on it. 0: it only sits there, and has no accelerator
    env: Mapping[str, str]  # the user's
    title: str = ""  # its name in messages; empty: its role and rank
    kind: str = ""  # its roles, or that of its group: a call of the same method takes others of its kind about as long

    @property
    def where(self) -> str:
        who = self.title or f"{self.role} rank {self.rank}"
        return f"{who} on node {self.node.node_rank} ({self.node.address or self.node.node_id})"

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.node.devices[slot] for slot in self.slots) if self.node.devices and self.share else ()

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
        if POST_MORTEM in os.environ:
            env[POST_MORTEM] = os.environ[POST_MORTEM]
        if self.node.visible_variable is not None:
            env[self.node.visible_variable] = ",".join(self.devices)
        return env


def whom(specs: Sequence[WorkerSpec]) -> dict[str, Any]:
    """The workers that a WorkerError names; it is about the first."""
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
    purposes: Mapping[str, str]  # what a call of a method is waited for, in words; {0} is its first argument


class Crew(Protocol):
    """The running workers of one group."""

    pids: Sequence[int]

    def start(self, *, timeout_s: float) -> None:
        """Make every worker."""
        ...

    def share(self, value: Any) -> Any:
        """The value in a form that is cheap to give to several workers."""
        ...

    def call(self, rank: int, method: str, drop: Drop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...

    def gather(self, futures: Sequence[Any], *, wait: Wait) -> list[Any]:
        """The results, in order; raises as soon as one call fails, a needed worker is lost, or the wait is over."""
        ...

    def ready(self, futures: Sequence[Any], *, timeout_s: float) -> list[Any]:
        """Those that have an answer or have failed; waits for the first, at most ``timeout_s``."""
        ...

    def is_alive(self, rank: int) -> bool: ...

    def tolerate(self, ranks: Collection[int]) -> None:
        """The group can go on without these workers. The loss of any other ends every wait, also waits for workers that live.

        A crew tolerates the loss of all its workers until this is called: a loss then ends the waits for the lost worker.
        """
        ...

    def replace(self, rank: int, *, timeout_s: float) -> WorkerSpec:
        """Put a new process into the seat of a lost worker; returns where it is now."""
        ...

    def sightings(self, *, last: bool = False) -> Sightings:
        """What its workers do and did since it was last asked. It asks nobody, unless this is the ``last`` time: then it waits a
        moment for what they did until now."""
        ...

    def stop(self, *, timeout_s: float) -> None:
        """End every process of the group, and every process that those have started."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Slots that are held."""

    nodes: Sequence[NodeSeats]  # by node rank; nodes without slots are left out
    crew: Callable[[Sequence[WorkerSpec], Recipe], Crew]
    release: Callable[[], None] = lambda: None


class Backend(Protocol):
    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation: ...
