"""The tokens of a training row while it is played: sampled ones, and those observed between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollcall.types import Completion, Ints, Segment


@dataclass(slots=True, kw_only=True, eq=False)
class Tokens:
    token_ids: list[Ints] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    mask: list[Any] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    length: int = 0

    def append_sampled(self, turn: Completion) -> None:
        self._append(turn.token_ids, turn.logprobs, turn.mask, turn.segments)

    def append_observed(self, ids: Ints) -> None:
        if len(ids):
            segment = Segment(version=self.segments[-1].version, num_tokens=len(ids))
            self._append(ids, np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.bool_), (segment,))

    def joined(self) -> dict[str, Any]:
        """The fields of a `Completion` or a `Branch`."""
        return {
            "token_ids": np.concatenate((np.zeros(0, dtype=np.int32), *self.token_ids), dtype=np.int32),
            "logprobs": np.concatenate((np.zeros(0, dtype=np.float32), *self.logprobs), dtype=np.float32),
            "mask": np.concatenate((np.zeros(0, dtype=np.bool_), *self.mask), dtype=np.bool_),
            "segments": tuple(self.segments),
        }

    def _append(self, ids: Ints, logprobs: Any, mask: Any, segments: tuple[Segment, ...]) -> None:
        self.token_ids.append(ids)
        self.logprobs.append(logprobs)
        self.mask.append(mask)
        self.length += len(ids)
        for segment in segments:
            if self.segments and self.segments[-1].version == segment.version:
                segment = replace(segment, num_tokens=self.segments.pop().num_tokens + segment.num_tokens)
            self.segments.append(segment)
