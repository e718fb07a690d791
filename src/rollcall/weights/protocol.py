"""What every transport of weights is: a sender in the learner's process, a receiver in each process with a policy of its own.

An update has a version and checksums. A receiver refuses an update that is not newer than what it holds or is not the one that is
due (stale). It also refuses one whose tensors differ in name, shape or type, or whose checksums differ once it is applied
(torn). The sender then sends the whole update again; a second refusal is an error that names the receiver. The contract test in
tests/weights_contract.py holds each transport to it.

Who waits for whom: ``send`` waits for all receivers to be in ``receive`` and for their answers, ``receive`` for the
sender. Each wait has a deadline, and its error says who is missing. After an error the sender is closed; make a new one and invite again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from rollcall.errors import WeightUpdateError

Carrying = Literal["shared_memory", "broadcast", "file"]  # how bytes get across


class StaleUpdateError(WeightUpdateError):
    """An update that is not newer than what the receiver has, or not the one that is due."""


class TornUpdateError(WeightUpdateError):
    """An update that does not fit the receiver's tensors, or arrived damaged."""


class RefusedUpdateError(WeightUpdateError):
    """Refused twice, the second time in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What a receiver needs to find its sender."""

    sender: str  # its name in messages
    carrying: Carrying
    host: str
    port: int  # of the sender's TCP listener; 0: it listens on ``local``
    local: str  # name of its socket on this host; empty: on TCP
    secret: str = field(repr=False)  # tells invited receivers from strangers
    timeout_s: float  # of one update, from the first to the last word


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one update took."""

    version: int
    num_bytes: int  # of weights or changes, as each receiver got them
    is_full: bool  # False: only the changes
    num_attempts: int
    refusals: Mapping[str, str]  # receivers that refused the first attempt, and why


class WeightSender(Protocol):
    @property
    def invitations(self) -> Mapping[str, Invitation]:
        """By receiver."""
        ...

    def send(self, tensors: Mapping[str, Tensor], *, version: int) -> Sequence[Sent]:
        """Bring these tensors to every receiver; returns once all have them, checked."""
        ...

    def close(self) -> None:
        """Let the receivers go. Closing twice does nothing."""
        ...


class WeightReceiver(ABC):
    """Receives into tensors that stay where they are."""

    def __init__(self, *, invitation: Invitation, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self._invitation = invitation
        self._tensors = dict(tensors)
        self._held: int | None = None
        self._newest: int | None = None

    @property
    def version(self) -> int | None:
        """What the tensors hold; None before the first update and after one that broke off."""
        return self._held

    @abstractmethod
    def receive(self, *, version: int) -> None:
        """Wait for the update to this version and apply it to the tensors, which keep their addresses."""

    @abstractmethod
    def close(self) -> None: ...


# Why a receiver refuses, if it does, and what the sender does next.
Outcome = tuple[StaleUpdateError | TornUpdateError | None, str]


def refuse_stale(came: int, *, due: int, newest: int | None) -> None:
    """``newest``: what the receiver has had."""
    if came != due:
        raise StaleUpdateError(f"version {came} came, and version {due} is due")
    if newest is not None and due <= newest:
        raise StaleUpdateError(f"version {due} is not newer than the {newest} that is here")


def take_update(attempt: Callable[[], Outcome], *, close: Callable[[], None], name: str, version: int) -> None:
    """Attempts until the sender ends the update. Closes the lines if one breaks, and raises if the last was refused."""
    try:
        refusal, step = attempt()
        while step != "end":
            refusal, step = attempt()
    except BaseException:
        close()
        raise
    if refusal is not None:
        raise RefusedUpdateError(f"{name} refused version {version} twice: {refusal}") from refusal
