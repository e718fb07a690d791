"""Learners, critics and engines on tiny models, random rows to train on, and the gradients that they should have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tiny import make_model, random_prompts
from torch import Tensor

from rollcall.algo.recipe import loss_weights, policy_loss
from rollcall.base.types import Sample, attempts_of
from rollcall.config import Grpo, OptimizerSection, Ppo
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.native.fill import run_fills
from rollcall.learner.gang import Gang
from rollcall.learner.layout import WeightSplit, fused_rows
from rollcall.learner.learner import Critic, Learner
from rollcall.learner.optimizer import Optimizer
from rollcall.learner.tensor_parallel import cut_dim, split_order
from rollcall.model import attention
from rollcall.model.decoder import Decoder, fuse_parameters
from rollcall.plan.mesh import ModelSplit

TEMPERATURE = 0.8
LONGEST = 12
# Scores are compared in both ways everywhere; gradients only in slow tests.
WAYS = [
    pytest.param(way, marks=[] if way == attention.cpu_way() else pytest.mark.slow) for way in ("products", "fused")
]


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """The state as ``Optimizer.load_state_dict`` takes it. A checkpoint saves it weight by weight."""
    return {
        "optimizer": optimizer.section.optimizer.name,
        "adamw": optimizer.adamw.state_dict(),
        "num_updates": optimizer.num_updates,
        "masters": dict(optimizer.targets) if optimizer.uses_masters else {},
    }


def trainable(name: str = "qwen2-tied", **shape: Any) -> Any:
    model = make_model(name, **shape)
    fuse_parameters(model)
    return model


def section(**changes: Any) -> OptimizerSection:
    return OptimizerSection(**{"lr": 1e-3, "grad_clip": 0.0, **changes})


def make_learner(model: Any, algorithm: Any = None, *, total_updates: int = 10, **changes: Any) -> Learner:
    return Learner(
        model,
        section(**changes),
        algorithm=algorithm or Grpo(),
        temperature=TEMPERATURE,
        max_response_tokens=LONGEST,
        total_updates=total_updates,
    )


def make_samples(
    model: Any, *, num_prompts: int = 4, group_size: int = 3, seed: int = 0, masked: bool = True
) -> list[Sample]:
    """Random rows whose old, behaviour and reference log-probs lie around the policy's own."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for draw, prompt in enumerate(random_prompts(num_prompts, seed=seed)):
        for attempt in range(group_size):
            # Without the pad token: transformers gives its embedding no gradient.
            response = rng.integers(2, 40, size=rng.integers(1, LONGEST + 1)).astype(np.int32)

            def noise(scale: float, length: int = len(response)) -> np.ndarray:
                return (scale * rng.standard_normal(length)).astype(np.float32)

            mask = rng.random(len(response)) < 0.8 if masked else np.ones(len(response), dtype=np.bool_)
            samples.append(
                Sample(
                    draw=draw,
                    attempt=attempt,
                    prompt_ids=prompt,
                    response_ids=response,
                    mask=mask,
                    behaviour_logprobs=noise(0.2),
                    old_logprobs=noise(0.2),
                    reference_logprobs=noise(0.3),
                    advantages=rng.standard_normal(len(response)).astype(np.float32),
                    returns=rng.standard_normal(len(response)).astype(np.float32),
                    values=np.zeros(len(response), dtype=np.float32),
                )
            )
    return [_near_the_policy(sample, own) for sample, own in zip(samples, _own_logprobs(model, samples), strict=True)]


def _near_the_policy(sample: Sample, own: np.ndarray) -> Sample:
    assert sample.old_logprobs is not None and sample.reference_logprobs is not None
    return sample.with_(
        behaviour_logprobs=own + sample.behaviour_logprobs,
        old_logprobs=own + sample.old_logprobs,
        reference_logprobs=own + sample.reference_logprobs,
    )


