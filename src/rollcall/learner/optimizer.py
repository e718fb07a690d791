"""The run file's optimizer (AdamW by default), with warm-up, decay, clipping, and float32 master weights for bfloat16
models.

Gradients are summed over micro-batches in float32, so that the number of micro-batches does not change the update.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollcall.base.errors import NonFiniteError
from rollcall.config import OptimizerSection
from rollcall.learner.gang import Gang


class Optimizer:
    def __init__(
        self,
        weights: Mapping[str, Tensor],
        section: OptimizerSection,
        *,
        total_updates: int,
        norm: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
    ):
        """``norm`` computes the norm over all gradients if these weights are only a part of the model."""
        self.section = section
        self._norm = norm or norm_of
        self.total_updates = total_updates
        self.num_updates = 0
        self.named = {name: weight.requires_grad_() for name, weight in weights.items()}
        low_precision = any(parameter.dtype != torch.float32 for parameter in self.named.values())
        self.uses_masters = low_precision and section.master_weights
        # The tensors that the optimizer updates: float32 masters, or the parameters themselves.
        self.targets: dict[str, Tensor] = {
            name: parameter.detach().float().contiguous().clone() if self.uses_masters else parameter
            for name, parameter in self.named.items()
        }
        self._sums: dict[str, Tensor] = {}
        decays = {name: target.ndim >= 2 for name, target in self.targets.items()}
        # In the order of the groups, because a saved state numbers the weights this way.
        self.names = [name for wanted in (True, False) for name in decays if decays[name] is wanted]
        groups = [
            {"params": [self.targets[name] for name in decays if decays[name]], "weight_decay": section.weight_decay},
            {"params": [self.targets[name] for name in decays if not decays[name]], "weight_decay": 0.0},
        ]
        self.adamw = make_optimizer(groups, section, on_cuda=next(iter(self.targets.values())).is_cuda)

    @torch.no_grad()
    def allocate(self) -> None:
        """Create Adam's state at the start, as its first step would, so that a run on a GPU that is too small fails before anything is
        sampled. Other optimizers create their state in the first update."""
        if not isinstance(self.adamw, torch.optim.Adam | torch.optim.AdamW | HalfStateAdamW) or self.adamw.state:
            return
        for group in self.adamw.param_groups:
            group["lr"] = 0.0  # so that this step leaves the weights unchanged; every update sets the rate again
        for target in self.targets.values():
            target.grad = torch.zeros_like(target)
            self.adamw.step()
            target.grad = None
        for entry in self.adamw.state.values():
            entry["step"].zero_()

    def accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch, in the order of ``named``, to the float32 sums. If memory runs out, add none of them."""
        given = {name: gradient for name, gradient in zip(self.named, gradients, strict=True) if gradient is not None}
        # Allocate everything before anything changes.
        new = {name: gradient.float() for name, gradient in given.items() if name not in self._sums}
        for name, gradient in given.items():
            if name not in new:
                _add(self._sums[name], gradient)
        self._sums |= new

    @property
    def num_bytes(self) -> int:
        """Bytes of master weights and optimizer state. Before the first update, assume the size of AdamW's state."""
        values = [value for entry in self.adamw.state.values() for value in entry.values()]
        state = sum(value.nbytes for value in values if isinstance(value, Tensor))
        masters = sum(target.nbytes for target in self.targets.values())
        expected = masters if self.section.optimizer.state == "bfloat16" else 2 * masters
        return (masters if self.uses_masters else 0) + (state or expected)

    def sum_over(self, gang: Gang) -> None:
        """Sum the gradients over the gang. A member without rows adds zeros."""
        if gang.size == 1:
            return
        for name, weight in self.named.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(weight, dtype=torch.float32)
        gang.sum_all([self._sums[name] for name in self.named])

    def discard(self) -> None:
        """Drop the gradients summed so far."""
        self._sums.clear()

    def step(self) -> dict[str, float]:
        """Clip the gradients, update the weights, and clear the gradients. If the gradient is zero, nothing changes. If it is not finite,
        this raises before anything changes."""
        grad_norm = float(self._norm(self._sums))
        if not math.isfinite(grad_norm):
            self.discard()
            raise NonFiniteError(f"the gradient norm is {grad_norm}")
        lr = self.learning_rate(self.num_updates)
        if grad_norm == 0:
            # There is nothing to learn, so momentum and decay must not change the weights, and the schedule must not advance.
            self.discard()
            return {"grad_norm": 0.0, "lr": lr, "skipped_fraction": 1.0}
        clip = self.section.grad_clip
        if clip and grad_norm > clip:
            torch._foreach_mul_(list(self._sums.values()), clip / (grad_norm + 1e-6))
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for name, target in self.targets.items():
            target.grad = self._sums[name].to(target.dtype) if name in self._sums else None
        try:
            self.adamw.step()
        except RuntimeError as error:
            if "without overflow" not in str(error):
                raise
            raise NonFiniteError(f"with a learning rate of {lr:g} the update is too large for float32") from error
        for target in self.targets.values():
            target.grad = None
        self._sums.clear()
        if self.uses_masters:
            self._publish_masters()
        self.num_updates += 1
        return {"grad_norm": grad_norm, "lr": lr, "skipped_fraction": 0.0}

    def learning_rate(self, update: int) -> float:
        """Return the learning rate: warm-up to the peak, then the section's decay."""
        section = self.section
        if update < section.warmup_steps:
            return section.lr * (update + 1) / section.warmup_steps
        if section.decay == "constant":
            return section.lr
        progress = min(1.0, (update - section.warmup_steps) / max(1, self.total_updates - section.warmup_steps))
        share = 1 - progress if section.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * share)

    def settings_dict(self) -> dict[str, Any]:
        """Return the part of the state that does not belong to individual weights."""
        groups = self.adamw.state_dict()["param_groups"]
        return {"optimizer": self.section.optimizer.name, "num_updates": self.num_updates, "param_groups": groups}

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state for each weight. It is empty before the first update."""
        return {name: dict(self.adamw.state.get(self.targets[name], {})) for name in self.names}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load momentum, masters and the number of updates from the state. The settings come from the section.

        Load the weights before calling this, because masters that are missing from the state are created from the weights.
        """
        groups = self._groups_for(state)
        self.adamw.state.clear()  # a GPU may not have room for both the old and the new state
        self.adamw.load_state_dict({**state["adamw"], "param_groups": groups})
        # The state may have been saved in a different memory layout than that of the weights, which would make the steps slow.
        for weight, entry in self.adamw.state.items():
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                    entry[key] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
        self.num_updates = state["num_updates"]
        masters: Mapping[str, Tensor] = state["masters"]
        for name, target in self.targets.items():  # converted to the targets' precision
            target.copy_(masters.get(name, self.named[name]))
        if self.uses_masters:
            self._publish_masters()

    def _groups_for(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return our own groups, with the saved groups' counters (keys that are not arguments of the optimizer)."""
        name = self.section.optimizer.name
        saved, own = state["adamw"]["param_groups"], self.adamw.state_dict()["param_groups"]
        if (before := state["optimizer"]) != name:
            raise ValueError(
                f"the checkpoint has the optimizer state of {before}, which {name} (optimizer.name) cannot use; set "
                f"optimizer.name={before}, or start over with --fresh"
            )
        num_saved, num_own = ([len(group["params"]) for group in groups] for groups in (saved, own))
        if num_saved != num_own:
            raise ValueError(
                f"the checkpoint has optimizer state for {sum(num_saved)} weights, but the model has {sum(num_own)}; restore the "
                "model.path that the run began with, or start over with --fresh"
            )
        for key in STATEFUL if name in ELEMENTWISE and name != "torch.optim.SGD" else ():
            if own[0].get(key) and not saved[0].get(key):
                raise ValueError(
                    f"optimizer.kwargs.{key}={own[0][key]} needs state that the checkpoint does not have, since the value was {saved[0].get(key)} "
                    "before; keep the old value, or start over with --fresh"
                )
        arguments = inspect.signature(type(self.adamw)).parameters
        return [
            {**mine, **{key: value for key, value in theirs.items() if key not in arguments}}
            for mine, theirs in zip(own, saved, strict=True)
        ]

    @torch.no_grad()
    def _publish_masters(self) -> None:
        torch._foreach_copy_([self.named[name] for name in self.targets], list(self.targets.values()))


def _add(total: Tensor, part: Tensor) -> None:
    if total.is_cuda:
        from rollcall.model.kernels.gradients import add

        add(total, part)
    else:
        total += part


def norm_of(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors.values()))))


