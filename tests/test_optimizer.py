"""AdamW as the paper writes it, the schedule, clipping, master weights, and refusal of non-finite gradients."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from learners import state_of
from torch import Tensor

from rollcall.base.errors import NonFiniteError
from rollcall.config import OptimizerSection
from rollcall.learner.optimizer import Optimizer


def weights(*, dtype: torch.dtype = torch.float32, transposed: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 5, generator=generator).to(dtype)
    if transposed:  # as the CPU keeps linear weights
        matrix = matrix.t().contiguous().t()
    return {"matrix": matrix, "vector": torch.randn(5, generator=generator).to(dtype)}


def section(**changes: Any) -> OptimizerSection:
    return OptimizerSection(**{"lr": 0.01, "grad_clip": 0.0, **changes})


def make_gradients(named: dict[str, Tensor], *, seed: int, factor: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: factor * torch.randn(weight.shape, generator=generator) for name, weight in named.items()}


def give(optimizer: Optimizer, grads: dict[str, Tensor]) -> None:
    optimizer.accumulate([grads[name].to(weight.dtype).clone() for name, weight in optimizer.named.items()])


def run(optimizer: Optimizer, *, seeds: range, factor: float = 1.0) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for seed in seeds:
        give(optimizer, make_gradients(optimizer.named, seed=seed, factor=factor))
        rows.append(optimizer.step())
    return rows


@pytest.mark.parametrize("transposed", [False, True])
def test_updates_follow_the_formula(transposed: bool) -> None:
    """Loshchilov and Hutter, arXiv:1711.05101, in float64; vectors (norms, biases) do not decay."""
    named = weights(transposed=transposed)
    expected = {name: weight.double().clone() for name, weight in named.items()}
    optimizer = Optimizer(
        named, section(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, warmup_steps=3, grad_clip=2.0), total_updates=10
    )
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(1, 7):
        grads = {name: grad.double() for name, grad in make_gradients(named, seed=step).items()}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        rate = 0.01 * min(step / 3, 1)
        for name, value in expected.items():
            grad = grads[name] * min(1.0, 2.0 / norm)
            first[name] = 0.8 * first[name] + 0.2 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            move = first[name] / (1 - 0.8**step) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-6)
            decay = 0.1 if name == "matrix" else 0.0
            expected[name] = value * (1 - rate * decay) - rate * move
        give(optimizer, grads)
        metrics = optimizer.step()
        assert norm > 2.0 and metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["lr"] == pytest.approx(rate)
    for name, value in expected.items():
        torch.testing.assert_close(named[name].detach().double(), value, atol=1e-6, rtol=1e-5)


def test_updates_equal_those_of_torch() -> None:
    named = weights()
    theirs = {name: weight.clone().requires_grad_() for name, weight in named.items()}
    optimizer = Optimizer(named, section(weight_decay=0.05), total_updates=10)
    reference = torch.optim.AdamW(
        [{"params": [theirs["matrix"]], "weight_decay": 0.05}, {"params": [theirs["vector"]], "weight_decay": 0.0}],
        lr=0.01,
        betas=optimizer.section.betas,
        eps=1e-8,
    )
    for seed in range(5):
        for name, grad in make_gradients(theirs, seed=seed).items():
            theirs[name].grad = grad
        reference.step()
    run(optimizer, seeds=range(5))
    for name in named:
        torch.testing.assert_close(named[name], theirs[name], atol=0, rtol=0)


def test_gradients_of_several_backwards_add_up() -> None:
    one, other = weights(), weights()
    together, apart = (Optimizer(named, section(), total_updates=1) for named in (one, other))
    grads = [make_gradients(other, seed=seed) for seed in (1, 2, 3)]
    for part in grads:
        give(apart, part)
    give(together, {name: grads[0][name] + grads[1][name] + grads[2][name] for name in one})
    assert together.step()["grad_norm"] == pytest.approx(apart.step()["grad_norm"], rel=1e-6)
    for name in one:
        torch.testing.assert_close(one[name], other[name])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(), [1.0] * 9),
        (dict(warmup_steps=4), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (dict(decay="linear"), [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]),
        (dict(decay="linear", warmup_steps=4), [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (dict(decay="linear", min_lr_ratio=0.5), [1.0, 0.9375, 0.875, 0.8125, 0.75, 0.6875, 0.625, 0.5625, 0.5]),
        (dict(decay="cosine"), [0.5 + 0.5 * math.cos(math.pi * step / 8) for step in range(9)]),
        (
            dict(decay="cosine", min_lr_ratio=0.1),
            [0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * n / 8)) for n in range(9)],
        ),
    ],
)
def test_the_rate_warms_up_and_decays(changes: dict[str, Any], expected: list[float]) -> None:
    optimizer = Optimizer(weights(), section(lr=2.0, **changes), total_updates=8)
    assert [optimizer.learning_rate(step) / 2.0 for step in range(9)] == pytest.approx(expected)
    assert optimizer.learning_rate(100) == pytest.approx(2.0 * expected[-1]), "past the end the rate stays where it is"


def test_the_rate_is_the_one_of_the_update() -> None:
    optimizer = Optimizer(weights(), section(lr=1.0, warmup_steps=2, decay="linear"), total_updates=4)
    assert [row["lr"] for row in run(optimizer, seeds=range(4))] == [0.5, 1.0, 1.0, 0.5]


def test_a_large_gradient_is_scaled_to_the_clip_and_a_small_one_is_not() -> None:
    def first_moment(clip: float, factor: float) -> tuple[float, dict[str, float]]:
        optimizer = Optimizer(weights(), section(grad_clip=clip), total_updates=1)
        (metrics,) = run(optimizer, seeds=range(1), factor=factor)
        moments = [state["exp_avg"] for state in optimizer.adamw.state.values()]
        return float(torch.cat([moment.flatten() for moment in moments]).norm()) / (1 - 0.9), metrics

    norm, metrics = first_moment(1.5, 10.0)
    assert norm == pytest.approx(1.5, rel=1e-4) and metrics["grad_norm"] > 10, "the metric is the norm before clipping"
    norm, metrics = first_moment(1.5, 0.01)
    assert norm == pytest.approx(metrics["grad_norm"], rel=1e-4) and norm < 1.5
    norm, metrics = first_moment(0.0, 10.0)
    assert norm == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_master_weights_keep_updates_too_small_for_bfloat16() -> None:
    """At 1.0 neighbouring bfloat16 numbers are 0.0039 and more apart; each update moves by 0.001."""

    def train(master_weights: bool) -> Tensor:
        named = {"weight": torch.ones(4, 4, dtype=torch.bfloat16)}
        optimizer = Optimizer(named, section(lr=1e-3, master_weights=master_weights), total_updates=20)
        for _ in range(20):
            give(optimizer, {"weight": torch.full((4, 4), 0.5)})
            optimizer.step()
        return named["weight"].detach().float()

    torch.testing.assert_close(train(True), torch.full((4, 4), 0.98), atol=0.003, rtol=0)
    assert (train(False) == 1.0).all()


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    named = {"weight": torch.ones(2, dtype=torch.bfloat16)}
    optimizer = Optimizer(named, section(), total_updates=1)
    for value in (256.0, *[0.5] * 512):
        give(optimizer, {"weight": torch.full((2,), value)})
    assert optimizer.step()["grad_norm"] == pytest.approx(512 * math.sqrt(2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_non_finite_gradient_changes_nothing(bad: float, dtype: torch.dtype) -> None:
    named = weights(dtype=dtype)
    optimizer = Optimizer(named, section(grad_clip=1.0), total_updates=9)
    run(optimizer, seeds=range(2))
    before = copy.deepcopy(({name: weight.detach() for name, weight in named.items()}, state_of(optimizer)))
    grads = make_gradients(named, seed=5)
    grads["matrix"][2, 3] = bad
    give(optimizer, grads)
    with pytest.raises(NonFiniteError, match="gradient norm is (nan|inf)"):
        optimizer.step()
    after = ({name: weight.detach() for name, weight in named.items()}, state_of(optimizer))
    assert_identical(after, before)
    (row,) = run(optimizer, seeds=range(2, 3))
    assert math.isfinite(row["grad_norm"]), "the bad gradient is gone"


def assert_identical(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_identical(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_identical(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_saved_state_continues_bit_for_bit(dtype: torch.dtype, transposed: bool) -> None:
    def make() -> Optimizer:
        settings = section(weight_decay=0.1, warmup_steps=4, decay="cosine", grad_clip=1.0)
        return Optimizer(weights(dtype=dtype, transposed=transposed), settings, total_updates=8)

    whole, first, second = make(), make(), make()
    run(whole, seeds=range(6))
    run(first, seeds=range(3))
    file = io.BytesIO()
    torch.save({"state": state_of(first), "weights": {name: w.detach() for name, w in first.named.items()}}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        for name, weight in second.named.items():
            weight.copy_(saved["weights"][name])
    second.load_state_dict(saved["state"])
    assert second.num_updates == 3
    run(second, seeds=range(3, 6))
    for name, weight in whole.named.items():
        assert torch.equal(second.named[name], weight)
    assert_identical(state_of(second), state_of(whole))


@pytest.mark.parametrize("name", ["torch.optim.SGD", "torch.optim.RMSprop", "torch.optim.Adam", "torch.optim.NAdam"])
def test_another_optimizer_by_its_name_steps_like_torchs(name: str) -> None:
    named = weights()
    theirs = {key: weight.clone() for key, weight in named.items()}
    optimizer = Optimizer(named, section(optimizer=dict(name=name), weight_decay=0.1), total_updates=3)
    kind = getattr(torch.optim, name.rpartition(".")[2])
    groups = [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["vector"]], "weight_decay": 0.0}]
    reference = kind(groups, lr=0.01)
    for seed in range(3):
        for key, grad in make_gradients(theirs, seed=seed).items():
            theirs[key].grad = grad
        reference.step()
    run(optimizer, seeds=range(3))
    for key in named:
        torch.testing.assert_close(named[key].detach(), theirs[key], atol=0, rtol=0)


@pytest.mark.parametrize("name", ["torch.optim.Adafactor", "torch.optim.RMSprop"])
def test_a_resolved_run_file_gives_another_optimizer_no_settings_of_adam(name: str) -> None:
    short = section(optimizer=dict(name=name))
    resolved = type(short).model_validate(short.model_dump(mode="json"))
    groups = [Optimizer(weights(), one, total_updates=3).adamw.param_groups[0] for one in (short, resolved)]
    assert (
        groups[0]["eps"]
        == groups[1]["eps"]
        == getattr(torch.optim, name.rpartition(".")[2])([torch.zeros(1)]).defaults["eps"]
    )


def test_arguments_of_the_optimizer_reach_it() -> None:
    chosen = section(optimizer=dict(name="torch.optim.SGD", kwargs=dict(momentum=0.9, foreach=False, lr=0.5)), lr=0.5)
    (group, _) = Optimizer(weights(), chosen, total_updates=1).adamw.param_groups
    assert (group["lr"], group["momentum"], group["foreach"]) == (0.5, 0.9, False)
    (group, _) = Optimizer(
        weights(), section(optimizer=dict(kwargs=dict(foreach=False))), total_updates=1
    ).adamw.param_groups
    assert group["foreach"] is False


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (dict(name="AdamW"), "has no module; write the import path, such as torch.optim.AdamW"),
        (dict(name="torch.optim.Adamm"), "is not a torch optimizer"),
        (dict(name="apex.optimizers.FusedAdam"), "cannot be imported .*; install it, or write torch.optim.AdamW"),
        (dict(name="torch.optim.LBFGS"), "needs a closure or sparse gradients"),
        (dict(name="torch.nn.Linear"), "is not a torch optimizer"),
        (
            dict(kwargs=dict(momentum=0.9)),
            "kwargs.momentum is not an argument of torch.optim.AdamW; its arguments are lr, betas",
        ),
        (dict(kwargs=dict(params=[])), "kwargs.params is not an argument of torch.optim.AdamW"),
    ],
)
def test_an_optimizer_that_cannot_be_had_is_refused(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimizer(weights(), section(optimizer=choice), total_updates=1)


def test_a_state_from_another_layout_is_laid_out_as_the_weights() -> None:
    rows, columns = weights(), weights(transposed=True)
    first = Optimizer(rows, section(), total_updates=4)
    run(first, seeds=range(2))
    second = Optimizer(columns, section(), total_updates=4)
    with torch.no_grad():
        for name, weight in columns.items():
            weight.copy_(rows[name])
    second.load_state_dict(copy.deepcopy(state_of(first)))
    moments = second.adamw.state[columns["matrix"]]["exp_avg"]
    assert moments.stride() == columns["matrix"].stride() != rows["matrix"].stride()
    run(first, seeds=range(2, 4))
    run(second, seeds=range(2, 4))
    for name, weight in rows.items():
        torch.testing.assert_close(columns[name], weight)


def saved(optimizer: Optimizer) -> dict[str, Any]:
    """The state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state_of(optimizer), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (dict(dtype=torch.float32), dict(dtype=torch.bfloat16)),
        (dict(dtype=torch.bfloat16, master_weights=False), dict(dtype=torch.bfloat16)),
        (dict(dtype=torch.bfloat16), dict(dtype=torch.bfloat16, master_weights=False)),
        (dict(dtype=torch.bfloat16), dict(dtype=torch.float32)),
        (dict(dtype=torch.bfloat16), dict(dtype=torch.bfloat16)),
    ],
)
def test_a_state_with_or_without_masters_keeps_the_trained_weights(before: Any, after: Any) -> None:
    """The weights that the optimizer steps on are the trained ones, whichever side keeps masters."""

    def make(dtype: torch.dtype, **changes: Any) -> Optimizer:
        return Optimizer(weights(dtype=dtype), section(lr=0.1, **changes), total_updates=10)

    trained, resumed = make(**before), make(**after)
    run(trained, seeds=range(4))
    with torch.no_grad():
        for name, weight in resumed.named.items():  # as a checkpoint's model directory has them
            weight.copy_(trained.named[name])
    resumed.load_state_dict(saved(trained))
    for name, target in resumed.targets.items():
        kept = resumed.named[name]
        torch.testing.assert_close(kept, trained.targets[name].to(kept.dtype), atol=0, rtol=0)
        torch.testing.assert_close(target.to(kept.dtype), kept, atol=0, rtol=0)
        assert not torch.equal(kept, weights(dtype=kept.dtype)[name])
    give(resumed, make_gradients(resumed.named, seed=9))
    resumed.step()  # and its momentum fits