@torch.no_grad()
def _own_logprobs(model: Any, samples: Sequence[Sample]) -> list[np.ndarray]:
    """By transformers, all rows in one padded batch: what follows a token changes nothing for it."""
    rows = [torch.from_numpy(np.concatenate((each.prompt_ids, each.response_ids)).astype(np.int64)) for each in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    logprobs = torch.log_softmax(model(ids, use_cache=False).logits.float() / TEMPERATURE, dim=-1)
    own = logprobs[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0].cpu().numpy()
    spans = ((len(each.prompt_ids) - 1, len(each.prompt_ids) + len(each.response_ids) - 1) for each in samples)
    return [row[start:end] for row, (start, end) in zip(own, spans, strict=True)]


def gradients(learner: Learner, samples: list[Sample]) -> dict[str, Tensor]:
    """The gradient that one update hands to AdamW, under the names of the module's own parameters.

    AdamW is replaced by a step that writes the gradient over the weight; the module shares those tensors.
    """
    optimizer = learner.optimizer

    @torch.no_grad()
    def write_gradient() -> None:
        for target in optimizer.targets.values():
            target.copy_(target.grad if target.grad is not None else torch.zeros_like(target))

    optimizer.adamw.step = write_gradient  # type: ignore[method-assign, assignment]
    learner.update(samples)
    return {name: parameter.detach().clone() for name, parameter in learner.model.named_parameters()}


def assert_same_gradient(one: dict[str, Tensor], other: dict[str, Tensor], *, tolerance: float = 2e-5) -> None:
    scale = max(float(grad.abs().max()) for grad in other.values())
    assert one.keys() == other.keys() and scale > 1e-4
    for name in other:
        assert float((one[name] - other[name]).abs().max()) <= tolerance * scale, name


def naive_logprobs(model: Any, samples: Sequence[Sample]) -> list[Tensor]:
    """[T, V] of each row by transformers' own forward, with gradient; padded, as in `_own_logprobs`."""
    rows = [torch.from_numpy(np.concatenate((each.prompt_ids, each.response_ids)).astype(np.int64)) for each in samples]
    logits = model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), use_cache=False).logits.float()
    logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    spans = (slice(len(each.prompt_ids) - 1, len(row) - 1) for each, row in zip(samples, rows, strict=True))
    return [row[span] for row, span in zip(logprobs, spans, strict=True)]


