"""The learner against transformers and autograd: scores, gradients, updates, and what must not change them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from learners import (
    TEMPERATURE,
    WAYS,
    assert_same_gradient,
    cpu_way,
    gradients,
    make_learner,
    make_samples,
    naive_gradients,
    naive_logprobs,
    section,
    state_of,
    trainable,
)
from tiny import ARCHITECTURES, compiles, make_model, needs_bfloat16, needs_compiler, reference_logprobs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollcall.base.errors import NonFiniteError
from rollcall.base.types import Sample
from rollcall.config import Cispo, Dapo, DrGrpo, Grpo, Gspo, Intuitor, Ppo, ReinforcePlusPlus, Rloo
from rollcall.learner import learner as learner_module
from rollcall.learner.learner import Critic, Learner, split_by_draw
from rollcall.learner.packing import pack
from rollcall.model.decoder import fuse_parameters

ALGORITHMS = [
    Grpo(), Grpo(kl_coef=0.1, entropy_coef=0.05, dual_clip=3.0), DrGrpo(), Dapo(), Gspo(clip_low=0.1, clip_high=0.1), Cispo(),
    Rloo(kl_coef=0.1, kl_estimator="k2"), ReinforcePlusPlus(), Ppo(mismatch_mask=(0.8, 1.25)), Intuitor(kl_estimator="k1"),
    Grpo(old_logprobs="engine", tis_cap=None),
]  # fmt: skip


def as_one(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.float().flatten() for gradient in gradients.values()])


def budget_for(samples: list[Sample], num_batches: int) -> int:
    weights = np.zeros(len(samples), dtype=np.float32)
    for budget in range(1, 2000):
        if len(list(pack(samples, weights=weights, tokens_per_microbatch=budget))) == num_batches:
            return budget
    raise AssertionError(f"no budget gives {num_batches} micro-batches")


assert cpu_way  # a fixture of these tests


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_equal_transformers(architecture: str, cpu_way: str) -> None:
    model = make_model(architecture)
    samples = make_samples(model)
    scores = make_learner(trainable(architecture), tokens_per_microbatch=40).score(samples)
    with torch.no_grad():
        expected_rows = naive_logprobs(model, samples)
    for sample, row, full in zip(samples, scores, map(Tensor.double, expected_rows), strict=True):
        chosen = full.gather(1, torch.from_numpy(sample.response_ids.astype(np.int64))[:, None])[:, 0].numpy()
        entropy = -(full.exp() * full).sum(-1).numpy()
        certainty = (-full.mean(-1) - np.log(full.shape[1])).numpy()
        for got, expected in ((row.logprobs, chosen), (row.entropy, entropy), (row.certainty, certainty)):
            np.testing.assert_allclose(got[sample.mask], expected[sample.mask], atol=1e-4)
            assert (got[~sample.mask] == 0).all()


@pytest.mark.parametrize("cpu_way", WAYS, indirect=True)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_gradient_equals_that_of_transformers(architecture: str, cpu_way: str) -> None:
    algorithm = Grpo(kl_coef=0.1, entropy_coef=0.05)
    samples = make_samples(make_model(architecture))
    expected = naive_gradients(make_model(architecture), algorithm, samples)
    packed = gradients(make_learner(trainable(architecture), algorithm, tokens_per_microbatch=60), samples)
    assert_same_gradient(packed, expected, tolerance=1e-4)


def test_segments_too_large_to_group_have_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples(make_model("qwen2-sliding"))
    grouped = gradients(make_learner(trainable("qwen2-sliding")), samples)
    monkeypatch.setattr("rollcall.model.attention.GROUPED_SCORES", 0)
    assert_same_gradient(gradients(make_learner(trainable("qwen2-sliding")), samples), grouped)


@pytest.mark.slow  # the compiler takes a minute
@needs_compiler
def test_a_compiled_learner_has_the_gradient_of_a_plain_one() -> None:
    samples = make_samples(make_model("qwen3-untied"))
    compiled = make_learner(trainable("qwen3-untied"))
    compiled.body.compile()
    with compiles():
        found = gradients(compiled, samples)
    assert_same_gradient(found, gradients(make_learner(trainable("qwen3-untied")), samples))


@needs_bfloat16
@pytest.mark.parametrize(
    ("architecture", "compile"),
    [
        *((name, False) for name in ARCHITECTURES),
        pytest.param("qwen3-untied", True, marks=[pytest.mark.slow, needs_compiler]),
    ],
)
def test_bfloat16_gives_the_gradient_of_float32_but_for_its_rounding(architecture: str, compile: bool) -> None:
    """From the same weights, those that bfloat16 has; a rounding of 1 in 256 in each product and sum."""
    model = trainable(architecture).to(torch.bfloat16)
    fuse_parameters(model)
    samples = make_samples(make_model(architecture))
    whole = trainable(architecture)
    whole.load_state_dict(model.state_dict())
    rounded = make_learner(model)
    if compile:
        rounded.body.compile()
    with compiles() if compile else nullcontext():
        found = as_one(gradients(rounded, samples))
    expected = as_one(gradients(make_learner(whole), samples))
    assert rounded.optimizer.uses_masters
    assert torch.cosine_similarity(found, expected, dim=0) > 0.999
    assert 0.98 < float(found.norm() / expected.norm()) < 1.02


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_one_and_seven_micro_batches_give_the_same_gradient(algorithm: Any) -> None:
    samples = make_samples(make_model())
    whole = gradients(make_learner(trainable(), algorithm, tokens_per_microbatch=10_000), samples)
    budget = budget_for(samples, 7)
    parts = gradients(make_learner(trainable(), algorithm, tokens_per_microbatch=budget), samples)
    assert_same_gradient(parts, whole)
    assert_same_gradient(whole, naive_gradients(make_model(), algorithm, samples), tolerance=1e-4)


@pytest.mark.parametrize("algorithm", [Grpo(), Dapo()], ids=["grpo", "dapo"])
def test_sharing_a_prompt_does_not_change_the_gradient(algorithm: Any) -> None:
    samples = make_samples(make_model())
    shared = gradients(make_learner(trainable(), algorithm), samples)
    apart = [sample.with_(draw=index) for index, sample in enumerate(samples)]
    assert_same_gradient(gradients(make_learner(trainable(), algorithm), apart), shared)


def test_the_order_of_groups_does_not_change_the_gradient() -> None:
    samples = make_samples(make_model())
    assert_same_gradient(
        gradients(make_learner(trainable(), tokens_per_microbatch=30), samples[::-1]),
        gradients(make_learner(trainable(), tokens_per_microbatch=30), samples),
    )


def test_masked_tokens_contribute_nothing() -> None:
    samples = make_samples(make_model())
    assert any(not sample.mask.all() for sample in samples)
    noisy = [
        sample.with_(
            **{
                name: np.where(sample.mask, getattr(sample, name), 50).astype(np.float32)
                for name in ("advantages", "behaviour_logprobs", "old_logprobs", "reference_logprobs")
            }
        )
        for sample in samples
    ]
    algorithm = Grpo(kl_coef=0.1)
    clean = gradients(make_learner(trainable(), algorithm), samples)
    assert_same_gradient(gradients(make_learner(trainable(), algorithm), noisy), clean, tolerance=0)


def test_rows_without_a_loss_token_contribute_nothing() -> None:
    samples = make_samples(make_model())
    silent = samples[4].with_(mask=np.zeros(len(samples[4].mask), dtype=np.bool_))
    nothing = np.zeros(0, dtype=np.float32)
    empty = silent.with_(
        response_ids=nothing.astype(np.int32), mask=nothing.astype(np.bool_), behaviour_logprobs=nothing, old_logprobs=nothing,
        reference_logprobs=nothing, advantages=nothing, returns=nothing, values=nothing,
    )  # fmt: skip
    clean = gradients(make_learner(trainable()), samples)
    assert_same_gradient(gradients(make_learner(trainable()), [silent, *samples, empty]), clean)


def with_some_flat_rows(samples: list[Sample]) -> list[Sample]:
    """Every second row has nothing to learn from: all its advantages are 0."""
    return [
        sample.with_(advantages=np.zeros_like(sample.advantages)) if row % 2 else sample
        for row, sample in enumerate(samples)
    ]


def test_rows_of_zero_advantage_are_left_out_without_changing_the_gradient() -> None:
    samples = with_some_flat_rows(make_samples(make_model()))
    learner, whole = make_learner(trainable(), Grpo()), make_learner(trainable(), Grpo())
    learner.update(samples)
    whole.update(make_samples(make_model()))
    assert 0 < learner.num_tokens_trained < whole.num_tokens_trained
    found = gradients(make_learner(trainable(), Grpo()), samples)
    assert_same_gradient(found, naive_gradients(make_model(), Grpo(), samples))


def test_rows_of_zero_advantage_stay_where_the_loss_has_a_kl_term() -> None:
    samples = with_some_flat_rows(make_samples(make_model()))
    learner, plain = make_learner(trainable(), Grpo(kl_coef=0.1)), make_learner(trainable(), Grpo())
    learner.update(samples)
    plain.update(samples)
    assert learner.num_tokens_trained > plain.num_tokens_trained


def test_a_step_without_any_loss_token_is_refused() -> None:
    samples = [sample.with_(mask=np.zeros_like(sample.mask)) for sample in make_samples(make_model())]
    with pytest.raises(ValueError, match="no completion of this step has a token to learn from; check"):
        make_learner(trainable()).update(samples)


@pytest.mark.parametrize("architecture", ["qwen2-sliding", "qwen3-tied", "llama-bias"])
def test_activation_checkpointing_gives_the_same_gradient(architecture: str) -> None:
    samples = make_samples(make_model(architecture))
    kept = gradients(make_learner(trainable(architecture), tokens_per_microbatch=60), samples)
    checkpointed = make_learner(trainable(architecture), tokens_per_microbatch=60, activation_checkpointing=True)
    assert_same_gradient(gradients(checkpointed, samples), kept)


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_activation_checkpointing_runs_the_layers_again() -> None:
    counts: list[int] = []
    for activation_checkpointing in (False, True):
        learner = make_learner(trainable(), activation_checkpointing=activation_checkpointing)
        samples = make_samples(make_model())
        with CountOperations() as operations:
            learner.update(samples)
        counts.append(operations.count)
    assert counts[1] > 1.1 * counts[0]


def watch_losses(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every policy loss that the learner asks for."""
    seen: list[dict[str, Any]] = []
    compute: Callable[..., Any] = learner_module.policy_loss

    def watch(algorithm: Any, **arguments: Any) -> Any:
        seen.append(arguments)
        return compute(algorithm, **arguments)

    monkeypatch.setattr(learner_module, "policy_loss", watch)
    return seen


