"""KV of sessions outside a CPU's dense rows: a copy of what each row had, oldest first."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from rollcall.base.types import Ints
from rollcall.engine.native.kept import Kept
from rollcall.engine.native.runner import Sequence


class Plane(NamedTuple):
    """Keys or values of one layer, as they lie in memory: [rows, Hkv, D and columns]."""

    tensor: Tensor
    dim: int  # of the columns

    def columns(self, row: int, start: int, count: int) -> Tensor:
        return self.tensor[row].narrow(self.dim - 1, start, count)


class KeptRows:
    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Kept[list[Tensor]]] = OrderedDict()
        self.num_tokens = 0  # whose KV is kept

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, session: str, ids: Ints, planes: list[Plane], *, row: int, start: int) -> None:
        """Copy the KV of these tokens, which begins at a row's column ``start``."""
        kv = [plane.columns(row, start, len(ids)).clone() for plane in planes]
        self.put_back(Kept(session=session, ids=ids, kv=kv))

    def put_back(self, kept: Kept[list[Tensor]]) -> None:
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


@torch.inference_mode()
def restore(kept: Kept[list[Tensor]], planes: list[Plane], *, num_tokens: int, row: int, column: int) -> None:
    """Copy the first tokens of what was taken into a row, from this column on."""
    for plane, kv in zip(planes, kept.kv, strict=True):
        plane.columns(row, column, num_tokens).copy_(kv.narrow(plane.dim - 1, 0, num_tokens))
