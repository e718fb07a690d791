"""One update between a sender and its receivers, the same over every carrier.

receiver                          sender
"I hold version 3"           ->
                             <-   "this is version 4": its layout, and the base of its changes if it is not whole
"go" or why it is refused    ->
                             <-   "data" if all say go, else "again" or "end"
                  (the carrier moves the bytes)
                             <-   checksums
"ok" or why it is refused    ->
                             <-   "again" (whole, from the top) or "end"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollcall.base.errors import WeightUpdateError
from rollcall.base.wait import Wait
from rollcall.engine.weights import delta
from rollcall.engine.weights.carrier import Header, LineReceiver, OpenInletFor, OpenOutlet, Outlet
from rollcall.engine.weights.layout import Views, cut, fit, view
from rollcall.engine.weights.line import Desk, Line, hear_all
from rollcall.engine.weights.parts import Parts
from rollcall.engine.weights.protocol import Carrying, Invitation, RefusedUpdateError, Sent, StaleUpdateError
from rollcall.model.checksum import checksum

TIMEOUT_S = 300.0
MOST_ATTEMPTS = 2


class StreamSender:
    """Sends over one carrier; ``changes_only`` where every receiver holds what was sent last."""

    def __init__(
        self,
        open_outlet: OpenOutlet,
        *,
        carrying: Carrying,
        name: str,
        receivers: Sequence[str],
        host: str,
        changes_only: bool,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._open_outlet = open_outlet
        self._outlet: Outlet | None = None
        self._timeout_s = timeout_s
        self._changes_only = changes_only
        self._desk = Desk(sender=name, receivers=receivers, carrying=carrying, host=host, timeout_s=timeout_s)
        self._receivers = tuple(receivers)
        self._lines: dict[str, Line] = {}
        self._views: Views | None = None
        self._base: list[Tensor] | None = None  # the bytes of the version that was sent last
        self._base_version: int | None = None
        self._is_closed = False

    @property
    def invitations(self) -> Mapping[str, Invitation]:
        return dict.fromkeys(self._receivers, self._desk.invitation)

    def send(self, tensors: Mapping[str, Tensor] | Parts, *, version: int) -> Sequence[Sent]:
        if self._is_closed:
            raise WeightUpdateError("this sender of weights is closed; make a new one and invite its receivers")
        deadline = Wait(self._timeout_s)
        try:
            views = tensors if isinstance(tensors, Parts) else self._viewed(tensors)
            if self._outlet is None:
                self._lines, hellos = self._desk.welcome(deadline)
                self._outlet = self._open_outlet(self._lines, hellos, views.device, deadline)
            sent = self._exchange(views, version=version, deadline=deadline)
        except BaseException:  # receivers must not wait for a sender that has given up
            self.close()
            raise
        return [sent]

    def _viewed(self, tensors: Mapping[str, Tensor]) -> Views:
        views = view(tensors, kept=self._views)
        if self._views is not None and views.layout != self._views.layout:
            self._base = self._base_version = None
        self._views = views
        return views

    def close(self) -> None:
        self._is_closed = True
        self._desk.close()
        for line in self._lines.values():
            line.close()
        if self._outlet is not None:
            self._outlet.close()
        self._outlet = self._views = self._base = None

    def _exchange(self, views: Views | Parts, *, version: int, deadline: Wait) -> Sent:
        first: dict[str, str] = {}
        for attempt in range(1, MOST_ATTEMPTS + 1):
            refused, num_bytes, is_full = self._attempt(
                views, version=version, deadline=deadline, in_full=attempt > 1, is_last=attempt == MOST_ATTEMPTS
            )
            if not refused:
                self._tell({"step": "end"}, deadline)
                return Sent(version=version, num_bytes=num_bytes, is_full=is_full, num_attempts=attempt, refusals=first)
            first = first or refused
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise RefusedUpdateError(f"weights of version {version} were refused, and again when sent in full: {why}")

    def _attempt(
        self, views: Views | Parts, *, version: int, deadline: Wait, in_full: bool, is_last: bool
    ) -> tuple[dict[str, str], int, bool]:
        """Who refused and why; the bytes that went out; whether they were all of the weights."""
        assert self._outlet is not None
        after_refusal = {"step": "end" if is_last else "again"}
        ready = hear_all(self._lines, deadline, waiting_for="readiness")
        changes = None
        if isinstance(views, Views) and not in_full:
            changes = self._changes(views, held=[word["version"] for word in ready.values()])
        self._tell(
            {
                "version": version,
                "layout": views.layout.text,
                "counts": None if changes is None else changes.counts,
                "base": None if changes is None else self._base_version,
                "parts": views.about if isinstance(views, Parts) else None,
            },
            deadline,
        )
        refused = self._refusals(deadline, waiting_for="consent")
        if refused:
            self._tell(after_refusal, deadline)
            return refused, 0, changes is None
        self._tell({"step": "data"}, deadline)
        size = self._outlet.bucket_size
        buckets = views.buckets(size)
        moved = buckets if changes is None else cut(changes.payload, size)
        sums = self._outlet.put(moved, deadline)
        if changes is not None:
            sums = [checksum(bucket) for bucket in buckets]
        self._tell({"sums": sums}, deadline)
        refused = self._refusals(deadline, waiting_for="confirmation")
        if refused:
            self._base_version = None
            self._tell(after_refusal, deadline)
        elif isinstance(views, Views):
            self._keep(views, version=version, changes=changes)
        return refused, views.layout.num_bytes if changes is None else len(changes.payload), changes is None

    def _changes(self, views: Views, *, held: Sequence[int | None]) -> delta.Delta | None:
        if self._base is None or self._base_version is None or any(version != self._base_version for version in held):
            return None
        return delta.encode(views.layout, new=views.flat, base=self._base)

    def _keep(self, views: Views, *, version: int, changes: delta.Delta | None) -> None:
        if not self._changes_only:
            return
        if self._base is None:
            self._base = [torch.empty_like(flat) for flat in views.flat]
        if changes is None:
            for mine, flat in zip(self._base, views.flat, strict=True):
                mine.copy_(flat)
        else:
            delta.apply(views.layout, changes, flat=self._base)
        self._base_version = version

    def _refusals(self, deadline: Wait, *, waiting_for: str) -> dict[str, str]:
        answers = hear_all(self._lines, deadline, waiting_for=waiting_for)
        return {name: answer["refused"] for name, answer in answers.items() if answer["refused"] is not None}

    def _tell(self, message: Mapping[str, Any], deadline: Wait) -> None:
        for line in self._lines.values():
            line.tell(message, deadline)


class StreamReceiver(LineReceiver):
    """Receives over one carrier, into tensors that stay where they are."""

    def __init__(
        self, invitation: Invitation, *, name: str, tensors: Mapping[str, Tensor], open_inlet: OpenInletFor
    ) -> None:
        self._tensors = dict(tensors)
        device = next(iter(self._tensors.values())).device
        super().__init__([invitation], name=name, device=device, open_inlet=open_inlet)
        self._views: Views | None = None

    def receive(self, *, version: int) -> None:
        self._update(version)

    def _fit(self, headers: Sequence[Header]) -> None:
        (header,) = headers
        if header["base"] is not None and header["base"] != self._held:
            raise StaleUpdateError(f"the changes are to version {header['base']}, and this receiver has {self._held}")
        self._views = fit(header["layout"], self._tensors, kept=self._views)

    def _apply(self, headers: Sequence[Header], deadline: Wait) -> list[list[int]]:
        (header,), ((_, inlet),), views = headers, self._ends, self._views
        assert views is not None
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
        views.read()  # of the tensors themselves, not of what was copied into them
        return [[checksum(bucket) for bucket in buckets]]