def without_old(samples: list[Sample]) -> list[Sample]:
    return [sample.with_(old_logprobs=None) for sample in samples]


def test_a_single_update_takes_the_old_logprobs_from_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_losses(monkeypatch)
    metrics = make_learner(trainable()).update(without_old(make_samples(make_model())))
    assert [arguments["old_logprobs"] for arguments in seen] == [None]
    assert metrics["ratio_mean"] == pytest.approx(1.0) and metrics["clip_fraction"] == 0


def test_later_epochs_compare_with_the_policy_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = without_old(make_samples(make_model()))
    learner = make_learner(trainable(), epochs=3, lr=3e-3)
    scores = learner.score(samples)
    expected = np.concatenate([row.logprobs[sample.mask] for row, sample in zip(scores, samples, strict=True)])
    seen = watch_losses(monkeypatch)
    metrics = learner.update(samples)
    assert len(seen) == learner.optimizer.num_updates == 3
    for arguments in seen:
        np.testing.assert_allclose(arguments["old_logprobs"].numpy(), expected, atol=1e-6)
    ratios = [(arguments["logprobs"] - arguments["old_logprobs"]).detach().abs().max() for arguments in seen]
    assert ratios[0] < 1e-4 < 1e-2 < ratios[1] < ratios[2]
    assert metrics["approx_kl"] != 0


