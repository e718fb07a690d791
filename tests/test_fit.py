"""Micro-batches that do not fit: split and computed again, with the same result; and the sentence where one row alone does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from learners import assert_same_gradient, gradients, make_learner, make_samples, section, trainable

from rollcall.base.errors import BatchTooLargeError, MemoryShortError, is_out_of_memory
from rollcall.base.types import MicroBatch
from rollcall.config import Gspo, Ppo
from rollcall.learner.fit import too_large
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Critic, Learner
from rollcall.learner.packing import Fit, Packing
from rollcall.plan.activations import Recompute
from rollcall.process.groups.host import RemoteFailureError

WHY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError(WHY)


def cap(learner: Learner, *, most: int, stage: str) -> list[int]:
    """From here on, what is larger than ``most`` tokens does not fit at this stage; the sizes that were tried."""
    stats, tried = learner.body.stats, []

    def capped(batch: MicroBatch, **how: Any) -> Any:
        tried.append(batch.num_tokens)
        if batch.num_tokens > most and stage == "forward":
            raise torch.OutOfMemoryError(WHY)
        found = stats(batch, **how)
        return found._replace(logprobs=_FailsBackward.apply(found.logprobs)) if batch.num_tokens > most else found

    learner.body.stats = capped  # type: ignore[method-assign]
    return tried


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_micro_batch_that_does_not_fit_is_split_and_the_gradient_is_the_same(
    stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = make_samples(trainable())
    whole = gradients(make_learner(trainable()), samples)
    learner = make_learner(trainable())
    tried = cap(learner, most=60, stage=stage)
    assert_same_gradient(gradients(learner, samples), whole)
    assert (
        tried[0] > 60
        and learner.fit.tokens <= 60
        and learner.fit.tokens == tried[0] // 2 ** (tried[0] // 60).bit_length()
    )
    told = capsys.readouterr().err
    assert f"actor.tokens_per_microbatch is {learner.fit.tokens} from now on" in told and "Traceback" not in told
    before = len(tried)
    learner.update(samples)
    assert max(tried[before:]) <= 60, "the size is kept"
    assert capsys.readouterr().err == "", "and told once"


def test_a_gradient_is_added_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples(trainable())
    whole = gradients(make_learner(trainable()), samples)
    learner = make_learner(trainable())
    to_float, calls = torch.Tensor.float, []

    def float_(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 3:
            raise torch.OutOfMemoryError(WHY)
        return to_float(tensor)

    accumulate = learner.optimizer.accumulate

    def capped(given: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "float", float_)
            accumulate(given)

    learner.optimizer.accumulate = capped  # type: ignore[method-assign]
    assert_same_gradient(gradients(learner, samples), whole)
    assert len(calls) > 3


def test_scores_and_values_are_the_same_after_a_split() -> None:
    samples = make_samples(trainable())
    expected = make_learner(trainable()).score(samples)
    learner = make_learner(trainable())
    tried = cap(learner, most=50, stage="forward")
    for one, other in zip(learner.score(samples), expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert len(tried) > 2 and learner.fit.tokens == tried[0] // 2
    plain, critic = (Critic(trainable(), section(), algorithm=Ppo(), total_updates=1) for _ in range(2))
    values = critic.body.values

    def capped(batch: MicroBatch, **how: Any) -> Any:
        if batch.num_tokens > 40:
            raise torch.OutOfMemoryError(WHY)
        return values(batch, **how)

    critic.body.values = capped  # type: ignore[method-assign]
    assert critic.update(samples) == pytest.approx(plain.update(samples), rel=1e-4)
    for one, other in zip(critic.values(samples), plain.values(samples), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert critic.fit.tokens <= 40


def test_layers_keep_less_step_by_step_before_the_run_ends(capsys: pytest.CaptureFixture[str]) -> None:
    samples = make_samples(trainable(), num_prompts=1, group_size=1)
    packing = Packing(samples=samples, weights=np.ones(1, dtype=np.float32), max_rows=None)
    (batch,) = packing.batches([0], 10_000)

    def steps(fit: Fit, furthest: Recompute) -> list[Recompute]:
        found = [fit.recompute]
        while fit.shrink(batch, why=WHY, units=1, furthest=furthest):
            found.append(fit.recompute)
        return found

    is_open = Fit(name="actor", tokens=800, recompute=Recompute.NO, may_recompute=True)
    assert steps(is_open, Recompute.ON_HOST) == list(Recompute)
    told = "".join(capsys.readouterr())
    assert "activation_checkpointing is true from" in told and "activation_checkpointing is offload from" in told
    on_cpu = Fit(name="actor", tokens=800, recompute=Recompute.NO, may_recompute=True)
    assert steps(on_cpu, Recompute.YES) == [Recompute.NO, Recompute.YES]
    fixed = Fit(name="actor", tokens=800, recompute=Recompute.YES)
    assert steps(fixed, Recompute.ON_HOST) == [Recompute.YES]


def test_rows_of_an_attempt_that_must_stay_together_do() -> None:
    samples = [sample.with_(attempt=0) for sample in make_samples(trainable(), num_prompts=3, group_size=2)]
    learner = make_learner(trainable(), Gspo())
    tried = cap(learner, most=20, stage="forward")
    with pytest.raises(MemoryShortError, match=r"an attempt \(2 rows that stay together\) with"):
        learner.update(samples)
    assert learner.fit.recompute, "the section leaves it open, so it is tried first"
    assert len(tried) > 2


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_one_row_alone_that_does_not_fit_ends_the_run_with_the_sum(stage: str) -> None:
    samples = make_samples(trainable())
    learner = make_learner(trainable(), activation_checkpointing=False)
    before = {name: tensor.clone() for name, tensor in learner.body.named.items()}
    cap(learner, most=1, stage=stage)
    with pytest.raises(MemoryShortError) as caught:
        learner.update(samples)
    told = str(caught.value)
    for part in ("weights", "optimizer state", "gradients", "activations of this row"):
        assert f"{part} " in told
    assert "Tried to allocate 2.00 GiB)" in told and "actor.activation_checkpointing=true" in told and "\n" not in told
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.body.named.items())
    assert caught.value.__context__ is None, "there is no traceback of torch behind it"


def test_what_is_not_about_memory_is_not_caught() -> None:
    learner = make_learner(trainable())

    def broken(batch: MicroBatch, **how: Any) -> Any:
        raise RuntimeError("shapes differ")

    learner.body.stats = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes differ"):
        learner.update(make_samples(trainable()))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(WHY), True),
        (MemoryError("numpy"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("shapes differ"), False),
        (MemoryShortError("out of memory"), False),
    ],
)
def test_errors_about_memory_are_known(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_ranks_that_run_together_end_the_attempt_with_half_the_size() -> None:
    learner, samples = make_learner(trainable()), make_samples(trainable())
    packing = Packing(samples=samples, weights=np.ones(len(samples), dtype=np.float32), max_rows=None)
    (batch,) = packing.batches(range(len(samples)), 10_000)
    error = too_large(learner.body, learner.fit, batch, packing, torch.OutOfMemoryError(WHY), optimizer=None)
    assert isinstance(error, BatchTooLargeError)
    assert (error.section, error.tokens) == ("actor", batch.num_tokens // 2)
    carried = RemoteFailureError.of(error)
    assert isinstance(carried.original, BatchTooLargeError) and carried.original.tokens == error.tokens
    assert str(carried) == str(error), "no traceback"
    (alone,) = packing.batches([0], 10_000)
    last = too_large(learner.body, learner.fit, alone, packing, torch.OutOfMemoryError(WHY), optimizer=None)
    assert type(last) is MemoryShortError and f"a row with {alone.num_tokens} tokens does not fit" in str(last)


def test_the_ranks_of_a_gang_take_the_smallest_size() -> None:
    fit = Fit(name="actor", tokens=800, recompute=Recompute.NO)
    fit.agree([(800, Recompute.YES), (400, Recompute.NO), (600, Recompute.ON_HOST)])
    assert (fit.tokens, fit.recompute) == (400, Recompute.ON_HOST)
    learner = make_learner(trainable())
    gang = Gang.alone()
    found: list[Any] = []

    def gather_bytes(data: bytes) -> list[bytes]:
        found.append(data)
        return [data]

    gang.gather_bytes = gather_bytes  # type: ignore[method-assign]
    learner.body.gang = gang
    learner.update(make_samples(trainable()))
    assert any(b"16384, 0]" in data for data in found)
