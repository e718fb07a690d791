"""The learner updates the policy from samples.

``update`` packs the samples, sums gradients over micro-batches and steps the optimizer. ``score`` runs the same forward pass
without gradients. The loss is a weighted sum over tokens. The weights are fixed before packing, so neither packing
nor accumulation changes the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rollcall.algo.recipe import loss_weights, policy_loss, value_loss
from rollcall.base.errors import NonFiniteError, short_of_memory
from rollcall.base.types import Floats, MicroBatch, Sample, attempts_of
from rollcall.config import Algorithm, OptimizerSection, Ppo
from rollcall.learner.body import Whole
from rollcall.learner.fit import accumulate, each_fitting, step_sentence
from rollcall.learner.gang import Gang, share
from rollcall.learner.optimizer import Optimizer, optimizer_class
from rollcall.learner.packing import Fit, Packing
from rollcall.model.adapter import Adapter
from rollcall.model.attention import on_device
from rollcall.model.base import base_identities, is_adapter
from rollcall.model.decoder import Decoder
from rollcall.model.stored.tensors import Stored
from rollcall.plan.mesh import split_of

if TYPE_CHECKING:
    from rollcall.learner.sharded import Sharded  # loads torch.distributed, which few runs need

Body: TypeAlias = "Whole | Sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores per response token, [T]. They are zero where the mask is false."""

    logprobs: Floats
    entropy: Floats
    certainty: Floats


