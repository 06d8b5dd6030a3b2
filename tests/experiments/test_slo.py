"""Who kept the bounds: worked out by hand."""

import polars as pl
import pytest

from experiments.slo import GLOSSARY, MLPERF, Slo, preset, slo_metrics


def served(*rows):
    """Requests of `(arrival_ms, first_token_ms, ended_ms, generated)`; one without tokens was refused."""
    names = ("arrival_ms", "first_token_ms", "ended_ms", "generated")
    types = dict.fromkeys(names[:3], pl.Float64) | {"generated": pl.Int32}
    return pl.DataFrame(list(rows), schema=types, orient="row")


FOUR = served(
    (0, 100, 1100, 11),  # TTFT 100, TPOT 100, latency 1100
    (0, 500, 1500, 101),  # 500, 10, 1500
    (500, 550, 550, 1),  # 50, none, 50
    (1000, 1050, 2000, 2),  # 50, 950, 1000
)


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
        ({"ttft_ms": 100}, 3),
        ({"ttft_ms": 99.9}, 2),
        ({"tpot_ms": 100}, 3),
        ({"tpot_ms": 100, "one_token": "fails"}, 2),
        ({"ttft_ms": 100, "tpot_ms": 100}, 2),
        ({"ttft_ms": 100, "tpot_ms": 100, "latency_ms": 1000}, 1),
        ({"latency_ms": 1000, "one_token": "fails"}, 2),
        ({"ttft_ms": 10}, 0),
    ],
)
def test_a_request_is_good_if_it_keeps_every_bound(bounds, good):
    found = slo_metrics(FOUR, Slo(**bounds))
    assert found["goodput_per_s"] == good / 2
    assert found["slo_share"] == good / 4


def test_refused_requests_are_no_good_and_no_nan():
    refused = served((0, None, None, 0), (7, None, None, 0))
    assert slo_metrics(refused, Slo(ttft_ms=1)) == {"goodput_per_s": 0, "slo_share": 0, "slo_p99_kept": False}
    among = slo_metrics(pl.concat([FOUR, refused]), Slo(ttft_ms=100))
    assert among == {"goodput_per_s": 1.5, "slo_share": 0.5, "slo_p99_kept": False}
    assert among.keys() == GLOSSARY.keys()


def test_one_request_in_a_hundred_may_miss_a_bound_of_mlperf_and_two_may_not():
    def run(slow):
        rows = [(0, 449, 449 + 39 * 10, 11)] * (201 - slow) + [(0, 500, 500 + 60 * 10, 11)] * slow
        return slo_metrics(served(*rows), preset("llama2_70b_interactive"))["slo_p99_kept"]

    # The 99th percentile of 201 is the 199th in order, with two above it.
    assert (run(0), run(2), run(3)) == (True, True, False)


def test_requests_of_one_token_have_no_percentile_of_the_time_between_tokens():
    ones = served((0, 10, 10, 1), (0, 20, 20, 1))
    for one_token, good in (("meets", 2), ("fails", 0)):
        found = slo_metrics(ones, Slo(tpot_ms=5, one_token=one_token))
        assert found == {"goodput_per_s": good / 0.02, "slo_share": good / 2, "slo_p99_kept": True}


def test_presets_are_those_of_mlperf():
    bounds = {name: (slo.ttft_ms, slo.tpot_ms, slo.latency_ms, slo.one_token) for name, slo in MLPERF.items()}
    assert bounds == {
        "llama2_70b": (2000, 200, None, "meets"),
        "llama2_70b_interactive": (450, 40, None, "meets"),
        "llama3_1_8b": (2000, 100, None, "meets"),
        "llama3_1_8b_interactive": (500, 30, None, "meets"),
        "llama3_1_405b": (6000, 175, None, "meets"),
        "mixtral_8x7b": (2000, 200, None, "meets"),
    }
    with pytest.raises(ValueError, match=r"slo: expected one of llama2_70b, .*, got 'llama2-70b' \(did you mean"):
        preset("llama2-70b")


def test_bounds_that_bound_nothing_are_refused():
    with pytest.raises(ValueError, match="ttft_ms: expected more than 0, got 0"):
        Slo(ttft_ms=0)
    with pytest.raises(ValueError, match="expected at least one of ttft_ms, tpot_ms, latency_ms, got none"):
        Slo()
