"""The interface of the backends of worker groups: Ray (``process/ray``), this process (``inprocess``), and nodes that share only a
folder (``folder``).

A virtual cluster reserves slots through a Backend and gets a Reservation. Its Carrier delivers a Gang's calls to the workers.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollcall.base.wait import Wait
from rollcall.process.debug.here import POST_MORTEM
from rollcall.process.groups.sightings import Lookout


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The slots that a virtual cluster requests."""

    name: str
    slots_per_node: tuple[int, ...]
    use_gpus: bool
    node_ranks: tuple[int, ...] | None  # the node of each entry; None: nodes with free slots, in rank order

    @property
    def resource(self) -> str:
        return "GPU" if self.use_gpus else "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeats:
    """A virtual cluster's slots on one node, in slot order."""

    node_rank: int
    node_id: str
    address: str  # empty: the node has none, and messages use its node_id
    bundles: tuple[int, ...]  # each slot's bundle in the placement group
    devices: tuple[str, ...] = ()  # each slot's accelerator; empty: slots are CPUs
    visible_variable: str | None = None  # selects a process's accelerators, such as CUDA_VISIBLE_DEVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The node and the slots of one process."""

    node_rank: int
    slots: tuple[int, ...]  # slot numbers on its node, within the virtual cluster


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
    share: float  # its part of the slot; other workers use the rest. 0: it uses no part of the slot, and no accelerator
    env: Mapping[str, str]  # the user's variables
    title: str = ""  # its name in messages; empty: use role and rank
    kind: str = ""  # its roles, or its group's name; a method takes about the same time in all workers of a kind

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
    """Return the keyword arguments that tell a WorkerError which workers failed; the error is about the first of them."""
    return dict(
        role=specs[0].role,
        ranks=list(dict.fromkeys(spec.rank for spec in specs)),
        node_ranks=sorted({spec.node.node_rank for spec in specs}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A worker's class and its arguments."""

    target: str | type  # "module.Class", or the class
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    purposes: Mapping[str, str]  # by method: completes the text "waiting for WORKER ..."; {0} is the first argument


@dataclass(eq=False, slots=True)
class Member:
    """The process in one seat of a gang. A process that replaces it is a different member."""

    spec: WorkerSpec
    link: Any = None  # the carrier's own object for reaching it
    pid: int = 0
    death: str = ""  # why it was lost; empty: it was not lost


@dataclass(eq=False, slots=True)
class Call:
    """A call to a member, and its outcome once the carrier has received it."""

    member: Member
    purpose: str = ""  # completes the text "waiting for WORKER ..."
    link: Any = None  # how its carrier finds the answer
    is_done: bool = False
    value: Any = None
    error: Exception | None = None  # RemoteFailureError: the worker's exception; others: why there is no answer

    def finish(self, value: Any = None, *, error: Exception | None = None) -> None:
        self.value, self.error, self.is_done = value, error, True


class Carrier(ABC):
    """Starts a gang's processes and delivers calls to them. A call names a method of ``host.Host``."""

    peer_s = 0.0  # a peer's death is known within this time after a worker reports it; 0: no peers
    changed = threading.Condition()  # one that finishes calls in a different thread has its own, and notifies it
    lookout: Lookout  # the gang's
    lose: Callable[[Mapping[Member, str]], None]  # the gang's; any thread may call it

    @abstractmethod
    def launch(self, spec: WorkerSpec, *, lost: Member | None, wait: Wait) -> Member:
        """Start a process in this seat, in place of the lost member. It may still be starting when this returns."""

    def watch(self, member: Member) -> None:  # noqa: B027 - only Ray's carrier watches by itself
        """From now on, tell the gang if the member is lost. If it runs on a different node than before, update its spec."""

    def start_env(self, spec: WorkerSpec) -> Mapping[str, str]:
        """Return the worker's environment variables, without those that the group sets."""
        return spec.env

    def share(self, value: Any) -> Any:
        """Return the value in a form that is cheap to send to several workers."""
        return value

    @abstractmethod
    def send(self, call: Call, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None: ...

    def settle(self, calls: Sequence[Call], *, timeout_s: float, through_failures: bool = False) -> None:
        """Collect answers; return when all have arrived, when one of them is a failure, or on timeout."""

        def is_enough() -> bool:
            has_failed = any(call.error is not None or call.member.death for call in calls)
            return (has_failed and not through_failures) or all(call.is_done for call in calls)

        with self.changed:
            self.changed.wait_for(is_enough, timeout=timeout_s)

    def answered(self, calls: Sequence[Call], *, timeout_s: float) -> Collection[Call]:
        """Wait for the first answer or failure; return all calls that have one."""
        with self.changed:
            self.changed.wait_for(lambda: any(call.is_done for call in calls), timeout=timeout_s)
            return [call for call in calls if call.is_done]

    @abstractmethod
    def is_alive(self, member: Member) -> bool: ...

    def look(self, members: Sequence[Member], *, last: bool) -> Collection[int]:
        """Tell the lookout what the members are doing, and return the ranks on nodes that do not answer. This queries the nodes only if
        ``last`` is set; it then waits a moment for their latest calls."""
        return ()

    @abstractmethod
    def stop(self, members: Sequence[Member], *, timeout_s: float) -> None:
        """Stop every process of the gang, and every process that they started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Reserved slots."""

    nodes: Sequence[NodeSeats]  # by node rank; nodes without slots are left out
    carrier: Callable[[Recipe], Carrier]  # creates the carrier for one worker group's gang
    release: Callable[[], None] = lambda: None


class Backend(Protocol):
    def reserve(self, ask: Ask, *, timeout_s: float) -> Reservation: ...
