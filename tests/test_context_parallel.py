"""Sequences divided over the ranks of a context group, against one process that has all of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branching import compacted_group, same_advantage
from learners import LONGEST, TEMPERATURE, make_samples, section, trainable
from ranks import Ranks
from saved import save
from tiny import make_model, needs_bfloat16, save_model

from rollcall.base.types import Sample
from rollcall.checkpoint.training import read_learner
from rollcall.config import Algorithm, Config, Grpo, Gspo, OptimizerSection, Ppo, RunSection
from rollcall.learner.context_parallel import own_of
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Critic, Learner, TokenScores, score_samples, whole_body
from rollcall.learner.packing import pack
from rollcall.model.decoder import fuse_parameters
from rollcall.plan.mesh import ModelSplit, indivisible_heads, split_of
from rollcall.plan.placement import SCORERS, Role
from rollcall.run.team import Team
from rollcall.run.worker import RoleWorker

ALONE: dict[str, Any] = {}
TWO = dict(context_parallel_size=2)
FOUR = dict(context_parallel_size=4)
FSDP = dict(sharding="fsdp", context_parallel_size=2)
TENSOR = dict(tensor_parallel_size=2, context_parallel_size=2)
SEQUENCE = dict(**FSDP, tensor_parallel_size=2, sequence_parallel=True)
REGULARISED = Grpo(kl_coef=0.1, entropy_coef=0.01)
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "context 2": (2, TWO),
    "context 4": (4, FOUR),
    "context 2, copies 2": (4, {**TWO, "tokens_per_microbatch": 20}),
    "context 2, recomputed": (2, {**TWO, "activation_checkpointing": True}),
    "fsdp, context 2": (2, FSDP),
    "fsdp, context 4": (4, {**FSDP, "context_parallel_size": 4}),
    "fsdp 2 x context 2": (4, FSDP),
    "fsdp 2 x context 2, recomputed, several micro-batches": (
        4,
        {**FSDP, "activation_checkpointing": True, "tokens_per_microbatch": 20},
    ),
    "hsdp 2 x 2, context 2": (4, dict(sharding="hsdp", sharding_group_size=2, context_parallel_size=2)),
    "context 2 x tensor 2": (4, TENSOR),
    "fsdp, context 2 x tensor 2": (4, {**FSDP, "tensor_parallel_size": 2}),
    "fsdp, context 2 x tensor 2, sequence parallel, recomputed": (4, {**SEQUENCE, "activation_checkpointing": True}),
}
SHORT = 12  # among the rows: the place of one that feeds a single token
QUICK = "fsdp, context 2 x tensor 2, sequence parallel, recomputed"
WITH_CRITIC = ("context 4", "fsdp 2 x context 2", QUICK)


def rows() -> list[Sample]:
    """Groups that share their prompts, a row that feeds one token, and episodes that branch."""
    plain = make_samples(make_model("qwen2-untied"))
    arrays = (
        "response_ids",
        "behaviour_logprobs",
        "old_logprobs",
        "reference_logprobs",
        "advantages",
        "returns",
        "values",
    )
    first = {name: getattr(plain[0], name)[:1] for name in arrays}
    short = plain[0].with_(**first, mask=np.ones(1, dtype=np.bool_), prompt_ids=plain[0].prompt_ids[:1], draw=4)
    return [*plain, short, *compacted_group(draw=5, turns=4, every=2)]


def make(
    gang: Gang, changes: dict[str, Any], algorithm: Algorithm, shape: dict[str, Any] | None = None
) -> Learner | Critic:
    given = section(**{"grad_clip": 0.5, "weight_decay": 0.1, **changes})
    model = trainable("qwen2-untied", **(shape or {}))
    if isinstance(algorithm, Ppo):
        return Critic(model, given, algorithm=algorithm, total_updates=9, gang=gang)
    return Learner(
        model, given, algorithm=algorithm, temperature=TEMPERATURE, max_response_tokens=LONGEST, total_updates=9, gang=gang
    )  # fmt: skip


def learn(
    gang: Gang,
    changes: dict[str, Any],
    algorithm: Algorithm,
    steps: int = 2,
    samples: list[Sample] | None = None,
    shape: dict[str, Any] | None = None,
) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    """The gradient of the first update, whole, and the metrics of all of them."""
    model = make(gang, changes, algorithm, shape)
    optimizer, body = model.optimizer, model.body
    first: dict[str, np.ndarray] = {}
    step = optimizer.adamw.step

    def keep_gradient() -> None:
        if not first:
            for name, target in optimizer.targets.items():
                gradient = torch.zeros_like(target) if target.grad is None else target.grad
                first[name] = (body.gather(name, gradient) if body.in_parts else gradient.clone()).numpy()  # type: ignore[union-attr]
        step()

    optimizer.adamw.step = keep_gradient  # type: ignore[method-assign, assignment]
    given = rows() if samples is None else samples
    return first, [model.update(given) for _ in range(steps)]


def assert_same(found: Any, expected: Any) -> None:
    gradients, curve = expected
    assert found[0].keys() == gradients.keys()
    scale = max(float(np.abs(gradient).max()) for gradient in gradients.values())
    assert scale > 1e-4
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[0][name], gradient, atol=2e-5 * scale, rtol=0, err_msg=name)
    for one, other in zip(found[1], curve, strict=True):
        assert one.keys() == other.keys()
        for name in other:
            assert one[name] == pytest.approx(other[name], rel=2e-4, abs=2e-5), name


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        pytest.param(world, kind, marks=() if world == QUICK and kind == "grpo" else pytest.mark.slow)
        for world in WORLDS
        for kind in ("grpo", "ppo")
        if kind == "grpo" or world in WITH_CRITIC
    ],
)
def test_ranks_that_divide_sequences_have_the_gradients_and_the_curve_of_one(
    ranks: Ranks, alone: dict[str, Any], world: str, kind: str
) -> None:
    algorithm = REGULARISED if kind == "grpo" else Ppo(value_clip=None)
    if kind not in alone:
        alone[kind] = learn(Gang.alone(), ALONE, algorithm)
    size, changes = WORLDS[world]
    found = ranks.run(learn, changes, algorithm, size=size)
    for one in found:
        assert_same(one, alone[kind])
        assert one[1] == found[0][1], "every rank tells the same"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (dict(num_key_value_heads=4), TWO),
        (dict(num_key_value_heads=1), FOUR),
        (dict(num_attention_heads=8, num_key_value_heads=2), TENSOR),
        (dict(num_attention_heads=8, num_key_value_heads=1), {**SEQUENCE, "tokens_per_microbatch": 15}),
    ],
)
def test_key_value_heads_are_divided_or_shared(ranks: Ranks, shape: dict[str, Any], changes: dict[str, Any]) -> None:
    expected = learn(Gang.alone(), ALONE, REGULARISED, 1, None, shape)
    for found in ranks.run(learn, changes, REGULARISED, 1, None, shape, size=4):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [TWO, FSDP, TENSOR], ids=["copies", "fsdp", "tensor"])
def test_an_attempt_in_several_rows_has_one_ratio(ranks: Ranks, changes: dict[str, Any]) -> None:
    samples = same_advantage(rows())
    expected = learn(Gang.alone(), ALONE, Gspo(clip_low=0.1, clip_high=0.1), 2, samples)
    for found in ranks.run(learn, changes, Gspo(clip_low=0.1, clip_high=0.1), 2, samples, size=4):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        (FOUR, SHORT),
        pytest.param(SEQUENCE, SHORT, marks=pytest.mark.slow),
        pytest.param(FSDP, 0, marks=pytest.mark.slow),
    ],
)
def test_a_row_with_fewer_tokens_than_ranks_and_ranks_without_rows_take_part(
    ranks: Ranks, changes: dict[str, Any], row: int
) -> None:
    """The short row feeds one token."""
    samples = [rows()[row]]
    expected = learn(Gang.alone(), ALONE, REGULARISED, 1, samples)
    for found in ranks.run(learn, changes, REGULARISED, 1, samples, size=4):
        assert_same(found, expected)


def score(gang: Gang, changes: dict[str, Any], samples: list[Sample]) -> list[np.ndarray]:
    """By the policy, by a reference whose processes have whole models and no actor, and by a critic."""
    learner = make(gang, {**changes, "logprob_batch_size": 3}, REGULARISED)
    critic = make(gang, changes, Ppo(value_clip=None))
    assert isinstance(learner, Learner) and isinstance(critic, Critic)
    critic.update(samples)
    frozen = whole_body(trainable("qwen2-untied"), gang=gang, context=learner.section.context_parallel_size)
    found = [learner.score(samples), score_samples(frozen, samples, learner.section, temperature=TEMPERATURE)]
    return [
        np.stack([row.logprobs, row.entropy, row.certainty, values])
        for scores in found
        for row, values in zip(scores, critic.values(samples), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [TWO, FOUR, FSDP, SEQUENCE], ids=["2", "4", "fsdp", "tensor"])
def test_scores_and_values_are_those_of_one_process(ranks: Ranks, changes: dict[str, Any]) -> None:
    expected = score(Gang.alone(), ALONE, rows())
    for found in ranks.run(score, changes, rows(), size=4):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-3)


def go_on(gang: Gang, changes: dict[str, Any], start: Path | None, end: Path | None) -> list[float]:
    learner = make(gang, changes, REGULARISED)
    assert isinstance(learner, Learner)
    if start is not None:
        read_learner(learner, start)
    losses = [learner.update(rows())["loss"] for _ in range(2)]
    if end is not None:
        save(gang, end, learner=learner)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"), [(FSDP, ALONE), (TWO, SEQUENCE), (SEQUENCE, {**FSDP, **FOUR}), (ALONE, TWO)]
)
def test_a_checkpoint_goes_on_with_another_context_size(
    ranks: Ranks, tmp_path: Path, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    expected = go_on(Gang.alone(), ALONE, None, tmp_path / "alone")
    expected += go_on(Gang.alone(), ALONE, tmp_path / "alone", None)
    found: list[float] = []
    for changes, paths in ((writer, (None, tmp_path / "saved")), (reader, (tmp_path / "saved", None))):
        found += ranks.run(go_on, changes, *paths, size=1 if changes == ALONE else 4)[0]
    assert found == pytest.approx(expected, rel=2e-4, abs=2e-5)


def learn_in_bfloat16(gang: Gang, changes: dict[str, Any]) -> list[dict[str, float]]:
    model = trainable("qwen2-untied").to(torch.bfloat16)
    fuse_parameters(model)
    learner = Learner(
        model, section(**changes), algorithm=Grpo(), temperature=TEMPERATURE, max_response_tokens=LONGEST, total_updates=9,
        gang=gang,
    )  # fmt: skip
    return [learner.update(make_samples(make_model("qwen2-untied"))) for _ in range(2)]


@needs_bfloat16
@pytest.mark.slow
def test_in_bfloat16_the_curve_is_that_of_one_process_but_for_rounding(ranks: Ranks) -> None:
    expected = learn_in_bfloat16(Gang.alone(), ALONE)
    for changes in (TWO, SEQUENCE):
        for found, row in zip(ranks.run(learn_in_bfloat16, changes, size=4)[0], expected, strict=True):
            assert found["loss"] == pytest.approx(row["loss"], abs=0.02)
            assert found["grad_norm"] == pytest.approx(row["grad_norm"], rel=0.05)


def seat(gang: Gang, config: Config, model_path: str, roles: list[Role], weights: Path | None) -> list[TokenScores]:
    """A process of the cluster without an actor, its gang given: what it scores as inference and as reference."""
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    worker = RoleWorker(config, model_path, in_parts=frozenset())
    worker._join = lambda ranks, meeting: gang  # type: ignore[method-assign]
    worker.build(dict.fromkeys(roles, gang.rank), {})
    return [*worker.score(rows()), *worker.score_reference(rows())]


@pytest.mark.slow
def test_processes_of_inference_and_reference_divide_sequences_too(ranks: Ranks, tmp_path: Path) -> None:
    path = str(save_model(tmp_path / "model"))

    def run(size: int, **changes: Any) -> list[list[TokenScores]]:
        config = Config(run=RunSection(dir=tmp_path / "run"), actor=section(**changes), algorithm=Grpo(kl_coef=0.1))
        return ranks.run(seat, config, path, [Role.REFERENCE, Role.INFERENCE], None, size=size)

    (expected,) = run(1)
    first, *others = run(4, **TWO)
    assert others == [[]] * 3, "one of them tells"
    for one, other in zip(first, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


# Without processes


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_and_every_logit_is_one_ranks_own(size: int) -> None:
    samples = rows()
    for budget in (1, 60, 10_000):
        for batch in pack(samples, weights=np.ones(len(samples), dtype=np.float32), tokens_per_microbatch=budget):
            parts = [own_of(batch, rank=rank, size=size) for rank in range(size)]
            for name in ("token_ids", "positions"):
                dealt = np.stack([getattr(part, name) for part in parts], axis=1).ravel()
                np.testing.assert_array_equal(dealt[: batch.num_tokens], getattr(batch, name))
                assert not dealt[batch.num_tokens :].any()
            predicted = np.concatenate([part.token_ids[part.logit_index] for part in parts])
            targets = np.concatenate([part.targets for part in parts])
            for part in parts:
                chosen = slice(None) if part.places is None else part.places
                np.testing.assert_array_equal(predicted[chosen], batch.token_ids[batch.logit_index])
                np.testing.assert_array_equal(targets[chosen], batch.targets)


def test_neighbours_divide_the_same_rows_and_weights_do_not_depend_on_it() -> None:
    wanted = OptimizerSection(sharding="fsdp", tensor_parallel_size=2, context_parallel_size=2)
    splits = [split_of(wanted, rank=rank, nodes=[0] * 8) for rank in range(8)]
    assert splits[0] == ModelSplit(replicate=1, shard=4, tensor=2, context=2, rank=0)
    assert [(one.data_rank, one.context_rank, one.tensor_rank) for one in splits if one is not None] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)
    ]  # fmt: skip
    assert [one.shard_rank for one in splits if one is not None] == [0, 0, 1, 1, 2, 2, 3, 3]
    copies = OptimizerSection(context_parallel_size=2)
    assert split_of(copies, rank=0, nodes=[0, 0]) is None, "every rank has the whole model"


@pytest.mark.parametrize(
    ("tensor", "num_processes", "message"),
    [
        (1, 1, "actor.context_parallel_size=2, but actor has one process; give the run a cluster of several slots"),
        (1, 3, "actor.context_parallel_size=2, but actor has 3 processes; use a divisor of 3"),
        (3, 4, "actor.tensor_parallel_size=3 x actor.context_parallel_size=2 = 6, but actor has 4 processes"),
    ],
)
def test_a_product_that_does_not_divide_the_processes_is_refused(tensor: int, num_processes: int, message: str) -> None:
    wanted = OptimizerSection(tensor_parallel_size=tensor, context_parallel_size=2)
    with pytest.raises(ValueError, match=message):
        split_of(wanted, rank=0, nodes=[0] * num_processes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "context", "message"),
    [
        (14, 2, 1, 2, None),
        (14, 2, 1, 4, "context_parallel_size=4 does not divide the model's 14 attention heads: 14 = 4 x 3 + 2; use 1 or 2"),
        (12, 3, 1, 2, "does not divide the model's 3 key/value heads: 3 = 2 x 1 + 1; use 1"),
        (12, 3, 1, 6, None),
        (32, 8, 8, 4, None),
        (12, 2, 4, 2, "3 attention heads on each rank of a tensor group (actor.tensor_parallel_size=4): 3 = 2 x 1 + 1; use 1"),
    ],
)  # fmt: skip
def test_heads_that_do_not_divide_are_refused_with_the_sum(
    heads: int, kv_heads: int, tensor: int, context: int, message: str | None
) -> None:
    found = indivisible_heads(heads=heads, kv_heads=kv_heads, tensor=tensor, context=context, name="actor")
    assert found is None if message is None else found is not None and message in found


class Listeners:
    """The processes of a group, which only listen; each has one port at a time."""

    def __init__(self) -> None:
        self.worker_metadata = [{"address": f"10.0.0.{worker}"} for worker in range(8)]
        self.asked: list[int] = []

    def run_some_workers_single_data(self, method: str, workers: list[int], *args: Any) -> list[int]:
        assert method == "listen" and args == (f"10.0.0.{workers[0]}",)
        self.asked += workers
        return [7000 + len(self.asked)]

    def get_all_worker_results(self, results: list[int]) -> list[int]:
        return results


@pytest.mark.parametrize(
    ("members", "together", "gangs"),
    [
        ({Role.ACTOR: [0, 1], Role.CRITIC: [0, 1]}, [], {Role.ACTOR: 0}),
        ({Role.ACTOR: [0, 1], Role.CRITIC: [2, 3]}, [], {Role.ACTOR: 0, Role.CRITIC: 2}),
        ({Role.ACTOR: [0], Role.REFERENCE: [0], Role.INFERENCE: [2, 3]}, [], {}),
        (
            {Role.ACTOR: [0, 1], Role.REFERENCE: [0, 1], Role.INFERENCE: [2, 3], Role.ROLLOUT: [2, 3]},
            [Role.ACTOR, Role.REFERENCE, Role.INFERENCE],
            {Role.ACTOR: 0, Role.INFERENCE: 2},
        ),
        ({Role.ACTOR: [0, 1], Role.REFERENCE: [2, 3], Role.INFERENCE: [2, 3]}, SCORERS, {Role.ACTOR: 0, Role.REFERENCE: 2}),
    ],
)  # fmt: skip
def test_roles_in_the_same_processes_make_one_gang(
    members: dict[Role, list[int]], together: list[Role], gangs: dict[Role, int]
) -> None:
    group: Any = Listeners()
    found = Team(group=group, members=members, together=frozenset(together)).meetings()
    assert {role: int(place.address.rpartition(".")[2]) for role, (place, _) in found.items()} == gangs
    assert group.asked == list(gangs.values()), "a second port would take the place of the first"
    assert all(size == len(members[role]) for role, (_, size) in found.items())
