"""The vLLM engine: this process implements the engine protocol, and vLLM itself runs in a child process.

``step`` reads the answer for the steps that it requested before. It then requests the next steps at once, so that vLLM decodes while the
caller handles the results. An update or an abort first waits for the requested steps. So it always takes effect between two tokens, and
every token is recorded with the version that it was sampled from.

The draws depend only on the seed, not on the rest of the batch. They differ from the native engine's draws, because vLLM has its own
generator. We search for stop strings in this process, in the string that the tokenizer decodes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollcall.base.types import Completion, FinishReason
from rollcall.config import VllmSection
from rollcall.engine.protocol import Refused, Request
from rollcall.engine.sequence import BaseCore, Sequence
from rollcall.engine.vllm.child import START_S, Child
from rollcall.engine.vllm.setup import make_spec
from rollcall.engine.weights.protocol import RefusedUpdateError
from rollcall.model.adapter import Adapter
from rollcall.model.peft_files import write_adapter
from rollcall.process.worker import Call

PART_BYTES = 128 << 20  # size of a part of an update; two or three parts are in memory at the same time
SHARED_MEMORY = "/dev/shm"
STEPS = 8  # tokens that vLLM samples for each completion per call
LEAST_TEMPERATURE = 0.01  # vLLM raises lower temperatures to this value, except 0


class VllmEngine(BaseCore):
    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        child: Child,
        *,
        section: VllmSection,
        max_running: int,
        kv_tokens: int | None,
        kv_fraction: float = 0.3,
        device: torch.device | None = None,
        adapter: Adapter | None = None,
    ):
        """``model`` is the source of the weights. If it is on the meta device, it has no weights: ``load_weights`` must then be called
        before anything is sampled, and ``device`` says where vLLM runs. With an ``adapter``, vLLM reads the model from its own path, and
        only the adapter is sent."""
        self.model = model
        self._adapter = adapter
        self._adapter_folder: tempfile.TemporaryDirectory[str] | None = None
        self.child = child
        self._rows: dict[str, Sequence] = {}  # sequences that vLLM has, or will get with the next steps
        self._new: list[dict[str, Any]] = []  # rows that vLLM has not seen yet
        self._advancing: Call | None = None  # the call for the requested steps
        self._asleep: set[str] = set()
        spec = make_spec(
            model,
            section,
            max_running=max_running,
            kv_tokens=kv_tokens,
            kv_fraction=kv_fraction,
            device=device,
            adapter=adapter,
        )
        config: Any = model.config
        max_positions, vocabulary = config.max_position_embeddings, config.vocab_size
        super().__init__(tokenizer, max_positions=max_positions, room=spec["kv_tokens"], vocabulary=vocabulary)
        self._sleeps: bool = spec["sleep"]
        child.ask("load", spec, deadline_s=START_S)
        if adapter is not None:
            self._ship_adapter(adapter)
        elif not next(model.parameters()).is_meta:
            self._ship(model.named_parameters())

    @property
    def num_waiting(self) -> int:
        return len(self._new)  # vLLM's scheduler does not report which requests it has started

    def submit(self, request: Request) -> None:
        if request.adapter is not None:
            raise Refused(
                f"request {request.id!r} names the adapter {request.adapter!r}, but vLLM has only the run's adapter; leave the adapter "
                "out, or use rollout.engine=native"
            )
        sampling = request.sampling
        if 0 < sampling.temperature < LEAST_TEMPERATURE:
            raise Refused(
                f"request {request.id!r} has temperature {sampling.temperature}, which vLLM would silently raise to "
                f"{LEAST_TEMPERATURE}; use 0 (greedy), at least {LEAST_TEMPERATURE}, or rollout.engine=native"
            )
        sequence = self._accept(request)
        self._rows[str(sequence.number)] = sequence
        self._new.append(
            {
                "id": str(sequence.number),
                "prompt": request.prompt_ids.tolist(),
                "sampling": {
                    "seed": vllm_seed(request.seed),
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k,
                    "max_tokens": sampling.max_tokens,
                    "stop_token_ids": list(sampling.stop_token_ids),
                },
            }
        )

    def step(self) -> dict[str, Completion]:
        if self._rows and self._advancing is None:
            self._advance()
        self.settle()
        if self._rows:
            self._advance()
        elif self._sleeps and not self._asleep:
            self.sleep()
        return self._take_ended()

    def abort(self, request_id: str) -> None:
        self.settle()
        sequence = self._requests.pop(request_id, None)
        if sequence is not None and sequence.finish is None:
            sequence.finish = FinishReason.ABORT
            self._drop([str(sequence.number)])

    def update_weights(self, version: int) -> None:
        """Send the model's parameters, or the adapter. Running completions continue with the new weights, and their KV is recomputed."""
        if self._adapter is None:
            self.load_weights(version, self.model.named_parameters())
            return
        self._refuse_stale(version)
        self.settle()
        self._ship_adapter(self._adapter)
        self.version = version

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Like ``update_weights``, but with tensors that arrive one by one, under their names in transformers. None of them is kept. A
        module's tensors should be consecutive, because vLLM keeps them until it has all of them."""
        self._refuse_stale(version)
        self.settle()
        self._wake("weights")
        self._ship(tensors)
        self.version = version

    def _refuse_stale(self, version: int) -> None:
        if version < self.version:
            raise RefusedUpdateError(f"version {version} of the weights is stale: vLLM has version {self.version}")

    def end_session(self, session: str) -> None:
        """Do nothing, because vLLM has no sessions, only prefixes. It keeps unused blocks until it needs them or gets new weights."""

    def sleep(self) -> None:
        """Release GPU memory while nothing is sampled. The next call that samples or updates the weights restores the memory that it
        needs."""
        assert not self._rows and self._advancing is None, "an engine that is sampling cannot sleep"
        self.child.ask("sleep")
        self._asleep = {"weights", "kv_cache"}

    def close(self) -> None:
        self.child.close()
        if self._adapter_folder is not None:
            self._adapter_folder.cleanup()

    def _ship_adapter(self, adapter: Adapter) -> None:
        """Send the adapter to vLLM as PEFT files in memory."""
        if self._adapter_folder is None:
            memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
            self._adapter_folder = tempfile.TemporaryDirectory(prefix="rollcall-adapter-", dir=memory)
        folder = Path(self._adapter_folder.name)
        write_adapter(folder, adapter.named_tensors(), adapter.section, base=adapter.base)
        self.child.ask("adapt", str(folder))

    def _ship(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send the tensors part by part, so that one part is written while vLLM loads the previous one."""
        self.child.ask("begin")
        held: list[int] = []  # start offsets of the parts that vLLM is still reading
        loading: Call | None = None
        for part in in_parts(tensors, num_bytes=PART_BYTES):
            written = self.child.memory.write(part, held=held)
            if loading is not None:
                held = self.child.result_of(loading)["held"]
            loading = self.child.begin("part", written["offset"], written["size"], written["tensors"])
            held = [*held, written["offset"]]
        if loading is not None:
            self.child.result_of(loading)
        self.child.ask("end")

    def _advance(self) -> None:
        self._wake("weights", "kv_cache")
        new, self._new = self._new, []
        self._advancing = self.child.begin("advance", new, STEPS)

    def settle(self) -> None:
        """Wait for the requested steps, if any, and add their tokens to the sequences."""
        if self._advancing is None:
            return
        call, self._advancing = self._advancing, None
        answer = self.child.result_of(call)
        self.num_preemptions += answer["preempted"]
        cut: list[str] = []
        for name, tokens, logprobs, finish in answer["rows"]:
            sequence = self._rows[name]
            if finish is not None:
                sequence.finish = FinishReason(finish)
            if self._take_new(sequence, tokens, logprobs) and finish is None:
                cut.append(name)
        self._rows = {name: sequence for name, sequence in self._rows.items() if sequence.finish is None or name in cut}
        self._drop(cut)

    def _drop(self, rows: list[str]) -> None:
        new = {row["id"] for row in self._new}
        self._new = [row for row in self._new if row["id"] not in rows]
        if known := [name for name in rows if name not in new]:
            self.child.ask("abort", known)
        for name in rows:
            del self._rows[name]

    def _wake(self, *tags: str) -> None:
        if due := sorted(self._asleep.intersection(tags)):
            self.child.ask("wake", due)
            self._asleep -= set(due)


def in_parts(tensors: Iterable[tuple[str, Tensor]], *, num_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in lists of about this many bytes. No tensor is split."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        part.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        if size >= num_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def vllm_seed(seed: int) -> int:
    """Hash a seed into a seed for vLLM: vLLM treats -1 as no seed, and torch's CPU generator uses only 32 of the 64 bits."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
