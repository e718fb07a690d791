"""AdamW with its two moments in bfloat16: this saves a third of the memory per weight with float32 masters.

Everything is computed in float32. Only the stored state is rounded, randomly up or down so that the mean is right: the second moment
changes by a thousandth per step, less than bfloat16 can represent, and would never change if it were rounded to nearest. The random
numbers depend on the number of the update, so a resumed run draws the same ones.

AdamW: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101. Stochastic rounding: Zamirai et al. 2020,
https://arxiv.org/abs/2010.06192.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 1 << 24  # elements that are in float32 at the same time
MOMENTS = ("exp_avg", "exp_avg_sq")


class HalfStateAdamW(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is not None:
                    self._update(weight, group, seed=number)

    def _update(self, weight: Tensor, group: dict[str, Any], *, seed: int) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = torch.zeros_like(weight, dtype=torch.bfloat16)
        state["step"] += 1
        step = int(state["step"])
        chance = torch.Generator(weight.device).manual_seed(step << 20 | seed)
        assert weight.grad is not None
        rows = [each if each.ndim else each[None] for each in (weight, weight.grad, *(state[name] for name in MOMENTS))]
        size = max(1, AT_ONCE // max(1, rows[0][:1].numel()))  # a rank's part may have no rows
        for start in range(0, len(rows[0]), size):
            own, grad, first, second = (each[start : start + size] for each in rows)
            _step(own, grad, first, second, group=group, step=step, chance=chance)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Convert the moments to bfloat16 again, because torch converts them to the weights' precision."""
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            for name in MOMENTS:
                entry[name] = entry[name].to(torch.bfloat16)


def _step(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    group: dict[str, Any],
    step: int,
    chance: torch.Generator,
) -> None:
    beta1, beta2 = group["betas"]
    mean = first.float().lerp_(grad, 1 - beta1)
    square = second.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    denominator = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
    first.copy_(by_chance(mean, chance))
    second.copy_(by_chance(square, chance))


def by_chance(x: Tensor, chance: torch.Generator) -> Tensor:
    """Round float32 numbers to bfloat16 values (still as float32), up or down with the probabilities that keep the mean.

    >>> by_chance(torch.tensor([1.0, -3.0]), torch.Generator().manual_seed(0))
    tensor([ 1., -3.])
    """
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=chance)
    return (x.view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
