"""Performs one update between a sender and its receivers, in the same way for every carrier.

receiver                          sender
"I have version 3"           ->
                             <-   "this is version 4": its layout, and the change counts if it is not sent in full
"go" or why it is refused    ->
                             <-   "data" if all say go, else "again" or "end"
                  (the carrier moves the bytes)
                             <-   checksums
"ok" or why it is refused    ->
                             <-   "again" (in full, from the top) or "end"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollcall.base.errors import WeightUpdateError
from rollcall.base.wait import Wait
from rollcall.engine.weights import delta, shared_memory
from rollcall.engine.weights.broadcast import BroadcastInlet, BroadcastOutlet
from rollcall.engine.weights.layout import Layout, Parts, Views, cut, view
from rollcall.engine.weights.line import Desk, Line, call, hear_all
from rollcall.engine.weights.protocol import Carrying, Inlet, Invitation, Outlet, RefusedUpdateError, refuse_stale
from rollcall.model.checksum import checksum

Header = Mapping[str, Any]  # a sender's description of an update


@dataclass(slots=True)
class _Base:
    """The weights that every receiver currently has."""

    version: int
    layout: Layout
    flat: list[Tensor]  # each tensor's bytes


class StreamSender:
    """Sends over one carrier. With ``changes_only``, it sends only the changes, if every receiver has the last version that was sent."""

    def __init__(
        self,
        *,
        carrying: Carrying,
        name: str,
        receivers: Sequence[str],
        host: str,
        changes_only: bool,
        timeout_s: float,
    ) -> None:
        self._carrying = carrying
        self._outlet: Outlet | None = None
        self._timeout_s = timeout_s
        self._changes_only = changes_only
        self._desk = Desk(sender=name, receivers=receivers, carrying=carrying, host=host, timeout_s=timeout_s)
        self.invitations = dict.fromkeys(receivers, self._desk.invitation)
        self._lines: dict[str, Line] = {}
        self._base: _Base | None = None
        self._is_closed = False

    def send(self, tensors: Mapping[str, Tensor] | Parts, *, version: int) -> None:
        if self._is_closed:
            raise WeightUpdateError("this weight sender is closed; create a new one and invite its receivers")
        deadline = Wait(self._timeout_s)
        try:
            views = tensors if isinstance(tensors, Parts) else view(tensors)
            if self._outlet is None:
                self._lines, hellos = self._desk.welcome(deadline)
                if self._carrying == "broadcast":
                    self._outlet = BroadcastOutlet(self._lines, hellos, views.device, deadline)
                else:
                    self._outlet = shared_memory.open_outlet(
                        self._lines, hellos, views.device, deadline, through_host=isinstance(views, Parts)
                    )
            self._exchange(views, version=version, deadline=deadline)
        except BaseException:  # receivers must not wait for a sender that has given up
            self.close()
            raise

    def close(self) -> None:
        self._is_closed = True
        self._desk.close()
        for line in self._lines.values():
            line.close()
        if self._outlet is not None:
            self._outlet.close()
        self._outlet = self._base = None

    def _exchange(self, views: Views | Parts, *, version: int, deadline: Wait) -> None:
        refused: dict[str, str] = {}
        for in_full in (False, True):
            refused = self._attempt(views, version=version, deadline=deadline, in_full=in_full)
            self._tell({"step": "again" if refused and not in_full else "end"}, deadline)
            if not refused:
                return
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise RefusedUpdateError(
            f"version {version} of the weights was refused, and refused again when sent in full: {why}"
        )

    def _attempt(self, views: Views | Parts, *, version: int, deadline: Wait, in_full: bool) -> dict[str, str]:
        """Make one attempt. Return the receivers that refused, each with its reason."""
        assert self._outlet is not None
        ready = hear_all(self._lines, deadline, waiting_for="first message")
        base = self._base
        changes: delta.Delta | None = None
        if base is not None and isinstance(views, Views) and not in_full:
            all_hold_it = all(word["version"] == base.version for word in ready.values())
            if all_hold_it and base.layout == views.layout:
                changes = delta.encode(views.layout, new=views.flat, base=base.flat)
        self._tell(
            {
                "version": version,
                "layout": views.layout.text,
                "counts": None if changes is None else changes.counts,
                "parts": views.about if isinstance(views, Parts) else None,
            },
            deadline,
        )
        if refused := self._refusals(deadline, waiting_for="go-ahead"):
            return refused
        self._tell({"step": "data"}, deadline)
        size = self._outlet.bucket_size
        buckets = views.buckets(size)
        sums = self._outlet.put(buckets if changes is None else cut(changes.payload, size), deadline)
        if changes is not None:
            sums = [checksum(bucket) for bucket in buckets]
        self._tell({"sums": sums}, deadline)
        refused = self._refusals(deadline, waiting_for="confirmation")
        if refused or not self._changes_only or isinstance(views, Parts):
            self._base = None
        elif changes is None or base is None:
            self._base = _Base(version, views.layout, [flat.clone() for flat in views.flat])
        else:
            delta.apply(views.layout, changes, flat=base.flat)
            base.version = version
        return refused

    def _refusals(self, deadline: Wait, *, waiting_for: str) -> dict[str, str]:
        answers = hear_all(self._lines, deadline, waiting_for=waiting_for)
        return {name: answer["refused"] for name, answer in answers.items() if answer["refused"] is not None}

    def _tell(self, message: Mapping[str, Any], deadline: Wait) -> None:
        for line in self._lines.values():
            line.tell(message, deadline)


class LineReceiver(ABC):
    """The receiving side, with a line to each sender."""

    def __init__(self, invitations: Sequence[Invitation], *, name: str, device: torch.device) -> None:
        self.name = name
        self._invitations = invitations
        self._device = device
        self._ends: list[tuple[Line, Inlet]] = []
        self._held: int | None = None  # None before the first update and after an interrupted update
        self._newest: int | None = None

    def close(self) -> None:
        for line, inlet in self._ends:
            line.close()
            inlet.close()
        self._ends = []

    @abstractmethod
    def _fit(self, headers: Sequence[Header]) -> None:
        """Raise if the update cannot be applied to this receiver."""

    @abstractmethod
    def _apply(self, headers: Sequence[Header], deadline: Wait) -> list[list[int]]:
        """Receive and apply the update. Return the checksums of each sender's buckets."""

    def _update(self, version: int) -> None:
        """Wait for the update to this version, and take part in as many attempts as the senders make."""
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
            about = {"device": self._device.type, "gpus": shared_memory.visible_gpus()}
            line = call(invitation, name=self.name, deadline=deadline, about=about)
            open_inlet = shared_memory.open_inlet if invitation.carrying == "shared_memory" else BroadcastInlet
            try:
                self._ends.append((line, open_inlet(line, deadline)))
            except BaseException:
                line.close()
                raise

    def _attempt(self, version: int, deadline: Wait) -> tuple[RefusedUpdateError | None, str]:
        """Return the reason for a refusal, if any, and the senders' next step."""
        lines = [line for line, _ in self._ends]
        for line in lines:
            line.tell({"version": self._held}, deadline)
        headers = [line.hear(deadline) for line in lines]
        refusal: RefusedUpdateError | None = None
        try:
            for header in headers:
                refuse_stale(header["version"], due=version, newest=self._newest)
            self._fit(headers)
        except RefusedUpdateError as error:
            refusal = error
        if (step := self._answer(refusal, deadline)) != "data":
            return refusal, step
        self._held = None  # from now on, the tensors are a mix of two versions
        sums: list[list[int]] = []
        try:
            sums = self._apply(headers, deadline)
        except RefusedUpdateError as error:
            refusal = error
        due = [line.hear(deadline)["sums"] for line in lines]
        if refusal is None and sums != due:
            wrong = [line.peer for line, own, its in zip(lines, sums, due, strict=True) if own != its]
            refusal = RefusedUpdateError(
                f"checksums differ after version {version} from {', '.join(wrong)} was applied"
            )
        return refusal, self._answer(refusal, deadline)

    def _answer(self, refusal: Exception | None, deadline: Wait) -> str:
        """Give all senders the same answer. Return their next step."""
        for line, _ in self._ends:
            line.tell({"refused": None if refusal is None else str(refusal)}, deadline)
        steps = {line.peer: line.hear(deadline)["step"] for line, _ in self._ends}
        if len(set(steps.values())) > 1:  # another receiver, which shares only some of the senders, has refused
            found = ", ".join(f"{sender}: {step}" for sender, step in steps.items())
            raise WeightUpdateError(
                f"{self.name} cannot continue: another receiver refused the weights, and the senders disagree about the next step "
                f"({found}); run the same command again"
            )
        return steps.popitem()[1]


