"""Packing: every loss token once, at its right place, within the budget, without padding."""

from __future__ import annotations

from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import num_unique

from rollcall.base.types import MicroBatch, Sample
from rollcall.learner import packing
from rollcall.learner.packing import pack

COUNTER = count()
OPTIONAL = ("old_logprobs", "reference_logprobs", "returns", "values")


def make_sample(
    draw: int, prompt: list[int], response: list[int], mask: list[bool] | None = None, **arrays: Any
) -> Sample:
    """Every float of a token tells which token it belongs to."""
    place = np.arange(len(response), dtype=np.float32)
    attempt = arrays.pop("attempt", next(COUNTER))
    fields: dict[str, Any] = dict(
        draw=draw, attempt=attempt, prompt_ids=np.array(prompt, dtype=np.int32), response_ids=np.array(response, dtype=np.int32),
        mask=np.array(mask if mask is not None else [True] * len(response), dtype=np.bool_), behaviour_logprobs=-place,
        old_logprobs=None, reference_logprobs=None, advantages=100 * draw + place, returns=None, values=None,
    )  # fmt: skip
    return Sample(**{**fields, **arrays})


def pack_all(samples: list[Sample], budget: int, *, few: int = packing.FEW) -> list[MicroBatch]:
    weights = np.arange(1, len(samples) + 1, dtype=np.float32)
    with patch.object(packing, "FEW", few):
        return list(pack(samples, weights=weights, tokens_per_microbatch=budget))


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    """Rows of a few groups in any order; small lengths, empty responses and masks included. Few different tokens, so that rows
    begin alike in prompts, in responses, and where one's response is another's prompt."""
    samples: list[Sample] = []
    most = draw(st.sampled_from([1, 2, 99]))
    for group in range(draw(st.integers(1, 4))):
        prompts = draw(st.lists(st.lists(st.integers(0, most), min_size=1, max_size=6), min_size=1, max_size=2))
        for _ in range(draw(st.integers(1, 4))):
            prompt = draw(st.sampled_from(prompts))
            response = draw(st.lists(st.integers(0, most), max_size=6))
            mask = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
            floats = np.array(draw(st.lists(st.integers(-9, 9), min_size=len(response), max_size=len(response))))
            extra = {name: (floats + shift).astype(np.float32) for shift, name in enumerate(OPTIONAL)}
            samples.append(make_sample(group, prompt, response, mask, **extra))
    return draw(st.permutations(samples))


def keys_of_each_token(batch: MicroBatch) -> list[list[int]]:
    """The packed positions that each packed token attends to."""
    keys: list[list[int]] = []
    for start_q, end_q, start_k, end_k in zip(batch.cu_q, batch.cu_q[1:], batch.cu_k, batch.cu_k[1:], strict=False):
        own = batch.kv_index[start_k:end_k].tolist()
        length = end_q - start_q
        keys += [own[: len(own) - length + place + 1] for place in range(length)]
    return keys


@settings(max_examples=60, deadline=None)
@given(samples=sample_lists(), budget=st.integers(1, 40))
def test_every_loss_token_is_there_once_and_is_predicted_from_its_own_prefix(
    samples: list[Sample], budget: int
) -> None:
    seen: list[int] = []
    for batch in pack_all(samples, budget, few=1 + budget % 3):
        keys = keys_of_each_token(batch)
        assert sorted(set(batch.row.tolist())) == list(range(batch.num_rows)), "every row has a loss token"
        for row, index in enumerate(batch.sample_index.tolist()):
            sample, mine = samples[index], batch.row == row
            seen.append(index)
            places = np.flatnonzero(sample.mask)
            assert batch.targets[mine].tolist() == sample.response_ids[places].tolist()
            assert batch.weights[mine].tolist() == [index + 1] * len(places)
            assert batch.advantages[mine].tolist() == sample.advantages[places].tolist()
            assert batch.behaviour_logprobs[mine].tolist() == sample.behaviour_logprobs[places].tolist()
            for name in OPTIONAL:
                assert getattr(batch, name)[mine].tolist() == getattr(sample, name)[places].tolist()
            for place, position in zip(places, batch.logit_index[mine], strict=True):
                prefix = [*sample.prompt_ids.tolist(), *sample.response_ids[:place].tolist()]
                assert batch.token_ids[keys[position]].tolist() == prefix
                assert batch.positions[keys[position]].tolist() == list(range(len(prefix)))
    assert seen == [index for index, sample in enumerate(samples) if sample.mask.any()]


