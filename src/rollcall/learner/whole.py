"""A model that is whole in this process. ``sharded.Sharded`` has the same methods for a model in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollcall.learner.context_parallel import Own, join_context
from rollcall.learner.fit import Fit, Packing, run_fitting, store_of
from rollcall.learner.gang import Gang
from rollcall.learner.layout import WeightSplit, fused_rows
from rollcall.learner.logprobs import TokenStats, token_stats
from rollcall.learner.optimizer import Optimizer, norm_of
from rollcall.model.adapter import Adapter
from rollcall.model.arrays import on_device
from rollcall.model.decoder import Decoder
from rollcall.model.load import non_finite_of, packed_hidden
from rollcall.plan.activations import Recompute
from rollcall.types import MicroBatch

T = TypeVar("T")
LossOf = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]


class Whole:
    """The weights of one model on one rank of a gang. All ranks make the same calls in the same order."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        gang: Gang,
        heads: Mapping[str, Tensor] | None = None,
        context: int = 1,
        adapter: Adapter | None = None,
    ):
        """``heads`` are a critic's, which take the output head's place. ``context`` neighbours divide the tokens of their rows. With an
        ``adapter`` only that is trained."""
        self.base = decoder
        self.adapter = adapter
        self.decoder = decoder if adapter is None else adapter.on(decoder)
        self.gang = gang
        self.named = (adapter or decoder).named_tensors()  # what the optimizer steps on
        self.context = join_context(gang, size=context)
        self.in_parts = False  # whether a rank has only a part of each weight
        self.together = context > 1  # whether no rank can run a forward or backward alone
        self.counts = self.context.rank == 0  # whether no rank before this one works on the same rows
        self.place = (
            gang.rank // context,
            gang.size // context,
        )  # which share of the rows is this rank's, and of how many
        self.norm = norm_of  # of all gradients together
        self._heads = heads
        self.head_dim, self.num_tensor, self.is_compiled = decoder.head_dim, 1, False
        self.fit: Fit | None = None  # the size of its micro-batches; its learner's, or made at the first call
        if heads:
            self.named = {name: tensor for name, tensor in self.named.items() if name != "lm_head"} | dict(heads)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def compile(self) -> None:
        self.is_compiled = True
        for decoder in {id(one): one for one in (self.decoder, self.base)}.values():
            decoder.compile()

    def stats(
        self, batch: MicroBatch, *, temperature: float, recompute: Recompute = Recompute.NO, plain: bool = False
    ) -> TokenStats:
        """``plain``: of the model's weights alone, without the adapter."""
        own = self.context.own(batch)
        picked = self._picked(batch, own, recompute, decoder=self.base if plain else self.decoder)
        targets = on_device(own.targets, picked.device)
        parts = token_stats(picked, self.decoder.lm_head, targets, temperature=temperature)
        return TokenStats(*(self.context.join(part, own) for part in parts))

    def values(self, batch: MicroBatch, *, recompute: Recompute = Recompute.NO) -> Tensor:
        assert self._heads is not None
        own = self.context.own(batch)
        picked = self._picked(batch, own, recompute, decoder=self.decoder)
        values = torch.nn.functional.linear(picked, self._heads["head"], self._heads["head_bias"])[:, 0].float()
        return self.context.join(values, own)

    def _picked(self, batch: MicroBatch, own: Own, recompute: Recompute, *, decoder: Decoder) -> Tensor:
        hidden = packed_hidden(
            decoder,
            batch,
            token_ids=own.token_ids,
            positions=own.positions,
            around=partial(self.context.around, count=batch.num_tokens),
            recompute=bool(recompute),
            store=store_of(recompute, self.device),
        )
        return hidden.index_select(0, on_device(own.logit_index, hidden.device))

    def each(self, packing: Packing, fit: Fit, run: Callable[[MicroBatch], T]) -> Iterator[tuple[MicroBatch, T]]:
        """What ``run`` gives for each micro-batch, without gradients."""
        return run_fitting(self, fit, packing, run, optimizer=None)

    def accumulate(
        self, packing: Packing, fit: Fit, loss_of: LossOf, optimizer: Optimizer
    ) -> list[tuple[MicroBatch, dict[str, Tensor]]]:
        """Backward through every micro-batch; returns each with its metrics."""
        weights = list(self.named.values())

        def run(batch: MicroBatch) -> dict[str, Tensor]:
            loss, metrics = loss_of(batch)
            # Not kept in a name: the gradients would be there during the next backward too.
            optimizer.accumulate(torch.autograd.grad(loss, weights, allow_unused=True))
            return metrics

        return list(run_fitting(self, fit, packing, run, optimizer=optimizer))

    def sum_gradients(self, optimizer: Optimizer) -> None:
        optimizer.sum_over(self.gang)

    def layout(self, name: str) -> WeightSplit:
        shape = (self.base.named_tensors() | self.named)[name].shape
        heads = dict(heads=self.decoder.num_heads, kv_heads=self.decoder.num_kv_heads)
        return WeightSplit(name=name, shape=shape, rows=fused_rows(name, shape[0], **heads))

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Of the whole weights."""
        return {name: tensor.shape for name, tensor in self.named.items()}

    @property
    def whole_shapes(self) -> Mapping[str, torch.Size]:
        """Of the decoder's weights, trained or not."""
        return {name: tensor.shape for name, tensor in self.decoder.named_tensors().items()}

    @property
    def frozen_bytes(self) -> int:
        """Of weights that are here beside those that are trained."""
        return 0 if self.adapter is None else sum(tensor.nbytes for tensor in self.base.named_tensors().values())

    def non_finite(self) -> list[str]:
        """Weights with a NaN or an infinity in them, on any rank."""
        return everyones(self.gang, non_finite_of(self.named, dtype=self.decoder.dtype))

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named.items()

    @property
    def base_names(self) -> list[str]:
        """Of the model's own weights, whatever is trained."""
        return list(self.base.named_tensors())

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.base.named_tensors().items()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self.named.items():
            tensor.copy_(weights[name])

    def masters(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """The weights at the precision that updates go to; empty: the weights themselves are it."""
        return optimizer.targets if optimizer.uses_masters else {}

    def load_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What ``load_state`` of any body takes."""
        return optimizer.state_dict()


def everyones(gang: Gang, names: list[str]) -> list[str]:
    """The names that any member of the gang has. All members get the same list, so that all go on or none."""
    return list(dict.fromkeys(name for own in gang.gather(names) for name in own))
