"""The learner: samples in, a changed policy out.

``update`` packs the samples, sums gradients over micro-batches and steps the optimizer; ``score`` is the same forward
without gradients. The loss is a weighted sum over tokens whose weights are fixed before packing, so neither packing
nor accumulation changes the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollcall.algo.recipe import loss_weights, policy_loss, value_loss
from rollcall.config import Algorithm, OptimizerSection, Ppo
from rollcall.decoder import Decoder
from rollcall.learner.cores import map_side_by_side, num_side_by_side
from rollcall.learner.gang import Gang
from rollcall.learner.logprobs import TokenStats, token_stats
from rollcall.learner.model import packed_hidden
from rollcall.learner.optimizer import NonFiniteError, Optimizer
from rollcall.learner.packing import pack
from rollcall.types import Floats, MicroBatch, Sample

LossOf = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Per response token, [T]; zero where the mask is false."""

    logprobs: Floats
    entropy: Floats
    certainty: Floats


class Learner:
    """The policy and its optimizer."""

    def __init__(
        self,
        model: Any,
        section: OptimizerSection,
        *,
        algorithm: Algorithm,
        temperature: float,
        max_response_tokens: int,
        total_updates: int,
        gang: Gang | None = None,
    ):
        self.model = model
        self.gang = gang or Gang.alone()
        self.decoder = Decoder.of(model)
        self.section = section
        self.algorithm = algorithm
        self.temperature = temperature
        self.max_response_tokens = max_response_tokens
        self.optimizer = Optimizer(self.decoder.named_tensors(), section, total_updates=total_updates)
        self.num_tokens_trained = 0

    @property
    def rescores(self) -> bool:
        """Whether updates compare with log-probs of the policy as it was before the step."""
        return self.section.minibatches * self.section.epochs > 1 and self.algorithm.old_logprobs == "learner"

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]:
        """The policy's own statistics of the samples' tokens, at the sampling temperature."""
        return score_samples(
            self.decoder,
            samples,
            temperature=self.temperature,
            tokens_per_microbatch=self.section.tokens_per_microbatch,
        )

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """All updates of one step (epochs x minibatches); the metrics are means over them.

        Every member of a gang gets all samples and takes its share of them.
        """
        rows: list[dict[str, float]] = []
        if self.rescores and samples[0].old_logprobs is None:
            scores = self.score(samples)
            samples = [sample.with_(old_logprobs=row.logprobs) for sample, row in zip(samples, scores, strict=True)]
        for _ in range(self.section.epochs):
            for part in split_by_draw(samples, self.section.minibatches):
                rows.append(self._update_once(part))
        metrics = {name: float(np.mean([row[name] for row in rows if name in row])) for name in rows[0]}
        for name in ("mismatch", "mismatch_max"):  # only the first pass sees the policy that was sampled from
            metrics[name] = rows[0][name]
        return metrics

    def _update_once(self, samples: Sequence[Sample]) -> dict[str, float]:
        counts = np.array([int(sample.mask.sum()) for sample in samples])
        weights = loss_weights(self.algorithm, num_loss_tokens=counts, max_response_tokens=self.max_response_tokens)
        rows = share_rows(samples, self._rows_with_gradient(samples), self.gang)
        batches = pack(
            [samples[row] for row in rows],
            weights=weights[rows],
            tokens_per_microbatch=self.section.tokens_per_microbatch,
            parts=num_side_by_side(self.decoder.device),
        )
        total = accumulate_gradients(batches, self._loss, self.optimizer, gang=self.gang)
        self.num_tokens_trained += int(total.pop("packed"))
        weight = total.pop("weight")
        num_tokens = total.pop("tokens")
        largest = total.pop("mismatch_max")
        loss = total.pop("loss")
        mismatch = total.pop("mismatch")
        metrics = {name: value / weight for name, value in total.items() if name != "policy_loss"}
        return {
            **metrics, "loss": loss, "mismatch": mismatch / num_tokens, "mismatch_max": largest, **self.optimizer.step()
        }  # fmt: skip

    def _rows_with_gradient(self, samples: Sequence[Sample]) -> list[int]:
        """Rows that can move the weights. Without KL or entropy in the loss a row of zero advantages cannot, and the
        loss weights were fixed with it counted: leaving it out is exact, and saves its share of the work."""
        regularised = self.algorithm.entropy_coef > 0 or (self.algorithm.kl_coef > 0 and self.algorithm.kl_in == "loss")
        with_loss = [row for row, sample in enumerate(samples) if sample.mask.any()]
        if regularised:
            return with_loss
        return [row for row in with_loss if samples[row].advantages.any()] or with_loss[:1]

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        recompute = self.section.activation_checkpointing
        stats = batch_stats(self.decoder, batch, temperature=self.temperature, recompute=recompute)
        behaviour = self._tensor(batch.behaviour_logprobs)
        result = policy_loss(
            self.algorithm,
            logprobs=stats.logprobs,
            old_logprobs=self._tensor(batch.old_logprobs),
            behaviour_logprobs=behaviour,
            reference_logprobs=self._tensor(batch.reference_logprobs),
            advantages=self._tensor(batch.advantages),
            weights=self._tensor(batch.weights),
            row=torch.from_numpy(batch.row).to(self.decoder.device),
            num_rows=batch.num_rows,
            entropy=stats.entropy if self.algorithm.entropy_coef > 0 else stats.entropy.detach(),
        )
        difference = (stats.logprobs.detach() - behaviour).abs()
        extra = {
            "loss": result.loss.detach(),
            "mismatch": difference.sum(),
            "mismatch_max": difference.max(),
            "tokens": torch.tensor(float(len(batch.targets))),
        }
        return result.loss, {**result.metrics, **extra}

    def _tensor(self, array: Any) -> Any:
        return None if array is None else torch.from_numpy(array).to(self.decoder.device)


