"""AdamW with warm-up, decay, clipping, and float32 master weights for bfloat16 models.

Gradients are summed over micro-batches in float32, so that the number of micro-batches does not change the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rollcall.config import OptimizerSection
from rollcall.learner.gang import Gang


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; no weight was changed by it."""


class Optimizer:
    def __init__(self, weights: dict[str, Tensor], section: OptimizerSection, *, total_updates: int):
        self.section = section
        self.total_updates = total_updates
        self.num_updates = 0
        self.named = {name: weight.requires_grad_() for name, weight in weights.items()}
        low_precision = any(parameter.dtype != torch.float32 for parameter in self.named.values())
        self.uses_masters = low_precision and section.master_weights
        # What AdamW steps on: float32 masters, or the parameters themselves.
        self.targets: dict[str, Tensor] = {
            name: parameter.detach().float().contiguous().clone() if self.uses_masters else parameter
            for name, parameter in self.named.items()
        }
        self._sums: dict[str, Tensor] = {}
        decayed = [target for target in self.targets.values() if target.ndim >= 2]
        plain = [target for target in self.targets.values() if target.ndim < 2]
        groups = [{"params": decayed, "weight_decay": section.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        on_cuda = next(iter(self.targets.values())).is_cuda
        self.adamw = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=on_cuda)

    def accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch, in the order of ``named``, to the float32 sums."""
        for name, gradient in zip(self.named, gradients, strict=True):
            if gradient is None:
                continue
            if name not in self._sums:
                self._sums[name] = gradient.float()
            else:
                self._sums[name] += gradient

    def sum_over(self, gang: Gang) -> None:
        """Make the sums those of the whole gang; a member that had no rows gives zeros."""
        if gang.size == 1:
            return
        for name, weight in self.named.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(weight, dtype=torch.float32)
        gang.sum_all([self._sums[name] for name in self.named])

    def discard(self) -> None:
        """Forget the gradients summed so far."""
        self._sums.clear()

    def step(self) -> dict[str, float]:
        """Clip, update, clear. Raises NonFiniteError before anything is changed."""
        sums = list(self._sums.values())
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(sums)))
        if not math.isfinite(grad_norm := float(norm)):
            self.discard()
            raise NonFiniteError(f"the gradient norm is {grad_norm}")
        clip = self.section.grad_clip
        if clip and grad_norm > clip:
            torch._foreach_mul_(sums, clip / (grad_norm + 1e-6))
        lr = self.learning_rate(self.num_updates)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for name, target in self.targets.items():
            target.grad = self._sums[name].to(target.dtype) if name in self._sums else None
        self.adamw.step()
        for target in self.targets.values():
            target.grad = None
        self._sums.clear()
        if self.uses_masters:
            self._publish_masters()
        self.num_updates += 1
        return {"grad_norm": grad_norm, "lr": lr}

    def learning_rate(self, update: int) -> float:
        """Warm-up to the peak, then the decay that the section names."""
        section = self.section
        if update < section.warmup_steps:
            return section.lr * (update + 1) / section.warmup_steps
        if section.decay == "constant":
            return section.lr
        span = max(1, self.total_updates - section.warmup_steps)
        progress = min(1.0, (update - section.warmup_steps) / span)
        share = 1 - progress if section.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * share)

    def state_dict(self) -> dict[str, Any]:
        masters = dict(self.targets) if self.uses_masters else {}
        return {"adamw": self.adamw.state_dict(), "num_updates": self.num_updates, "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.num_updates = state["num_updates"]
        if self.uses_masters:
            for name, master in state["masters"].items():
                self.targets[name].copy_(master)
            self._publish_masters()

    @torch.no_grad()
    def _publish_masters(self) -> None:
        torch._foreach_copy_([self.named[name] for name in self.targets], list(self.targets.values()))
