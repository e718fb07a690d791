"""The native engine: continuous batching over a runner.

One ``poll`` is: admit what fits, make room for the next chunk of tokens (preempting the youngest when there is none),
decode the chunk, take out what finished. A sequence's KV always covers all its tokens but the last; the last is fed
next. So a fresh prompt, a preempted sequence and one that met a weight update are all the same thing: fill, then
decode.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import nn

from rollcall.decoder import Decoder
from rollcall.engine.native.runner import Chunk, Runner, Sequence
from rollcall.engine.protocol import Finished, Request
from rollcall.types import Completion, FinishReason, Segment


class NativeEngine:
    def __init__(
        self, model: nn.Module, tokenizer: Any, *, max_running: int, kv_tokens: int | None, kv_fraction: float = 0.3
    ):
        decoder = Decoder.of(model)
        self.tokenizer = tokenizer
        self.runner = make_runner(decoder, max_running=max_running, kv_tokens=kv_tokens, kv_fraction=kv_fraction)
        self.max_positions = decoder.max_positions
        self.version = 0
        self.num_preemptions = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._requests: dict[str, list[Sequence]] = {}
        self._num_submitted = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def submit(self, request: Request) -> None:
        if request.id in self._requests:
            raise ValueError(f"request {request.id!r} is already running; give each request its own id")
        if request.sampling.max_tokens < 1:
            raise ValueError(
                f"request {request.id!r} asks for {request.sampling.max_tokens} new tokens; ask for 1 or more"
            )
        longest = len(request.prompt_ids) + request.sampling.max_tokens
        if longest > self.max_positions:
            raise ValueError(
                f"request {request.id!r} needs {len(request.prompt_ids)} prompt + {request.sampling.max_tokens} new = {longest} "
                f"positions; the model has {self.max_positions}; lower rollout.max_response_tokens or data.max_prompt_tokens"
            )
        if longest > self.runner.room:
            raise ValueError(
                f"request {request.id!r} needs KV room for {len(request.prompt_ids)} prompt + {request.sampling.max_tokens} new = "
                f"{longest} tokens; the cache has {self.runner.room}; raise rollout.kv_tokens or lower "
                "rollout.max_response_tokens"
            )
        sequences = [
            Sequence(request=request, index=index, order=self._num_submitted + index)
            for index in range(len(request.seeds))
        ]
        self._num_submitted += len(sequences)
        self._requests[request.id] = sequences
        self._waiting.extend(sequences)

    def poll(self) -> list[Finished]:
        self._admit()
        if self._running:
            steps = self._make_room()
            self._collect(self.runner.decode(steps))
        return self._take_finished()

    def abort(self, request_id: str) -> None:
        for sequence in self._requests.get(request_id, []):
            if sequence.finish is None:
                sequence.finish = FinishReason.ABORT
        self._waiting = deque(sequence for sequence in self._waiting if sequence.request.id != request_id)
        self._remove_finished()

    def update_weights(self, version: int) -> None:
        """KV made by old weights is never mixed with new ones: every running sequence is filled again."""
        self.version = version
        for row in reversed(range(len(self._running))):
            self._waiting.appendleft(self._drop(row))
        self._waiting = deque(sorted(self._waiting, key=lambda sequence: sequence.order))

    def _admit(self) -> None:
        if not self._waiting:
            return
        count = self.runner.admit(list(self._waiting))
        for _ in range(count):
            self._running.append(self._waiting.popleft())
        assert self._running, "a lone sequence always fits: submit checked it"

    def _make_room(self) -> int:
        steps = self.runner.steps([sequence.limit - sequence.length for sequence in self._running])
        while not self.runner.reserve(steps):
            youngest = max(range(len(self._running)), key=lambda row: self._running[row].order)
            self.num_preemptions += 1
            self._waiting.appendleft(self._drop(youngest))
            assert self._running, "a lone sequence always fits: submit checked it"
        return steps

    def _collect(self, chunk: Chunk) -> None:
        tokens, logprobs = chunk.tokens.T.tolist(), chunk.logprobs.T.tolist()
        for sequence, new_tokens, new_logprobs in zip(self._running, tokens, logprobs, strict=True):
            before = len(sequence.token_ids)
            _extend(sequence, new_tokens, new_logprobs)
            if sequence.request.sampling.stop_strings:
                self._cut_at_stop_string(sequence, before)
            _note_version(sequence, self.version, len(sequence.token_ids) - before)
        self._remove_finished()

    def _cut_at_stop_string(self, sequence: Sequence, before: int) -> None:
        """End at the first token that completes a stop string, however many tokens were decoded past it."""
        stops = sequence.request.sampling.stop_strings
        if not any(stop in self._decode(sequence.token_ids) for stop in stops):
            return
        for count in range(before + 1, len(sequence.token_ids) + 1):
            text = self._decode(sequence.token_ids[:count])
            if any(stop in text for stop in stops):
                del sequence.token_ids[count:], sequence.logprobs[count:]
                sequence.finish = FinishReason.STOP
                return

    def _remove_finished(self) -> None:
        for row in reversed(range(len(self._running))):
            if self._running[row].finish is not None:
                self._drop(row)

    def _drop(self, row: int) -> Sequence:
        sequence = self._running[row]
        self.runner.remove(row)
        self._running[row] = self._running[-1]
        self._running.pop()
        return sequence

    def _take_finished(self) -> list[Finished]:
        done = [
            rid
            for rid, sequences in self._requests.items()
            if all(sequence.finish is not None for sequence in sequences)
        ]
        return [
            Finished(
                request_id=rid, completions=tuple(self._completion(sequence) for sequence in self._requests.pop(rid))
            )
            for rid in done
        ]

    def _completion(self, sequence: Sequence) -> Completion:
        assert sequence.finish is not None
        return Completion(
            token_ids=np.array(sequence.token_ids, dtype=np.int32),
            logprobs=np.array(sequence.logprobs, dtype=np.float32),
            mask=np.ones(len(sequence.token_ids), dtype=np.bool_),
            segments=tuple(sequence.segments),
            finish=sequence.finish,
            seed=sequence.seed,
            text=self._decode(sequence.token_ids),
        )

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def make_runner(decoder: Decoder, *, max_running: int, kv_tokens: int | None, kv_fraction: float) -> Runner:
    if decoder.device.type == "cuda":
        from rollcall.engine.native.paged import PagedRunner

        return PagedRunner(decoder, max_running=max_running, kv_tokens=kv_tokens, kv_fraction=kv_fraction)
    from rollcall.engine.native.rows import RowRunner

    return RowRunner(decoder, max_running=max_running, kv_tokens=kv_tokens)


def _extend(sequence: Sequence, tokens: list[int], logprobs: list[float]) -> None:
    """Append up to the stop token or the limit, and note which it was."""
    stops = sequence.request.sampling.stop_token_ids
    room = sequence.limit - sequence.length
    if len(tokens) >= room:
        tokens, sequence.finish = tokens[:room], FinishReason.LENGTH
    ends = [tokens.index(stop) for stop in stops if stop in tokens]
    if ends:
        tokens, sequence.finish = tokens[: min(ends) + 1], FinishReason.STOP
    sequence.token_ids += tokens
    sequence.logprobs += logprobs[: len(tokens)]


def _note_version(sequence: Sequence, version: int, num_new: int) -> None:
    if sequence.segments and sequence.segments[-1].version == version:
        num_new += sequence.segments.pop().num_tokens
    sequence.segments.append(Segment(version=version, num_tokens=num_new))