class Learner:
    """The policy and its optimizer.

    In a gang with several members, every member gets all samples and trains on its share. If the model is split
    (``section.sharding``, ``section.tensor_parallel_size``), all members must make every call together, including ``score``.
    """

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
        device: torch.device | None = None,
        mirror: bool = False,
        unread: Stored | None = None,
        adapter: Adapter | None = None,
    ):
        """If each rank copies only a part of ``model``, the model may be on a different device than ``device``. Training then does not
        change ``model``, unless ``mirror`` keeps it equal to the trained weights. ``unread`` contains the weights of a model on the meta
        device. With an ``adapter``, only the adapter is trained, and only the adapter is mirrored."""
        self.adapter = adapter
        self.model = model
        self.gang = gang or Gang.alone()
        self.section = section
        self.algorithm = algorithm
        self.temperature = temperature
        self.max_response_tokens = max_response_tokens
        self.body = make_body(model, section, gang=self.gang, device=device, unread=unread, adapter=adapter)
        self.fit = self.body.fit = Fit.of(section, name="actor")
        self.optimizer = Optimizer(self.body.named, section, total_updates=total_updates, norm=self.body.norm)
        self.num_tokens_trained = 0
        mirrored = adapter or Decoder.of(model)
        self._mirrored = mirrored.named_tensors() if mirror and self.body.in_parts else {}

    @cached_property
    def base_identities(self) -> dict[str, str]:
        """Fingerprints, by dtype, of the frozen weights that the adapter is added to. Empty without an adapter, or if its base is itself
        an adapter, because an adapter has no fingerprint."""
        if self.adapter is None or is_adapter(self.adapter.base):
            return {}
        return base_identities(self.body.base_tensors(), dtype=self.body.dtype)

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]:
        """Compute the policy's own statistics for the samples' tokens at the sampling temperature."""
        return score_samples(self.body, samples, self.section, temperature=self.temperature)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Run all updates of one step (epochs x minibatches). The metrics are means over the updates."""
        rows: list[dict[str, float]] = []
        if self.algorithm.rescores(self.section) and samples[0].old_logprobs is None:
            scores = self.score(samples)
            samples = [sample.with_(old_logprobs=row.logprobs) for sample, row in zip(samples, scores, strict=True)]
        for _ in range(self.section.epochs):
            for part in split_by_draw(samples, self.section.minibatches):
                rows.append(self._update_once(part))
        self.refresh()
        metrics = {name: float(np.mean([row[name] for row in rows if name in row])) for name in rows[0]}
        # Only in the first update is the policy still the one that was sampled from.
        first = {name: rows[0][name] for name in ("mismatch", "mismatch_max")}
        return {**metrics, **first, "lr": rows[-1]["lr"]}

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the trained weights to a model that mirrors them."""
        if self._mirrored:
            for name, tensor in self.body.whole_tensors():
                self._mirrored[name].copy_(tensor)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Make dropout in an update depend only on the run's seed, the update and the rank that has the tokens."""
        if self.adapter is None or not self.adapter.section.dropout:
            yield
            return
        device = self.body.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # The ranks of a tensor group compute with the same tokens, so they must draw the same numbers.
            numbers = (self.adapter.seed, self.optimizer.num_updates, self.body.place[0], self.body.context.rank)
            torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))
            yield

    def _update_once(self, samples: Sequence[Sample]) -> dict[str, float]:
        weights = loss_weights(
            self.algorithm,
            num_loss_tokens=np.array([int(sample.mask.sum()) for sample in samples]),
            attempts=attempts_of(samples),
            max_response_tokens=self.max_response_tokens,
        )
        rows = self._rows_with_gradient(samples)
        with self._drawing():
            total, stepped = step_on(self, samples, rows=rows, weights=weights)
        self.num_tokens_trained += int(total.pop("packed"))
        weight, num_tokens, largest = total.pop("weight"), total.pop("tokens"), total.pop("mismatch_max")
        loss, mismatch = total.pop("loss"), total.pop("mismatch")
        metrics = {name: value / weight for name, value in total.items()}
        return {**metrics, "loss": loss, "mismatch": mismatch / num_tokens, "mismatch_max": largest, **stepped}

    def _rows_with_gradient(self, samples: Sequence[Sample]) -> list[int]:
        """Return the rows that can change the weights. Without KL or entropy in the loss, a row with zero advantages cannot change them.
        The loss weights already count such a row, so leaving it out is exact and saves work."""
        regularised = self.algorithm.entropy_coef > 0 or (self.algorithm.kl_coef > 0 and self.algorithm.kl_in == "loss")
        with_loss = [row for row, sample in enumerate(samples) if sample.mask.any()]
        if regularised:
            return with_loss
        learns = {row for row in with_loss if samples[row].advantages.any()}
        if self.algorithm.name == "gspo":  # GSPO computes one ratio per attempt, over all its rows
            attempts = attempts_of(samples)
            learning = {attempts[row] for row in learns}
            learns = {row for row in with_loss if attempts[row] in learning}
        return sorted(learns) or with_loss[:1]

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        stats = self.body.stats(batch, temperature=self.temperature, recompute=self.fit.recompute)
        given: dict[str, Any] = {}
        for name in ("behaviour_logprobs", "old_logprobs", "reference_logprobs", "advantages", "weights"):
            array = getattr(batch, name)
            given[name] = None if array is None else on_device(array, self.body.device)
        result = policy_loss(
            self.algorithm,
            logprobs=stats.logprobs,
            **given,
            attempt=on_device(batch.attempt[batch.row], self.body.device),
            num_attempts=batch.num_attempts,
            entropy=stats.entropy if self.algorithm.entropy_coef > 0 else stats.entropy.detach(),
        )
        difference = (stats.logprobs.detach() - given["behaviour_logprobs"]).abs()
        return result.loss, {
            **result.metrics,
            "loss": result.loss.detach(),
            "mismatch": difference.sum(),
            "mismatch_max": difference.max(),
            "tokens": torch.tensor(float(len(batch.targets))),
        }


