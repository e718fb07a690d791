"""The processes that train together: who works on what, and what they add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learners import make_learner, make_samples, trainable
from ranks import Ranks
from tiny import make_model

from rollcall.learner import gang as gang_module
from rollcall.learner.gang import Gang, balance, share
from rollcall.learner.learner import Learner


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_every_part_goes_to_one_member(costs: list[int], size: int) -> None:
    parts = [[index] for index in range(len(costs))]
    members = balance(parts, costs, size=size)
    assert len(members) == size
    assert sorted(item for member in members for item in member) == list(range(len(costs)))
    assert all(member == sorted(member) for member in members)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_no_member_has_more_than_its_share_and_one_part(costs: list[int], size: int) -> None:
    members = balance([[index] for index in range(len(costs))], costs, size=size)
    loads = [sum(costs[item] for item in member) for member in members]
    assert max(loads) <= sum(costs) / size + max(costs)


def test_tokens_count_and_not_rows() -> None:
    """One long row weighs as much as three short ones."""
    costs = [300, 100, 100, 100]
    assert [share(costs, keys=[0, 1, 2, 3], attempts=range(4), rank=rank, size=2) for rank in range(2)] == [
        [0],
        [1, 2, 3],
    ]


def test_groups_stay_together_where_there_are_enough() -> None:
    keys = [key for key in range(4) for _ in range(3)]
    parts = [share([10] * 12, keys=keys, attempts=range(12), rank=rank, size=2) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(12))
    for part in parts:
        assert all(keys.count(keys[item]) == sum(keys[other] == keys[item] for other in part) for item in part)


def test_few_groups_are_split_rather_than_leave_members_idle() -> None:
    parts = [share([10] * 6, keys=[0] * 6, attempts=range(6), rank=rank, size=3) for rank in range(3)]
    assert [len(part) for part in parts] == [2, 2, 2]


def test_more_members_than_rows_leaves_some_with_none() -> None:
    parts = [share([5, 5], keys=[0, 1], attempts=range(2), rank=rank, size=4) for rank in range(4)]
    assert sorted(len(part) for part in parts) == [0, 0, 1, 1]


def test_one_member_has_everything_in_order() -> None:
    assert share([3, 1, 2], keys=[0, 0, 1], attempts=range(3), rank=0, size=1) == [0, 1, 2]
    tensor = torch.ones(3)
    Gang.alone().sum_all([tensor])
    assert torch.equal(tensor, torch.ones(3)) and Gang.alone().gather("x") == ["x"]


def sums(gang: Gang, bucket_bytes: int) -> tuple[list[np.ndarray], list[Any]]:
    gang_module.BUCKET_BYTES = bucket_bytes
    shapes = [(3, 4), (5,), (1,), (2, 2, 2), (7, 1)]
    tensors = [
        torch.full(shape, float(10**gang.rank)) + torch.arange(shape[0])[(...,) + (None,) * (len(shape) - 1)]
        for shape in shapes
    ]
    turned = [tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for tensor in tensors]
    gang.sum_all(turned)
    return [tensor.numpy() for tensor in turned], gang.gather((gang.rank, gang.size))


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_sums_do_not_depend_on_the_buckets(ranks: Ranks, bucket_bytes: int) -> None:
    for tensors, members in ranks.run(sums, bucket_bytes, size=3):
        assert members == [[0, 3], [1, 3], [2, 3]]
        for tensor in tensors:
            offsets = np.arange(len(tensor)).reshape(-1, *[1] * (tensor.ndim - 1))
            np.testing.assert_allclose(tensor, np.broadcast_to(111 + 3 * offsets, tensor.shape))


def learn(gang: Gang, num_samples: int) -> tuple[dict[str, float], int, dict[str, np.ndarray]]:
    learner = make_gang_learner(gang)
    metrics = learner.update(make_samples(make_model(), masked=False)[:num_samples])
    weights = {name: tensor.detach().numpy() for name, tensor in learner.body.named.items()}
    return metrics, learner.num_tokens_trained, weights


def make_gang_learner(gang: Gang) -> Learner:
    learner = make_learner(trainable(), tokens_per_microbatch=60)
    learner.gang = learner.body.gang = gang
    learner.body.place = (gang.rank, gang.size)
    return learner


@pytest.mark.parametrize("num_samples", [1, 2, 12])
def test_members_without_rows_take_the_same_step(ranks: Ranks, num_samples: int) -> None:
    metrics, _, weights = learn(Gang.alone(), num_samples)
    results = ranks.run(learn, num_samples, size=3)
    for found, _, own in results:
        assert found == results[0][0]
        assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=1e-3, abs=1e-5)
        for name, weight in weights.items():
            np.testing.assert_allclose(own[name], weight, atol=1e-5, err_msg=name)
            np.testing.assert_array_equal(own[name], results[0][2][name], err_msg=name)


def learn_nothing(gang: Gang) -> str:
    samples = [sample.with_(mask=np.zeros_like(sample.mask)) for sample in make_samples(make_model())]
    try:
        make_gang_learner(gang).update(samples)
    except ValueError as error:
        return str(error)
    return "an update without a token"


def test_a_step_without_a_token_is_refused_by_everyone(ranks: Ranks) -> None:
    assert len({message for message in ranks.run(learn_nothing, size=3) if "has a token to learn from" in message}) == 1