def test_settings_changed_on_resume_reach_the_optimizer() -> None:
    before = Optimizer(weights(), section(), total_updates=10)
    run(before, seeds=range(3))
    changed = section(betas=(0.5, 0.6), eps=1e-3, weight_decay=0.3, optimizer={"kwargs": {"foreach": True}})
    resumed, reference = (Optimizer(copy.deepcopy(before.named), changed, total_updates=10) for _ in range(2))
    resumed.load_state_dict(saved(before))
    for index, decay in enumerate((0.3, 0.0)):
        group = resumed.adamw.param_groups[index]
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-3, decay)
        assert group["foreach"] is True
    # The same update as by an optimizer that was made with the new settings and given the old momentum.
    for name, target in reference.targets.items():
        reference.adamw.state[target] = copy.deepcopy(before.adamw.state[before.targets[name]])
    for optimizer in (resumed, reference):
        give(optimizer, make_gradients(optimizer.named, seed=7))
        optimizer.step()
    for name, weight in resumed.named.items():
        torch.testing.assert_close(weight, reference.named[name], atol=0, rtol=0)


def test_a_state_of_another_optimizer_is_refused_by_both_names() -> None:
    before = Optimizer(weights(), section(), total_updates=10)
    run(before, seeds=range(1))
    other = Optimizer(
        weights(), section(optimizer={"name": "torch.optim.SGD", "kwargs": {"momentum": 0.9}}), total_updates=10
    )
    with pytest.raises(
        ValueError, match=r"state of torch\.optim\.AdamW, which torch\.optim\.SGD \(optimizer\.name\) cannot use"
    ):
        other.load_state_dict(saved(before))