class Critic:
    """PPO's value function: a body like the policy's but with a scalar head, and its own optimizer."""

    def __init__(
        self,
        model: Any,
        section: OptimizerSection,
        *,
        algorithm: Ppo,
        total_updates: int,
        gang: Gang | None = None,
        device: torch.device | None = None,
        unread: Stored | None = None,
    ):
        self.gang = gang or Gang.alone()
        # A new critic's values are all 0.
        heads = {"head": torch.zeros(1, model.config.hidden_size), "head_bias": torch.zeros(1)}
        self.section = section
        self.algorithm = algorithm
        self.body = make_body(model, section, gang=self.gang, device=device, heads=heads, name="critic", unread=unread)
        self.fit = self.body.fit = Fit.of(section, name="critic")
        self.optimizer = Optimizer(self.body.named, section, total_updates=total_updates, norm=self.body.norm)

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Compute the value before each response token, [T] per sample."""
        body = self.body
        (values,) = over_samples(body, samples, self.section, lambda batch: (body.values(batch),), num_outputs=1)
        return values

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        losses: list[float] = []
        for _ in range(self.section.epochs):
            for part in split_by_draw(samples, self.section.minibatches):
                counts = np.array([int(sample.mask.sum()) for sample in part])
                weights = np.full(len(part), 1.0 / max(counts.sum(), 1), dtype=np.float32)
                total, _ = step_on(self, part, rows=range(len(part)), weights=weights)
                losses.append(total["loss"])
        return {"value_loss": float(np.mean(losses))}

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.values is not None and batch.returns is not None, "the critic learns from returns"
        device = self.body.device
        loss = value_loss(
            self.algorithm,
            values=self.body.values(batch, recompute=self.fit.recompute),
            old_values=on_device(batch.values, device),
            returns=on_device(batch.returns, device),
            weights=on_device(batch.weights, device),
        )
        return loss, {"loss": loss.detach()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The frozen policy, which computes log-probs of samples. With ``plain``, it uses ``body`` without the adapter."""

    body: Body
    section: OptimizerSection
    temperature: float
    plain: bool = False

    def __call__(self, samples: Sequence[Sample]) -> list[TokenScores]:
        return score_samples(self.body, samples, self.section, temperature=self.temperature, plain=self.plain)


def make_body(
    model: Any,
    section: OptimizerSection,
    *,
    gang: Gang,
    device: torch.device | None = None,
    heads: Mapping[str, Tensor] | None = None,
    frozen: bool = False,
    name: str = "actor",
    unread: Stored | None = None,
    adapter: Adapter | None = None,
) -> Body:
    """Create this rank's body: all of the model's weights, or a part of them. ``unread`` has the weights of a model on the meta
    device. With an ``adapter``, only the adapter is trained."""
    split = split_of(section, rank=gang.rank, nodes=gang.nodes, name=name)
    optimizer_class(section, name=name, in_parts=split is not None)
    decoder = Decoder.of(model)
    if split is None:
        if heads is not None:
            heads = {key: head.to(decoder.device, decoder.dtype) for key, head in heads.items()}
        return Whole(decoder, gang=gang, heads=heads, context=section.context_parallel_size, adapter=adapter)
    from rollcall.learner.sharded import Sharded

    where = device or decoder.device
    if section.cpu_offload and where.type == "cpu":
        raise ValueError(
            f"{name}.cpu_offload=true keeps weights off the accelerator, but this run uses only the CPU; leave the key out"
        )
    return Sharded(
        decoder,
        section,
        gang=gang,
        split=split,
        device=where,
        heads=heads,
        frozen=frozen,
        unread=unread,
        adapter=adapter,
    )


def whole_body(model: Any, *, gang: Gang | None = None, context: int = 1, adapter: Adapter | None = None) -> Body:
    """Return a full model in this process, for scoring only. In a ``gang``, each set of ``context`` neighbouring ranks splits the tokens
    of its rows."""
    mine = gang if gang is not None and context > 1 else Gang.alone()
    return Whole(Decoder.of(model), gang=mine, context=context, adapter=adapter)


def share_rows(samples: Sequence[Sample], rows: Sequence[int], body: Body) -> list[int]:
    """Return the rows for this member of the gang. All members get about the same number of tokens."""
    costs = [len(samples[row].prompt_ids) + len(samples[row].response_ids) for row in rows]
    rank, size = body.place
    keys, attempts = [samples[row].draw for row in rows], attempts_of([samples[row] for row in rows]).tolist()
    return [rows[index] for index in share(costs, keys=keys, attempts=attempts, rank=rank, size=size)]


