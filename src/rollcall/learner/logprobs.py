"""Log-probs of chosen tokens, computed directly from hidden states, a chunk of rows at a time.

The forward pass keeps a few numbers per row, and the backward pass recomputes each chunk's logits, so the full [tokens, vocabulary]
matrix never exists. If a GPU has room for the logits, the forward pass keeps them to save a matrix product later, with the same results.
Entropy and self-certainty come from the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollcall.model.decoder import wide_product

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 29}  # logits in memory at once


class TokenStats(NamedTuple):
    logprobs: Tensor  # [M] float32, differentiable
    entropy: Tensor  # [M] float32, differentiable
    certainty: Tensor  # [M] float32, KL(uniform || policy), detached


def token_stats(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float) -> TokenStats:
    """Compute statistics of softmax(hidden @ weight.T / temperature) at the targets."""
    return TokenStats(*_TokenStats.apply(hidden, weight, targets, 1.0 / temperature))  # type: ignore[misc]


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float):  # type: ignore[override]
        rows = len(hidden)
        out = torch.empty(4, rows, dtype=torch.float32, device=hidden.device)
        keeps = any(ctx.needs_input_grad) and _has_room(rows, weight)
        ctx.kept = []
        for part in _chunks(rows, weight):
            logits = wide_product(hidden[part], weight.t())
            if keeps:
                ctx.kept.append(logits)
            for index, values in enumerate(_row_stats(logits, targets[part], scale)):
                out[index, part] = values
            del logits  # free them before the next chunk's logits are computed
        logprobs, lse, entropy, mean = out.unbind(0)
        certainty = lse - mean - torch.log(torch.tensor(float(len(weight))))
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.scale = scale
        ctx.mark_non_differentiable(certainty)
        ctx.set_materialize_grads(False)  # so that the backward pass computes nothing for an unused entropy
        return logprobs, entropy, certainty

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None):  # type: ignore[override]
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # The output head may be frozen.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        grad_logits: Callable[..., Tensor] = _grad_logits
        if hidden.is_cuda:
            from rollcall.model.kernels import logprobs as kernels

            grad_logits = kernels.grad_logits
        for part in _chunks(len(hidden), weight):
            logits = ctx.kept.pop(0) if ctx.kept else wide_product(hidden[part], weight.t())
            grad = grad_logits(
                logits,
                targets[part],
                lse=lse[part],
                grad_logprobs=grad_logprobs[part],
                entropy=entropy[part],
                grad_entropy=None if grad_entropy is None else grad_entropy[part],
                scale=ctx.scale,
                dtype=hidden.dtype,
            )
            del logits  # logits are the largest tensors, so keep only one chunk alive at a time
            torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if grad.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), hidden[part])
                elif grad.is_cuda:
                    torch.ops.aten.addmm.dtype_out(grad_weight, grad.t(), hidden[part], torch.float32, out=grad_weight)
                else:
                    grad_weight += wide_product(grad.t(), hidden[part])
            del grad
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


may_keep = True  # ``measure.py`` clears this while it measures the least memory that a pass needs


def _has_room(rows: int, weight: Tensor) -> bool:
    """Return whether the GPU has twice as much free memory as all logits take."""
    if not weight.is_cuda or not may_keep:
        return False
    device = weight.device
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * rows * len(weight) * 4 <= torch.cuda.mem_get_info(device)[0] + unused


def _chunks(rows: int, weight: Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS[weight.device.type] // len(weight))
    count = max(1, -(-rows // size))
    size = -(-rows // count) if rows else 1
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _row_stats(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (log-prob of the target, log-sum-exp, entropy, mean logit) for the scaled logits, each [rows]."""
    if logits.is_cuda:
        from rollcall.model.kernels.logprobs import row_stats

        return row_stats(logits, targets, scale=scale)
    logits = logits * scale if scale != 1.0 else logits
    lse = torch.logsumexp(logits, dim=-1)
    entropy = lse - (torch.exp(logits - lse[:, None]) * logits).sum(dim=-1)
    return logits.gather(1, targets[:, None])[:, 0] - lse, lse, entropy, logits.mean(dim=-1)


def _grad_logits(
    logits: Tensor, targets: Tensor, *, lse: Tensor, grad_logprobs: Tensor, entropy: Tensor, grad_entropy: Tensor | None,
    scale: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute d/dlogits of sum(grad_logprobs * logprobs + grad_entropy * entropy)."""
    logits = logits * scale if scale != 1.0 else logits
    log_probs = logits - lse[:, None]
    probs = torch.exp(log_probs)
    grad = -probs * grad_logprobs[:, None]
    grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    if grad_entropy is not None:
        grad -= probs * (log_probs + entropy[:, None]) * grad_entropy[:, None]
    return (grad * scale if scale != 1.0 else grad).to(dtype)