# These optimizers update each element only from its own gradient and state, so parts of a weight can be updated separately.
ELEMENTWISE = (
    "torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD", "torch.optim.RMSprop", "torch.optim.Adagrad",
    "torch.optim.Adadelta", "torch.optim.Adamax", "torch.optim.NAdam", "torch.optim.RAdam", "torch.optim.ASGD",
    "torch.optim.Rprop",
)  # fmt: skip
# Arguments of these optimizers that need state from the first update on. Of this state, only SGD's momentum is created later if it is
# missing.
STATEFUL = ("amsgrad", "centered", "momentum")


def optimizer_class(section: OptimizerSection, *, name: str = "actor", in_parts: bool = False) -> type:
    """Return the class that ``optimizer.name`` names. With ``in_parts``, each rank has only a part of each weight."""
    path = section.optimizer.name
    module, _, attribute = path.rpartition(".")
    where = f"{name}.optimizer.name={path}"
    if not module:
        raise ValueError(f"{where} has no module; write the import path, such as torch.optim.{attribute or 'AdamW'}")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"{where} cannot be imported ({error}); install it, or write torch.optim.AdamW") from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
        raise ValueError(f"{where} is not a torch optimizer; write, for example, torch.optim.AdamW")
    if path in ("torch.optim.LBFGS", "torch.optim.SparseAdam"):
        raise ValueError(
            f"{where} needs a closure or sparse gradients, which Rollcall does not provide; write torch.optim.AdamW"
        )
    if in_parts and path not in ELEMENTWISE:
        raise ValueError(
            f"{where} may need whole weights, but with {name}.sharding={section.sharding} and "
            f"{name}.tensor_parallel_size={section.tensor_parallel_size} each rank has only parts of them; use sharding=replicate, or one of "
            f"{', '.join(ELEMENTWISE)}"
        )
    accepted = inspect.signature(found).parameters
    if strangers := [key for key in section.optimizer.kwargs if key not in accepted or key == "params"]:
        raise ValueError(
            f"{name}.optimizer.kwargs.{strangers[0]} is not an argument of {path}; its arguments are "
            f"{', '.join(key for key in accepted if key != 'params')}"
        )
    return found


