"""The learner's model: either all of its weights (``Whole``) or one rank's part of them (``sharded.py``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.base.types import MicroBatch
from rollcall.learner.context_parallel import ContextGroup, join_context, own_of
from rollcall.learner.gang import Gang
from rollcall.learner.layout import WeightSplit, fused_rows
from rollcall.learner.logprobs import TokenStats, token_stats
from rollcall.learner.optimizer import Optimizer, norm_of
from rollcall.learner.packing import Fit
from rollcall.model.adapter import Adapter
from rollcall.model.attention import layout_of, on_device, packed_attention
from rollcall.model.decoder import Decoder, Rope
from rollcall.model.layer import Halves, Ops, Pass, Shape, TorchOps, compiled_halves
from rollcall.model.load import non_finite_of
from rollcall.model.recompute import HostStore
from rollcall.plan.activations import Recompute

_ONE, _NOTHING = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
# The micro-batch for a rank that has none left while other ranks still have some.
IDLE = MicroBatch(
    token_ids=_ONE, positions=_ONE, kv_index=_ONE, cu_q=np.array([0, 1], dtype=np.int32),
    cu_k=np.array([0, 1], dtype=np.int32), logit_index=_ONE, targets=_ONE, row=_ONE, sample_index=_ONE, attempt=_ONE,
    weights=_NOTHING, behaviour_logprobs=_NOTHING, old_logprobs=None, reference_logprobs=None, advantages=_NOTHING,
    returns=None, values=None,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One micro-batch, or this rank's tokens from it, during its pass through the model."""

    token_ids: Tensor  # [N]
    layers: Pass
    logit_index: Tensor  # [M]
    targets: Tensor  # [M]
    temperature: float
    plain: bool  # without the adapter


