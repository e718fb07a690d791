"""AdamW with moments in bfloat16: how far it drifts from float32, that small changes are not lost, and that a resume goes on the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from learners import make_learner, make_samples, state_of, trainable

from rollcall.config import OptimizerSection
from rollcall.learner.optimizer import HalfStateAdamW, Optimizer, by_chance

HALF: dict[str, Any] = {"optimizer": {"state": "bfloat16"}}


@pytest.mark.slow
def test_the_weights_stay_close_to_those_of_float32_state() -> None:
    samples = make_samples(trainable())
    start = {name: tensor.clone() for name, tensor in make_learner(trainable()).body.named.items()}
    wide, half = make_learner(trainable(), weight_decay=0.1), make_learner(trainable(), weight_decay=0.1, **HALF)
    for _ in range(10):
        wide.update(samples)
        half.update(samples)
    moved = drift = 0.0
    for name, tensor in wide.body.named.items():
        moved += float((tensor - start[name]).detach().square().sum())
        drift += float((tensor - half.body.named[name]).detach().square().sum())
    assert (drift / moved) ** 0.5 < 0.02, "of the way that they went; measured: 0.003"
    kept = [value for entry in half.optimizer.adamw.state.values() for value in entry.values() if value.ndim]
    assert {value.dtype for value in kept} == {torch.bfloat16}


def test_a_change_smaller_than_bfloat16_shows_is_not_lost() -> None:
    """The second moment falls from 1 toward 0.01 by a thousandth of the difference a step; rounded to the nearest it would stay."""
    weight = torch.zeros(4096, requires_grad=True)
    optimizer = HalfStateAdamW([weight], lr=0.0, betas=(0.9, 0.999), eps=1e-8)
    weight.grad = torch.full_like(weight, 0.1)
    optimizer.step()
    optimizer.state[weight]["exp_avg_sq"].fill_(1.0)
    for _ in range(300):
        optimizer.step()
    exact = 0.01 + 0.99 * 0.999**300
    assert float(optimizer.state[weight]["exp_avg_sq"].float().mean()) == pytest.approx(exact, rel=0.01)


def test_rounding_by_chance_keeps_the_mean_and_the_sign() -> None:
    x = torch.full((20_000,), 1.001)
    rounded = by_chance(-x, torch.Generator().manual_seed(3))
    assert set(rounded.tolist()) == {-1.0, -1.0078125}
    assert float(rounded.double().mean()) == pytest.approx(-1.001, abs=2e-4)


def test_a_resume_draws_the_same_chance_and_float32_state_is_taken_over() -> None:
    samples = make_samples(trainable())
    whole = make_learner(trainable(), **HALF)
    whole.update(samples)
    state = copy.deepcopy(state_of(whole.optimizer))
    weights = {name: tensor.clone() for name, tensor in whole.body.named.items()}
    whole.update(samples)
    for settings in (HALF, {}):
        again = make_learner(trainable(), **settings)
        again.body.load(weights)
        again.optimizer.load_state_dict(copy.deepcopy(state))
        again.update(samples)
        for name, tensor in whole.body.named.items():
            torch.testing.assert_close(again.body.named[name], tensor, rtol=0, atol=0 if settings else 1e-5)
    wide = make_learner(trainable())
    wide.update(samples)
    half = make_learner(trainable(), **HALF)
    half.optimizer.load_state_dict(state_of(wide.optimizer))
    kept = next(iter(half.optimizer.adamw.state.values()))
    assert kept["exp_avg"].dtype == torch.bfloat16 and half.optimizer.num_updates == 1


def test_scalars_large_weights_and_early_state_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    named = {"one": torch.randn(()), "many": torch.randn(7, 5), "turned": torch.randn(5, 9).t()}
    results = []
    for early in (False, True):
        optimizer = Optimizer(
            {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in named.items()},
            OptimizerSection(lr=0.01, **HALF),
            total_updates=3,
        )
        if early:
            optimizer.allocate()
        for _ in range(3):
            optimizer.accumulate([torch.ones_like(tensor) for tensor in optimizer.named.values()])
            optimizer.step()
        results.append({name: tensor.detach().clone() for name, tensor in optimizer.named.items()})
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]) and not torch.equal(tensor, named[name])


def test_a_part_without_rows_has_state_of_the_same_kind() -> None:
    """As the second rank has of a critic's head, which is one row."""
    weights = {"head": torch.zeros(0, 3), "norm": torch.ones(2)}
    optimizer = Optimizer(weights, OptimizerSection(**HALF), total_updates=3)
    optimizer.allocate()
    optimizer.accumulate([torch.zeros(0, 3), torch.ones(2)])
    optimizer.step()
    assert optimizer.states()["head"]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.num_updates == 1 and weights["norm"].max() < 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"state": "bfloat16", "name": "torch.optim.SGD"}}, "works only with torch.optim.AdamW"),
        (
            {"optimizer": {"state": "bfloat16", "kwargs": {"amsgrad": True}}},
            "does not work with optimizer.kwargs.amsgrad",
        ),
        ({"optimizer": {"state": "bfloat16"}, "master_weights": False}, "state is bfloat16 already"),
        ({"optimizer": {"state": "bfloat16"}, "cpu_offload": True, "sharding": "fsdp"}, "in host memory"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OptimizerSection(**changes)  # type: ignore[arg-type]
