"""Token statistics straight from hidden states, against the whole softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollcall.learner import logprobs as module
from rollcall.learner.logprobs import token_stats

ROWS, SIZE, VOCABULARY = 23, 16, 211
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs(*, device: str = "cpu", scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, SIZE, generator=generator).to(device)
    weight = (scale * torch.randn(VOCABULARY, SIZE, generator=generator) / math.sqrt(SIZE)).to(device)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator).to(device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, temperature: float) -> Any:
    logprobs = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    certainty = (1 / VOCABULARY * (math.log(1 / VOCABULARY) - logprobs)).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy, certainty


@pytest.fixture(params=[1, 5, ROWS])
def rows_per_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size = request.param * VOCABULARY
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": size, "cuda": size})
    return request.param


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.8])
def test_statistics_equal_the_full_softmax(device: str, temperature: float, rows_per_chunk: int) -> None:
    hidden, weight, targets = inputs(device=device)
    stats = token_stats(hidden, weight, targets, temperature=temperature)
    logprobs, entropy, certainty = naive(hidden, weight, targets, temperature=temperature)
    torch.testing.assert_close(stats.logprobs, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.entropy, entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.certainty, certainty, atol=1e-5, rtol=1e-5)
    assert not stats.certainty.requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("logprob_factor", "entropy_factor"), [(1.0, 0.0), (1.0, 0.3), (0.0, 1.0)])
def test_the_gradient_equals_autograds(
    device: str, temperature: float, logprob_factor: float, entropy_factor: float, rows_per_chunk: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    shares = torch.randn(2, ROWS, generator=generator).to(device)
    grads = []
    for compute in (token_stats, naive):
        hidden, weight, targets = inputs(device=device)
        out: Any = compute(hidden, weight, targets, temperature=temperature)
        logprobs, entropy = (out.logprobs, out.entropy) if compute is token_stats else out[:2]
        loss = torch.zeros((), device=device)
        if logprob_factor:
            loss = loss + logprob_factor * (shares[0] * logprobs).sum()
        if entropy_factor:
            loss = loss + entropy_factor * (shares[1] * entropy).sum()
        loss.backward()
        grads.append((hidden.grad, weight.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


class LargestLogits(TorchDispatchMode):
    """Notes the most rows of any tensor that is as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.most_rows = 0
        self.num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim >= 2 and tensor.shape[-1] == VOCABULARY:
                rows = tensor.numel() // VOCABULARY
                if rows != SIZE:  # the transposed weight
                    self.most_rows, self.num_seen = max(self.most_rows, rows), self.num_seen + 1
        return out


def test_no_more_logits_exist_at_once_than_a_chunk_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": 5 * VOCABULARY, "cuda": 5 * VOCABULARY})
    hidden, weight, targets = inputs()
    with LargestLogits() as seen:
        stats = token_stats(hidden, weight, targets, temperature=0.7)
        (stats.logprobs.sum() + stats.entropy.sum()).backward()
    assert 0 < seen.most_rows <= 5 and seen.num_seen >= 2 * math.ceil(ROWS / 5)
    with LargestLogits() as seen:
        naive(*inputs(), temperature=0.7)[0].sum().backward()
    assert seen.most_rows == ROWS, "the watch sees a full matrix where there is one"


def test_a_chunk_holds_at_least_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": 1, "cuda": 1})
    hidden, weight, targets = inputs()
    stats = token_stats(hidden, weight, targets, temperature=1.0)
    torch.testing.assert_close(stats.logprobs, naive(hidden, weight, targets, temperature=1.0)[0], atol=1e-5, rtol=1e-5)


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = inputs(scale=500.0)
    stats = token_stats(hidden, weight, targets, temperature=1.0)
    (stats.logprobs.sum() + stats.entropy.sum()).backward()
    for values in (stats.logprobs, stats.entropy, stats.certainty, hidden.grad, weight.grad):
        assert values is not None and torch.isfinite(values).all()
    assert (stats.entropy >= -1e-3).all()


def test_a_frozen_weight_and_no_gradient_at_all_are_fine() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        assert not token_stats(hidden, weight, targets, temperature=1.0).logprobs.requires_grad
    token_stats(hidden, weight.detach(), targets, temperature=1.0).logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None
