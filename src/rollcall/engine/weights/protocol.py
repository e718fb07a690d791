"""The contract of every transport of weights: a sender in the learner's process, a receiver in each process that has its own copy of the policy.

An update has a version and checksums. A receiver refuses an update that is not newer than what it holds or is not the one that is
due (stale). It also refuses one whose tensors differ in name, shape or type, or whose checksums differ once it is applied
(torn). The sender then sends the whole update again; a second refusal is an error that names the receiver. The contract test in
tests/weights_contract.py holds each transport to it.

Who waits for whom: ``send`` waits for all receivers to be in ``receive`` and for their answers, ``receive`` for the
sender. Each wait has a deadline, and its error says who is missing. After an error the sender is closed; make a new one and invite again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollcall.base.errors import WeightUpdateError

Carrying = Literal["shared_memory", "broadcast", "file"]  # how bytes get across


class RefusedUpdateError(WeightUpdateError):
    """An update that is stale (not newer than what the receiver has, or not the one that is due) or torn (it does not fit the receiver's
    tensors, or arrived damaged)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Tells a receiver where to find its sender."""

    sender: str  # its name in messages
    carrying: Carrying
    host: str
    port: int  # of the sender's TCP listener; 0: it listens on ``local``
    local: str  # name of its socket on this host; empty: on TCP
    secret: str = field(repr=False)  # tells invited receivers from strangers
    timeout_s: float  # of one update, from the first to the last word


def refuse_stale(came: int, *, due: int, newest: int | None) -> None:
    """``newest``: what the receiver has had."""
    if came != due:
        raise RefusedUpdateError(f"got version {came}, but version {due} is due")
    if newest is not None and due <= newest:
        raise RefusedUpdateError(f"version {due} is not newer than the {newest} that is here")