def test_minibatches_split_a_step_between_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = without_old(make_samples(make_model(), num_prompts=4, group_size=3, masked=False))
    seen = watch_losses(monkeypatch)
    learner = make_learner(trainable(), minibatches=2, lr=3e-3, warmup_steps=2)
    metrics = learner.update(samples)
    assert learner.optimizer.num_updates == 2 and metrics["lr"] == 3e-3, "that of the last update"
    targets = [len(arguments["logprobs"]) for arguments in seen]
    assert targets == [sum(len(sample.response_ids) for sample in part) for part in (samples[:6], samples[6:])]
    later = seen[1]["logprobs"].detach() - seen[1]["old_logprobs"]
    assert later.abs().max() > 1e-2, "the second minibatch meets a policy that has moved"
    assert sum(float(arguments["weights"].sum()) for arguments in seen) == pytest.approx(2.0), "each update is a whole"


def test_engine_logprobs_as_the_base_need_no_second_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = without_old(make_samples(make_model()))
    learner = make_learner(trainable(), Grpo(old_logprobs="engine"), epochs=2)
    monkeypatch.setattr(learner, "score", lambda samples: pytest.fail("nothing to score"))
    learner.update(samples)
    assert learner.optimizer.num_updates == 2


def test_groups_are_split_evenly_and_never_apart() -> None:
    samples = make_samples(make_model(), num_prompts=5, group_size=2)
    parts = list(split_by_draw(samples, 2))
    assert [[sample.draw for sample in part] for part in parts] == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4]]
    assert [len(part) for part in split_by_draw(samples, 1)] == [10]


