"""One completion in progress, and what every engine does for it: check its request, record its weight versions, cut it at stop strings.

The search for stop strings decodes only the end of a completion, so its cost does not depend on the completion's length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollcall.base.types import Completion, FinishReason, Ints, Segment
from rollcall.engine.protocol import Refused, Request
from rollcall.model.tokenizers import is_plain_fast


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One completion in progress. ``token_ids`` and ``logprobs`` grow chunk by chunk."""

    request: Request
    number: int  # in order of arrival
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish: FinishReason | None = None
    watched_from: int = 0  # the search for stop strings decodes from this token on

    @property
    def order(self) -> tuple[tuple[int, int, int], int]:
        """Sequences with the lowest order are admitted first; those with the highest are preempted first."""
        return self.request.order, self.number

    @property
    def length(self) -> int:
        """Number of prompt and generated tokens. The KV of all but the last token is cached; the last token is the next input."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def limit(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    def all_ids(self) -> Ints:
        return np.concatenate((self.request.prompt_ids, np.array(self.token_ids, dtype=np.int32)))


class BaseCore:
    """What both engines do with requests: check and number them, record new tokens, and return the completions that have ended."""

    def __init__(self, tokenizer: Any, *, max_positions: int, room: int, vocabulary: int) -> None:
        """``room`` is the maximum number of KV tokens that a single sequence can have."""
        self.tokenizer = tokenizer
        self.max_positions, self._room, self._vocabulary = max_positions, room, vocabulary
        self.version = 0
        self.num_preemptions = 0
        self._requests: dict[str, Sequence] = {}  # sequences that have not been returned yet
        self._ended: list[Sequence] = []  # the sequences among these that have ended
        self._num_submitted = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def _accept(self, request: Request) -> Sequence:
        """Return a sequence for this request. Refuse a request that this engine could never finish."""
        if request.id in self._requests:
            raise Refused(f"request {request.id!r} is already running; give each request its own id")
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_tokens
        if num_prompt == 0:
            raise Refused(f"request {request.id!r} has an empty prompt; a prompt needs at least one token")
        lowest, highest = int(request.prompt_ids.min()), int(request.prompt_ids.max())
        if lowest < 0 or highest >= self._vocabulary:
            wrong = lowest if lowest < 0 else highest
            raise Refused(
                f"request {request.id!r} has token {wrong}, but the model has only tokens 0 to {self._vocabulary - 1}: the prompt was "
                "encoded with another model's tokenizer; set model.path to a directory with the model's own tokenizer"
            )
        if num_new < 1:
            raise Refused(f"request {request.id!r} asks for {num_new} new tokens; ask for 1 or more")
        longest = num_prompt + num_new
        if longest > self.max_positions:
            raise Refused(
                f"request {request.id!r} needs {num_prompt} prompt + {num_new} new = {longest} positions, but the model has "
                f"only {self.max_positions}; lower rollout.max_response_tokens or data.max_prompt_tokens"
            )
        if longest > self._room:
            raise Refused(
                f"request {request.id!r} needs KV room for {num_prompt} prompt + {num_new} new = {longest} tokens, but the cache has "
                f"room for only {self._room}; raise rollout.kv_tokens or lower rollout.max_response_tokens"
            )
        sequence = self._requests[request.id] = Sequence(request=request, number=self._num_submitted)
        self._num_submitted += 1
        return sequence

    def _take_new(self, sequence: Sequence, tokens: list[int], logprobs: list[float]) -> bool:
        """Append new tokens to a sequence. Return whether it was then cut at a stop string."""
        before = len(sequence.token_ids)
        sequence.token_ids += tokens
        sequence.logprobs += logprobs
        is_cut = bool(sequence.request.sampling.stop_strings) and cut_at_stop_string(sequence, before, self.tokenizer)
        num_new = len(sequence.token_ids) - before
        if sequence.segments and sequence.segments[-1].version == self.version:
            num_new += sequence.segments.pop().num_tokens
        sequence.segments.append(Segment(version=self.version, num_tokens=num_new))
        if sequence.finish is not None:
            self._ended.append(sequence)
        return is_cut

    def _take_ended(self) -> dict[str, Completion]:
        """Remove the sequences that have ended. Return the completions of those that were not aborted, by request."""
        taken = [sequence for sequence in self._ended if self._requests.pop(sequence.request.id, None) is not None]
        self._ended.clear()
        texts = texts_of([sequence.token_ids for sequence in taken], self.tokenizer)
        return {sequence.request.id: completion_of(sequence, text) for sequence, text in zip(taken, texts, strict=True)}


def cut_at_stop_string(sequence: Sequence, before: int, tokenizer: Any) -> bool:
    """Cut the sequence after the first token that completes a stop string. Return whether there is a stop string.

    The first ``before`` tokens are known not to contain one.
    """
    stops = sequence.request.sampling.stop_strings
    end = text_of(sequence.token_ids[sequence.watched_from :], tokenizer)
    if not any(stop in end for stop in stops):
        _move_watch(sequence, end, tokenizer)
        return False
    # The decoded end can begin with characters that the full string does not contain, so check the full string too.
    if not any(stop in text_of(sequence.token_ids, tokenizer) for stop in stops):
        return False
    for count in range(before + 1, len(sequence.token_ids) + 1):
        text = text_of(sequence.token_ids[:count], tokenizer)
        if any(stop in text for stop in stops):
            del sequence.token_ids[count:], sequence.logprobs[count:]
            sequence.finish = FinishReason.STOP
            return True
    return False


# The number of characters that can be missing or added when decoding starts in the middle of a text: split characters, a leading space.
RAGGED = 8
BYTES = 4  # a character can take up to this many tokens


def _move_watch(sequence: Sequence, end: str, tokenizer: Any) -> None:
    """Start the next search at a later token, but leave enough characters for a stop string that has already begun. ``end`` is the
    text that the current search decoded. Do nothing while the last character is incomplete: until a run of byte tokens is complete,
    some tokenizers decode the whole run to replacement characters.
    """
    needed = max(len(stop) for stop in sequence.request.sampling.stop_strings) + RAGGED
    length = len(sequence.token_ids)
    if length - sequence.watched_from <= 2 * BYTES * needed or end.endswith("\ufffd"):
        return
    latest = length - BYTES * (needed + RAGGED)
    # In a run of byte tokens, decoding from a token on gives the same text as in the full string only if a character starts at that
    # token. A character does start at one of these positions.
    for start in range(latest, latest - BYTES, -1):
        text = text_of(sequence.token_ids[start:], tokenizer)
        if len(text) >= needed + RAGGED and text[-needed:] == end[-needed:]:
            sequence.watched_from = start
            return


def completion_of(sequence: Sequence, text: str) -> Completion:
    assert sequence.finish is not None
    return Completion(
        token_ids=np.array(sequence.token_ids, dtype=np.int32),
        logprobs=np.array(sequence.logprobs, dtype=np.float32),
        mask=np.ones(len(sequence.token_ids), dtype=np.bool_),
        segments=tuple(sequence.segments),
        finish=sequence.finish,
        seed=sequence.request.seed,
        text=text,
        episode=None,
    )


def texts_of(many: list[list[int]], tokenizer: Any) -> list[str]:
    """Decode each list as ``text_of`` does. Often many completions end together, and a Rust tokenizer decodes them in parallel."""
    if is_plain_fast(tokenizer, "decode", "_decode") and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(many, skip_special_tokens=True)
    return [text_of(token_ids, tokenizer) for token_ids in many]


def text_of(token_ids: list[int], tokenizer: Any) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)
