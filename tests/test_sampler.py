"""Sampling by inversion: exact at the borders, never a token of probability zero, truncation as defined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollcall.engine.native.sampler import BLOCK, invert_cdf, sample, truncate

LARGEST = 1 - 2.0**-24  # the largest uniform that is drawn
SIZES = [2, 40, 4 * BLOCK, 4 * BLOCK + 1, 5 * BLOCK + 17]  # one-level search, its border, two levels


def draw(logits: torch.Tensor, uniforms: list[float], *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0):
    rows = len(logits)
    return sample(
        logits,
        uniforms=torch.tensor(uniforms),
        temperature=torch.full((rows,), temperature),
        top_p=torch.full((rows,), top_p) if top_p < 1 else None,
        top_k=torch.full((rows,), top_k) if top_k else None,
    )


def test_a_uniform_picks_the_token_whose_share_of_the_line_it_falls_into() -> None:
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25]).expand(6, 4)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, LARGEST])
    assert invert_cdf(probs, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("size", SIZES)
def test_evenly_spaced_uniforms_visit_every_token_in_proportion(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    probs = torch.rand(size, generator=generator) * (torch.rand(size, generator=generator) < 0.5)
    probs[-1] = 0.5  # the last token can be drawn
    probs /= probs.sum()
    count = 20_000
    uniforms = (torch.arange(count) + 0.5) / count
    tokens = torch.cat([invert_cdf(probs.expand(len(part), -1), part) for part in uniforms.split(500)])
    counts = torch.bincount(tokens, minlength=size)
    assert (tokens.diff() >= 0).all()
    assert (counts - probs * count).abs().max() <= 2
    assert counts[probs == 0].sum() == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_uniform_past_the_rounded_total_means_the_last_token_of_any_weight(size: int) -> None:
    last = (size - 1) // 2
    probs = torch.zeros(1, size)
    probs[0, last] = 0.9999
    assert invert_cdf(probs, torch.tensor([LARGEST])).tolist() == [last]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=st.sampled_from(SIZES))
def test_a_token_of_probability_zero_is_never_drawn(data: st.DataObject, size: int) -> None:
    """Weights span many orders of magnitude and mostly vanish; the uniform may be at either end."""
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6, unique=True))
    exponents = data.draw(st.lists(st.floats(-37, 0), min_size=len(places), max_size=len(places)))
    uniform = data.draw(st.sampled_from([0.0, 2.0**-24, 0.5, LARGEST]) | st.floats(0, LARGEST, width=32))
    weights = np.zeros(size, dtype=np.float32)
    weights[places] = np.power(10.0, np.array(exponents))
    probs = torch.from_numpy(weights / weights.sum())[None]
    token = int(invert_cdf(probs, torch.tensor([uniform], dtype=torch.float32)))
    assert 0 <= token < size
    assert probs[0, token] > 0


@settings(max_examples=60, deadline=None)
@given(
    logits=arrays.arrays(np.float32, (3, 50), elements=st.floats(-80, 80, width=32)),
    uniforms=st.lists(st.floats(0, LARGEST, width=32), min_size=3, max_size=3),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.001, 1.0),
)
def test_a_sample_has_the_logprob_of_the_distribution_it_was_drawn_from(
    logits: np.ndarray, uniforms: list[float], top_k: int, top_p: float
) -> None:
    raw = torch.from_numpy(logits)
    tokens, logprobs = draw(raw, uniforms, temperature=1.7, top_p=top_p, top_k=top_k)
    scaled = raw / 1.7
    if top_k or top_p < 1:
        scaled = truncate(scaled, top_p=torch.full((3,), top_p), top_k=torch.full((3,), top_k))
    expected = torch.log_softmax(scaled.double(), dim=-1).gather(1, tokens[:, None])[:, 0]
    assert torch.isfinite(logprobs).all()
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)


def test_temperature_zero_takes_the_likeliest_with_its_plain_logprob() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 5.0]])
    tokens, logprobs = draw(logits, [LARGEST, 0.0], temperature=0.0)
    assert tokens.tolist() == [1, 2]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).max(-1).values)


def test_rows_keep_their_own_temperature_and_truncation() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(4, 4)
    tokens, _ = sample(
        logits,
        uniforms=torch.zeros(4),  # the first token that is kept
        temperature=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.8]),
        top_k=torch.tensor([0, 0, 3, 0]),
    )
    assert tokens.tolist() == [0, 3, 1, 2]


def kept(logits: list[float], *, top_p: float = 1.0, top_k: int = 0) -> list[int]:
    out = truncate(torch.tensor([logits]), top_p=torch.tensor([top_p]), top_k=torch.tensor([top_k]))
    assert torch.equal(out[out > -torch.inf], torch.tensor([logits])[out > -torch.inf]), "kept logits do not change"
    return torch.nonzero(out[0] > -torch.inf)[:, 0].tolist()


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = [0.5, 2.0, -1.0, 1.0]
    assert [kept(logits, top_k=k) for k in (1, 2, 3, 4, 9, 0)] == [[1], [1, 3], [0, 1, 3], *([[0, 1, 2, 3]] * 3)]


def test_top_p_keeps_the_fewest_likeliest_that_reach_p() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().tolist()
    assert [kept(logits, top_p=p) for p in (1e-6, 0.49, 0.6, 0.8, 0.95, 1.0)] == [
        [1], [1], [1, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3],
    ]  # fmt: skip


def test_top_p_is_taken_of_what_top_k_left() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().tolist()
    assert kept(logits, top_k=2, top_p=0.6) == [1]  # 0.5 of 0.75 is enough
    assert kept(logits, top_k=2, top_p=0.7) == [1, 3]


def test_equal_logits_are_cut_to_exactly_k() -> None:
    assert len(kept([1.0] * 6, top_k=4)) == 4
