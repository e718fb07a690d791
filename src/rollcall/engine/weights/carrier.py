"""A carrier moves the bytes of an update once sender and receivers have agreed on it; a receiver's side of that agreement.

Both ends of a carrier get the same buckets: the sender's are read, the receivers' are written. Each side returns a checksum per
bucket, the receivers' of what lies in their own memory. Making an end opens it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rollcall.base.errors import WeightUpdateError
from rollcall.base.wait import Wait
from rollcall.engine.weights.layout import BucketSize
from rollcall.engine.weights.line import Line, call
from rollcall.engine.weights.protocol import (
    Invitation,
    RefusedUpdateError,
    StaleUpdateError,
    TornUpdateError,
    refuse_stale,
)

Bucket = Sequence[Tensor]  # flat uint8 tensors
Header = Mapping[str, Any]  # what a sender says of an update
Refusal = StaleUpdateError | TornUpdateError | None


class Outlet(Protocol):
    """The sender's end."""

    bucket_size: BucketSize

    def put(self, buckets: Iterable[Bucket], deadline: Wait) -> list[int]: ...

    def close(self) -> None:
        """Release what Python does not release by itself. Closing twice does nothing."""


class Inlet(Protocol):
    """A receiver's end."""

    bucket_size: BucketSize

    def each(self, buckets: Iterable[Bucket], deadline: Wait) -> Iterator[int]:
        """The checksum of each bucket once it has come. A few buckets are asked for ahead of that."""
        ...

    def close(self) -> None:
        """As of ``Outlet``."""


Hellos = Mapping[str, Mapping[str, Any]]  # what each receiver says of itself
OpenOutlet = Callable[[Mapping[str, Line], Hellos, torch.device, Wait], Outlet]  # the device of what is sent
OpenInlet = Callable[[Line, Wait], Inlet]
OpenInletFor = Callable[[Invitation], OpenInlet]


class LineReceiver(ABC):
    """A receiver's side of an exchange (``exchange.py``), with a line to each of its senders."""

    def __init__(
        self,
        invitations: Sequence[Invitation],
        *,
        name: str,
        device: torch.device,
        open_inlet: OpenInletFor,
    ) -> None:
        self.name = name
        self._invitations = invitations
        self._device = device
        self._open_inlet = open_inlet
        self._ends: list[tuple[Line, Inlet]] = []
        self._held: int | None = None
        self._newest: int | None = None

    @property
    def version(self) -> int | None:
        """The version held; None before the first update and after one that broke off."""
        return self._held

    def close(self) -> None:
        for line, inlet in self._ends:
            line.close()
            inlet.close()
        self._ends = []

    @abstractmethod
    def _fit(self, headers: Sequence[Header]) -> None:
        """Raises if the update cannot be applied here."""

    @abstractmethod
    def _apply(self, headers: Sequence[Header], deadline: Wait) -> list[list[int]]:
        """Receives and applies the update; returns the checksums of what each sender brought."""

    def _update(self, version: int) -> None:
        """Waits for the update to this version, in as many attempts as its senders make."""
        deadline = Wait(max(invitation.timeout_s for invitation in self._invitations))
        try:
            if not self._ends:
                self._join(deadline)
            refusal, step = self._attempt(version, deadline)
            while step != "end":
                refusal, step = self._attempt(version, deadline)
        except BaseException:
            self.close()
            raise
        if refusal is not None:
            raise RefusedUpdateError(f"{self.name} refused version {version} twice: {refusal}") from refusal
        self._held = self._newest = version

    def _join(self, deadline: Wait) -> None:
        for invitation in self._invitations:
            about = {"device": self._device.type, "gpus": visible_gpus()}
            line = call(invitation, name=self.name, deadline=deadline, about=about)
            try:
                self._ends.append((line, self._open_inlet(invitation)(line, deadline)))
            except BaseException:
                line.close()
                raise

    def _attempt(self, version: int, deadline: Wait) -> tuple[Refusal, str]:
        """The reason for a refusal, if any, and what the senders do next."""
        lines = [line for line, _ in self._ends]
        for line in lines:
            line.tell({"version": self._held}, deadline)
        headers = [line.hear(deadline) for line in lines]
        refusal: Refusal = None
        try:
            self._check(headers, version=version)
        except (StaleUpdateError, TornUpdateError) as error:
            refusal = error
        if (step := self._answer(refusal, deadline)) != "data":
            return refusal, step
        self._held = None  # from here on the tensors are a mix of two versions
        sums: list[list[int]] = []
        try:
            sums = self._apply(headers, deadline)
        except (StaleUpdateError, TornUpdateError) as error:
            refusal = error
        due = [line.hear(deadline)["sums"] for line in lines]
        if refusal is None and sums != due:
            wrong = [line.peer for line, own, its in zip(lines, sums, due, strict=True) if own != its]
            refusal = TornUpdateError(f"checksums differ after version {version} from {', '.join(wrong)} was applied")
        return refusal, self._answer(refusal, deadline)

    def _check(self, headers: Sequence[Header], *, version: int) -> None:
        for header in headers:
            refuse_stale(header["version"], due=version, newest=self._newest)
        self._fit(headers)

    def _answer(self, refusal: Exception | None, deadline: Wait) -> str:
        """Gives all senders the same answer, and returns what they do next."""
        for line, _ in self._ends:
            line.tell({"refused": None if refusal is None else str(refusal)}, deadline)
        steps = {line.peer: line.hear(deadline)["step"] for line, _ in self._ends}
        if len(set(steps.values())) > 1:  # a receiver that shares some of the senders with this one has refused
            found = ", ".join(f"{sender}: {step}" for sender, step in steps.items())
            raise WeightUpdateError(
                f"{self.name} cannot continue, since another receiver of weights refused them and its senders differ ({found}); start the "
                "run again, and look at the memory and the network of the receiver that refused if it comes back"
            )
        return steps.popitem()[1]


def visible_gpus() -> list[str]:
    """The accelerators that this process may open memory of."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