class Critic:
    """PPO's value function: a policy-shaped body with a one-number head, and its own optimizer."""

    def __init__(
        self, model: Any, section: OptimizerSection, *, algorithm: Ppo, total_updates: int, gang: Gang | None = None
    ):
        self.gang = gang or Gang.alone()
        self.decoder = Decoder.of(model)
        size, device, dtype = model.config.hidden_size, self.decoder.device, self.decoder.dtype
        self.head = torch.zeros(1, size, device=device, dtype=dtype)  # a fresh critic knows nothing: values are 0
        self.head_bias = torch.zeros(1, device=device, dtype=dtype)
        self.section = section
        self.algorithm = algorithm
        self.optimizer = Optimizer(self.named_tensors(), section, total_updates=total_updates)

    def named_tensors(self) -> dict[str, Tensor]:
        body = {name: tensor for name, tensor in self.decoder.named_tensors().items() if name != "lm_head"}
        return {**body, "head": self.head, "head_bias": self.head_bias}

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """The value before each response token, [T] per sample."""
        out = [np.zeros(len(sample.response_ids), dtype=np.float32) for sample in samples]
        for batch in pack_unweighted(samples, self.section.tokens_per_microbatch):
            scatter(self._values(batch), batch, samples, out)
        return out

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        rows: list[dict[str, float]] = []
        for _ in range(self.section.epochs):
            for part in split_by_draw(samples, self.section.minibatches):
                counts = np.array([int(sample.mask.sum()) for sample in part])
                weights = np.full(len(part), 1.0 / max(counts.sum(), 1), dtype=np.float32)
                mine = share_rows(part, range(len(part)), self.gang)
                batches = pack(
                    [part[row] for row in mine],
                    weights=weights[mine],
                    tokens_per_microbatch=self.section.tokens_per_microbatch,
                    parts=num_side_by_side(self.decoder.device),
                )
                total = accumulate_gradients(batches, self._loss, self.optimizer, gang=self.gang)
                self.optimizer.step()
                rows.append({"value_loss": total["loss"]})
        return {"value_loss": float(np.mean([row["value_loss"] for row in rows]))}

    def _values(self, batch: MicroBatch) -> Tensor:
        hidden = packed_hidden(self.decoder, batch, recompute=self.section.activation_checkpointing)
        picked = hidden.index_select(0, torch.from_numpy(batch.logit_index).to(hidden.device))
        return torch.nn.functional.linear(picked, self.head, self.head_bias)[:, 0].float()

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.values is not None and batch.returns is not None, "the critic learns from returns"
        device = self.decoder.device
        result = value_loss(
            self.algorithm,
            values=self._values(batch),
            old_values=torch.from_numpy(batch.values).to(device),
            returns=torch.from_numpy(batch.returns).to(device),
            weights=torch.from_numpy(batch.weights).to(device),
        )
        return result.loss, {"loss": result.loss.detach()}


