"""KV of sessions outside a CPU's dense rows: a copy of what each row had."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from rollcall.engine.native.kept import Kept
from rollcall.engine.native.runner import Sequence


class KeptRows:
    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Kept[list[Tensor]]] = OrderedDict()  # oldest first
        self.num_tokens = 0  # whose KV is kept

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, kept: Kept[list[Tensor]]) -> None:
        self.forget(kept.session)
        self._sessions[kept.session] = kept
        self.num_tokens += len(kept.ids)

    def take(self, sequence: Sequence) -> tuple[Kept[list[Tensor]], int] | None:
        """Take out what the sequence's session left, with the number of its tokens that can be used, if any can."""
        kept = self._sessions.get(sequence.request.session or "")
        if kept is None:
            return None
        self.forget(kept.session)
        num_tokens = kept.num_shared(sequence)
        return (kept, num_tokens) if num_tokens else None

    def forget(self, session: str) -> None:
        if (kept := self._sessions.pop(session, None)) is not None:
            self.num_tokens -= len(kept.ids)

    def give_way(self) -> bool:
        """Forget the oldest session. Returns whether there was one."""
        if not self._sessions:
            return False
        self.forget(next(iter(self._sessions)))
        return True

    def forget_all(self) -> None:
        self._sessions.clear()
        self.num_tokens = 0
