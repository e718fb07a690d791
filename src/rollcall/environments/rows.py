"""A training row that is being played: its sampled tokens, the observed tokens between them, and its turns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollcall.base.types import Completion, Episode, FinishReason, Ints, Prompt, Segment, ToolCall, Turn


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    prompt_ids: Ints
    token_ids: list[Ints] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    mask: list[Any] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    length: int = 0
    turns: list[Turn] = field(default_factory=list)
    finish: FinishReason = FinishReason.ABORT  # until a turn is sampled

    def add_sampled(self, turn: Completion, calls: tuple[ToolCall, ...] = ()) -> None:
        self._append(turn.token_ids, turn.logprobs, turn.mask, turn.segments)
        self.finish, count = turn.finish, len(turn.token_ids)
        self.turns.append(
            Turn(num_sampled=count, num_observed=0, text=turn.text, observation="", calls=calls, reward=None)
        )

    def add_observed(self, ids: Ints, text: str) -> None:
        if len(ids):
            segment = Segment(version=self.segments[-1].version, num_tokens=len(ids))
            self._append(ids, np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.bool_), (segment,))
        self.change_last(num_observed=len(ids), observation=text)

    def change_last(self, **fields: Any) -> None:
        """Change the last turn."""
        self.turns[-1] = replace(self.turns[-1], **fields)

    def joined(self) -> dict[str, Any]:
        """Return the fields for a `Completion` or a `Branch`."""
        return {
            "token_ids": np.concatenate((np.zeros(0, dtype=np.int32), *self.token_ids), dtype=np.int32),
            "logprobs": np.concatenate((np.zeros(0, dtype=np.float32), *self.logprobs), dtype=np.float32),
            "mask": np.concatenate((np.zeros(0, dtype=np.bool_), *self.mask), dtype=np.bool_),
            "segments": tuple(self.segments),
        }

    def completion(self, prompt: Prompt, *, seed: int, **episode: Any) -> Completion:
        """Return this row as an attempt at the prompt. ``episode`` contains the other fields of its `Episode`."""
        is_own = np.array_equal(self.prompt_ids, prompt.token_ids)
        opened = None if is_own else self.prompt_ids
        return Completion(
            **self.joined(),
            finish=self.finish,
            seed=seed,
            text=self.turns[-1].text if self.turns else "",
            episode=Episode(prompt_ids=opened, turns=tuple(self.turns), **episode),
        )

    def _append(self, ids: Ints, logprobs: Any, mask: Any, segments: tuple[Segment, ...]) -> None:
        self.token_ids.append(ids)
        self.logprobs.append(logprobs)
        self.mask.append(mask)
        self.length += len(ids)
        for segment in segments:
            if self.segments and self.segments[-1].version == segment.version:
                segment = replace(segment, num_tokens=self.segments.pop().num_tokens + segment.num_tokens)
            self.segments.append(segment)
