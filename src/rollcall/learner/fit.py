"""Handles micro-batches that do not fit in memory.

A failed allocation does not affect the gradient, because the micro-batch's results are dropped and its rows are packed again with half
the tokens. All later micro-batches keep the smaller size. The run ends only if a single row does not fit; the error lists the memory that
it needs.

If a model or its tokens are split across ranks, all ranks are inside the same forward pass. A rank that fails cannot run it again,
because the other ranks are waiting for it in a collective. So it raises ``BatchTooLargeError``. The attempt ends, and the next one starts
from the newest checkpoint with half the tokens. The groups are in the journal, so they are not lost.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from rollcall.base.errors import BatchTooLargeError, MemoryShortError, in_one_line, is_out_of_memory
from rollcall.base.types import MicroBatch
from rollcall.base.words import counted, size
from rollcall.learner.body import IDLE, BodyBase
from rollcall.learner.optimizer import Optimizer
from rollcall.learner.packing import Fit, Packing
from rollcall.plan.activations import DecoderSizes, Passes, Recompute

T = TypeVar("T")
LossOf = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]


def accumulate(
    body: BodyBase, fit: Fit, packing: Packing, loss_of: LossOf, optimizer: Optimizer
) -> list[tuple[MicroBatch, dict[str, Tensor]]]:
    """Run the backward pass of every micro-batch. Return each micro-batch with its metrics."""

    def run(batch: MicroBatch) -> dict[str, Tensor]:
        loss, metrics = loss_of(batch) if batch is not IDLE else (body.nothing(), {})
        # Do not bind the gradients to a name, because they would stay in memory during the next backward.
        optimizer.accumulate(body.gradients(loss))
        return metrics

    return list(each_fitting(body, fit, packing, run, optimizer=optimizer))


def each_fitting(
    body: BodyBase, fit: Fit, packing: Packing, run: Callable[[MicroBatch], T], *, optimizer: Optimizer | None = None
) -> Iterator[tuple[MicroBatch, T]]:
    """Yield each micro-batch with the result of ``run``. If a micro-batch does not fit, use smaller ones, unless other ranks run
    the same micro-batch. The next micro-batch is packed while a GPU is still computing the previous one."""
    rows, done = range(len(packing.samples)), set[int]()
    waiting = packing.batches(rows, fit.tokens * body.context.size)
    if body.in_parts:  # every rank must run the same number of micro-batches
        own = list(waiting)
        waiting = iter([*own, *[IDLE] * (max(body.gang.gather(len(own))) - len(own))])
    while (batch := next(waiting, None)) is not None:
        try:
            result = run(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if body.together:
                raise too_large(body, fit, batch, packing, error, optimizer=optimizer) from None
            why = in_one_line(error)
        else:
            if batch is not IDLE:
                done.update(batch.sample_index.tolist())
                yield batch, result
            continue
        # Release memory outside the handler, because the error keeps the frames alive, and the frames keep the tensors alive.
        release(body.device)
        if not fit.shrink(batch, why=why, units=packing.units(batch), furthest=_furthest(body, optimizer)):
            raise MemoryShortError(row_sentence(body, fit, batch, why=why, optimizer=optimizer))
        waiting = packing.batches([row for row in rows if row not in done], fit.tokens)


def too_large(
    body: BodyBase, fit: Fit, batch: MicroBatch, packing: Packing, error: Exception, *, optimizer: Optimizer | None
) -> Exception:
    """Return the error to raise if all ranks run the micro-batch together."""
    why, before = in_one_line(error), min(fit.tokens, -(-batch.num_tokens // body.context.size))
    if packing.units(batch) <= 1:
        return MemoryShortError(row_sentence(body, fit, batch, why=why, optimizer=optimizer))
    return BatchTooLargeError(
        f"{fit.name}: a micro-batch of {before} tokens does not fit ({why}), and all ranks run it together, so it cannot shrink now; the next attempt "
        f"uses {fit.name}.tokens_per_microbatch={before // 2}",
        fit.name,
        max(1, before // 2),
    )


def release(device: torch.device) -> None:
    """Return the memory of a failed micro-batch to the GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def sizes_of(shapes: Mapping[str, torch.Size], *, head_dim: int) -> DecoderSizes:
    """Return the sizes of the decoder whose weights have these shapes."""
    (vocab, hidden), (_, queries) = shapes["embed"], shapes["layers.0.out"]
    return DecoderSizes(
        hidden=hidden,
        intermediate=shapes["layers.0.gate_up"][0] // 2,
        layers=sum(name.endswith(".gate_up") for name in shapes),
        heads=queries // head_dim,
        kv_heads=(shapes["layers.0.qkv"][0] - queries) // (2 * head_dim),
        head_dim=head_dim,
        vocab=vocab,
    )


