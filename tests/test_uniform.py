"""The uniform numbers that sampling draws with: exact, even, independent."""

import math

import torch

from rollcall.engine.native.sampler import uniforms


def python_uniform(seed, position):
    """The same hash in Python's unbounded integers."""
    mask = (1 << 64) - 1

    def mix(state):
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    gamma = 0x9E3779B97F4A7C15
    state = (mix((seed + gamma) & mask) + (position + 1) * gamma) & mask
    return (mix(state) >> 40) / 2**24


def chi_square(counts, expected):
    return float(((counts.double() - expected) ** 2 / expected).sum())


def assert_spread(values, bins):
    """Counts in equal bins look like independent uniform draws: chi-square within 5 standard deviations."""
    counts = torch.bincount(values, minlength=bins)
    assert len(counts) == bins
    assert abs(chi_square(counts, len(values) / bins) - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


def test_uniforms_equal_the_hash_in_unbounded_integers():
    seeds = [0, 1, -1, 12345, 2**63 - 1, -(2**63), 0x61C8864680B583EB, 7 * 10**17]
    positions = [0, 1, 2, 511, 2**31, 2**40, 5, 6]
    drawn = uniforms(torch.tensor(seeds), torch.tensor(positions))
    assert drawn.dtype == torch.float32
    assert drawn.tolist() == [python_uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def test_uniforms_stay_below_one_and_fill_the_interval_evenly():
    drawn = uniforms(torch.arange(256)[:, None], torch.arange(256)[None, :]).flatten()
    assert drawn.min() >= 0 and drawn.max() < 1
    assert_spread((drawn * 256).long(), 256)


def test_neighbouring_positions_and_neighbouring_seeds_draw_independently():
    drawn = (uniforms(torch.arange(257)[:, None], torch.arange(257)[None, :]) * 16).long()
    assert_spread((drawn[:, :-1] * 16 + drawn[:, 1:]).flatten(), 256)
    assert_spread((drawn[:-1] * 16 + drawn[1:]).flatten(), 256)


def test_no_seed_draws_a_shifted_copy_of_another_seeds_stream():
    gamma = 0x9E3779B97F4A7C15 - 2**64
    one = uniforms(torch.tensor(5), torch.arange(100))
    two = uniforms(torch.tensor(5 + gamma), torch.arange(100))
    for shift in range(3):
        assert (one[shift:] != two[: 100 - shift]).all() and (two[shift:] != one[: 100 - shift]).all()
