"""Where engine and learner read the same tensors, nothing moves: an update is only a new version number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rollcall.weights.layout import places
from rollcall.weights.protocol import Invitation, RefusedUpdateError, Sent, StaleUpdateError, TornUpdateError


class SameProcessReceiver:
    """``tensors`` are those it reads, where they are to be compared with the ones that are sent."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, *, name: str) -> None:
        self.name = name
        self._places = None if tensors is None else places(tensors)
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        return self._version

    def receive(self, *, version: int) -> None:
        if self._version is not None and version <= self._version:
            raise StaleUpdateError(f"{self.name}: version {version} is not newer than the {self._version} that is here")
        self._version = version

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        if self._places is not None and places(tensors) != self._places:
            raise TornUpdateError(f"{self.name} does not read the tensors that are sent, so it cannot share them")

    def close(self) -> None:
        return


class SameProcessSender:
    def __init__(self, receivers: Sequence[SameProcessReceiver]) -> None:
        self._receivers = list(receivers)

    @property
    def invitations(self) -> Mapping[str, Invitation]:
        return {}

    def send(self, tensors: Mapping[str, Tensor], *, version: int) -> Sequence[Sent]:
        for receiver in self._receivers:
            try:
                receiver.check(tensors)
                receiver.receive(version=version)
            except (StaleUpdateError, TornUpdateError) as error:
                # Sending it again would give the same result: nothing moves, so nothing can arrive differently.
                raise RefusedUpdateError(f"weights of version {version} were refused: {error}") from error
        return [Sent(version=version, num_bytes=0, is_full=True, num_attempts=1, refusals={})]

    def close(self) -> None:
        return