def naive_gradients(model: Any, algorithm: Any, samples: list[Sample]) -> dict[str, Tensor]:
    """Through transformers, one loss over all tokens, autograd."""
    counts = np.array([int(sample.mask.sum()) for sample in samples])
    attempts = attempts_of(samples)
    weights = loss_weights(algorithm, num_loss_tokens=counts, attempts=attempts, max_response_tokens=LONGEST)
    rows = naive_logprobs(model, samples)
    masks = [torch.from_numpy(sample.mask) for sample in samples]

    def flat(name: str) -> Tensor:
        return torch.cat(
            [torch.from_numpy(getattr(sample, name))[mask] for sample, mask in zip(samples, masks, strict=True)]
        )

    chosen = [
        row.gather(1, torch.from_numpy(sample.response_ids.astype(np.int64))[:, None])[:, 0][mask]
        for row, sample, mask in zip(rows, samples, masks, strict=True)
    ]
    entropy = [-(row.exp() * row).sum(-1)[mask] for row, mask in zip(rows, masks, strict=True)]
    policy_loss(
        algorithm,
        logprobs=torch.cat(chosen),
        old_logprobs=flat("old_logprobs"),
        behaviour_logprobs=flat("behaviour_logprobs"),
        reference_logprobs=flat("reference_logprobs"),
        advantages=flat("advantages"),
        weights=torch.from_numpy(np.repeat(weights, counts)),
        attempt=torch.from_numpy(np.repeat(attempts, counts)),
        num_attempts=int(attempts.max()) + 1,
        entropy=torch.cat(entropy),
    ).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def learner_of(gang: Gang, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Learner:
    model = make_model().to(dtype).requires_grad_(False)
    fuse_parameters(model)
    return Learner(
        model, section(lr=0.1, **changes), algorithm=Grpo(), temperature=TEMPERATURE, max_response_tokens=LONGEST,
        total_updates=10, gang=gang,
    )  # fmt: skip


def critic_of(gang: Gang, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Critic:
    model = make_model().to(dtype).requires_grad_(False)
    fuse_parameters(model)
    return Critic(model, section(lr=0.1, **changes), algorithm=Ppo(), total_updates=10, gang=gang)


def step(trained: Learner | Critic, seed: int) -> None:
    """Along a made-up gradient: a CPU need not compute in bfloat16 for it."""
    body: Any = trained.body
    generator = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in body.shapes.items()}
    trained.optimizer.accumulate([body.cut(name, whole[name]) if body.in_parts else whole[name] for name in whole])
    trained.optimizer.step()


def num_unique(rows: list[Sample]) -> int:
    """Different beginnings of what the rows feed, draw by draw."""
    fed = [(row.draw, [*row.prompt_ids.tolist(), *row.response_ids[:-1].tolist()]) for row in rows]
    return len({(draw, *ids[: end + 1]) for draw, ids in fed for end in range(len(ids))})


def make_sample(draw: int) -> Sample:
    row = np.zeros(3, dtype=np.float32)
    return Sample(
        draw=draw, attempt=0, prompt_ids=np.arange(2, dtype=np.int32), response_ids=np.arange(3, dtype=np.int32),
        mask=np.ones(3, dtype=bool), behaviour_logprobs=row, old_logprobs=None, reference_logprobs=None, advantages=row,
        returns=None, values=None,
    )  # fmt: skip


@cache
def decoder_of(architecture: str) -> Decoder:
    model = make_model(architecture).requires_grad_(False)
    fuse_parameters(model)
    return Decoder.of(model)


def layout_of(decoder: Decoder, name: str, split: ModelSplit) -> WeightSplit:
    """As ``Sharded`` makes it."""
    shape, field = decoder.named_tensors()[name].shape, name.rpartition(".")[2]
    heads: dict[str, Any] = dict(heads=decoder.shape.heads, kv_heads=decoder.shape.kv_heads)
    order = split_order(
        field,
        **heads,
        dim=decoder.shape.head_dim,
        intermediate=len(decoder.layers[0].gate_up) // 2,
        tensor=split.tensor,
    )
    return WeightSplit(
        name=name, shape=shape, rows=fused_rows(name, shape[0], **heads), split=split, dim=cut_dim(field), order=order,
        is_root="." not in name,
    )  # fmt: skip


def make_engine(
    model: Any,
    tokenizer: Any,
    *,
    max_running: int = 16,
    kv_tokens: int | None = None,
    ahead_from: float | None = None,
    way: str | None = None,
    **settings: Any,
) -> NativeEngine:
    """``way`` is one of a CPU's two ways to attend, or None for this machine's own."""
    fuse_parameters(model)
    with mock.patch("rollcall.engine.native.rows.cpu_way", lambda: way or attention.cpu_way()):
        engine = NativeEngine(model, tokenizer, max_running=max_running, kv_tokens=kv_tokens, **settings)
    if ahead_from is not None:
        engine.runner.ahead_from = ahead_from
    return engine


def count_fills(patch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call fills into the KV cache outside decoding, from now on."""
    counts: list[int] = []

    def counted(decoder: Any, fills: Any, *args: Any, **kwargs: Any) -> None:
        counts.append(sum(len(fill.token_ids) for fill in fills))
        run_fills(decoder, fills, *args, **kwargs)

    for module in ("rows", "paged"):
        if (loaded := sys.modules.get(f"rollcall.engine.native.{module}")) is not None:
            patch.setattr(loaded, "run_fills", counted)
    return counts


@pytest.fixture(params=["products", "fused"])
def cpu_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of a CPU's two ways to attend, whichever is this machine's own."""
    monkeypatch.setattr("rollcall.model.attention.cpu_way", lambda: request.param)
    return request.param
