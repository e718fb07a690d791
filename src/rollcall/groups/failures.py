"""Errors about workers, with role, rank and node; and how a worker's own exception gets to the caller."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence

from rollcall.errors import MemoryShortError, WorkerDiedError, WorkerError, WorkerTimeoutError
from rollcall.groups.backend import WorkerSpec, whom

_CARRIERS = ("rollcall.groups.host", "rollcall.groups.inprocess", "rollcall.groups.pulse")


# What gloo, NCCL, TCPStore and sockets say when the other side is gone or silent.
_COMPLAINTS = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket closed",
    "gloo/transport", "NCCL", "ncclRemoteError", "failed to recv", "No route to host", "Timed out waiting",
)  # fmt: skip


def is_about_a_peer(error: BaseException | None, text: str) -> bool:
    """Whether a worker's exception says that another process did not answer, rather than that its own code failed."""
    if isinstance(error, ConnectionError):
        return True
    names = {kind.__name__ for kind in type(error).__mro__} if error is not None else set()
    if names & {"DistBackendError", "DistNetworkError", "DistStoreError", "MissingPeerError"}:
        return True
    end = "\n".join(text.rstrip().splitlines()[-3:])
    return any(word in end for word in _COMPLAINTS)


class RemoteFailureError(Exception):
    """A worker's exception on its way to the caller: the text always, the object where it can be pickled."""

    def __init__(self, text: str, pickled: bytes | None) -> None:
        super().__init__(text, pickled)
        self.text = text
        self.pickled = pickled

    def __str__(self) -> str:
        return self.text.rstrip()

    @classmethod
    def of(cls, error: Exception) -> RemoteFailureError:
        """The exception as the worker's author knows it, without the frames that lead to the worker's code."""
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_globals.get("__name__", "").startswith(_CARRIERS):
            inner = inner.tb_next
        # Where memory ended says nothing about why: the sum does.
        frames = None if isinstance(error, MemoryShortError) else traceback.format_exception(type(error), error, inner)
        text = str(error) if frames is None else "".join(frames)
        try:
            pickled = pickle.dumps(error)
        except Exception:  # an exception may hold anything, and pickling runs its code
            pickled = None
        return cls(text, pickled)

    @property
    def original(self) -> Exception | None:
        if self.pickled is None:
            return None
        try:
            return pickle.loads(self.pickled)
        except Exception:  # its class may not exist here, or refuse its own arguments
            return None


def listed(specs: Sequence[WorkerSpec], *, most: int = 8) -> str:
    more = f" and {len(specs) - most} more" if len(specs) > most else ""
    return ", ".join(spec.where for spec in specs[:most]) + more


def waits_words(waits: Mapping[str, Sequence[WorkerSpec]]) -> str:
    """Who is waited for, by purpose."""
    parts = [f"{listed(specs, most=3)} {purpose}" for purpose, specs in waits.items()]
    return f"the run waited for {', and for '.join(parts)}" if parts else ""


def died(specs: Sequence[WorkerSpec], why: str) -> WorkerDiedError:
    return WorkerDiedError(f"{specs[0].where} is dead: {why}", **whom(specs))


def unanswered(missing: Sequence[WorkerSpec], *, total: int, timeout_s: float) -> WorkerTimeoutError:
    return WorkerTimeoutError(
        f"no answer after {timeout_s:g} s from {len(missing)} of {total} workers: {listed(missing)}",
        **whom(missing),
    )


def failure_of(failed: Sequence[tuple[WorkerSpec, Exception]]) -> WorkerError:
    """What these failed calls mean: that of a dead worker comes before those that failed because of its death."""
    spec, error = next(((spec, error) for spec, error in failed if isinstance(error, WorkerDiedError)), failed[0])
    others = [other for other, _ in failed if other is not spec]
    also = f"\nAlso failed: {listed(others)}" if others else ""
    if isinstance(error, WorkerDiedError):
        return died([spec, *others], f"{error}{also}")
    told = error if isinstance(error, RemoteFailureError) else RemoteFailureError.of(error)
    found = WorkerError(f"{spec.where} raised\n{told}{also}", **whom([spec, *others]))
    found.__cause__ = told.original if told is error else error
    return found
