"""A model that is complete in this process. ``sharded.Sharded`` has the same methods for a divided model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollcall.learner.body import BodyBase, Work, head_outputs
from rollcall.learner.context_parallel import join_context
from rollcall.learner.gang import Gang
from rollcall.learner.layout import WeightSplit, fused_rows
from rollcall.learner.optimizer import Optimizer, norm_of
from rollcall.model.adapter import Adapter
from rollcall.model.decoder import Decoder


class Whole(BodyBase):
    in_parts = False
    norm = staticmethod(norm_of)  # over all gradients together

    def __init__(
        self,
        decoder: Decoder,
        *,
        gang: Gang,
        heads: Mapping[str, Tensor] | None = None,
        context: int = 1,
        adapter: Adapter | None = None,
    ):
        """``heads`` are a critic's heads, which replace the output head. ``context`` neighbours divide the tokens of their rows. With
        an ``adapter``, only the adapter is trained."""
        group = join_context(gang, size=context)
        super().__init__(
            decoder, shape=decoder.shape, rope=decoder.rope, device=decoder.device, gang=gang, context=group,
            adapter=adapter,
        )  # fmt: skip
        self.base = decoder
        self.decoder = decoder if adapter is None else adapter.on(decoder)
        self.together = context > 1
        self.counts = group.rank == 0
        self.place = (gang.rank // context, gang.size // context)
        base = decoder.named_tensors()
        trained = adapter.named_tensors() if adapter is not None else base | dict(heads or {})
        self._weights = base | trained
        self.base_names = list(base)
        self.named = {name: tensor for name, tensor in trained.items() if not (heads and name == "lm_head")}

    def _run(self, work: Work) -> tuple[Tensor, ...]:
        decoder = self.base if work.plain else self.decoder
        hidden = decoder.run(work.token_ids, work.layers).index_select(0, work.logit_index)
        return head_outputs(hidden, self._weights, work.targets, temperature=work.temperature)

    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        return torch.autograd.grad(loss, list(self.named.values()), allow_unused=True)

    def sum_gradients(self, optimizer: Optimizer) -> None:
        optimizer.sum_over(self.gang)

    def local(self, name: str) -> Tensor:
        return self._weights[name]

    def layout(self, name: str) -> WeightSplit:
        shape = self._weights[name].shape
        heads = dict(heads=self.shape.heads, kv_heads=self.shape.kv_heads)
        return WeightSplit(name=name, shape=shape, rows=fused_rows(name, shape[0], **heads))

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local

    def masters(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """Return the master weights; empty if the optimizer updates the weights themselves."""
        return optimizer.targets if optimizer.uses_masters else {}