@settings(max_examples=60, deadline=None)
@given(samples=sample_lists(), budget=st.integers(1, 40))
def test_the_budget_is_kept_but_for_lone_rows_and_nothing_is_padded(samples: list[Sample], budget: int) -> None:
    for batch in pack_all(samples, budget, few=1):
        rows = [samples[index] for index in batch.sample_index]
        assert batch.num_tokens <= budget or len(rows) == 1
        assert batch.num_tokens == num_unique(rows)
        assert (np.diff(batch.cu_q) > 0).all() and (np.diff(batch.cu_k) >= np.diff(batch.cu_q)).all()


def test_a_shared_prompt_is_laid_out_once() -> None:
    rows = [make_sample(3, [1, 2, 3], [4, 5]), make_sample(3, [1, 2, 3], [6, 7, 8])]
    (batch,) = pack_all(rows, 100)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 3, 4]
    assert batch.logit_index.tolist() == [2, 3, 2, 4, 5]
    assert batch.targets.tolist() == [4, 5, 6, 7, 8]
    assert batch.cu_q.tolist() == [0, 3, 4, 6] and batch.cu_k.tolist() == [0, 3, 7, 12]
    assert batch.kv_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5]


def test_a_few_tokens_past_the_prompt_are_not_shared_so_that_segments_keep_one_shape() -> None:
    common = list(range(10, 10 + packing.FEW))
    for number, expected in ((packing.FEW - 1, 3 + 2 * 9), (packing.FEW, 3 + packing.FEW + 2 * (9 - packing.FEW))):
        rows = [make_sample(0, [1, 2, 3], [*common[:number], *[last] * (10 - number)]) for last in (50, 60)]
        (batch,) = pack_all(rows, 100)
        assert batch.num_tokens == expected
    same = [make_sample(0, [1, 2, 3], [4, 5, 6]) for _ in range(2)]
    assert pack_all(same, 100)[0].num_tokens == 5, "a row that is all there already needs no segment"


def test_a_prompt_is_laid_out_again_where_its_group_is_cut() -> None:
    rows = [make_sample(3, [1, 2, 3], [4, 5]), make_sample(3, [1, 2, 3], [6, 7, 8])]
    first, second = pack_all(rows, 5)
    assert first.token_ids.tolist() == [1, 2, 3, 4] and second.token_ids.tolist() == [1, 2, 3, 6, 7]


def test_equal_prompts_of_different_draws_are_not_mixed_up() -> None:
    (batch,) = pack_all([make_sample(0, [1, 2], [3]), make_sample(1, [1, 2], [4])], 100)
    assert batch.token_ids.tolist() == [1, 2, 1, 2] and batch.logit_index.tolist() == [1, 3]


def test_rows_without_a_loss_token_cost_nothing() -> None:
    silent = make_sample(0, [1, 2], [3, 4], [False, False])
    empty = make_sample(1, [1, 2], [])
    assert pack_all([silent, empty], 100) == []
    (batch,) = pack_all([silent, make_sample(2, [5], [6]), empty], 100)
    assert batch.sample_index.tolist() == [1] and batch.token_ids.tolist() == [5]


def test_a_row_longer_than_the_budget_has_a_micro_batch_of_its_own() -> None:
    rows = [make_sample(index, [1] * 5, [2] * length) for index, length in enumerate((3, 20, 3))]
    assert [batch.num_tokens for batch in pack_all(rows, 10)] == [7, 24, 7]


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_the_samples_lack_the_micro_batch_lacks(name: str) -> None:
    (batch,) = pack_all([make_sample(0, [1], [2, 3])], 10)
    assert getattr(batch, name) is None
    (batch,) = pack_all([make_sample(0, [1], [2, 3], [False, True], **{name: np.array([7, 8], dtype=np.float32)})], 10)
    assert getattr(batch, name).tolist() == [8]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_rows_of_a_micro_batch_can_be_bounded_beside_its_tokens(most: int) -> None:
    samples = [make_sample(index // 2, [1, 2], [3, 4]) for index in range(7)]
    weights = np.ones(len(samples), dtype=np.float32)
    batches = list(pack(samples, weights=weights, tokens_per_microbatch=1000, max_rows=most))
    assert [batch.num_rows for batch in batches] == [most] * (7 // most) + ([7 % most] if 7 % most else [])
    assert [index for batch in batches for index in batch.sample_index] == list(range(7))