def passes_of(body: BodyBase, fit: Fit, *, recompute: Recompute | None = None) -> Passes:
    """Return the memory estimate for this body's passes, as in ``rollcall plan``."""
    return Passes(
        sizes=sizes_of(body.whole_shapes, head_dim=body.head_dim),
        width=body.dtype.itemsize,
        num_parameters=sum(tensor.numel() for tensor in body.named.values()),
        gradient_width=4 if body.in_parts else body.dtype.itemsize,
        has_head="head" not in body.named,
        tensor=body.num_tensor,
        compiled=body.is_compiled or body.device.type == "cpu",
        recompute=fit.recompute if recompute is None else recompute,
        frozen=body.frozen_bytes > 0,
    )


def row_sentence(body: BodyBase, fit: Fit, batch: MicroBatch, *, why: str, optimizer: Optimizer | None) -> str:
    """Return the error message for when a single row, or an attempt whose rows stay together, does not fit."""
    rows = "a row" if batch.num_rows == 1 else f"an attempt ({counted(batch.num_rows, 'row')} that stay together)"
    parts = _needs(body, optimizer)
    parts["activations of this row"] = passes_of(body, fit).peak(-(-batch.num_tokens // body.context.size))
    if body.device.type == "cuda":
        held = torch.cuda.memory_allocated(body.device)
        parts["KV cache and other roles"] = max(0, held - parts["weights"] - parts.get("optimizer state", 0))
    again = ""
    if fit.recompute < _furthest(body, optimizer):
        again = f"set {fit.name}.activation_checkpointing={Recompute(fit.recompute + 1).setting}, "
    if optimizer is not None and optimizer.num_bytes > sum(parts.values()) / 2:
        again += f"set {fit.name}.optimizer.state=bfloat16, train an adapter (model.lora.rank=16), "
    return (
        f"{fit.name}: {rows} with {batch.num_tokens} tokens does not fit in memory ({why}). It needs {_listed(parts)}: "
        f"{size(sum(parts.values()))} in all{_card(body.device)}. To make room: {again}lower rollout.max_response_tokens, data.max_prompt_tokens or "
        f"rollout.kv_memory_fraction, or use more cards: split the model with {fit.name}.sharding=fsdp, or the row with "
        f"{fit.name}.context_parallel_size. The run directory is intact, and the same command continues the run"
    )


def step_sentence(body: BodyBase, fit: Fit, optimizer: Optimizer, why: str) -> str:
    """Return the error message for when there is too little memory to update the weights, whatever the micro-batch size."""
    return (
        f"{fit.name}: there is no memory left to update the weights ({why}). The update needs {_listed(_needs(body, optimizer))}"
        f"{_card(body.device)}. Lower rollout.kv_memory_fraction, set {fit.name}.master_weights=false, or split the model across more cards with {fit.name}.sharding=fsdp. "
        "The run directory is intact, and the same command continues the run"
    )


def _furthest(body: BodyBase, optimizer: Optimizer | None) -> Recompute:
    """Return the setting that keeps the least in memory. Without a backward pass, layers keep nothing. A CPU has only host memory."""
    if optimizer is None:
        return Recompute.NO
    return Recompute.ON_HOST if body.device.type == "cuda" else Recompute.YES


def _needs(body: BodyBase, optimizer: Optimizer | None) -> dict[str, int]:
    parts = {"weights": sum(tensor.nbytes for tensor in body.named.values()) + body.frozen_bytes}
    if optimizer is not None:
        parts["optimizer state"] = optimizer.num_bytes
        parts["gradients"] = 4 * sum(tensor.numel() for tensor in body.named.values())
    return parts


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in parts.items())


def _card(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f", and the card has {size(torch.cuda.get_device_properties(device).total_memory)}"
