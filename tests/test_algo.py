"""Advantages, losses and corrections against numbers from verl and TRL (tests/data/make_algo_reference.py), and the
properties that no table of numbers shows: splitting changes nothing, nothing is ever NaN."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcall.algo import advantages as adv
from rollcall.algo import losses, recipe
from rollcall.config import Cispo, Dapo, DrGrpo, Grpo, Gspo, Intuitor, Ppo, ReinforcePlusPlus, Rloo

REFERENCE = json.loads((Path(__file__).parent / "data" / "algo_reference.json").read_text())
MASK = np.array(REFERENCE["inputs"]["mask"], dtype=bool)
LENGTHS = MASK.sum(axis=1)
MAX_TOKENS = MASK.shape[1]
ALGORITHMS = [Grpo, DrGrpo, Dapo, Gspo, Cispo, Rloo, ReinforcePlusPlus, Ppo, Intuitor]
GROUP_ALGORITHMS = [Grpo, DrGrpo, Dapo, Gspo, Cispo, Rloo, Intuitor]
# the reference's case -> our algorithm with the same settings; weights then give verl's aggregation
POLICY_CASES = {
    "grpo": Grpo, "dr_grpo": DrGrpo, "dapo": Dapo, "ppo_dual_clip": Ppo, "gspo": Gspo, "cispo": Cispo,
}  # fmt: skip


def padded(name: str) -> np.ndarray:
    return np.array(REFERENCE["inputs"][name], dtype=np.float32)


def flat(values: Any) -> torch.Tensor:
    """A padded reference array as the flat float64 tensor of its loss tokens."""
    return torch.tensor(np.array(values, dtype=np.float64)[MASK])


def flat_input(name: str) -> torch.Tensor:
    return flat(REFERENCE["inputs"][name])


def flat_rows() -> torch.Tensor:
    return torch.tensor(np.nonzero(MASK)[0])


def flat_weights(algorithm: Any) -> torch.Tensor:
    row_weights = recipe.loss_weights(algorithm, num_loss_tokens=LENGTHS, max_response_tokens=MAX_TOKENS)
    return torch.tensor(row_weights, dtype=torch.float64)[flat_rows()]


def grouped(name: str) -> list[list[np.ndarray]]:
    """A padded input as two groups of four rows."""
    rows = list(padded(name))
    return [rows[:4], rows[4:]]


def grouped_masks() -> list[list[np.ndarray]]:
    rows = list(MASK)
    return [rows[:4], rows[4:]]


def advantages_of(algorithm: Any, **changes: Any) -> list[recipe.TokenAdvantages]:
    rewards = padded("rewards")
    given = {"rewards": [rewards[:4], rewards[4:]], "masks": grouped_masks(), "kl": None, "values": None}
    groups = recipe.compute_advantages(algorithm, **{**given, **changes})
    return [token for group in groups for token in group]


def reference_kl(estimator: Any) -> list[list[np.ndarray]]:
    old, reference = torch.tensor(padded("old_logprobs")), torch.tensor(padded("reference_logprobs"))
    rows = list(losses.kl_estimate(old, reference, estimator=estimator).numpy())
    return [rows[:4], rows[4:]]


def policy_loss_of(algorithm: Any, logprobs: torch.Tensor, **changes: Any) -> recipe.BatchLoss:
    given = {
        "logprobs": logprobs,
        "old_logprobs": flat_input("old_logprobs"),
        "behaviour_logprobs": flat_input("behaviour_logprobs"),
        "reference_logprobs": flat_input("reference_logprobs"),
        "advantages": flat_input("sequence_advantages" if algorithm.name == "gspo" else "advantages"),
        "weights": flat_weights(algorithm),
        "attempt": flat_rows(),
        "num_attempts": len(MASK),
        "entropy": flat_input("entropy"),
    }
    return recipe.policy_loss(algorithm, **{**given, **changes})


def policy() -> torch.Tensor:
    return flat_input("logprobs").requires_grad_()


def assert_close(ours: Any, theirs: Any) -> None:
    # Ours ends in float32 for advantages and weights; theirs is float64 with 1e-8 added to some denominators.
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=2e-5, atol=2e-6)


def assert_same_advantages(ours: list[recipe.TokenAdvantages], theirs: Any) -> None:
    assert_close(np.stack([token.advantages for token in ours]), theirs)


# --- the docstrings' examples


@pytest.mark.parametrize("module", [adv, losses, recipe], ids=lambda module: module.__name__)
def test_docstring_examples_hold(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_worked_example_of_the_docs_holds() -> None:
    path = Path(__file__).parents[1] / "docs" / "algorithms.md"
    result = doctest.testfile(str(path), module_relative=False, encoding="utf-8")
    assert result.attempted > 0
    assert result.failed == 0


# --- advantages, against verl


@pytest.mark.parametrize("algorithm", [cls() for cls in GROUP_ALGORITHMS], ids=lambda a: a.name)
def test_group_algorithms_have_verls_advantages(algorithm: Any) -> None:
    name = algorithm.name if algorithm.name in ("dr_grpo", "rloo") else "grpo"
    assert_same_advantages(advantages_of(algorithm), REFERENCE["advantages"][name])


def test_kl_in_the_reward_is_taken_off_each_completion_before_groups_are_compared() -> None:
    algorithm = Grpo(kl_in="reward", kl_coef=REFERENCE["advantages"]["kl_coef"])
    ours = advantages_of(algorithm, kl=reference_kl("k3"))
    assert_same_advantages(ours, REFERENCE["advantages"]["grpo_kl_k3_in_reward"])


@pytest.mark.parametrize("case", REFERENCE["advantages"]["reinforce_pp"], ids=lambda case: f"gamma={case['gamma']}")
def test_reinforce_pp_normalises_token_returns_over_the_batch(case: dict[str, Any]) -> None:
    kl_coef = REFERENCE["advantages"]["kl_coef"]
    algorithm = ReinforcePlusPlus(gamma=case["gamma"], kl_coef=kl_coef)
    kl = reference_kl("k1")
    assert_same_advantages(advantages_of(algorithm, kl=kl), case["advantages"])
    for row, (mask, kl_T) in enumerate(zip(MASK, kl[0] + kl[1], strict=True)):
        rewards = adv.token_rewards(float(padded("rewards")[row]), kl_T, kl_coef=kl_coef, mask_T=mask)
        assert_close(adv.discounted_returns(rewards, mask, gamma=case["gamma"]), case["returns"][row])


@pytest.mark.parametrize("case", REFERENCE["advantages"]["gae"], ids=lambda case: f"{case['gamma']}-{case['lam']}")
def test_ppo_whitens_gae_and_keeps_its_returns(case: dict[str, Any]) -> None:
    kl_coef = REFERENCE["advantages"]["kl_coef"]
    algorithm = Ppo(gamma=case["gamma"], lam=case["lam"], kl_in="reward", kl_coef=kl_coef, kl_estimator="k1")
    ours = advantages_of(algorithm, kl=reference_kl("k1"), values=grouped("values"))
    assert_same_advantages(ours, case["advantages"])
    assert_close(np.stack([token.returns for token in ours if token.returns is not None]), case["returns"])


# --- advantages, at the edges


@pytest.mark.parametrize("compare", [adv.group_normalized, adv.group_centered, adv.leave_one_out])
def test_a_completion_alone_in_its_group_has_no_advantage(compare: Any) -> None:
    assert compare(np.array([3.0], dtype=np.float32)).tolist() == [0.0]


@pytest.mark.parametrize("algorithm", [ReinforcePlusPlus(), Ppo()], ids=lambda a: a.name)
def test_groups_of_one_and_completions_without_loss_tokens_are_fine(algorithm: Any) -> None:
    masks = [[np.array([True, True])], [np.array([False])], [np.zeros(0, dtype=bool)], [np.array([True])]]
    rewards = [np.array([reward]) for reward in (1.0, 5.0, 5.0, 0.0)]
    values = [[np.zeros(len(mask), dtype=np.float32) for mask in group] for group in masks]
    groups = recipe.compute_advantages(algorithm, rewards=rewards, masks=masks, kl=None, values=values)
    assert [len(group) for group in groups] == [1, 1, 1, 1]
    assert [len(token.advantages) for group in groups for token in group] == [2, 1, 0, 1]
    assert groups[1][0].advantages.tolist() == [0.0]
    assert groups[0][0].advantages[0] > 0 > groups[3][0].advantages[0]


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_batch_with_equal_or_too_few_values_normalises_to_zeros(num_tokens: int) -> None:
    mask = np.arange(2) < num_tokens
    assert all((part == 0).all() for part in adv.batch_normalized([np.full(3, 0.1)], [np.ones(3, bool)]))
    assert adv.batch_normalized([np.array([4.0, 7.0])], [mask])[0].tolist() == [0.0, 0.0]


def test_a_batch_without_groups_has_no_advantages() -> None:
    for algorithm in (Grpo(), ReinforcePlusPlus()):
        assert recipe.compute_advantages(algorithm, rewards=[], masks=[], kl=None, values=None) == []


def test_kl_in_the_loss_leaves_advantages_alone() -> None:
    with_kl = advantages_of(Grpo(kl_in="loss", kl_coef=0.1), kl=reference_kl("k3"))
    assert_same_advantages(with_kl, REFERENCE["advantages"]["grpo"])


def test_overlong_penalty_is_trls() -> None:
    case = REFERENCE["overlong"]
    ours = [
        adv.overlong_penalty(length, max_tokens=case["max_tokens"], buffer=case["buffer"], penalty=1.0)
        for length in case["lengths"]
    ]
    assert_close(ours, case["penalties"])


def test_overlong_penalty_scales_stops_and_turns_off() -> None:
    assert adv.overlong_penalty(90, max_tokens=100, buffer=20, penalty=0.5) == -0.25
    assert adv.overlong_penalty(500, max_tokens=100, buffer=20, penalty=0.5) == -0.5
    assert adv.overlong_penalty(100, max_tokens=100, buffer=0, penalty=1.0) == 0.0
    with pytest.raises(AssertionError, match="cannot set a longer buffer"):
        adv.overlong_penalty(5, max_tokens=10, buffer=20, penalty=1.0)


rewards_strategy = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8)


@given(rewards=rewards_strategy)
@settings(max_examples=60, deadline=None)
def test_group_advantages_are_finite_and_centred(rewards: list[float]) -> None:
    rewards_G = np.array(rewards, dtype=np.float32)
    for compare in (adv.group_normalized, adv.group_centered, adv.leave_one_out):
        advantages = compare(rewards_G)
        assert np.isfinite(advantages).all()
        assert abs(float(advantages.astype(np.float64).sum())) < 1e-3


@given(rewards=rewards_strategy, seed=st.integers(0, 1000), lam=st.floats(0, 1), gamma=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_masked_out_tokens_change_nothing(rewards: list[float], seed: int, lam: float, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    num_tokens = len(rewards)
    rewards_T = np.array(rewards, dtype=np.float32)
    values_T = rng.normal(size=num_tokens).astype(np.float32)
    place = np.sort(rng.choice(2 * num_tokens, num_tokens, replace=False))
    mask = np.zeros(2 * num_tokens, dtype=bool)
    mask[place] = True
    wide_rewards, wide_values = np.full((2, 2 * num_tokens), 99.0, dtype=np.float32)
    wide_rewards[place], wide_values[place] = rewards_T, values_T
    everything = np.ones(num_tokens, dtype=bool)
    narrow = (*adv.gae(rewards_T, values_T, everything, gamma=gamma, lam=lam),
              adv.discounted_returns(rewards_T, everything, gamma=gamma))  # fmt: skip
    wide = (*adv.gae(wide_rewards, wide_values, mask, gamma=gamma, lam=lam),
            adv.discounted_returns(wide_rewards, mask, gamma=gamma))  # fmt: skip
    for expected, found in zip(narrow, wide, strict=True):
        assert (found[mask] == expected).all()
        assert (found[~mask] == 0).all()


# --- aggregation


@pytest.mark.parametrize(
    ("mode", "algorithms"),
    [
        ("token-mean", [Dapo(), Cispo(), ReinforcePlusPlus(), Ppo(), Rloo()]),
        ("seq-mean-token-mean", [Grpo(), Intuitor(), Gspo()]),
        ("seq-mean-token-sum-norm", [DrGrpo()]),
    ],
)
def test_weights_aggregate_as_verl_does(mode: str, algorithms: list[Any]) -> None:
    for algorithm in algorithms:
        ours = (flat_weights(algorithm) * flat_input("advantages")).sum()
        assert_close(ours, REFERENCE["aggregation"][mode])


@pytest.mark.parametrize("algorithm", [cls() for cls in ALGORITHMS], ids=lambda a: a.name)
def test_rows_without_loss_tokens_weigh_nothing(algorithm: Any) -> None:
    for lengths in ([3, 0, 5], [0, 0], []):
        num_loss_tokens = np.array(lengths, dtype=np.int64)
        weights = recipe.loss_weights(algorithm, num_loss_tokens=num_loss_tokens, max_response_tokens=8)
        assert np.isfinite(weights).all()
        assert (weights[num_loss_tokens == 0] == 0).all()
        assert (weights[num_loss_tokens > 0] > 0).all()


@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=50))
@settings(max_examples=60, deadline=None)
def test_weights_of_a_batch_add_up_to_one_except_dr_grpos(lengths: list[int]) -> None:
    num_loss_tokens = np.array([*lengths, 7])
    for cls in ALGORITHMS:
        weights = recipe.loss_weights(cls(), num_loss_tokens=num_loss_tokens, max_response_tokens=5000)
        total = float((weights.astype(np.float64) * num_loss_tokens).sum())
        expected = num_loss_tokens.sum() / ((num_loss_tokens > 0).sum() * 5000) if cls is DrGrpo else 1.0
        assert total == pytest.approx(expected, rel=1e-5)


# --- policy losses, against verl


def case_algorithm(name: str, **settings: Any) -> Any:
    case = REFERENCE["policy"][name]
    clips = {key: case[key] for key in ("clip_low", "clip_high", "dual_clip")}
    return POLICY_CASES[name](**clips, **settings)


@pytest.mark.parametrize("name", POLICY_CASES)
@pytest.mark.parametrize("correction", ["plain", "truncated"])
def test_policy_loss_and_gradient_are_verls(name: str, correction: str) -> None:
    expected = REFERENCE["policy"][name][correction]
    cap = REFERENCE["corrections"]["cap"] if correction == "truncated" else None
    logprobs = policy()
    result = policy_loss_of(case_algorithm(name, tis_cap=cap), logprobs)
    result.loss.backward()
    assert_close(result.loss.detach(), expected["loss"])
    assert_close(logprobs.grad, flat(expected["grad"]))


@pytest.mark.parametrize("name", POLICY_CASES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_whole_objective_with_kl_and_entropy_is_verls(name: str, estimator: str) -> None:
    expected = REFERENCE["policy"][name][f"whole_{estimator}"]
    algorithm = case_algorithm(name, tis_cap=2.0, kl_in="loss", kl_coef=0.05, kl_estimator=estimator, entropy_coef=0.01)
    logprobs = policy()
    result = policy_loss_of(algorithm, logprobs)
    result.loss.backward()
    assert_close(result.loss.detach(), expected["loss"])
    assert_close(logprobs.grad, flat(expected["grad"]))


def test_clip_fraction_and_approx_kl_are_verls() -> None:
    for name in ("dapo", "cispo", "ppo_dual_clip"):
        expected = REFERENCE["policy"][name]["plain"]
        metrics = policy_loss_of(case_algorithm(name), policy()).metrics
        # verl counts the dual clip on its own; here it is one fraction. The two never meet: they need opposite ratios.
        assert_close(metrics["clip_fraction"], expected["clip_fraction"] + expected["dual_clip_fraction"])
    # verl bounds the log-ratios of its vanilla loss in this metric too, but not those of GSPO.
    metrics = policy_loss_of(Dapo(), policy()).metrics
    assert_close(metrics["approx_kl"], REFERENCE["policy"]["gspo"]["plain"]["approx_kl"])


def test_gspo_has_the_gradient_of_its_sequence_objective() -> None:
    logprobs, row = policy(), flat_rows()
    old, advantages = flat_input("old_logprobs"), flat_input("sequence_advantages")
    ratio = losses.attempt_mean(logprobs - old, attempt=row, num_attempts=len(MASK)).exp()
    advantage = losses.attempt_mean(advantages, attempt=row, num_attempts=len(MASK))
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.08) * advantage)[LENGTHS > 0].mean()
    (-objective).backward()
    ours = policy()
    policy_loss_of(Gspo(clip_low=0.05, clip_high=0.08, tis_cap=None), ours).loss.backward()
    assert ours.grad is not None and (ours.grad != 0).any()
    assert_close(ours.grad, logprobs.grad)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_and_gradients_are_verls(estimator: Any) -> None:
    logprobs = policy()
    kl = losses.kl_estimate(logprobs, flat_input("reference_logprobs"), estimator=estimator)
    kl.sum().backward()
    assert_close(kl.detach(), flat(REFERENCE["kl"][estimator]["kl"]))
    assert_close(logprobs.grad, flat(REFERENCE["kl"][estimator]["grad"]))


def test_k3_is_never_negative_nor_infinite() -> None:
    difference = torch.tensor([0.0, 1e-6, -1e-6, 3e-4, -3e-4, 90.0, -90.0, 1e30, -1e30])
    kl = losses.kl_estimate(difference, torch.zeros_like(difference), estimator="k3")
    assert bool((kl >= 0).all()) and bool(kl.isfinite().all())


def test_corrections_are_verls_and_carry_no_gradient() -> None:
    expected = REFERENCE["corrections"]
    old, behaviour = flat_input("old_logprobs").requires_grad_(), flat_input("behaviour_logprobs")
    truncated = losses.truncated_weights(old, behaviour, cap=expected["cap"])
    low, high = expected["bounds"]
    kept = losses.mismatch_mask(old, behaviour, low=low, high=high)
    assert not truncated.requires_grad and not kept.requires_grad
    assert_close(truncated, flat(expected["truncated"]))
    assert_close(kept, flat(expected["kept"]))
    assert 0 < float(kept.mean()) < 1
    assert_close(kept * losses.truncated_weights(old, behaviour, cap=high), flat(expected["icepop"]))


@pytest.mark.parametrize("case", REFERENCE["value"], ids=lambda case: f"clip={case['clip']}")
def test_value_loss_and_gradient_are_verls(case: dict[str, Any]) -> None:
    algorithm = Ppo(value_clip=case["clip"])
    values = flat_input("values").requires_grad_()
    loss = recipe.value_loss(
        algorithm,
        values=values,
        old_values=flat_input("old_values"),
        returns=flat_input("returns"),
        weights=flat_weights(algorithm),
    )
    loss.backward()
    assert_close(loss.detach(), case["loss"])
    assert_close(values.grad, flat(case["grad"]))


# --- policy loss, its own promises


@pytest.mark.parametrize("algorithm", [cls(mismatch_mask=(0.5, 2.0)) for cls in ALGORITHMS], ids=lambda a: a.name)
def test_micro_batches_of_whole_rows_add_up_to_the_batch(algorithm: Any) -> None:
    whole = policy()
    expected = policy_loss_of(algorithm, whole)
    expected.loss.backward()
    parts = policy()
    names = ("old_logprobs", "behaviour_logprobs", "reference_logprobs", "advantages", "entropy")
    found: list[recipe.BatchLoss] = []
    for low, high in ((0, 2), (2, 7), (7, 8)):
        here = (flat_rows() >= low) & (flat_rows() < high)
        inputs = {name: flat_input(name)[here] for name in names}
        if algorithm.name == "gspo":
            inputs["advantages"] = flat_input("sequence_advantages")[here]
        weights, row = flat_weights(algorithm)[here], flat_rows()[here] - low
        result = policy_loss_of(algorithm, parts[here], **inputs, weights=weights, attempt=row, num_attempts=high - low)
        result.loss.backward()
        found.append(result)
    assert_close(parts.grad, whole.grad)
    for name, value in expected.metrics.items():
        assert not value.requires_grad
        assert_close(sum(part.metrics[name] for part in found), value)


@pytest.mark.parametrize("algorithm", [cls(kl_coef=0) for cls in ALGORITHMS], ids=lambda a: a.name)
def test_without_old_logprobs_the_gradient_is_reinforces(algorithm: Any) -> None:
    logprobs = policy()
    result = policy_loss_of(algorithm, logprobs, old_logprobs=None, behaviour_logprobs=logprobs.detach())
    result.loss.backward()
    advantages = flat_input("sequence_advantages" if algorithm.name == "gspo" else "advantages")
    assert_close(logprobs.grad, -flat_weights(algorithm) * advantages)
    assert_close(result.metrics["ratio_mean"], result.metrics["weight"])
    assert float(result.metrics["clip_fraction"]) == 0
    assert float(result.metrics["approx_kl"]) == 0


def test_engine_logprobs_are_the_base_of_the_ratio_when_asked_for() -> None:
    engine, learner = policy(), policy()
    result = policy_loss_of(Grpo(old_logprobs="engine"), engine)
    expected = policy_loss_of(Grpo(tis_cap=None), learner, old_logprobs=flat_input("behaviour_logprobs"))
    result.loss.backward()
    expected.loss.backward()
    assert_close(engine.grad, learner.grad)
    assert_close(result.metrics["tis_weight_mean"], 1.0)


def test_mismatched_tokens_are_left_out_of_every_term() -> None:
    bounds = tuple(REFERENCE["corrections"]["bounds"])
    kept = flat(REFERENCE["corrections"]["kept"])
    algorithm = Grpo(mismatch_mask=bounds, kl_coef=0.1, entropy_coef=0.1)
    logprobs, entropy = policy(), flat_input("entropy").requires_grad_()
    result = policy_loss_of(algorithm, logprobs, entropy=entropy)
    result.loss.backward()
    assert logprobs.grad is not None and entropy.grad is not None
    assert bool((logprobs.grad[kept == 0] == 0).all()) and bool((entropy.grad[kept == 0] == 0).all())
    assert bool((entropy.grad[kept == 1] < 0).all())
    assert_close(result.metrics["masked_fraction"], (flat_weights(algorithm) * (1 - kept)).sum())


def test_metrics_are_means_weighted_as_the_loss() -> None:
    algorithm = Grpo(kl_estimator="k2")
    weights = flat_weights(algorithm)
    metrics = policy_loss_of(algorithm, policy()).metrics
    reference = flat_input("reference_logprobs")
    assert_close(metrics["weight"], 1.0)
    assert_close(metrics["entropy"], (weights * flat_input("entropy")).sum())
    assert_close(metrics["kl"], (weights * 0.5 * (flat_input("logprobs") - reference) ** 2).sum())
    assert_close(metrics["tis_weight_mean"], (weights * flat(REFERENCE["corrections"]["truncated"])).sum())


def test_kl_in_the_reward_is_measured_but_not_added_to_the_loss() -> None:
    result = policy_loss_of(Grpo(kl_in="reward", kl_coef=0.5), policy())
    assert_close(result.loss.detach(), policy_loss_of(Grpo(), policy()).loss.detach())
    assert float(result.metrics["kl"]) > 0


@pytest.mark.parametrize("algorithm", [cls(kl_coef=0.1, kl_in="loss") for cls in ALGORITHMS], ids=lambda a: a.name)
def test_policies_far_apart_give_finite_losses_and_gradients(algorithm: Any) -> None:
    logprobs = torch.tensor([-1e-4, -300.0, -1e4, -2.0], requires_grad=True)
    far = torch.tensor([-1e4, -1e-4, -300.0, -2.0])
    result = recipe.policy_loss(
        algorithm, logprobs=logprobs, old_logprobs=far, behaviour_logprobs=far.flip(0), reference_logprobs=far,
        advantages=torch.tensor([-1.0, 1.0, 1.0, -1.0]), weights=torch.full((4,), 0.25), attempt=torch.tensor([0, 1, 1, 2]),
        num_attempts=4, entropy=None,
    )  # fmt: skip
    result.loss.backward()
    assert logprobs.grad is not None
    assert bool(result.loss.isfinite()) and bool(logprobs.grad.isfinite().all())
    assert all(bool(value.isfinite()) for value in result.metrics.values())


@pytest.mark.parametrize("algorithm", [cls() for cls in ALGORITHMS], ids=lambda a: a.name)
def test_a_micro_batch_without_loss_tokens_can_still_be_differentiated(algorithm: Any) -> None:
    none = torch.zeros(0)
    logprobs = torch.zeros(0, requires_grad=True)
    result = recipe.policy_loss(
        algorithm, logprobs=logprobs, old_logprobs=none, behaviour_logprobs=none, reference_logprobs=none,
        advantages=none, weights=none, attempt=torch.zeros(0, dtype=torch.int64), num_attempts=0, entropy=none,
    )  # fmt: skip
    result.loss.backward()
    assert float(result.loss.detach()) == 0
    assert float(result.metrics["weight"]) == 0