class StreamReceiver(LineReceiver):
    """Receives over one carrier, into tensors that stay in place."""

    def __init__(self, invitation: Invitation, *, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        super().__init__([invitation], name=name, device=next(iter(self._tensors.values())).device)

    def receive(self, *, version: int) -> None:
        self._update(version)

    def _fit(self, headers: Sequence[Header]) -> None:
        (header,) = headers
        Layout.parse(header["layout"]).check(self._tensors)

    def _apply(self, headers: Sequence[Header], deadline: Wait) -> list[list[int]]:
        (header,), ((_, inlet),) = headers, self._ends
        views = Views(self._tensors, Layout.parse(header["layout"]))
        buckets = views.buckets(inlet.bucket_size)
        counts = header["counts"]
        if counts is None:
            sums = list(inlet.each(buckets, deadline))
            views.write()
            if not views.has_copies:
                return [sums]
        else:
            payload = torch.empty(delta.total_bytes(views.layout, counts), dtype=torch.uint8, device=views.device)
            list(inlet.each(cut(payload, inlet.bucket_size), deadline))
            views.read()
            delta.apply(views.layout, delta.Delta(counts=counts, payload=payload), flat=views.flat)
            views.write()
        views.read()  # so that the checksums cover the tensors themselves, not the data that was copied into them
        return [[checksum(bucket) for bucket in buckets]]