def step_on(
    model: Learner | Critic, samples: Sequence[Sample], *, rows: Sequence[int], weights: Floats
) -> tuple[dict[str, float], dict[str, float]]:
    """Run the backward passes of the gang's micro-batches for these rows, then one optimizer step. Return the metrics of both. The
    micro-batches' metrics are summed, except for ``*_max``, where the largest value is returned."""
    body, optimizer = model.body, model.optimizer
    mine = share_rows(samples, rows, body)
    packing = Packing(
        samples=[samples[row] for row in mine],
        weights=weights[mine],
        max_rows=model.section.train_micro_batch_size,
        whole_attempts=model.algorithm.name == "gspo",  # its ratio is a mean over the full attempt
    )
    own = accumulate(body, model.fit, packing, model._loss, optimizer)
    # Read the values only now, because reading them earlier would make the device wait between micro-batches.
    metrics = [
        {name: float(value) for name, value in row.items()} | {"packed": float(batch.num_tokens)} for batch, row in own
    ]
    members = body.gang.gather([metrics if body.counts else [], model.fit.tokens, model.fit.recompute])
    everyone = [row for rows, _, _ in members for row in rows]
    model.fit.agree([(tokens, recompute) for _, tokens, recompute in members])
    if not everyone:
        raise ValueError(
            "no completion of this step has a token to learn from; check rollout.max_response_tokens and rollout.stop"
        )
    total: dict[str, float] = {}
    for row in everyone:
        for name, value in row.items():
            pick = max if name.endswith("_max") else float.__add__
            total[name] = pick(total[name], value) if name in total else value
    if not math.isfinite(total["loss"]):
        optimizer.discard()
        raise NonFiniteError(f"the loss is {total['loss']}")
    with short_of_memory(partial(step_sentence, body, model.fit, optimizer)):
        if not body.in_parts:  # otherwise, FSDP has summed them in every backward pass
            optimizer.sum_over(body.gang)
        return total, optimizer.step()


@torch.no_grad()
def score_samples(
    body: Body, samples: Sequence[Sample], section: OptimizerSection, *, temperature: float, plain: bool = False
) -> list[TokenScores]:
    """Compute a model's statistics for the samples' tokens. The frozen reference uses this too."""
    run = partial(body.stats, temperature=temperature, plain=plain)
    rows = zip(*over_samples(body, samples, section, run, num_outputs=3), strict=True)
    return [TokenScores(logprobs=one, entropy=two, certainty=three) for one, two, three in rows]


def over_samples(
    body: Body,
    samples: Sequence[Sample],
    section: OptimizerSection,
    run: Callable[[MicroBatch], tuple[Tensor, ...]],
    *,
    num_outputs: int,
) -> list[list[Floats]]:
    """Compute the outputs of ``run`` for each loss token, as [T] per sample. If the members of a gang run every forward pass
    together, each member runs its share of the samples, and all members get all results."""
    mine = share_rows(samples, range(len(samples)), body) if body.together else list(range(len(samples)))
    own = [samples[index] for index in mine]
    out = [[np.zeros(len(sample.response_ids), dtype=np.float32) for sample in own] for _ in range(num_outputs)]
    packing = Packing(samples=own, weights=np.zeros(len(own), dtype=np.float32), max_rows=section.logprob_batch_size)
    fit = body.fit = body.fit or Fit.of(section, name="actor")
    for batch, outputs in each_fitting(body, fit, packing, run):
        for values, rows in zip(outputs, out, strict=True):
            scatter(values, batch, own, rows)
    if not body.together:
        return out
    # Gather the indices of each rank's samples and all their values, output by output.
    counts = body.counts
    shares = body.gang.gather(mine if counts else [])
    flat = np.concatenate([np.zeros(0, dtype=np.float32), *(row for rows in out for row in rows)])
    found: list[list[Floats]] = [[np.zeros(0, dtype=np.float32)] * len(samples) for _ in range(num_outputs)]
    for indices, numbers in zip(shares, body.gang.gather_floats(flat if counts else flat[:0]), strict=True):
        start = 0
        for rows in found:
            for index in indices:
                rows[index] = numbers[start : start + len(samples[index].response_ids)]
                start += len(rows[index])
    return found


def scatter(values: Tensor, batch: MicroBatch, samples: Sequence[Sample], out: list[Floats]) -> None:
    """Write values per loss token back to the rows from which they came."""
    flat = values.float().cpu().numpy()
    for row, index in enumerate(batch.sample_index):
        out[index][samples[index].mask] = flat[batch.row == row]


def split_by_draw(samples: Sequence[Sample], parts: int) -> Iterator[Sequence[Sample]]:
    """Yield consecutive parts with the same number of prompts. A group is never split. A part without loss tokens is left out."""
    draws = list(dict.fromkeys(sample.draw for sample in samples))
    size = -(-len(draws) // parts)
    some = any(sample.mask.any() for sample in samples)
    for start in range(0, len(draws), size):
        chosen = set(draws[start : start + size])
        part = [sample for sample in samples if sample.draw in chosen]
        if not some or any(sample.mask.any() for sample in part):
            yield part
