"""A request whose worker is lost goes out again with the seeds that are missing, and comes back whole."""

from __future__ import annotations

import numpy as np

from rollcall.engine.protocol import Ended, Finished, Request, Sampling
from rollcall.roles.unfinished import Unfinished
from rollcall.types import Completion, FinishReason, Segment

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop_token_ids=(), stop_strings=())


def made(seed: int) -> Completion:
    return Completion(
        token_ids=np.array([seed], dtype=np.int32), logprobs=np.zeros(1, dtype=np.float32), mask=np.ones(1, dtype=np.bool_),
        segments=(Segment(version=0, num_tokens=1),), finish=FinishReason.STOP, seed=seed, text=str(seed), episode=None,
    )  # fmt: skip


def ask(*seeds: int) -> Request:
    return Request(id="r", prompt_ids=np.array([3], dtype=np.int32), seeds=seeds, sampling=SAMPLING)


def test_two_workers_are_lost_and_nothing_that_they_made() -> None:
    unfinished, request = Unfinished(), ask(10, 11, 12, 13)
    assert unfinished.note(Ended(request_id="r", place=2, completion=made(12))).place == 2
    request = unfinished.missing(request)
    assert request.seeds == (10, 11, 13)
    told = unfinished.note(Ended(request_id="r", place=2, completion=made(13)))
    assert told.place == 3, "the place in the whole group"
    request = unfinished.missing(request)
    assert request.seeds == (10, 11)
    whole = unfinished.whole(Finished(request_id="r", completions=(made(10), made(11))))
    assert [completion.seed for completion in whole.completions] == [10, 11, 12, 13]


def test_a_request_that_lost_nothing_stays_as_it_is() -> None:
    unfinished, request = Unfinished(), ask(10, 11)
    assert unfinished.missing(request) is request
    unfinished.note(Ended(request_id="r", place=0, completion=made(10)))
    finished = Finished(request_id="r", completions=(made(10), made(11)))
    assert unfinished.whole(finished) is finished
    assert unfinished.missing(request) is request, "what was finished is forgotten"