def test_arguments_that_need_state_which_was_not_kept_are_refused() -> None:
    before = Optimizer(weights(), section(), total_updates=10)
    run(before, seeds=range(1))
    other = Optimizer(weights(), section(optimizer={"kwargs": {"amsgrad": True}}), total_updates=10)
    with pytest.raises(ValueError, match="kwargs.amsgrad=True needs state .* the value was False before"):
        other.load_state_dict(saved(before))


def test_a_first_momentum_begins_on_resume() -> None:
    """SGD keeps no state without momentum, and begins it with the next gradient."""
    before = Optimizer(weights(), section(optimizer={"name": "torch.optim.SGD"}), total_updates=10)
    run(before, seeds=range(1))
    kwargs = {"name": "torch.optim.SGD", "kwargs": {"momentum": 0.9}}
    resumed = Optimizer(weights(), section(optimizer=kwargs), total_updates=10)
    resumed.load_state_dict(saved(before))
    run(resumed, seeds=range(2))
    fresh = Optimizer(weights(), section(optimizer=kwargs), total_updates=10)
    run(fresh, seeds=range(2))
    assert str(state_of(resumed).keys()) == str(state_of(fresh).keys())
    assert "momentum_buffer" in str(saved(resumed))


def test_a_gradient_of_zero_moves_neither_weights_nor_momentum_nor_schedule() -> None:
    optimizer = Optimizer(weights(), section(weight_decay=0.1, decay="linear"), total_updates=10)
    run(optimizer, seeds=range(3))
    before = copy.deepcopy((optimizer.named, state_of(optimizer)))
    give(optimizer, make_gradients(optimizer.named, seed=5, factor=0.0))
    metrics = optimizer.step()
    assert metrics["skipped_fraction"] == 1.0 and metrics["grad_norm"] == 0.0
    named, state = before
    for name, weight in optimizer.named.items():
        assert torch.equal(weight, named[name])
    now = state_of(optimizer)
    assert now["num_updates"] == state["num_updates"] == 3
    for index, entry in state["adamw"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(now["adamw"]["state"][index][key], value)
    assert run(optimizer, seeds=range(3, 4))[0]["skipped_fraction"] == 0.0
