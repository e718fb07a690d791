"""Chooses a transport for each receiver and opens its two ends.

``auto`` uses shared memory for receivers on the sender's host and broadcast for all others. On GPUs, it uses broadcast for all
receivers, because NCCL uses the links between the GPUs of a host. ``delta`` is like ``auto``, but sends only the changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from rollcall.base.errors import WeightUpdateError
from rollcall.config import WeightTransport
from rollcall.engine.weights.exchange import StreamReceiver, StreamSender
from rollcall.engine.weights.folder import FolderReceiver, FolderSender
from rollcall.engine.weights.layout import Parts
from rollcall.engine.weights.protocol import Carrying, Invitation

TIMEOUT_S = 300.0  # for one update


def carrying_for(transport: WeightTransport, *, on_host: bool, on_gpu: bool) -> Carrying:
    """Return how weights are sent to one receiver."""
    assert on_host or transport != "shared_memory", "the plan refuses this"
    if transport == "broadcast" or not on_host:
        return "broadcast"
    return "broadcast" if on_gpu and transport != "shared_memory" else "shared_memory"


def open_sender(
    transport: WeightTransport, *, receivers: Mapping[str, bool], name: str, host: str, on_gpu: bool, folder: Path
) -> FanOut:
    """Open a sender for these receivers. Each value says whether the receiver is on this host.

    ``host`` is the address at which they reach this host, or empty if they share only the folder.
    """
    if transport == "file":
        return FanOut([FolderSender(folder, name=name, receivers=tuple(receivers), timeout_s=TIMEOUT_S)])
    by_carrier: dict[Carrying, list[str]] = {}
    for receiver, on_host in receivers.items():
        carrying = carrying_for(transport, on_host=on_host, on_gpu=on_gpu)
        by_carrier.setdefault(carrying, []).append(receiver)
    return FanOut(
        [
            StreamSender(
                carrying=carrying,
                name=name,
                receivers=names,
                host=host,
                changes_only=transport == "delta",
                timeout_s=TIMEOUT_S,
            )
            for carrying, names in by_carrier.items()
        ]
    )


def open_receiver(
    invitation: Invitation, *, name: str, tensors: Mapping[str, Tensor]
) -> StreamReceiver | FolderReceiver:
    if invitation.carrying == "file":
        return FolderReceiver(invitation=invitation, name=name, tensors=tensors)
    return StreamReceiver(invitation, name=name, tensors=tensors)


class FanOut:
    """Several senders that act as one. They send at the same time."""

    def __init__(self, senders: Sequence[StreamSender] | Sequence[FolderSender]) -> None:
        self._senders: list[Any] = list(senders)  # only some kinds of sender accept Parts
        self.invitations: Mapping[str, Invitation] = {  # by receiver
            name: invitation for sender in senders for name, invitation in sender.invitations.items()
        }

    def send(self, tensors: Mapping[str, Tensor] | Parts, *, version: int) -> None:
        """Send these tensors to every receiver. Return when all receivers have applied and checked them."""
        if len(self._senders) == 1:
            self._senders[0].send(tensors, version=version)
            return
        with ThreadPoolExecutor(thread_name_prefix="weights") as pool:
            running = [pool.submit(sender.send, tensors, version=version) for sender in self._senders]
        failures = [error for future in running if (error := future.exception()) is not None]
        if not failures:
            return
        self.close()
        if len(failures) == 1 or not all(isinstance(error, WeightUpdateError) for error in failures):
            raise failures[0]
        kind = type(failures[0]) if len(set(map(type, failures))) == 1 else WeightUpdateError
        raise kind("; ".join(map(str, failures)))

    def close(self) -> None:
        """Disconnect the receivers. A second call does nothing."""
        for sender in self._senders:
            sender.close()
