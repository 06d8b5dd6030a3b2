"""Drawn lengths against the distribution written out cell by cell."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.workloads import PRESETS, constant_lengths, exponential_lengths, uniform_lengths
from experiments.workloads.lengths import _truncated_geometric, solve_exponential


def _table(a, b, max_prompt, max_total):
    """p(prompt, output) on the whole grid, in float64 and in no clever order."""
    prompt = np.arange(1, max_prompt + 1)[:, None]
    output = np.arange(1, max_total)[None, :]
    log = np.where(prompt + output <= max_total, a * prompt + b * output, -np.inf)
    weight = np.exp(log - log.max())
    return weight / weight.sum(), prompt, output


@pytest.mark.parametrize("name", ["sharegpt", "alpaca"])
def test_presets_keep_their_means_after_both_cuts(name):
    means = PRESETS[name]
    table, prompt, output = _table(*solve_exponential(*means, 1024, 2048), 1024, 2048)
    assert (table * prompt).sum() == pytest.approx(means[0], rel=1e-9)
    assert (table * output).sum() == pytest.approx(means[1], rel=1e-9)


def test_cutting_plain_exponentials_would_shift_the_means():
    # Why the exponents are solved for: the exponents of the uncut distributions miss the published means.
    table, prompt, output = _table(np.log1p(-1 / 161.31), np.log1p(-1 / 337.99), 1024, 2048)
    assert (table * prompt).sum() < 161.31 - 0.5
    assert (table * output).sum() < 337.99 - 5


@given(st.data())
def test_means_after_truncation_are_the_asked_ones(data):
    max_total = data.draw(st.integers(5, 60))
    max_prompt = data.draw(st.integers(3, max_total))
    share = st.floats(0.02, 0.98)
    prompt_mean = 1 + data.draw(share) * (min(max_prompt, max_total - 1) - 1)
    output_mean = 1 + data.draw(share) * (max_total - prompt_mean - 1)
    if not 1 < output_mean < max_total - prompt_mean:
        return
    a, b = solve_exponential(prompt_mean, output_mean, max_prompt, max_total)
    table, prompt, output = _table(a, b, min(max_prompt, max_total - 1), max_total)
    assert (table * prompt).sum() == pytest.approx(prompt_mean, rel=1e-8)
    assert (table * output).sum() == pytest.approx(output_mean, rel=1e-8)


@pytest.mark.parametrize(
    ("prompt_mean", "output_mean", "max_prompt", "max_total"),
    [(2.2, 2.9, 5, 9), (3.9, 4.2, 5, 9), (2.0, 6.0, 5, 9), (3.0, 4.5, 20, 9)],
    ids=["decaying", "growing", "long-outputs", "prompt-cut-by-total"],
)
def test_every_pair_of_lengths_comes_as_often_as_its_probability(prompt_mean, output_mean, max_prompt, max_total):
    draws = 400_000
    prompt, output = exponential_lengths(
        np.random.default_rng(1), draws, prompt_mean, output_mean, max_prompt, max_total
    )
    a, b = solve_exponential(prompt_mean, output_mean, max_prompt, max_total)
    table, _, _ = _table(a, b, min(max_prompt, max_total - 1), max_total)
    seen = np.zeros_like(table)
    np.add.at(seen, (prompt - 1, output - 1), 1)  # an index out of the grid raises
    assert seen[table == 0].sum() == 0
    sigma = np.sqrt(draws * table * (1 - table))
    assert (np.abs(seen - draws * table) <= 5 * sigma + 1e-9).all()


def test_uniform_pairs_come_equally_often():
    prompt, output = uniform_lengths(np.random.default_rng(0), 150_000, 3.0, 2.0)
    counts = np.zeros((5, 3))
    np.add.at(counts, (prompt - 1, output - 1), 1)
    assert np.abs(counts - 10_000).max() < 5 * np.sqrt(10_000)


@pytest.mark.parametrize("b", [0.0, 1e-13, -1e-13])
def test_vanishing_exponent_gives_every_output_equally_often(b):
    u = (np.arange(700) + 0.5) / 700
    assert np.bincount(_truncated_geometric(u, b, np.full(700, 7))).tolist() == [0] + [100] * 7


@pytest.mark.parametrize("b", [0.0, -0.5, 0.5, -800.0, 800.0])
def test_outputs_stay_in_range_at_the_ends_of_the_unit_interval(b):
    u = np.array([0.0, np.nextafter(0, 1), 0.5, np.nextafter(1, 0)])
    outputs = _truncated_geometric(u, b, np.array([1, 9, 9, 9]))
    assert (outputs >= 1).all()
    assert (outputs <= [1, 9, 9, 9]).all()


def test_realised_means_of_a_large_sample_are_the_published_ones():
    prompt, output = exponential_lengths(np.random.default_rng(0), 1_000_000, *PRESETS["sharegpt"], 1024, 2048)
    assert prompt.mean() == pytest.approx(161.31, rel=5e-3)
    assert output.mean() == pytest.approx(337.99, rel=5e-3)
    assert prompt.min() == output.min() == 1
    assert prompt.max() == 1024
    assert 2000 < (prompt + output).max() <= 2048


def test_drawing_more_leaves_the_first_lengths_as_they_were():
    few = exponential_lengths(np.random.default_rng(5), 10, *PRESETS["alpaca"], 1024, 2048)
    many = exponential_lengths(np.random.default_rng(5), 500, *PRESETS["alpaca"], 1024, 2048)
    assert [lengths.tolist() for lengths in few] == [lengths[:10].tolist() for lengths in many]


@pytest.mark.parametrize(
    "arguments",
    [(1.0, 5.0, 8, 16), (8.0, 5.0, 8, 16), (5.0, 1.0, 8, 16), (6.0, 10.0, 8, 16), (float("nan"), 5.0, 8, 16)],
)
def test_means_outside_the_allowed_lengths_are_refused(arguments):
    with pytest.raises(ValueError, match="exponential lengths need 1 < prompt_mean < max_prompt"):
        solve_exponential(*arguments)


def test_constant_and_uniform_lengths_refuse_means_they_cannot_have():
    rng = np.random.default_rng(0)
    for bad in (0.0, 0.75, float("nan"), float("inf"), -3.0):
        with pytest.raises(ValueError, match="uniform lengths need means"):
            uniform_lengths(rng, 4, bad, 2.0)
        with pytest.raises(ValueError, match="constant lengths must be whole"):
            constant_lengths(4, 2.0, bad)
    assert [lengths.tolist() for lengths in constant_lengths(2, 7.0, 3.0)] == [[7, 7], [3, 3]]
