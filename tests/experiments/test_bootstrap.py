"""Intervals against all resamples that there are, listed one by one."""

import itertools

import numpy as np
import pytest

from experiments.bootstrap import difference_interval, mean_interval


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0, 8.0], [0.2, 0.21, 0.25, 0.9, -1.0]])
@pytest.mark.parametrize("confidence", [0.95, 0.5])
def test_the_interval_is_that_of_all_resamples(values, confidence):
    means = np.sort([np.mean(drawn) for drawn in itertools.product(values, repeat=len(values))])
    found = mean_interval(values, confidence=confidence, resamples=100_000)
    assert found.mean == pytest.approx(np.mean(values))
    for bound, share in ((found.low, (1 - confidence) / 2), (found.high, (1 + confidence) / 2)):
        # A quantile of so many draws lies between those that are 0.5 % to each side.
        assert np.quantile(means, share - 0.005) - 1e-12 <= bound <= np.quantile(means, share + 0.005) + 1e-12


def test_the_same_numbers_give_the_same_interval_and_another_seed_almost():
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    assert mean_interval(values) == mean_interval(values)
    other = mean_interval(values, seed=1)
    assert other != mean_interval(values, resamples=100)
    assert other.low == pytest.approx(mean_interval(values).low, abs=0.15)


def test_equal_values_leave_no_doubt():
    assert mean_interval([2.5] * 3) == (2.5, 2.5, 2.5)


def test_a_difference_is_taken_seed_by_seed():
    ours, theirs = [10.0, 20.0, 30.0], [9.0, 18.0, 29.0]
    found = difference_interval(ours, theirs)
    assert found == mean_interval([1.0, 2.0, 1.0])
    assert found.low > 0  # though the two ranges overlap
    with pytest.raises(ValueError, match="theirs: expected 3 values, one for each of ours, got 2"):
        difference_interval(ours, theirs[:2])


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        ([1.0], {}, "values: expected at least two finite numbers"),
        ([1.0, float("nan")], {}, "values: expected at least two finite numbers"),
        ([1.0, 2.0], {"confidence": 1.0}, "confidence: expected a number between 0 and 1, got 1.0"),
        ([1.0, 2.0], {"resamples": 0}, "resamples: expected at least 1, got 0"),
    ],
)
def test_too_few_seeds_are_refused(values, options, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        mean_interval(values, **options)
