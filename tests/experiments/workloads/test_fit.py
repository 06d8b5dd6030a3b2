"""Scaling and fitting lengths: exact arithmetic, nothing negative, everything counted."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.workloads import Provenance, Workload, fit_lengths, scale_lengths


def _workload(prompt, output, hash_ids=None, hash_block_size=0):
    return Workload(
        Provenance(source="test", rows_read=len(prompt), lengths="given", arrivals="given"),
        arrival_ms=np.arange(len(prompt), dtype=np.float64),
        prompt_len=np.array(prompt, np.int32),
        output_len=np.array(output, np.int32),
        hash_ids=None if hash_ids is None else tuple(np.array(ids, np.int64) for ids in hash_ids),
        hash_block_size=hash_block_size,
    )


def _lengths(workload):
    return list(zip(workload.prompt_len.tolist(), workload.output_len.tolist(), strict=True))


def test_truncation_cuts_the_output_and_leaves_the_prompt():
    fitted = fit_lengths(_workload([10], [5000]), 4096, "truncate")
    assert _lengths(fitted) == [(10, 4086)]
    assert (fitted.provenance.output_tokens_cut, fitted.provenance.prompt_tokens_cut) == (914, 0)


@pytest.mark.parametrize(
    ("lengths", "fitted"),
    [
        ((5000, 10), (4095, 1)),
        ((4096, 10), (4095, 1)),
        ((4095, 10), (4095, 1)),
        ((4094, 10), (4094, 2)),
        ((4095, 1), (4095, 1)),
        ((5000, 5000), (4095, 1)),
        ((5000, 0), (4096, 0)),
        ((4096, 0), (4096, 0)),
        ((2**31 - 1, 2**31 - 1), (4095, 1)),
    ],
)
def test_truncation_keeps_one_output_token_then_cuts_the_prompt(lengths, fitted):
    assert _lengths(fit_lengths(_workload([lengths[0]], [lengths[1]]), 4096, "truncate")) == [fitted]


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=1, max_size=6),
    st.integers(2, 120),
)
def test_truncated_requests_fit_and_lose_only_what_they_must(lengths, limit):
    fitted = fit_lengths(_workload(*zip(*lengths, strict=True)), limit, "truncate")
    for (prompt, output), (new_prompt, new_output) in zip(lengths, _lengths(fitted), strict=True):
        assert new_prompt + new_output == min(prompt + output, limit)
        assert 1 <= new_prompt <= prompt
        assert min(output, 1) <= new_output <= output
        # The prompt is touched only once the output is down to its last token.
        assert new_prompt == prompt or new_output == min(output, 1)
    over = sum(prompt + output > limit for prompt, output in lengths)
    lost = sum(max(prompt + output - limit, 0) for prompt, output in lengths)
    provenance = fitted.provenance
    assert (provenance.too_long, provenance.too_long_truncated, provenance.too_long_dropped) == (over, over, 0)
    assert provenance.prompt_tokens_cut + provenance.output_tokens_cut == lost


def test_dropping_keeps_the_others_in_order_with_their_times():
    fitted = fit_lengths(_workload([10, 90, 20, 50], [10, 20, 30, 50]), 100, "drop")
    assert _lengths(fitted) == [(10, 10), (20, 30), (50, 50)]
    assert fitted.arrival_ms.tolist() == [0, 2, 3]
    assert (fitted.provenance.too_long, fitted.provenance.too_long_dropped, fitted.provenance.rows_read) == (1, 1, 4)


def test_refusal_names_the_first_request_and_what_to_do():
    problem = r"^2 of 3 requests exceed max_model_len 160; the first is request 1 \(150 prompt \+ 50 output tokens\)"
    with pytest.raises(ValueError, match=problem + r".*length_scale.*drop or truncate"):
        fit_lengths(_workload([10, 150, 161], [10, 50, 1]), 160, "refuse")


def test_requests_that_fit_exactly_are_not_too_long():
    workload = _workload([150], [10])
    assert fit_lengths(workload, 160, "refuse").provenance.too_long == 0


def test_nothing_left_is_refused():
    with pytest.raises(ValueError, match="all 2 requests exceed max_model_len 5"):
        fit_lengths(_workload([10, 20], [1, 1]), 5, "drop")
    with pytest.raises(ValueError, match="max_model_len must hold"):
        fit_lengths(_workload([10], [1]), 1, "truncate")


@given(
    st.lists(st.tuples(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_scaled_lengths_are_the_exact_quotients_rounded_up(lengths, numerator, denominator):
    exact = Fraction(numerator, denominator)
    expected = [tuple(-(-length * exact.numerator // exact.denominator) for length in pair) for pair in lengths]
    workload = _workload(*zip(*lengths, strict=True))
    if max(max(pair) for pair in expected) >= 2**31:
        with pytest.raises(ValueError, match="exceed 32 bits"):
            scale_lengths(workload, numerator / denominator)
    else:
        assert _lengths(scale_lengths(workload, numerator / denominator)) == expected


def test_decimal_factors_mean_what_they_say():
    # 35 * 0.2 is 7.000000000000001 in floats, which rounds up to 8.
    assert _lengths(scale_lengths(_workload([35, 1], [15, 0]), 0.2)) == [(7, 3), (1, 0)]


def test_hash_ids_follow_scaling_and_cutting():
    workload = _workload([1025, 512], [1, 1], [[4, 5, 6], [4]], 512)
    scaled = scale_lengths(workload, 1 / 16)
    assert (scaled.hash_block_size, _lengths(scaled)) == (32, [(65, 1), (32, 1)])
    cut = fit_lengths(scaled, 33, "truncate")
    assert [ids.tolist() for ids in cut.hash_ids] == [[4], [4]]
    cut = fit_lengths(scaled, 34, "truncate")
    assert [ids.tolist() for ids in cut.hash_ids] == [[4, 5], [4]]
    dropped = fit_lengths(scaled, 64, "drop")
    assert [ids.tolist() for ids in dropped.hash_ids] == [[4]]


def test_factor_that_splits_hash_blocks_is_refused():
    with pytest.raises(ValueError, match=r"length_scale must turn the trace's hash blocks of 512 tokens.*51\.2"):
        scale_lengths(_workload([512], [1], [[0]], 512), 0.1)


@pytest.mark.parametrize("factor", [0.0, -0.5, float("nan"), float("inf"), 1e-7])
def test_factor_must_be_a_positive_number(factor):
    with pytest.raises(ValueError, match="length_scale must be a number >= 1e-6"):
        scale_lengths(_workload([10], [10]), factor)
