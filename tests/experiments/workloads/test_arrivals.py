"""Arrival processes: their law, neither clipped nor rescaled."""

import numpy as np
import pytest
import scipy.stats

from experiments.workloads import gamma_arrivals


def _gaps_s(num_requests, rate, burstiness=1.0, seed=0):
    times = gamma_arrivals(np.random.default_rng(seed), num_requests, rate, burstiness)
    return np.diff(times, prepend=0.0) / 1e3


@pytest.mark.parametrize("rate", [0.25, 20.0])
def test_poisson_rate_is_the_one_asked_for_and_no_gap_is_clipped(rate):
    gaps = _gaps_s(1_000_000, rate)
    # A million gaps have a mean within 0.1 % (one sigma); a clip at three mean gaps raises the rate by 5.2 %.
    assert 1 / gaps.mean() == pytest.approx(rate, rel=5e-3)
    assert gaps.max() > 3 / rate
    # P(gap > x mean gaps) = exp(-x) at the body and in the tail.
    for x in (0.1, 1, 3, 6):
        assert (gaps > x / rate).mean() == pytest.approx(np.exp(-x), rel=0.08)


@pytest.mark.parametrize(("burstiness", "cv"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_sets_the_variation_of_the_gaps_and_keeps_the_rate(burstiness, cv):
    gaps = _gaps_s(400_000, 5.0, burstiness)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02)
    assert 1 / gaps.mean() == pytest.approx(5.0, rel=0.02)


@pytest.mark.parametrize("cv", [0.5, 2.0, 13.0])
def test_gaps_follow_the_law_of_their_variation(cv):
    # 13 is about that of requests for code in a public trace.
    burstiness, rate = cv**-2, 5.0
    gaps = _gaps_s(400_000, rate, burstiness, seed=1)
    for x in (0.1, 0.5, 1, 2, 5, 20):
        expected = scipy.stats.gamma.sf(x, burstiness, scale=1 / burstiness)
        assert (gaps > x / rate).mean() == pytest.approx(expected, rel=0.05, abs=1e-4)


def test_rescaled_times_end_on_time_and_keep_their_proportions():
    plain, rescaled = (
        gamma_arrivals(np.random.default_rng(2), 50, 10.0, 0.5, rescale=rescale) for rescale in (False, True)
    )
    assert rescaled[-1] == pytest.approx(5000)
    assert rescaled / rescaled[-1] == pytest.approx(plain / plain[-1])
    for burstiness in (0.5, float("inf")):
        assert gamma_arrivals(np.random.default_rng(0), 7, 2.0, burstiness, rescale=True)[-1] == pytest.approx(3500)
    with pytest.raises(ValueError, match="burstiness must be larger for 1 requests to be rescaled"):
        gamma_arrivals(np.random.default_rng(0), 1, 2.0, 1e-300, rescale=True)


def test_times_are_not_rescaled_to_the_expected_end():
    ends = [gamma_arrivals(np.random.default_rng(seed), 50, 10.0)[-1] for seed in range(20)]
    assert np.std(ends) > 300  # sqrt(50) / 10 s = 707 ms; rescaling makes every end 5,000 ms


def test_infinite_burstiness_makes_every_gap_the_mean():
    times = gamma_arrivals(np.random.default_rng(0), 1000, 8.0, float("inf"))
    assert times.tolist() == [125.0 * (i + 1) for i in range(1000)]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, float("inf")])
def test_infinite_rate_puts_every_arrival_at_zero(burstiness):
    assert gamma_arrivals(np.random.default_rng(0), 3, float("inf"), burstiness).tolist() == [0, 0, 0]


def test_drawing_more_leaves_the_first_arrivals_as_they_were():
    few, many = (gamma_arrivals(np.random.default_rng(3), n, 2.0, 0.5) for n in (10, 1000))
    assert many[:10].tolist() == few.tolist()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_rate_and_burstiness_must_be_positive(bad):
    with pytest.raises(ValueError, match="rate must be > 0"):
        gamma_arrivals(np.random.default_rng(0), 3, bad)
    with pytest.raises(ValueError, match="burstiness must be > 0"):
        gamma_arrivals(np.random.default_rng(0), 3, 1.0, bad)
