"""Metrics of quality against sums in float64, and against numbers worked out by hand."""

import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest
import scipy.special

from experiments import quality_metrics


def _compared(reference, logits, following):
    compared = quality_metrics.compare(
        jnp.asarray(reference, jnp.float32), jnp.asarray(logits, jnp.float32), jnp.asarray(following, jnp.int32)
    )
    return quality_metrics.table(compared, "text", 0)


def test_two_tokens_by_hand():
    # p = (3/4, 1/4), q = (1/2, 1/2); the second token follows.
    found = _compared([[np.log(3), 0.0]], [[5.0, 5.0]], [1]).row(0, named=True)
    assert found["nll"] == pytest.approx(np.log(2), rel=1e-6)
    assert found["reference_nll"] == pytest.approx(np.log(4), rel=1e-6)
    assert found["kl"] == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5), rel=1e-5)
    assert found["change"] == pytest.approx(0.25, rel=1e-6)
    assert found["top_change"] == pytest.approx(-0.25, rel=1e-6)
    assert found["agrees"]  # of two equal ones the first counts
    assert not found["is_nan"]


@pytest.mark.parametrize("noise", [3e-4, 1e-2, 0.3, 3.0])
def test_every_position_agrees_with_float64(noise):
    """The smallest noise gives a KL near 1e-8, where a plain sum in float32 has lost every digit."""
    rng = np.random.default_rng(0)
    reference = (4 * rng.normal(size=(20, 3000))).astype(np.float32)
    logits = (reference + noise * rng.normal(size=reference.shape)).astype(np.float32)
    following = rng.integers(3000, size=20)
    log_p, log_q = (scipy.special.log_softmax(x.astype(np.float64), axis=-1) for x in (reference, logits))
    found = _compared(reference, logits, following)
    rows = np.arange(20)
    np.testing.assert_allclose(found["kl"], np.sum(np.exp(log_p) * (log_p - log_q), axis=-1), rtol=2e-3)
    np.testing.assert_allclose(found["nll"], -log_q[rows, following], rtol=1e-5)
    np.testing.assert_allclose(
        found["change"], np.exp(log_q)[rows, following] - np.exp(log_p)[rows, following], atol=1e-6
    )
    top = log_p.argmax(axis=-1)
    np.testing.assert_allclose(found["top_change"], np.exp(log_q)[rows, top] - np.exp(log_p)[rows, top], atol=1e-6)
    assert found["agrees"].to_list() == (log_q.argmax(axis=-1) == top).tolist()


def test_equal_logits_differ_in_nothing():
    logits = np.random.default_rng(1).normal(size=(5, 70))
    found = _compared(logits, logits, np.zeros(5))
    assert found.select("kl", "change", "top_change").to_numpy().tolist() == [[0.0] * 3] * 5
    assert found["agrees"].all()


def test_a_position_with_nan_is_counted_and_spoils_no_other():
    logits = np.random.default_rng(2).normal(size=(4, 9))
    broken = logits.copy()
    broken[2, 3] = np.nan
    found = quality_metrics.summarise(_compared(logits, broken, np.zeros(4)))
    assert (found["predictions"], found["n_nan"], found["mean_kl"], found["top1_agreement"]) == (4, 1, 0.0, 1.0)
    nothing = quality_metrics.summarise(_compared(logits, np.full_like(logits, np.nan), np.zeros(4)))
    assert (nothing["n_nan"], nothing["mean_kl"]) == (4, None)


def _positions(windows):
    """A table from (delta, kl) of each position of each window."""
    rows = [
        {"text": text, "window": w, "nll": 1 + d, "reference_nll": 1.0, "kl": kl, "agrees": kl < 1, "change": d,
         "top_change": 2 * d, "is_nan": False}
        for (text, w), positions in windows.items() for d, kl in positions
    ]  # fmt: skip
    return pl.DataFrame(rows)


def test_the_standard_error_is_that_of_windows_not_of_positions():
    found = quality_metrics.summarise(
        _positions({("a", 0): [(0.5, 0.0), (0.5, 2.0)], ("a", 1): [(0.0, 1.0), (0.0, 1.0)], ("b", 0): [(1.0, 4.0)] * 2})
    )
    assert found["delta_nll"] == pytest.approx(0.5)
    assert found["delta_nll_se"] == pytest.approx(0.5 / np.sqrt(3))  # means 0.5, 0, 1: standard deviation 0.5
    assert found["mean_kl"] == pytest.approx(2.0)
    assert found["mean_kl_se"] == pytest.approx(np.std([1, 1, 4], ddof=1) / np.sqrt(3))
    assert found["perplexity"] == pytest.approx(np.exp(1.5))
    assert found["rms_change"] == pytest.approx(np.sqrt((2 * 0.25 + 2 * 1) / 6))
    assert found["rms_top_change"] == pytest.approx(2 * found["rms_change"])
    assert (found["kl_max"], found["top1_agreement"]) == (4.0, pytest.approx(1 / 6))


def test_a_bootstrap_over_windows_finds_the_same_standard_error():
    rng = np.random.default_rng(3)
    means = rng.normal(size=40)
    drawn = means[rng.integers(40, size=(4000, 40))].mean(axis=1)
    assert quality_metrics.standard_error(means) == pytest.approx(drawn.std(), rel=0.06)
    assert quality_metrics.standard_error(means[:1]) is None


def test_quantiles_see_the_tail():
    kl = [0.0] * 999 + [8.0] * 2
    found = quality_metrics.summarise(_positions({("a", 0): [(0.0, x) for x in kl]}))
    assert (found["kl_p99"], found["kl_max"]) == (0.0, 8.0)
    assert found["kl_p999"] == 8.0


def test_the_first_difference_is_counted_in_steps():
    reference = np.array([4, 5, 6, 7], np.int32)
    assert quality_metrics.first_difference(reference, reference) == 4
    assert quality_metrics.first_difference(np.array([4, 5, 9, 7], np.int32), reference) == 2
    assert quality_metrics.first_difference(np.array([0, 5, 6, 7], np.int32), reference) == 0


def test_the_error_of_an_output_is_relative():
    error = quality_metrics.relative_error(jnp.array([[3.0, 0.0]]), jnp.array([[0.0, 4.0]]))
    assert float(error) == pytest.approx(5 / 4)