def make_optimizer(groups: list[dict[str, Any]], section: OptimizerSection, *, on_cuda: bool) -> torch.optim.Optimizer:
    kind = optimizer_class(section)
    if section.optimizer.state == "bfloat16":
        return HalfStateAdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)
    accepted = inspect.signature(kind).parameters
    adam = kind in (torch.optim.AdamW, torch.optim.Adam)
    # The section's defaults are Adam's. Other optimizers keep their own defaults, unless the run file has different values. A
    # resolved run file sets every key, so this compares values and not whether a key is set.
    fields = type(section).model_fields
    own = ["lr", *(key for key in ("betas", "eps") if adam or getattr(section, key) != fields[key].default)]
    settings = {key: getattr(section, key) for key in own if key in accepted}
    kwargs = section.optimizer.kwargs
    if kind is torch.optim.AdamW and "fused" not in kwargs and "foreach" not in kwargs:
        settings["fused"] = on_cuda
    if "weight_decay" not in accepted:
        groups = [{"params": group["params"]} for group in groups]
    return kind(groups, **settings, **kwargs)


AT_ONCE = 1 << 24  # the number of elements that are in float32 at the same time
MOMENTS = ("exp_avg", "exp_avg_sq")


class HalfStateAdamW(torch.optim.Optimizer):
    """AdamW with its two moments in bfloat16, which saves a third of the memory per weight with float32 masters.

    Everything is computed in float32. Only the stored state is rounded, randomly up or down so that the mean is right: the second moment
    changes by a thousandth per step, less than bfloat16 can represent, and would never change if it were rounded to nearest. The random
    numbers are seeded with the update's number, so a resumed run draws the same ones.

    AdamW: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101. Stochastic rounding: Zamirai et al. 2020,
    https://arxiv.org/abs/2010.06192.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0):
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
            _step([each[start : start + size] for each in rows], group, step=step, chance=chance)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Convert the moments to bfloat16 again, because torch converts them to the weights' precision."""
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            for name in MOMENTS:
                entry[name] = entry[name].to(torch.bfloat16)


def _step(parts: Sequence[Tensor], group: dict[str, Any], *, step: int, chance: torch.Generator) -> None:
    weight, grad, first, second = parts
    beta1, beta2 = group["betas"]
    mean = first.float().lerp_(grad, 1 - beta1)
    square = second.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    denominator = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
    first.copy_(by_chance(mean, chance))
    second.copy_(by_chance(square, chance))


def by_chance(x: Tensor, chance: torch.Generator) -> Tensor:
    """Round float32 numbers to bfloat16 values (still as float32), up or down with the probabilities that preserve the mean.

    >>> by_chance(torch.tensor([1.0, -3.0]), torch.Generator().manual_seed(0))
    tensor([ 1., -3.])
    """
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=chance)
    return (x.view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
