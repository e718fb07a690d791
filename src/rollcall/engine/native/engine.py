"""The native engine: continuous batching over a runner.

Each ``step`` admits the sequences that fit, makes room for the next chunk of tokens (if there is no room, it preempts the last sequence
in order), decodes the chunk and removes the sequences that ended. A sequence's KV always covers all its tokens except the last, which
is the next input. So a new prompt, a preempted sequence and a sequence after a weight update are all treated in the same way: their KV
is filled, then they are decoded.

With several rows and no waiting requests, the next chunk starts before the last one is finished, so that a GPU does not wait for the
host. Ended rows stay in the batch until a step without them is cheaper. Tokens that are sampled for them in the meantime are dropped.

Requests are admitted in the order given by ``Request.order``. All turns of an episode have the same order. So if there are more episodes
than rows, running episodes continue before new ones begin, and reuse their KV while it is still in memory.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from rollcall.base.errors import short_of_memory
from rollcall.base.types import Completion, FinishReason
from rollcall.base.words import size
from rollcall.engine.native.adapters import BASE, Served
from rollcall.engine.native.runner import Chunk, Runner
from rollcall.engine.protocol import Refused, Request
from rollcall.engine.sequence import BaseCore, Sequence
from rollcall.model.adapter import Adapter
from rollcall.model.decoder import Decoder


class NativeEngine(BaseCore):
    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_running: int,
        kv_tokens: int | None,
        kv_fraction: float = 0.3,
        compile: bool = False,
        graphs: bool = True,
        adapters: Mapping[str, Adapter] | None = None,
    ):
        """With ``graphs``, decode steps on a GPU are captured as CUDA graphs. Without it, a debugger can step through them. The keys of
        ``adapters`` are the names that requests use. Adapters share the model's weights, and rows in one batch may use different
        adapters. Requests that do not name an adapter use the first one."""
        decoder = Decoder.of(model)
        self.served = Served(decoder, adapters) if adapters else None
        if self.served is not None:
            decoder = replace(decoder, adapter_of=self.served.adapter_of)
        self.runner: Runner
        if decoder.device.type == "cuda":
            from rollcall.engine.native.paged import PagedRunner

            self.runner = PagedRunner(
                decoder,
                max_running=max_running,
                kv_tokens=kv_tokens,
                kv_fraction=kv_fraction,
                graphs=graphs,
                served=self.served,
            )
        else:
            from rollcall.engine.native.rows import RowRunner

            self.runner = RowRunner(
                decoder, max_running=max_running, kv_tokens=kv_tokens, compile=compile, served=self.served
            )
        self._weight_bytes = sum(each.numel() * each.element_size() for each in decoder.named_tensors().values())
        room, vocabulary = self.runner.room, len(decoder.embed)
        super().__init__(tokenizer, max_positions=decoder.max_positions, room=room, vocabulary=vocabulary)
        self._waiting: list[Sequence] = []  # sorted by order
        self._running: list[Sequence] = []
        self._started = 0  # steps of the newest chunk in progress; 0 if there is none

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        self._check_adapter(request)
        self._wait(self._accept(request))

    def step(self) -> dict[str, Completion]:
        with short_of_memory(self._sentence):
            if not self._started:
                self._admit()
                if self._running:
                    self._start(self._make_room())
            if self._started:
                self._take_in(goes_on=True)
        return self._take_ended()

    def _sentence(self, why: str) -> str:
        """Return the error message for running out of memory while sampling."""
        return (
            f"the native engine is out of memory ({why}). It holds {size(self._weight_bytes)} of weights and a KV cache of "
            f"{self.runner.room} tokens, and is sampling {len(self._running)} completions; lower rollout.kv_memory_fraction, "
            "rollout.kv_tokens or rollout.max_running"
        )

    def abort(self, request_id: str) -> None:
        sequence = self._requests.pop(request_id, None)
        if sequence is None or sequence.finish is not None:
            return
        sequence.finish = FinishReason.ABORT
        if sequence.request.session is not None:
            self.end_session(sequence.request.session)
        self._waiting = [other for other in self._waiting if other is not sequence]
        if not self._started:
            self._remove_finished()

    def settle(self) -> None:
        if self._started:
            self._take_in(goes_on=False)

    def update_weights(self, version: int) -> None:
        """Queue every running sequence to be filled again, so that KV from old weights is never mixed with new weights."""
        self.settle()
        self.version = version
        if self.served is not None:
            self.served.refresh()
        self.runner.forget(None)
        for row in reversed(range(len(self._running))):
            self._wait(self._drop(row))

    def end_session(self, session: str) -> None:
        self.runner.forget(session)
        # A turn that has ended, but has not been removed yet, must not leave its KV behind.
        for sequence in self._running:
            if sequence.finish is not None and sequence.request.session == session:
                sequence.request = replace(sequence.request, session=None)

    def close(self) -> None:
        """Do nothing, because no resource outlives this object."""

    def _check_adapter(self, request: Request) -> None:
        names = [] if self.served is None else [BASE, *self.served.adapters]
        if request.adapter is not None and request.adapter not in names:
            raise Refused(
                f"request {request.id!r} asks for the adapter {request.adapter!r}; "
                + (f"this engine has {', '.join(names)}" if names else "this engine has no adapters, so leave it out")
            )
        if request.adapter is not None and request.session is not None:
            raise Refused(
                f"request {request.id!r} of session {request.session!r} names the adapter {request.adapter!r}, but sessions always use "
                "the engine's first adapter; leave out the adapter or the session"
            )

    def _wait(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=lambda each: each.order)

    def _admit(self) -> None:
        if not self._waiting:
            return
        count = self.runner.admit(self._waiting)
        self._running += self._waiting[:count]
        del self._waiting[:count]
        assert self._running, "a single sequence always fits, because submit checks it"

    def _start(self, steps: int) -> None:
        self.runner.start(steps)
        self._started = steps

    def _take_in(self, *, goes_on: bool) -> None:
        """Collect the oldest chunk in progress. With ``goes_on``, first start the next chunk unless there is a reason to wait."""
        steps, rows = self._started, list(self._running)
        is_behind = goes_on and not any(map(_leaves_kv, rows)) and self._start_next(steps)
        chunk = self.runner.read()
        if not is_behind:
            self._started = 0
            self._remove_finished()  # sequences that ended in the previous chunk
            if goes_on:
                self._start_next(steps)
        self._collect(chunk, rows)
        if not self._started:
            self._remove_finished()

    def _start_next(self, steps: int) -> bool:
        """Start another chunk before the ``steps`` of the last one are collected. Return False if there is a reason to wait for them."""
        remaining = [each.limit - each.length - steps for each in self._running if each.finish is None]
        if self._waiting or not remaining or len(remaining) < self.runner.ahead_from:
            return False
        ended = [row for row, each in enumerate(self._running) if each.finish is not None]
        next_steps = self.runner.steps(remaining)
        if next_steps <= 0 or not self.runner.carry(ended) or not self.runner.reserve(next_steps):
            return False
        self._start(next_steps)
        return True

    def _make_room(self) -> int:
        steps = self.runner.steps([sequence.limit - sequence.length for sequence in self._running])
        while not self.runner.reserve(steps):
            last = max(range(len(self._running)), key=lambda row: self._running[row].order)
            self.num_preemptions += 1
            self._wait(self._drop(last))
            assert self._running, "a single sequence always fits, because submit checks it"
        return steps

    def _collect(self, chunk: Chunk, rows: list[Sequence]) -> None:
        tokens, logprobs = chunk.tokens.T.tolist(), chunk.logprobs.T.tolist()
        for sequence, new_tokens, new_logprobs in zip(rows, tokens, logprobs, strict=True):
            if sequence.finish is not None:
                continue
            # Keep the tokens up to a stop token or the limit.
            room = sequence.limit - sequence.length
            if len(new_tokens) >= room:
                new_tokens, sequence.finish = new_tokens[:room], FinishReason.LENGTH
            ends = [new_tokens.index(stop) for stop in sequence.request.sampling.stop_token_ids if stop in new_tokens]
            if ends:
                new_tokens, sequence.finish = new_tokens[: min(ends) + 1], FinishReason.STOP
            self._take_new(sequence, new_tokens, new_logprobs[: len(new_tokens)])

    def _remove_finished(self) -> None:
        kept = {row: sequence for row, sequence in enumerate(self._running) if _leaves_kv(sequence)}
        if kept:
            self.runner.keep(kept)
        for row in reversed(range(len(self._running))):
            if self._running[row].finish is not None:
                self._drop(row)

    def _drop(self, row: int) -> Sequence:
        sequence = self._running[row]
        self.runner.remove(row)
        self._running[row] = self._running[-1]
        self._running.pop()
        return sequence


def _leaves_kv(sequence: Sequence) -> bool:
    return sequence.request.session is not None and sequence.finish not in (None, FinishReason.ABORT)