def share_rows(samples: Sequence[Sample], rows: Sequence[int], gang: Gang) -> list[int]:
    """Those of the rows that this member of the gang works on: a fair share of the tokens."""
    costs = [len(samples[row].prompt_ids) + len(samples[row].response_ids) for row in rows]
    return [rows[index] for index in gang.share(costs, keys=[samples[row].draw for row in rows])]


def accumulate_gradients(
    batches: Sequence[MicroBatch], loss_of: LossOf, optimizer: Optimizer, *, gang: Gang
) -> dict[str, float]:
    """Backward through every micro-batch of the gang; the metrics are sums over them (``*_max``: the largest)."""
    weights = list(optimizer.named.values())

    def gradients_of(batch: MicroBatch) -> tuple[tuple[Tensor | None, ...], dict[str, Tensor]]:
        loss, metrics = loss_of(batch)
        return torch.autograd.grad(loss, weights, allow_unused=True), metrics

    own: list[dict[str, Tensor]] = []
    for gradients, metrics in map_side_by_side(gradients_of, batches, width=num_side_by_side(weights[0].device)):
        optimizer.accumulate(gradients)
        own.append(metrics)
    rows = [{name: float(value) for name, value in row.items()} for row in own]  # here, not while others still compute
    for row, batch in zip(rows, batches, strict=True):
        row["packed"] = float(batch.num_tokens)
    everyone = [row for member in gang.gather(rows) for row in member]
    if not everyone:
        raise ValueError(
            "no completion of this step has a token to learn from; check rollout.max_response_tokens and stop"
        )
    total: dict[str, float] = {}
    for row in everyone:
        for name, value in row.items():
            pick = max if name.endswith("_max") else float.__add__
            total[name] = pick(total[name], value) if name in total else value
    if not math.isfinite(total["loss"]):
        optimizer.discard()
        raise NonFiniteError(f"the loss is {total['loss']}")
    optimizer.sum_over(gang)
    return total


def batch_stats(decoder: Decoder, batch: MicroBatch, *, temperature: float, recompute: bool = False) -> TokenStats:
    hidden = packed_hidden(decoder, batch, recompute=recompute)
    picked = hidden.index_select(0, torch.from_numpy(batch.logit_index).to(hidden.device))
    targets = torch.from_numpy(batch.targets).to(hidden.device)
    return token_stats(picked, decoder.lm_head, targets, temperature=temperature)


@torch.no_grad()
def score_samples(
    decoder: Decoder, samples: Sequence[Sample], *, temperature: float, tokens_per_microbatch: int
) -> list[TokenScores]:
    """A model's statistics of the samples' tokens; also how the frozen reference is asked."""
    names = ("logprobs", "entropy", "certainty")
    out = {name: [np.zeros(len(sample.response_ids), dtype=np.float32) for sample in samples] for name in names}
    for batch in pack_unweighted(samples, tokens_per_microbatch):
        stats = batch_stats(decoder, batch, temperature=temperature)
        for name in names:
            scatter(getattr(stats, name), batch, samples, out[name])
    return [TokenScores(**{name: out[name][index] for name in names}) for index in range(len(samples))]


def pack_unweighted(samples: Sequence[Sample], tokens_per_microbatch: int) -> list[MicroBatch]:
    return pack(samples, weights=np.zeros(len(samples), dtype=np.float32), tokens_per_microbatch=tokens_per_microbatch)


def scatter(values: Tensor, batch: MicroBatch, samples: Sequence[Sample], out: list[Floats]) -> None:
    """Per-loss-token values back to the rows they came from."""
    flat = values.float().cpu().numpy()
    for row, index in enumerate(batch.sample_index):
        out[index][samples[index].mask] = flat[batch.row == row]


def split_by_draw(samples: Sequence[Sample], parts: int) -> Iterator[Sequence[Sample]]:
    """Consecutive parts with equally many prompts; a group is never split, a part with nothing to learn left out."""
    draws = list(dict.fromkeys(sample.draw for sample in samples))
    size = -(-len(draws) // parts)
    some = any(sample.mask.any() for sample in samples)
    for start in range(0, len(draws), size):
        chosen = set(draws[start : start + size])
        part = [sample for sample in samples if sample.draw in chosen]
        if not some or any(sample.mask.any() for sample in part):
            yield part
