"""What a workload refuses to be."""

import dataclasses

import numpy as np
import pytest

from experiments.workloads import Provenance, Workload, statistics

GOOD = {
    "provenance": Provenance(source="test", rows_read=2, lengths="given", arrivals="given"),
    "arrival_ms": np.array([0.0, 5.0]),
    "prompt_len": np.array([3, 4], np.int32),
    "output_len": np.array([1, 2], np.int32),
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"arrival_ms": np.array([5.0, 4.0])}, "request 1: expected arrival_ms finite, >= 0, not decreasing, got 4.0"),
        ({"arrival_ms": np.array([-1.0, 4.0])}, "request 0: expected arrival_ms"),
        ({"arrival_ms": np.array([np.nan, 4.0])}, "request 0: expected arrival_ms"),
        ({"arrival_ms": np.array([0.0, np.inf])}, "request 1: expected arrival_ms"),
        ({"arrival_ms": np.zeros(3)}, "equally long, got 3, 2 and 2"),
        ({"prompt_len": np.array([3, 0], np.int32)}, "request 1: expected prompt_len >= 1, got 0"),
        ({"output_len": np.array([-1, 0], np.int32)}, "request 0: expected output_len >= 0, got -1"),
        ({"hash_block_size": 4}, "hash_block_size must be positive with hash_ids and 0 without, got 4"),
        ({"hash_ids": (np.array([1]), np.array([2]))}, "hash_block_size must be positive"),
        ({"hash_ids": (np.array([1]),), "hash_block_size": 4}, "2 arrays, one per request, got 1"),
        (
            {"hash_ids": (np.array([1]), np.array([2, 3])), "hash_block_size": 4},
            r"request 1: expected ceil\(prompt_len / 4\) hash ids, got 2",
        ),
    ],
)
def test_broken_workload_is_refused(change, problem):
    with pytest.raises(ValueError, match=problem):
        Workload(**GOOD | change)


def test_empty_workload_is_refused():
    none = {name: value[:0] for name, value in GOOD.items() if name != "provenance"}
    with pytest.raises(ValueError, match="at least one request, got none from test"):
        Workload(**GOOD | none)


def test_arrays_are_read_only():
    workload = Workload(**GOOD)
    for array in (workload.arrival_ms, workload.prompt_len, workload.output_len):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.hash_ids = None


def test_statistics_of_one_request_have_no_rate():
    one = {name: value[:1] for name, value in GOOD.items() if name != "provenance"}
    figures = statistics(Workload(**GOOD | one))
    assert (figures["rate"], figures["gap_cv"], figures["span_s"]) == (None, None, 0)
    assert (figures["requests"], figures["prompt_mean"], figures["total_max"]) == (1, 3, 4)


def test_sums_of_long_requests_do_not_overflow():
    longest = np.full(2, 2**31 - 1, np.int32)
    figures = statistics(Workload(**GOOD | {"prompt_len": longest, "output_len": longest}))
    assert (figures["prompt_sum"], figures["total_max"]) == (2**32 - 2, 2**32 - 2)