def test_an_update_moves_the_policy_towards_the_advantage() -> None:
    samples = [
        sample.with_(old_logprobs=None, advantages=np.full(len(sample.advantages), sign, dtype=np.float32))
        for sample, sign in zip(make_samples(make_model()), [1.0, -1.0, 1.0] * 4, strict=True)
    ]
    learner = make_learner(trainable(), Grpo(tis_cap=None), lr=1e-2)
    before = learner.score(samples)
    for _ in range(5):
        learner.update(samples)
    after = learner.score(samples)
    moved = [float((new.logprobs - old.logprobs).sum()) for new, old in zip(after, before, strict=True)]
    signs = [float(sample.advantages[0]) for sample in samples]
    assert np.corrcoef(moved, signs)[0, 1] > 0.8


def test_the_mismatch_is_the_distance_to_the_behaviour_logprobs() -> None:
    samples = make_samples(make_model())
    learner = make_learner(trainable(), tokens_per_microbatch=40)
    scores = learner.score(samples)
    distances = np.concatenate(
        [np.abs(row.logprobs - one.behaviour_logprobs)[one.mask] for row, one in zip(scores, samples, strict=True)]
    )
    metrics = learner.update(samples)
    assert metrics["mismatch"] == pytest.approx(distances.mean(), rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(distances.max(), rel=1e-4)


def test_metrics_do_not_depend_on_the_number_of_micro_batches() -> None:
    samples = make_samples(make_model())
    algorithm = Grpo(kl_coef=0.1, entropy_coef=0.01)
    whole = make_learner(trainable(), algorithm).update(samples)
    parts = make_learner(trainable(), algorithm, tokens_per_microbatch=30).update(samples)
    assert parts.keys() == whole.keys() >= {"loss", "grad_norm", "lr", "kl", "entropy", "ratio_mean", "clip_fraction"}
    for name in whole:
        assert parts[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-5), name


def snapshot(learner: Learner) -> Any:
    weights = {name: parameter.detach() for name, parameter in learner.model.named_parameters()}
    return copy.deepcopy((weights, state_of(learner.optimizer)))


def assert_identical(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_identical(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_identical(left, right)
    else:
        assert one == other


def test_a_non_finite_loss_is_refused_and_changes_nothing() -> None:
    samples = make_samples(make_model())
    learner = make_learner(trainable(), tokens_per_microbatch=40)
    learner.update(samples)
    before = snapshot(learner)
    broken = samples[-1].with_(
        advantages=np.full(len(samples[-1].advantages), np.nan, dtype=np.float32), mask=np.ones_like(samples[-1].mask)
    )
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        learner.update([*samples[:-1], broken])
    assert_identical(snapshot(learner), before)
    fresh = make_learner(trainable(), tokens_per_microbatch=40)
    fresh.update(samples)
    assert learner.update(samples) == fresh.update(samples), "nothing of the refused update is left"


def test_a_non_finite_gradient_is_refused_and_changes_nothing() -> None:
    samples = make_samples(make_model())
    learner = make_learner(trainable())
    learner.update(samples)
    before = snapshot(learner)
    weight = next(iter(learner.optimizer.named.values()))
    handle = weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteError, match="the gradient norm is"):
        learner.update(samples)
    handle.remove()
    assert_identical(snapshot(learner), before)
    assert np.isfinite(learner.update(samples)["grad_norm"])


def test_a_saved_learner_continues_bit_for_bit() -> None:
    samples = make_samples(make_model())

    def fresh() -> Learner:
        return make_learner(trainable(), weight_decay=0.1, warmup_steps=3, decay="cosine", tokens_per_microbatch=40)

    whole, first, second = fresh(), fresh(), fresh()
    for _ in range(4):
        whole.update(samples)
    for _ in range(2):
        first.update(samples)
    file = io.BytesIO()
    torch.save((first.model.state_dict(), state_of(first.optimizer)), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    with torch.no_grad():
        for name, parameter in second.model.named_parameters():
            parameter.copy_(weights[name])
    second.optimizer.load_state_dict(state)
    for _ in range(2):
        second.update(samples)
    assert_identical(snapshot(second), snapshot(whole))


def test_an_update_is_seen_by_the_module_and_exported_under_its_names() -> None:
    learner = make_learner(trainable())
    before = copy.deepcopy(learner.model.state_dict())
    learner.update(make_samples(make_model()))
    after = learner.model.state_dict()
    assert after.keys() == before.keys()
    assert all(not torch.equal(after[name], before[name]) for name in before)
    plain = make_model()
    plain.load_state_dict(after)
    samples = make_samples(plain, seed=3)
    for sample, row in zip(samples, learner.score(samples), strict=True):
        expected = reference_logprobs(plain, sample.prompt_ids, sample.response_ids, temperature=TEMPERATURE).numpy()
        np.testing.assert_allclose(row.logprobs[sample.mask], expected[sample.mask], atol=1e-4)


def make_critic(**changes: Any) -> Critic:
    return Critic(trainable(), section(**changes), algorithm=Ppo(value_clip=None), total_updates=100)


def test_a_fresh_critic_values_everything_at_zero() -> None:
    samples = make_samples(make_model())
    for sample, values in zip(samples, make_critic().values(samples), strict=True):
        assert values.shape == sample.response_ids.shape and (values == 0).all()


def test_a_critic_learns_the_returns() -> None:
    samples = make_samples(make_model(), masked=False)
    critic = make_critic(lr=1e-2)
    losses = [critic.update(samples)["value_loss"] for _ in range(20)]
    returns = np.concatenate([sample.returns for sample in samples if sample.returns is not None])
    assert losses[0] == pytest.approx(0.5 * float((returns**2).mean()), rel=1e-4)
    assert losses[-1] < 0.3 * losses[0]
    values = np.concatenate(critic.values(samples))
    assert 0.5 * ((values - returns) ** 2).mean() < 0.3 * losses[0]


def test_values_do_not_depend_on_packing_and_are_zero_where_masked() -> None:
    samples = make_samples(make_model())
    critic = make_critic(lr=1e-2)
    for _ in range(3):
        critic.update(samples)
    together = critic.values(samples)
    for sample, values in zip(samples, together, strict=True):
        (alone,) = critic.values([sample])
        np.testing.assert_allclose(values, alone, atol=1e-5)
        assert (values[~sample.mask] == 0).all() and (values[sample.mask] != 0).all()


def test_a_critics_gradient_does_not_depend_on_the_number_of_micro_batches() -> None:
    samples = make_samples(make_model())
    one, other = make_critic(), make_critic(tokens_per_microbatch=30)
    for critic in (one, other):
        critic.update(samples)
    for left, right in zip(one.values(samples), other.values(samples), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-4)