class BodyBase(ABC):
    """One model's weights on one rank of a gang. All ranks make the same calls in the same order."""

    in_parts: bool  # whether a rank has only a part of each weight
    together: bool  # whether all ranks must run each forward and backward together
    counts: bool  # whether this is the first of the ranks that work on these rows
    place: tuple[int, int]  # index of this rank's share of the rows, and number of shares
    num_tensor = 1  # ranks across which each layer is split
    named: Mapping[str, Tensor]  # the weights that the optimizer updates
    base_names: list[str]  # names of the model's own weights, whatever is trained

    def __init__(
        self, decoder: Decoder, *, shape: Shape, rope: Rope, device: torch.device, gang: Gang, context: ContextGroup,
        adapter: Adapter | None,
    ):  # fmt: skip
        """``shape`` is the shape of this rank's part of a layer."""
        self.gang, self.context, self.adapter = gang, context, adapter
        self.device, self.dtype = device, decoder.dtype
        self.shape, self.rope, self.head_dim = shape, rope, decoder.shape.head_dim
        self.windows = [layer.window for layer in decoder.layers]
        self.halves, self.is_compiled = Halves(), False
        self.fit: Fit | None = None  # the micro-batch size; set by the learner, or created at the first call

    def compile(self) -> None:
        self.halves, self.is_compiled = compiled_halves(), True

    # The forward pass

    def stats(
        self, batch: MicroBatch, *, temperature: float, recompute: Recompute = Recompute.NO, plain: bool = False
    ) -> TokenStats:
        """Compute the token statistics. With ``plain``, compute them for the model without its adapter."""
        return TokenStats(*self._forward(batch, temperature=temperature, recompute=recompute, plain=plain))

    def values(self, batch: MicroBatch, *, recompute: Recompute = Recompute.NO) -> Tensor:
        (values,) = self._forward(batch, recompute=recompute)
        return values

    def _forward(
        self, batch: MicroBatch, *, temperature: float = 1.0, recompute: Recompute = Recompute.NO, plain: bool = False
    ) -> tuple[Tensor, ...]:
        device, own = self.device, own_of(batch, rank=self.context.rank, size=self.context.size)
        layout = layout_of(batch, device=device, dtype=self.dtype)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return packed_attention(q, k, v, layout, scale=self.shape.scale, window=self.windows[index])

        self.rope.grow(int(batch.positions.max()) + 1)
        work = Work(
            token_ids=on_device(own.token_ids, device),
            layers=Pass(
                ops=self._ops(*self.rope.at(on_device(own.positions, device))),
                attend=self.context.around(attend, count=batch.num_tokens),
                halves=self.halves,
                recompute=bool(recompute),
                store=store_of(recompute, device),
            ),
            logit_index=on_device(own.logit_index, device),
            targets=on_device(own.targets, device),
            temperature=temperature,
            plain=plain,
        )
        return tuple(self.context.join(part, own) for part in self._run(work))

    def _ops(self, cos: Tensor, sin: Tensor) -> Ops:
        return TorchOps(shape=self.shape, cos=cos, sin=sin)

    @abstractmethod
    def _run(self, work: Work) -> tuple[Tensor, ...]:
        """Compute ``head_outputs`` for the work's logits."""

    def nothing(self) -> Tensor:
        """Return the loss of an idle pass, which is zero and has only zero gradients."""
        return self._forward(IDLE)[0].sum() * 0.0

    @abstractmethod
    def gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        """Compute the gradients of one micro-batch, in the order of ``named``."""

    # The weights: full tensors, and this rank's parts of them

    @abstractmethod
    def local(self, name: str) -> Tensor:
        """Return this rank's part of a weight."""

    @abstractmethod
    def layout(self, name: str) -> WeightSplit: ...

    @abstractmethod
    def gather(self, name: str, local: Tensor) -> Tensor:
        """Gather the full tensor from all ranks' parts, on the device."""

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Cut this rank's part from a full tensor; ``gather`` is the inverse."""
        return self.layout(name).cut(whole)

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full trained weights in the model's compute dtype."""
        for name, local in self.named.items():
            yield name, self.gather(name, local.detach().to(self.dtype))

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.base_names:
            yield name, self.gather(name, self.local(name).detach().to(self.dtype))

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The shapes of the full trained weights."""
        return {name: self.layout(name).shape for name in self.named}

    @property
    def whole_shapes(self) -> Mapping[str, torch.Size]:
        """The shapes of the model's own full weights."""
        return {name: self.layout(name).shape for name in self.base_names}

    @property
    def frozen_bytes(self) -> int:
        """Memory for the model's own weights while only an adapter is trained; otherwise 0."""
        return 0 if self.adapter is None else sum(self.local(name).nbytes for name in self.base_names)

    def non_finite(self) -> list[str]:
        """Return the names of weights that contain a NaN or an infinity on any rank."""
        return self.gang.names_of_all(non_finite_of(self.named, dtype=self.dtype))

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, local in self.named.items():
            local.copy_(self.cut(name, weights[name]))


def store_of(recompute: Recompute, device: torch.device) -> HostStore | None:
    """Return a store that keeps layer inputs on the host for one forward and backward pass, or None if they stay on the device."""
    return HostStore(device) if recompute is Recompute.ON_HOST and device.type == "cuda" else None


def head_outputs(
    hidden: Tensor, weights: Mapping[str, Tensor], targets: Tensor, *, temperature: float
) -> tuple[Tensor, ...]:
    """Compute a critic's values or a policy's token statistics from normed states [M, C]."""
    if "head" in weights:
        return (F.linear(hidden, weights["head"], weights["head_bias"])[:, 0].float(),)
    return token_stats(hidden, weights.get("lm_head", weights["embed"]), targets, temperature=temperature)


class Whole(BodyBase):
    """A model that is complete in this process. ``sharded.Sharded`` has the same methods for a model that is split across ranks."""

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
        """``heads`` are a critic's heads, which replace the output head. The ``context`` neighbouring ranks split the tokens of their
        rows among themselves. With an ``adapter``, only the adapter is trained."""
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

    def local(self, name: str) -> Tensor:
        return self._weights[name]

    def layout(self, name: str) -> WeightSplit:
        shape = self._weights[name].shape
        heads = dict(heads=self.shape.heads, kv_heads=self.shape.kv_heads)
        return WeightSplit(name=name, shape=shape, rows=fused_rows(name, shape[0], **heads))

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local

    def masters(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """Return the master weights. The result is empty if the optimizer updates the weights themselves."""
        return optimizer.targets if optimizer.uses_masters else {}
