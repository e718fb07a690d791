"""Lengths are checked when an object is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollcall.base.types import Completion, FinishReason, Group, MicroBatch, Prompt, Sample, Score, Segment


def prompt(**changes: Any) -> Prompt:
    fields = dict(id="p", token_ids=np.array([4, 5], dtype=np.int32), text="45", answer="9", metadata={})
    return Prompt(**{**fields, **changes})  # type: ignore[arg-type]


def completion(num_tokens: int = 3, /, **changes: Any) -> Completion:
    fields: dict[str, Any] = dict(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        mask=np.ones(num_tokens, dtype=np.bool_),
        segments=(Segment(version=0, num_tokens=num_tokens),),
        finish=FinishReason.STOP,
        seed=1,
        text="abc",
        episode=None,
    )
    return Completion(**{**fields, **changes})


def score(value: float) -> Score:
    return Score(value=value, parts={"exact": value}, errors={})


def group(**changes: Any) -> Group:
    fields: dict[str, Any] = dict(
        step=1, draw=0, prompt=prompt(), completions=(completion(3), completion(2)), scores=(score(1.0), score(0.5)),
        started_s=0.0, finished_s=1.0, worker="local",
    )  # fmt: skip
    return Group(**{**fields, **changes})


def sample(num_tokens: int = 3, /, **changes: Any) -> Sample:
    floats = np.zeros(num_tokens, dtype=np.float32)
    fields: dict[str, Any] = dict(
        draw=0, attempt=0, prompt_ids=np.array([4], dtype=np.int32), response_ids=np.arange(num_tokens, dtype=np.int32),
        mask=np.ones(num_tokens, dtype=np.bool_), behaviour_logprobs=floats, old_logprobs=None, reference_logprobs=None,
        advantages=floats, returns=None, values=None,
    )  # fmt: skip
    return Sample(**{**fields, **changes})


def test_a_prompt_without_tokens_is_refused_by_its_id() -> None:
    with pytest.raises(ValueError, match="prompt 'empty' has no tokens, but needs at least one"):
        prompt(id="empty", token_ids=np.zeros(0, dtype=np.int32))


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "mask"])
def test_a_completion_has_one_logprob_and_one_mask_entry_per_token(field: str) -> None:
    with pytest.raises(AssertionError, match="differ in length"):
        completion(**{field: np.zeros(4, dtype=np.float32)})


def test_the_segments_of_a_completion_add_up() -> None:
    two = (Segment(version=0, num_tokens=1), Segment(version=1, num_tokens=2))
    assert completion(segments=two).segments == two
    with pytest.raises(AssertionError, match="segments do not add up"):
        completion(segments=two[:1])


def test_an_empty_completion_is_allowed() -> None:
    assert len(completion(0, segments=()).token_ids) == 0


def test_a_group_has_one_score_per_completion() -> None:
    assert group().rewards.tolist() == [1.0, 0.5] and group().rewards.dtype == np.float64
    assert group().num_tokens == 5
    with pytest.raises(AssertionError, match="one score per completion"):
        group(scores=(score(1.0),))


@pytest.mark.parametrize(
    "field", ["mask", "behaviour_logprobs", "old_logprobs", "reference_logprobs", "advantages", "returns", "values"]
)
def test_every_array_of_a_sample_has_one_entry_per_token(field: str) -> None:
    with pytest.raises(AssertionError, match=f"{field} has 2 entries for 3 tokens"):
        sample(**{field: np.zeros(2, dtype=np.float32)})
    assert len(getattr(sample(**{field: np.zeros(3, dtype=np.float32)}), field)) == 3


def test_a_changed_sample_is_checked_again_and_the_first_stays() -> None:
    one = sample()
    other = one.with_(advantages=np.ones(3, dtype=np.float32))
    assert one.advantages.sum() == 0 and other.advantages.sum() == 3
    with pytest.raises(AssertionError, match="advantages has 4"):
        one.with_(advantages=np.ones(4, dtype=np.float32))


def micro_batch(**changes: Any) -> MicroBatch:
    """A prompt of two tokens and one row of two more; three loss tokens."""
    fields: dict[str, Any] = dict(
        token_ids=np.arange(4), positions=np.arange(4), kv_index=np.array([0, 1, 0, 1, 2, 3]),
        cu_q=np.array([0, 2, 4], dtype=np.int32), cu_k=np.array([0, 2, 6], dtype=np.int32),
        logit_index=np.array([1, 2, 3]), targets=np.array([7, 8, 9]), row=np.zeros(3, dtype=np.int64),
        sample_index=np.array([0]), attempt=np.array([0]), weights=np.ones(3, dtype=np.float32), behaviour_logprobs=np.zeros(3, dtype=np.float32),
        old_logprobs=None, reference_logprobs=None, advantages=np.zeros(3, dtype=np.float32), returns=None, values=None,
    )  # fmt: skip
    return MicroBatch(**{**fields, **changes})


def test_a_micro_batch_counts_its_tokens_and_rows() -> None:
    assert (micro_batch().num_tokens, micro_batch().num_rows) == (4, 1)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("token_ids", "packed tokens and query segments differ"),
        ("positions", "packed tokens and query segments differ"),
        ("kv_index", "key index and key segments differ"),
        *(
            (name, f"{name} does not have one entry")
            for name in ("logit_index", "row", "weights", "behaviour_logprobs")
        ),
        ("advantages", "advantages does not have one entry"),
    ],
)
def test_every_array_of_a_micro_batch_is_checked(field: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        micro_batch(**{field: np.zeros(11)})


@pytest.mark.parametrize(
    ("make", "field"),
    [(prompt, "id"), (completion, "mask"), (group, "draw"), (sample, "draw"), (micro_batch, "row")],
)
def test_objects_do_not_change_and_take_no_unknown_field(make: Any, field: str) -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        setattr(make(), field, 5)
    with pytest.raises(TypeError):
        make(unknown=1)
