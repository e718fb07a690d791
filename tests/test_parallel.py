"""A learner in parts: FSDP, tensor and sequence parallel, HSDP, against one process that has everything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branching import compacted_group
from learners import LONGEST, TEMPERATURE, make_samples, section, trainable
from ranks import Ranks
from saved import save
from tiny import ARCHITECTURES, make_model, needs_bfloat16, save_model

from rollcall.base.errors import NonFiniteError
from rollcall.base.types import Sample
from rollcall.checkpoint.training import open_role, read_critic, read_learner
from rollcall.config import ClusterSection, Config, Grpo, OptimizerSection, Ppo, RolloutSection, RunSection
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Critic, Learner, Reference, make_body
from rollcall.learner.tensor_parallel import split_order
from rollcall.model.decoder import fuse_parameters
from rollcall.plan.mesh import ModelSplit, is_split, split_of
from rollcall.plan.placement import Plan, Role, plan_placement, roles_in_parts
from rollcall.run.worker import PURPOSES, RoleWorker

ALONE: dict[str, Any] = {}
FSDP = dict(sharding="fsdp")
TENSOR = dict(tensor_parallel_size=2)
BOTH = dict(sharding="fsdp", tensor_parallel_size=2)
SEQUENCE = dict(sharding="fsdp", tensor_parallel_size=2, sequence_parallel=True)
HSDP = dict(sharding="hsdp", sharding_group_size=2)
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp 2": (2, FSDP),
    "fsdp 3, several micro-batches": (3, {**FSDP, "tokens_per_microbatch": 40}),
    "fsdp 4": (4, FSDP),
    "hsdp 2 x 2": (4, HSDP),
    "tensor 2": (2, TENSOR),
    "tensor 2, copies 2": (4, TENSOR),
    "2 x 2": (4, BOTH),
    "2 x 2, sequence parallel": (4, SEQUENCE),
    "2 x 2, recomputed": (4, {**SEQUENCE, "activation_checkpointing": True}),
    "copies 2": (2, ALONE),
}


def learner_of(gang: Gang, changes: dict[str, Any], architecture: str = "qwen2-tied", **shape: Any) -> Learner:
    return Learner(
        trainable(architecture, **shape),
        section(**{"grad_clip": 0.5, "weight_decay": 0.1, "warmup_steps": 2, **changes}),
        algorithm=Grpo(kl_coef=0.1, entropy_coef=0.01),
        temperature=TEMPERATURE,
        max_response_tokens=LONGEST,
        total_updates=10,
        gang=gang,
    )


def train(
    gang: Gang,
    changes: dict[str, Any],
    architecture: str,
    steps: int,
    start: Path | None = None,
    end: Path | None = None,
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """The metrics of some updates, and the whole weights after them; from and to a checkpoint where one is given."""
    learner = learner_of(gang, changes, architecture)
    samples = make_samples(make_model(architecture))
    if start is not None:
        read_learner(learner, start)
    rows = [learner.update(samples) for _ in range(steps)]
    if end is not None:
        save(gang, end, learner=learner)
    return rows, {name: tensor.detach().numpy() for name, tensor in learner.body.whole_tensors()}


def assert_same(one: Any, other: Any) -> None:
    """Metrics and weights to float tolerance. A weight moves by about the rate, 1e-3, in every step."""
    for left, right in zip(one[0], other[0], strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert left[name] == pytest.approx(right[name], rel=2e-4, abs=2e-5), name
    assert list(one[1]) == list(other[1])
    for name, weight in other[1].items():
        np.testing.assert_allclose(one[1][name], weight, atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {}


# Each of these divides as a part of another world does.
PARTS = (
    "fsdp 2", "fsdp 3, several micro-batches", "fsdp 4", "tensor 2", "tensor 2, copies 2", "2 x 2", "2 x 2, sequence parallel",
)  # fmt: skip


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.slow) if world in PARTS else world for world in WORLDS]
)
def test_a_divided_learner_has_the_same_curve(ranks: Ranks, alone: dict[str, Any], world: str) -> None:
    expected = alone.setdefault("curve", train(Gang.alone(), ALONE, "qwen2-tied", 2))
    size, changes = WORLDS[world]
    results = ranks.run(train, changes, "qwen2-tied", 2, size=size)
    for result in results:
        assert_same(result, expected)
        assert result[0] == results[0][0], "every rank tells the same"


@pytest.mark.parametrize(
    "architecture",
    # Biases everywhere; test_ranks_that_share_a_key_value_head_keep_it_equal has norms of heads. The others differ from them
    # in nothing that is divided.
    ["llama-bias"]
    + [
        pytest.param(name, marks=pytest.mark.slow) for name in sorted(set(ARCHITECTURES) - {"qwen2-tied", "llama-bias"})
    ],
)
def test_every_architecture_is_divided_by_heads_and_columns(ranks: Ranks, architecture: str) -> None:
    expected = train(Gang.alone(), ALONE, architecture, 2)
    assert_same(ranks.run(train, SEQUENCE, architecture, 2, size=4)[0], expected)


def train_branches(gang: Gang, changes: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    learner = learner_of(gang, changes)
    metrics = learner.update([row for draw in range(2) for row in compacted_group(draw=draw, turns=4, every=2)])
    return [metrics], {name: tensor.detach().numpy() for name, tensor in learner.body.whole_tensors()}


@pytest.mark.parametrize(
    ("size", "changes"),
    [pytest.param(2, FSDP, marks=pytest.mark.slow), (4, {**SEQUENCE, "tokens_per_microbatch": 60})],
    ids=["fsdp", "2x2"],
)
def test_episodes_that_branch_have_the_same_curve(ranks: Ranks, size: int, changes: dict[str, Any]) -> None:
    expected = train_branches(Gang.alone(), ALONE)
    for found in ranks.run(train_branches, changes, size=size):
        assert_same(found, expected)


def keep_rows(
    gang: Gang, changes: dict[str, Any], rows: list[int]
) -> tuple[dict[str, float], dict[str, np.ndarray], int]:
    learner = learner_of(gang, changes)
    samples = make_samples(make_model())
    metrics = learner.update([samples[row] for row in rows])
    weights = {name: tensor.detach().numpy() for name, tensor in learner.body.whole_tensors()}
    return metrics, weights, learner.num_tokens_trained


@pytest.mark.parametrize(
    "changes",
    [SEQUENCE, *(pytest.param(changes, marks=pytest.mark.slow) for changes in (FSDP, HSDP, ALONE))],
    ids=["2x2", "fsdp", "hsdp", "copies"],
)
def test_ranks_without_rows_take_part(ranks: Ranks, changes: dict[str, Any]) -> None:
    """One row for up to four data ranks."""
    metrics, weights, num_tokens = keep_rows(Gang.alone(), ALONE, [0])
    for found in ranks.run(keep_rows, changes, [0], size=4):
        assert_same(([found[0]], found[1]), ([metrics], weights))
        assert found[2] == num_tokens, "an idle pass counts for nothing"


def score(gang: Gang, changes: dict[str, Any], num_samples: int) -> list[Any]:
    learner = learner_of(gang, changes)
    reference = Reference(
        body=make_body(trainable("qwen2-tied"), learner.section, gang=gang, frozen=True),
        section=learner.section,
        temperature=TEMPERATURE,
    )
    samples = make_samples(make_model(), seed=3)[:num_samples]
    scores = [learner.score(samples), reference(samples)]
    learner.update(samples)
    return [*scores, learner.score(samples)]


@pytest.mark.parametrize(
    ("num_samples", "changes"),
    [
        (1, {**SEQUENCE, "logprob_batch_size": 1}),
        pytest.param(12, {**SEQUENCE, "logprob_batch_size": 1}, marks=pytest.mark.slow),
        pytest.param(12, FSDP, marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_one_process(ranks: Ranks, num_samples: int, changes: dict[str, Any]) -> None:
    expected = score(Gang.alone(), ALONE, num_samples)
    for found in ranks.run(score, changes, num_samples, size=4):
        for one, other in zip(found, expected, strict=True):
            for left, right in zip(one, other, strict=True):
                np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-3)
                np.testing.assert_allclose(left.entropy, right.entropy, atol=1e-3)
                np.testing.assert_allclose(left.certainty, right.certainty, atol=1e-3)


def rescore(gang: Gang, changes: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    learner = learner_of(gang, {**changes, "epochs": 2, "minibatches": 2})
    samples = [sample.with_(old_logprobs=None) for sample in make_samples(make_model())]
    rows = [learner.update(samples)]
    assert learner.optimizer.num_updates == 4
    return rows, {name: tensor.detach().numpy() for name, tensor in learner.body.whole_tensors()}


def test_several_updates_of_a_step_compare_with_the_policy_before(ranks: Ranks) -> None:
    assert_same(ranks.run(rescore, BOTH, size=4)[2], rescore(Gang.alone(), ALONE))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param("alone", "fsdp 4", marks=pytest.mark.slow), ("fsdp 4", "2 x 2, sequence parallel"),
        pytest.param("2 x 2, sequence parallel", "alone", marks=pytest.mark.slow),
        pytest.param("hsdp 2 x 2", "tensor 2", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_checkpoint_goes_on_in_another_world(
    ranks: Ranks, alone: dict[str, Any], tmp_path: Path, writer: str, reader: str
) -> None:
    worlds = {**WORLDS, "alone": (1, ALONE)}
    expected = alone.setdefault("curve", train(Gang.alone(), ALONE, "qwen2-tied", 2))
    for world, paths in ((writer, (None, tmp_path)), (reader, (tmp_path, None))):
        size, changes = worlds[world]
        result = ranks.run(train, changes, "qwen2-tied", 1, *paths, size=size)[0]
    assert_same(result, (expected[0][1:], expected[1]))


def test_a_checkpoint_does_not_depend_on_who_wrote_it(ranks: Ranks, tmp_path: Path) -> None:
    saved = {}
    for world, (size, changes) in {"two": (2, FSDP), "four": (4, SEQUENCE)}.items():
        (tmp_path / world).mkdir()
        ranks.run(train, changes, "qwen3-untied", 1, None, tmp_path / world, size=size)
        stored = [open_role(tmp_path / world, role) for role in ("model", "actor")]
        numbers = torch.load(tmp_path / world / "actor" / "optimizer.pt", weights_only=True)
        saved[world] = ({name: one.read(name) for one in stored if one for name in one.tensors}, numbers)
    (two, two_numbers), (four, four_numbers) = saved["two"], saved["four"]
    assert two.keys() == four.keys() and {name.partition("/")[0] for name in two if "/" in name} == {
        "exp_avg",
        "exp_avg_sq",
    }
    for name in two:
        torch.testing.assert_close(four[name], two[name], atol=1e-4, rtol=1e-3)
    assert four_numbers == two_numbers and four_numbers["num_updates"] == 1


def train_critic(gang: Gang, changes: dict[str, Any], steps: int, start: Path | None, end: Path | None) -> Any:
    critic = Critic(
        trainable("qwen2-untied"), section(**changes), algorithm=Ppo(value_clip=None), total_updates=9, gang=gang
    )
    samples = make_samples(make_model("qwen2-untied"))
    if start is not None:
        read_critic(critic, start)
    losses = [critic.update(samples)["value_loss"] for _ in range(steps)]
    values = critic.values(samples)
    if end is not None:
        save(gang, end, critic=critic)
    return losses, values


def test_a_divided_critic_learns_and_resumes_the_same(ranks: Ranks, tmp_path: Path) -> None:
    losses, values = train_critic(Gang.alone(), ALONE, 2, None, None)
    first, _ = ranks.run(train_critic, SEQUENCE, 1, None, tmp_path, size=4)[0]
    for size, changes in ((1, ALONE), (3, FSDP)):
        for found in ranks.run(train_critic, changes, 1, tmp_path, None, size=size):
            assert first + found[0] == pytest.approx(losses, rel=1e-4)
            for left, right in zip(found[1], values, strict=True):
                np.testing.assert_allclose(left, right, atol=1e-3)


def break_down(gang: Gang, changes: dict[str, Any]) -> tuple[str, bool]:
    learner = learner_of(gang, changes)
    samples = make_samples(make_model())
    before = {name: tensor.clone() for name, tensor in learner.body.whole_tensors()}
    bad: Sample = samples[0].with_(advantages=np.full(len(samples[0].advantages), np.nan, dtype=np.float32))
    try:
        learner.update([bad.with_(mask=np.ones_like(bad.mask)), *samples[1:]])
    except NonFiniteError as error:
        kept = all(torch.equal(tensor, before[name]) for name, tensor in learner.body.whole_tensors())
        learner.update(samples)
        return str(error), kept
    return "nothing was raised", False


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_changes_nothing(ranks: Ranks) -> None:
    assert ranks.run(break_down, BOTH, size=4) == [("the loss is nan", True)] * 4


def no_signal(gang: Gang, changes: dict[str, Any]) -> tuple[list[float], bool]:
    """The share of skipped updates of steps with and without a signal, and whether the latter changed anything."""
    learner = Learner(
        trainable(), section(weight_decay=0.1, decay="linear", minibatches=2, **changes), algorithm=Grpo(),
        temperature=TEMPERATURE, max_response_tokens=LONGEST, total_updates=10, gang=gang,
    )  # fmt: skip
    samples = make_samples(make_model())
    flat = [sample.with_(advantages=sample.advantages * 0) for sample in samples]
    half = [sample.with_(advantages=sample.advantages * (sample.draw == samples[0].draw)) for sample in samples]
    skipped = [learner.update(samples)["skipped_fraction"]]
    before = {name: tensor.detach().clone() for name, tensor in learner.body.whole_tensors()}
    count = learner.optimizer.num_updates
    skipped.append(learner.update(flat)["skipped_fraction"])
    same = all(torch.equal(tensor, before[name]) for name, tensor in learner.body.whole_tensors())
    same = same and learner.optimizer.num_updates == count
    return [*skipped, learner.update(half)["skipped_fraction"]], same


@pytest.mark.parametrize(
    ("size", "changes"), [(1, {}), pytest.param(2, {}, marks=pytest.mark.slow), (2, dict(sharding="fsdp"))]
)
def test_an_update_without_signal_changes_nothing_on_any_rank(ranks: Ranks, size: int, changes: dict[str, Any]) -> None:
    assert ranks.run(no_signal, changes, size=size) == [([0.0, 1.0, 0.5], True)] * size


def bfloat16_learner(gang: Gang, **changes: Any) -> Learner:
    model = trainable("qwen2-tied").to(torch.bfloat16)
    fuse_parameters(model)
    return Learner(
        model, section(**changes), algorithm=Grpo(), temperature=TEMPERATURE, max_response_tokens=LONGEST, total_updates=10,
        gang=gang,
    )  # fmt: skip


def learn_in_bfloat16(gang: Gang, changes: dict[str, Any]) -> list[dict[str, float]]:
    learner = bfloat16_learner(gang, **changes)
    return [learner.update(make_samples(make_model())) for _ in range(3)]


@pytest.mark.slow
@needs_bfloat16
def test_in_bfloat16_a_divided_learner_has_the_curve_of_one_process_but_for_rounding(ranks: Ranks) -> None:
    expected = learn_in_bfloat16(Gang.alone(), ALONE)
    for changes in (ALONE, FSDP, SEQUENCE):
        for found, row in zip(ranks.run(learn_in_bfloat16, changes, size=4)[0], expected, strict=True):
            for name in ("grad_norm", "entropy"):
                assert found[name] == pytest.approx(row[name], rel=0.02), name


def step_in_bfloat16(
    gang: Gang, changes: dict[str, Any], start: Path | None, end: Path, steps: int
) -> tuple[set[Any], int]:
    """Steps along made-up gradients, from a checkpoint where one is given, and to another."""
    learner = bfloat16_learner(gang, lr=1e-5, **changes)
    body: Any = learner.body
    if start is not None:
        read_learner(learner, start)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        whole = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in body.whole_tensors()}
        learner.optimizer.accumulate([body.cut(name, whole[name]) if body.in_parts else whole[name] for name in whole])
        learner.optimizer.step()
    save(gang, end, learner=learner)
    return {tensor.dtype for _, tensor in body.whole_tensors()}, learner.optimizer.num_updates


def masters_in(directory: Path) -> dict[str, torch.Tensor]:
    stored = open_role(directory, "actor")
    return {name: stored.read(name) for name in stored.tensors if name.startswith("master/")}


def test_master_weights_stay_in_float32_and_travel_with_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    dtypes, _ = ranks.run(step_in_bfloat16, FSDP, None, tmp_path / "first", 2, size=2)[0]
    assert dtypes == {torch.bfloat16}, "engines get what the model computes in"
    first, weights = masters_in(tmp_path / "first"), open_role(tmp_path / "first", "model")
    kept, rounded = first["master/model.norm.weight"], weights.read("model.norm.weight")
    assert kept.dtype == torch.float32 and not torch.equal(kept, rounded.float())
    assert torch.equal(kept.bfloat16(), rounded)
    # Without an update: what was read is written again, by one process and by several.
    for world, size, changes in (("one", 1, ALONE), ("four", 4, BOTH)):
        _, num_updates = ranks.run(step_in_bfloat16, changes, tmp_path / "first", tmp_path / world, 0, size=size)[0]
        assert num_updates == 2
    for world in ("one", "four"):
        again = masters_in(tmp_path / world)
        assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)


def count_elements(gang: Gang, changes: dict[str, Any]) -> tuple[int, int]:
    learner = learner_of(gang, changes)
    learner.update(make_samples(make_model()))
    state = sum(value.numel() for entry in learner.optimizer.adamw.state.values() for value in entry.values())
    return sum(tensor.numel() for tensor in learner.body.named.values()), state


def test_each_rank_holds_its_part_of_weights_and_state(ranks: Ranks) -> None:
    whole, whole_state = count_elements(Gang.alone(), ALONE)
    for part, state in ranks.run(count_elements, BOTH, size=4):
        assert part < 0.3 * whole and state < 0.3 * whole_state
    assert [part for part, _ in ranks.run(count_elements, ALONE, size=2)] == [whole, whole]


def try_to_build(gang: Gang, changes: dict[str, Any], shape: dict[str, Any]) -> str:
    try:
        make_body(trainable("llama-tied", **shape), section(**changes), gang=gang)
    except ValueError as error:
        return str(error)
    return "built"


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (dict(), dict(tensor_parallel_size=4), "actor.tensor_parallel_size=4, but actor has 2 processes; use a divisor of 2"),
        (dict(), dict(**HSDP, tensor_parallel_size=2), "sharding_group_size=2 does not divide the 1 data ranks"),
        (dict(), dict(sharding="fsdp", cpu_offload=True), "this run uses only the CPU; leave the key out"),
        (dict(), dict(sharding="fsdp", optimizer=dict(name="torch.optim.Muon")), "may need whole weights"),
        (dict(vocab_size=41), TENSOR, "built"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(ranks: Ranks, shape: Any, changes: Any, message: str) -> None:
    for found in ranks.run(try_to_build, changes, shape, size=2):
        assert message in found


@pytest.mark.slow
def test_an_odd_vocabulary_is_divided_by_tokens(ranks: Ranks) -> None:
    """Embeddings and output head are whole while they run, so their rows need not divide."""
    shape = dict(vocab_size=43, num_attention_heads=2, num_key_value_heads=2, intermediate_size=94)
    expected = odd(Gang.alone(), ALONE, "llama-tied", shape)
    for found in ranks.run(odd, SEQUENCE, "llama-tied", shape, size=4):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "architecture"),
    [
        pytest.param(1, 2, "qwen2-untied", marks=pytest.mark.slow),
        (2, 4, "qwen3-tied"),
        pytest.param(1, 4, "llama-bias", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_a_key_value_head_keep_it_equal(
    ranks: Ranks, kv_heads: int, tensor: int, architecture: str
) -> None:
    shape = dict(num_key_value_heads=kv_heads)
    expected = odd(Gang.alone(), ALONE, architecture, shape)
    changes = dict(sharding="fsdp", tensor_parallel_size=tensor, sequence_parallel=True)
    for found in ranks.run(odd, changes, architecture, shape, size=4):
        assert_same(found, expected)


def odd(
    gang: Gang, changes: dict[str, Any], architecture: str, shape: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    learner = learner_of(gang, changes, architecture, **shape)
    samples = make_samples(make_model(architecture, **shape))
    rows = [learner.update(samples)]
    return rows, {name: tensor.detach().numpy() for name, tensor in learner.body.whole_tensors()}


def mirrored(gang: Gang, directory: Path) -> tuple[bool, bool]:
    """Whether the module has what was learnt, after an update and after a checkpoint was read."""
    learner = Learner(
        trainable(), section(**FSDP), algorithm=Grpo(), temperature=TEMPERATURE, max_response_tokens=LONGEST,
        total_updates=10, gang=gang, mirror=True,
    )  # fmt: skip
    save(gang, directory, learner=learner)
    before = learner.model.lm_head.weight.clone()
    learner.update(make_samples(make_model()))
    whole = dict(learner.body.whole_tensors())
    follows = not torch.equal(learner.model.lm_head.weight, before) and torch.equal(
        learner.model.lm_head.weight, whole["embed"]
    )
    read_learner(learner, directory)
    return follows, torch.equal(learner.model.lm_head.weight, before)


def test_a_module_that_mirrors_a_divided_learner_has_its_weights(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(mirrored, tmp_path, size=2) == [(True, True)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_state_in_host_memory_learns_the_same(dtype: torch.dtype) -> None:
    import torch.distributed as dist

    samples = make_samples(make_model("qwen2-untied"))

    def learn(**changes: Any) -> tuple[Learner, list[float]]:
        model = trainable("qwen2-untied").to("cuda", dtype)
        fuse_parameters(model)
        learner = Learner(
            model, section(**changes), algorithm=Grpo(), temperature=TEMPERATURE, max_response_tokens=LONGEST,
            total_updates=10, mirror=True,
        )  # fmt: skip
        return learner, [learner.update(samples)["loss"] for _ in range(3)]

    whole, losses = learn()
    try:
        offloaded, found = learn(sharding="fsdp", cpu_offload=True)
        assert all(tensor.device.type == "cpu" for tensor in offloaded.body.named.values())
        assert found == pytest.approx(losses, abs=1e-4 if dtype == torch.float32 else 0.02)
        for name, parameter in offloaded.model.named_parameters():
            other = whole.model.get_parameter(name)
            if name.endswith("k_proj.bias"):
                continue  # softmax takes no notice of it: its gradient is rounding alone, of which Adam makes whole steps
            assert parameter.is_cuda and (parameter - other).abs().max() < 4e-3, name
    finally:
        dist.destroy_process_group()


def seat(
    gang: Gang, config: Config, model_path: str, in_parts: frozenset[Role], roles: list[set[Role]]
) -> dict[str, Any]:
    """A process of the cluster, its gang given: two updates, the weights handed on, and what is then where."""
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    worker = RoleWorker(config, model_path, in_parts=in_parts)
    worker._join = lambda ranks, meeting: gang  # type: ignore[method-assign]
    worker.build(dict.fromkeys(roles[gang.rank], gang.rank), {})
    samples = make_samples(make_model())
    before = {name: tensor.clone() for name, tensor in worker.model.named_parameters()}
    for _ in range(2):
        worker.update(samples)
    worker.send_weights(1)
    assert worker.learner is not None
    whole = {name: tensor.detach().numpy() for name, tensor in worker.learner.body.whole_tensors()}
    held = {name: tensor.detach().numpy() for name, tensor in worker.model.named_parameters() if not tensor.is_meta}
    return {
        "whole": whole,
        "held": {name: held[name] for name in held},
        "moved": [name for name in held if not np.array_equal(held[name], before[name].numpy())],
        "scores": worker.score(samples),
        "reference": worker.score_reference(samples),
        "shares": worker.learner.body.named["norm"].data_ptr()
        == worker.model.get_parameter("model.norm.weight").data_ptr(),
    }


@pytest.mark.parametrize("changes", [pytest.param(FSDP, marks=pytest.mark.slow), SEQUENCE], ids=["fsdp", "2x2"])
def test_an_engine_beside_a_divided_learner_gets_all_of_the_policy(
    ranks: Ranks, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Engines on ranks 1 and 3 only: the others hold their parts and nothing else."""
    path = str(save_model(tmp_path / "model"))
    config = Config(
        run=RunSection(dir=tmp_path / "run"), actor=section(**changes), algorithm=Grpo(kl_coef=0.1),
        rollout=RolloutSection(max_running=4),
    )  # fmt: skip
    with_engine = {Role.ACTOR, Role.REFERENCE, Role.ROLLOUT}
    roles = [with_engine if rank % 2 else with_engine - {Role.ROLLOUT} for rank in range(4)]
    found = ranks.run(seat, config, path, frozenset({Role.ACTOR, Role.REFERENCE}), roles, size=4)
    expected = found[0]["whole"]
    for rank, result in enumerate(found):
        assert not result["shares"]
        if rank % 2 == 0:
            assert result["held"] == {}
            continue
        np.testing.assert_array_equal(result["held"]["model.norm.weight"], expected["norm"])
        parts = [result["held"][f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
        np.testing.assert_array_equal(np.concatenate(parts), expected["layers.1.qkv"])
        assert sorted(result["moved"]) == sorted(result["held"])
    assert [len(result["scores"]) for result in found] == [12, 0, 0, 0], "one of them tells"
    assert [len(result["reference"]) for result in found] == [12, 0, 0, 0]


def test_an_engine_beside_a_whole_learner_reads_its_tensors(ranks: Ranks, tmp_path: Path) -> None:
    config = Config(
        run=RunSection(dir=tmp_path / "run"), actor=section(), algorithm=Grpo(kl_coef=0.1), rollout=RolloutSection(max_running=4)
    )  # fmt: skip
    roles = [{Role.ACTOR, Role.REFERENCE, Role.ROLLOUT}] * 2
    for result in ranks.run(seat, config, str(save_model(tmp_path / "model")), frozenset(), roles, size=2):
        assert result["shares"] and len(result["scores"]) == 12


# Without processes


def test_a_reference_in_the_actors_processes_is_divided_with_it() -> None:
    config = Config(actor=OptimizerSection(sharding="fsdp"))

    def plan(**placement: str | int) -> Plan:
        return plan_placement(ClusterSection(num_gpus_per_node=4, component_placement=placement))

    together = plan(actor="0-1", reference="0-1", critic="0-1", rollout="2-3")
    assert roles_in_parts(config, together) == {Role.ACTOR, Role.REFERENCE}
    assert roles_in_parts(config, plan(actor="0-1", reference="2-3", rollout="2-3")) == {Role.ACTOR}
    assert roles_in_parts(Config(critic=OptimizerSection(tensor_parallel_size=2)), together) == {Role.CRITIC}


def test_one_process_is_never_divided_unless_it_has_to_be() -> None:
    assert not is_split(OptimizerSection(sharding="fsdp"), num_ranks=1)
    assert not is_split(OptimizerSection(), num_ranks=8)
    assert is_split(OptimizerSection(sharding="fsdp", cpu_offload=True), num_ranks=1)
    assert is_split(OptimizerSection(tensor_parallel_size=2), num_ranks=2)
    assert not is_split(OptimizerSection(sharding="hsdp"), num_ranks=1)


def test_ranks_count_along_replicas_shards_and_tensor_groups() -> None:
    wanted = OptimizerSection(sharding="hsdp", tensor_parallel_size=2)
    splits = [split_of(wanted, rank=rank, nodes=[0, 0, 0, 0, 1, 1, 1, 1]) for rank in range(8)]
    assert splits[0] == ModelSplit(replicate=2, shard=2, tensor=2, rank=0)
    assert [(one.data_rank, one.shard_rank, one.tensor_rank) for one in splits if one is not None] == [
        (0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1), (2, 0, 0), (2, 0, 1), (3, 1, 0), (3, 1, 1)
    ]  # fmt: skip


def test_hsdp_needs_equal_nodes_or_a_size() -> None:
    nodes = [0, 0, 0, 1]
    with pytest.raises(ValueError, match="the nodes have 1 and 3 processes of actor .* set actor.sharding_group_size"):
        split_of(OptimizerSection(sharding="hsdp"), rank=0, nodes=nodes)
    sized = split_of(OptimizerSection(sharding="hsdp", sharding_group_size=2), rank=3, nodes=nodes)
    assert sized == ModelSplit(replicate=2, shard=2, tensor=1, rank=3)


@pytest.mark.parametrize("field", ["qkv", "qkv_bias", "gate_up", "gate_up_bias"])
def test_the_order_of_cut_rows_is_a_permutation(field: str) -> None:
    order = split_order(field, heads=6, kv_heads=3, dim=4, intermediate=12, tensor=3)
    assert order is not None and sorted(order.tolist()) == list(range(len(order)))
    assert split_order(field, heads=6, kv_heads=3, dim=4, intermediate=12, tensor=1) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sequence_parallel=True), "raise tensor_parallel_size, or remove sequence_parallel"),
        (dict(sharding_group_size=2), "set sharding=hsdp, or remove sharding_group_size"),
        (dict(cpu_offload=True), "set sharding=fsdp"),
        (dict(lr=1e-3, optimizer=dict(kwargs=dict(lr="1e-4"))), "optimizer.kwargs.lr=1e-4 contradicts lr=0.001"),
        (dict(lr=1e-3, optimizer=dict(kwargs=dict(lr=1e-4))), "optimizer.kwargs.lr=0.0001 contradicts lr=0.001"),
        (dict(optimizer=dict(kwargs=dict(foreach=True, fused=True))), "sets both foreach and fused"),
        (dict(optimizer=dict(kwargs=dict(maximize=True))), "optimizer.kwargs.maximize=True is not supported"),
        (dict(train_global_batch_size=96), "48 x 8 / 1 = 384 completions; write actor.minibatches=4"),
        (dict(train_global_batch_size=100), "write actor.train_global_batch_size=384"),
        (dict(max_total_sequence_length=100), "512 \\+ 8 = 520; lower one of them"),
    ],
)  # fmt: skip
def test_keys_that_contradict_others_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(actor=OptimizerSection(**changes))


def test_names_of_other_systems_are_taken() -> None:
    config = Config(
        actor=OptimizerSection.model_validate(
            dict(
                train_global_batch_size=192, minibatches=2, train_micro_batch_size=4, logprob_batch_size=8,
                max_total_sequence_length=1024, tensor_parallel_size=2, sequence_parallel=True, context_parallel_size=1,
                cpu_offload=False, activation_checkpointing=True,
                optimizer=dict(name="torch.optim.AdamW", kwargs=dict(lr=5e-6, weight_decay=0.01, betas=[0.9, 0.95], foreach=False)),
            )
        )
    )  # fmt: skip
    assert (config.actor.lr, config.actor.weight_decay, config.actor.betas) == (5e-6, 0.01, (0.9, 0.95))
    assert config.actor.optimizer.kwargs == {"foreach": False}


def test_each_purpose_is_that_of_a_method() -> None:
    assert all(callable(getattr(RoleWorker, method)) for method in PURPOSES)
