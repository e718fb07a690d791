"""What went wrong with a worker, told with its role, rank and node; and how a worker's own exception travels."""

from __future__ import annotations

import pickle
import traceback

_CARRIERS = ("rollcall.groups.host", "rollcall.groups.inprocess", "rollcall.groups.pulse")


# How gloo, NCCL, TCPStore and sockets word that the other side is gone or silent.
_COMPLAINTS = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket closed",
    "gloo/transport", "NCCL", "ncclRemoteError", "failed to recv", "No route to host", "Timed out waiting",
)  # fmt: skip


def is_about_a_peer(error: BaseException | None, text: str) -> bool:
    """Whether a worker's exception says that someone else did not answer, rather than that its own code failed."""
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
        """The exception as the worker's author knows it: the frames that lead to the worker's code are left out."""
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_globals.get("__name__", "").startswith(_CARRIERS):
            inner = inner.tb_next
        text = "".join(traceback.format_exception(type(error), error, inner))
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
