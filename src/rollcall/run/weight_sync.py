"""Sends new weights to the processes of a cluster: who sends, who receives, and when they connect.

The first actor process sends. If only vLLM's process has the weights, each actor process sends its own part instead
(``engine/weights/parts.py``). Every process with a rollout or inference role but no actor receives. A process with an actor reads the
actor's parameters, so it only records the version. The controller calls all of these processes at once (``WeightSync``). The data goes
directly from process to process (``WorkerWeights``), over the transport that ``rollout.weights`` names. When a process is new, or is back
after a failure, the senders invite all receivers again, and the next update sends all weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rollcall.base.errors import MissingPeerError, WorkerTimeoutError
from rollcall.config import WeightTransport
from rollcall.engine.weights.layout import Parts
from rollcall.engine.weights.line import decline
from rollcall.engine.weights.protocol import Invitation
from rollcall.engine.weights.transports import FanOut, open_sender
from rollcall.plan.placement import HOLDERS, Role

if TYPE_CHECKING:  # team.py imports modules for clusters, which a run in one process does not need
    from rollcall.run.team import Team


class WeightSync:
    """The controller's side of the weight sync."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._invited: dict[int, str] | None = {}  # receiver names by process; None if all must be invited again
        self._invitations: Mapping[str, list[Invitation]] = {}  # by receiver: an invitation from each sender
        self._broken_off: list[Any] = []

    def push(self, version: int, *, without: Collection[int] = (), has_new: bool = False) -> None:
        """Send this version to every process with a policy, except those in ``without``. Returns when all have it. With ``has_new``, one
        of the receivers is a new process, so all are invited again."""
        group, actors = self._team.group, self._team.members[Role.ACTOR]
        names = {worker: name for worker, name in self._names().items() if worker not in without}
        apart = {worker: name for worker, name in names.items() if worker not in actors}
        if has_new or apart != self._invited:
            self._invite(apart)
        # Call all actor processes, because each may have a part of what the first one sends.
        futures = group.run_some_workers_single_data("send_weights", actors, version)
        for worker, name in apart.items():
            arguments = (version, name, self._invitations[name])
            futures.append(group.run_single_worker_single_data("use_weights", worker, *arguments))
        try:
            group.get_all_worker_results(futures)
        except BaseException:
            self._invited = None  # the remaining processes must connect again
            self._broken_off = futures
            raise

    def settle(self, *, lost: Collection[int], timeout_s: float) -> None:
        """After a failed push, wait until the actor's processes have stopped sending. Raises if one takes longer than ``timeout_s``."""
        deadline, actors = time.monotonic() + timeout_s, self._team.members[Role.ACTOR]
        for name in [name for worker, name in self._names().items() if worker in lost and name in self._invitations]:
            # Errors are expected: a sender that was connected to the lost receiver has stopped listening already, and other senders may
            # listen only on their own host.
            for invitation in self._invitations[name]:
                with suppress(MissingPeerError):
                    decline(invitation, name=name, timeout_s=2.0)
        for worker, future in zip(actors, self._broken_off, strict=False):
            left_s = max(deadline - time.monotonic(), 0.1)
            if not self._team.group.wait_for_some([future], timeout_s=left_s):
                raise WorkerTimeoutError(
                    f"actor rank {actors.index(worker)} is still sending weights {timeout_s:g} s after a receiver was lost",
                    role="actor",
                    ranks=[worker],
                    node_ranks=[],
                )

    def _invite(self, apart: dict[int, str]) -> None:
        self._invited = None  # if this fails, some actors have new invitations
        group, actors = self._team.group, self._team.members[Role.ACTOR]
        metadata = group.worker_metadata
        futures = []
        for actor in actors:
            node = metadata[actor]["node_rank"]
            on_node = {name: metadata[worker]["node_rank"] == node for worker, name in apart.items()}
            futures.append(group.run_single_worker_single_data("invite", actor, on_node, metadata[actor]["address"]))
        from_each = group.get_all_worker_results(futures)  # a process that does not send returns nothing
        self._invitations = {name: [one[name] for one in from_each if name in one] for name in apart.values()}
        self._invited = apart

    def _names(self) -> dict[int, str]:
        """Return the processes that have a policy, with names for error messages."""
        metadata = self._team.group.worker_metadata
        names: dict[int, str] = {}
        for role in HOLDERS:
            for rank, worker in enumerate(self._team.members.get(role, [])):
                names.setdefault(worker, f"{role.value} rank {rank} on node {metadata[worker]['node_rank']}")
        return dict(sorted(names.items()))


class WorkerWeights:
    """A process's side of the weight sync, as sender or as receiver."""

    def __init__(self, transport: WeightTransport, *, folder: Path, on_gpu: bool) -> None:
        self._transport: WeightTransport = transport
        self._folder = folder
        self._on_gpu = on_gpu
        self.sender: FanOut | None = None
        self._receiver: Any = None  # receives either parts or full tensors
        self._invitations: Sequence[Invitation] = ()  # the invitations that the receiver was opened for

    def invite(self, receivers: Mapping[str, bool], host: str, *, name: str) -> Mapping[str, Invitation]:
        """Open a sender to these receivers. Each value says whether the receiver is on this host; ``name`` is this sender's name in
        messages."""
        if self.sender is not None:
            self.sender.close()
            self.sender = None
        if not receivers:
            return {}
        self.sender = open_sender(
            self._transport, receivers=receivers, name=name, host=host, on_gpu=self._on_gpu, folder=self._folder
        )
        return self.sender.invitations

    def send(self, tensors: Iterable[tuple[str, Tensor]] | Parts, *, version: int) -> None:
        """Send to all invited receivers. A process without receivers only takes part in gathering the tensors."""
        if self.sender is not None:
            self.sender.send(tensors if isinstance(tensors, Parts) else dict(tensors), version=version)
        elif not isinstance(tensors, Parts):
            for _ in tensors:
                continue

    def receiver(self, invitations: Sequence[Invitation], make: Callable[[], Any]) -> Any:
        """Return the receiver for these invitations, made by ``make`` if the invitations are new."""
        if invitations != self._invitations:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver, self._invitations = make(), invitations
        return self._receiver
