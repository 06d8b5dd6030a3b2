import json
import math

import numpy as np
import polars as pl
import pytest

from experiments.metrics import (
    GLOSSARY,
    MODELLED,
    memory_metrics,
    memory_shares,
    peak_concurrency,
    request_metrics,
    served_by_all,
)


def requests(*rows):
    """Requests of `(arrival_ms, token_ms)`; one without tokens was refused."""
    return pl.DataFrame(
        {
            "arrival_ms": [float(arrival) for arrival, _ in rows],
            "first_token_ms": [times[0] if times else None for _, times in rows],
            "ended_ms": [times[-1] if times else float(arrival) for arrival, times in rows],
            "generated": [len(times) for _, times in rows],
            "prompt_len": [8] * len(rows),
            "preemptions": [1] * len(rows),
            "token_ms": [list(times) for _, times in rows],
        },
        schema_overrides={"first_token_ms": pl.Float64, "token_ms": pl.List(pl.Float64)},
    )


def evenly(first, gap, count):
    return [first + gap * i for i in range(count)]


def test_a_request_worked_out_by_hand():
    found = request_metrics(requests((0, [1000.0, 1100.0, 1200.0])))
    assert found["ttft_ms_mean"] == 1000
    assert found["tpot_ms_mean"] == pytest.approx(100)
    assert found["itl_ms_mean"] == pytest.approx(100)  # not 400: the first token is no gap
    assert found["latency_ms_mean"] == 1200
    assert found["normalized_latency_ms"] == 400
    assert found["makespan_s"] == 1.2
    assert found["output_tokens_per_s"] == pytest.approx(2.5)
    assert found["requests_per_s"] == pytest.approx(1 / 1.2)


def test_requests_weigh_alike_in_tpot_and_normalized_latency_and_gaps_alike_in_itl():
    found = request_metrics(requests((0, evenly(500, 1000, 2)), (0, evenly(500, 100, 11))))
    assert found["tpot_ms_mean"] == pytest.approx(550)
    assert found["itl_ms_mean"] == pytest.approx(2000 / 11)
    assert found["normalized_latency_ms"] == pytest.approx((1500 / 2 + 1500 / 11) / 2)
    assert found["itl_ms_p50"] == pytest.approx(100)
    assert found["itl_ms_p99"] == pytest.approx(100 + 900 * 0.9)  # linear between the 10th and the last of 11


def test_times_count_from_the_arrival_and_the_makespan_from_the_first():
    found = request_metrics(requests((200, [300.0, 400.0]), (250, [500.0, 800.0])))
    assert found["ttft_ms_mean"] == 175
    assert found["latency_ms_mean"] == 375
    assert found["normalized_latency_ms"] == (100 + 275) / 2
    assert found["output_tokens_per_s"] == pytest.approx(4 / 0.6)


def test_percentiles_interpolate_linearly():
    found = request_metrics(requests(*((0, [float(t)]) for t in (10, 20, 30, 40, 50))))
    assert (found["ttft_ms_p50"], found["ttft_ms_p90"], found["ttft_ms_p99"]) == (30, 46, pytest.approx(49.6))


def test_a_single_token_has_no_time_between_tokens():
    found = request_metrics(requests((0, [70.0]), (0, [90.0])))
    assert found["ttft_ms_mean"] == 80
    assert not any(name.startswith(("tpot", "itl")) for name in found)
    mixed = request_metrics(requests((0, [70.0]), (0, [90.0, 100.0])))
    assert mixed["tpot_ms_mean"] == mixed["itl_ms_mean"] == 10


def test_requests_without_output_are_counted_and_change_no_latency():
    served = [(0, [50.0, 60.0]), (5, [70.0])]
    alone = request_metrics(requests(*served))
    among = request_metrics(requests((0, []), *served, (9, [])))
    assert among["requests"] == 4
    assert among["served"] == 2
    assert among["refused_or_empty"] == 2
    assert among["preemptions"] == 4
    counts = ("requests", "refused_or_empty", "preemptions")
    assert among["compared_requests"] == 2
    assert {k: v for k, v in among.items() if k not in counts} == {k: v for k, v in alone.items() if k not in counts}


def test_nothing_but_refusals_gives_counts_and_no_nan():
    found = request_metrics(requests((0, []), (1, [])))
    assert found == {"requests": 2, "served": 0, "refused_or_empty": 2, "compared_requests": 0, "preemptions": 2}


def test_latency_is_that_of_the_compared_requests_and_throughput_that_of_all():
    rows = requests((0, [50.0, 60.0]), (5, [705.0]), (9, []))
    found = request_metrics(rows, rows[[0, 2]])
    alone = request_metrics(rows[:1])
    assert (found["served"], found["compared_requests"]) == (2, 1)
    assert found["output_tokens_per_s"] == pytest.approx(3 / 0.705)
    latencies = {name for name in alone if "_ms" in name}
    assert len(latencies) == 4 * 6 + 1
    assert {name: found[name] for name in latencies} == {name: alone[name] for name in latencies}
    nobody = request_metrics(rows, rows[2:])
    assert nobody["compared_requests"] == 0
    assert nobody["makespan_s"] == 0.705
    assert not latencies & nobody.keys()


def test_deviations_are_those_of_the_population():
    found = request_metrics(requests(*((0, [float(t), float(t) + 10.0]) for t in (10, 20, 30, 40))))
    assert found["ttft_ms_std"] == pytest.approx(math.sqrt(125))  # of a sample it would be 12.91
    assert found["tpot_ms_std"] == 0


def test_tokens_that_come_together_have_one_gap_between_them_and_the_next():
    # Three tokens a step, as with speculative decoding: no token waits 0 ms, and none of them 300.
    found = request_metrics(requests((0, [300.0 * (1 + i // 3) for i in range(30)])))
    assert found["itl_ms_mean"] == 300
    assert found["tpot_ms_mean"] == pytest.approx(2700 / 29)


def test_tokens_are_those_generated_and_not_those_asked_for():
    # Stopped at 11 of 101 tokens: dividing by what was asked for made 10 ms of it.
    rows = requests((0, evenly(1000, 100, 11))).with_columns(output_len=101)
    assert request_metrics(rows)["tpot_ms_mean"] == pytest.approx(100)


def test_the_first_token_is_the_first_one_whatever_it_holds():
    # Counted from the first token with visible text, it was 34.69 s.
    assert request_metrics(requests((0, [28_640.0, 34_690.0])))["ttft_ms_mean"] == 28_640


def test_tokens_a_second_are_over_the_whole_run():
    # 1.92 was printed for these 15,728,640 tokens in 8,192 s.
    rows = pl.DataFrame({"arrival_ms": [0.0], "first_token_ms": [1.0], "ended_ms": [8_192_000.0]})
    assert request_metrics(rows.with_columns(generated=15_728_640))["output_tokens_per_s"] == 1920
    many = pl.concat([rows] * 200).with_columns(generated=15_728_640)
    assert request_metrics(many)["output_tokens_per_s"] == 200 * 1920  # more than 32 bits hold


def test_prompt_tokens_a_second_name_what_they_are_divided_by():
    found = request_metrics(requests((0, evenly(500, 950, 11))).with_columns(prompt_len=1000))
    assert found["makespan_s"] == 10
    assert (found["prompt_tokens_per_s"], found["prompt_tokens_per_ttft_s"]) == (100, 2000)


def test_requests_of_a_simulator_have_all_metrics_but_those_of_single_tokens():
    rows = requests((0, evenly(500.0, 1000, 2)), (3, evenly(500.0, 100, 11)), (5, []))
    whole = request_metrics(rows)
    short = request_metrics(rows.drop("token_ms", "preemptions", "prompt_len"))
    left_out = {"preemptions", "prompt_tokens_per_s", "prompt_tokens_per_ttft_s"}
    assert short == {k: v for k, v in whole.items() if not k.startswith("itl") and k not in left_out}


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        ([(0, 10), (10, 20), (20, 30)], 1),  # who ends makes way for who begins
        ([(0, 10), (5, 15), (9, 20), (10, 11)], 3),
        ([(0, 0), (0, 0)], 0),
        ([(0, 10), (5, 5), (5, 6)], 2),
        ([(4, 9)], 1),
    ],
)
def test_concurrency_counts_half_open_spans(spans, most):
    begin, end = np.array(spans, np.float64).T
    assert peak_concurrency(begin, end) == most
    moments = [sum(b <= at < e for b, e in spans) for at in begin]
    assert most == max(moments)


def test_a_measured_run_of_another_server_has_the_latencies_that_were_published_of_it(trace_dir):
    path = trace_dir / "llmservingsim_vllm_rtxpro6000_llama31_8b_requests.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = pl.DataFrame(
        {
            "arrival_ms": [1000 * line["queued_ts"] for line in lines],
            "first_token_ms": [1000 * line["first_token_ts"] for line in lines],
            "ended_ms": [1000 * line["last_token_ts"] for line in lines],
            "generated": [line["output_toks"] for line in lines],
        }
    )
    found = request_metrics(rows)
    published = {
        "ttft": (7097.2, 9442.7, 16852.7, 18397.9, 19755.3),
        "tpot": (32.5, 33.4, 36.5, 36.9, 37.3),
        "latency": (28200.7, 29615.6, 35450.7, 36617.4, 37638.8),
    }
    for name, digits in published.items():
        assert tuple(round(found[f"{name}_ms_{of}"], 1) for of in ("mean", "p50", "p90", "p95", "p99")) == digits
    assert round(found["normalized_latency_ms"], 1) == 43.7
    assert found["served"] == 300


def test_a_request_that_one_memory_refused_is_compared_under_none():
    of_both = pl.DataFrame(
        {
            "memory": ["a", "a", "a", "b", "b", "b"],
            "request": [0, 1, 2, 0, 1, 2],
            "reason": ["length", "refused_too_long", "no_output", "length", "length", "refused_never_fits"],
        }
    )
    assert served_by_all(of_both).select("memory", "request").rows() == [("a", 0), ("b", 0)]


def steps(*rows, **changes):
    """Steps of `(duration_ms, new_tokens, running, waiting, tokens, reserved, internal, allocated)`; capacity 100."""
    names = ("duration_ms", "new_tokens", "running", "waiting", "tokens", "reserved", "internal", "allocated")
    frame = pl.DataFrame(list(rows), schema=names, orient="row")
    external = 100 - pl.col("tokens") - pl.col("reserved") - pl.col("internal")
    others = {"recompute_tokens": 3, "map_calls": 4, "mapping_ms": 0.5, "sync_mapping_ms": 0.25, "saved": 0}
    others |= {"hit_tokens": 7, "swapped_out_blocks": 2, "swapped_in_blocks": 1, "swap_ms": 1.5} | changes
    return frame.with_columns(pl.col("duration_ms").cast(pl.Float64), external=external, **others)


def test_memory_is_averaged_over_the_time_in_which_requests_queued():
    found = memory_metrics(
        steps(
            (10.0, 5, 2, 1, 50, 20, 10, 90),
            (30.0, 5, 4, 2, 70, 10, 0, 80),
            (60.0, 5, 9, 0, 1, 1, 1, 3),  # nobody waits
            (900.0, 0, 0, 0, 0, 0, 0, 0),  # idle
        )
    )
    assert found["peak_running"] == 9
    assert found["mean_running"] == pytest.approx((10 * 2 + 30 * 4) / 40)
    assert found["pool_utilization"] == pytest.approx((10 * 50 + 30 * 70) / 40 / 100)
    assert found["allocated_utilization"] == pytest.approx((10 * 50 + 30 * 70) / (10 * 90 + 30 * 80))
    assert found["reservation_waste"] == pytest.approx((10 * 20 + 30 * 10) / 40 / 100)
    assert found["internal_waste"] == pytest.approx(10 * 10 / 40 / 100)
    assert found["external_waste"] == pytest.approx((10 * 20 + 30 * 20) / 40 / 100)
    assert found["queueing_share"] == pytest.approx(0.4)
    assert (found["map_calls"], found["mapping_ms"], found["sync_mapping_ms"]) == (16, 2.0, 1.0)
    assert (found["recompute_tokens"], found["hit_tokens"], found["steps"]) == (12, 28, 3)
    assert (found["swapped_out_blocks"], found["swapped_in_blocks"], found["swap_ms"]) == (8, 4, 6.0)
    assert (found["blocks_saved_share"], found["peak_blocks_saved_share"]) == (0, 0)


def test_what_sharing_saves_is_a_share_of_what_would_be_held_without_it_while_anything_runs():
    found = memory_metrics(
        steps(
            (10.0, 5, 2, 1, 50, 20, 10, 80),
            (30.0, 5, 4, 0, 60, 0, 0, 60),
            (5.0, 5, 0, 0, 0, 0, 0, 0),
            (900.0, 0, 1, 0, 10, 0, 0, 10),
            saved=pl.Series([20, 90, 0, 90]),
        )
    )
    assert found["blocks_saved_share"] == pytest.approx((10 * 20 + 30 * 90) / (10 * 100 + 30 * 150))
    assert found["peak_blocks_saved_share"] == 0.6


def test_without_a_queue_all_busy_steps_count():
    found = memory_metrics(
        steps((10.0, 5, 2, 0, 50, 0, 0, 50), (10.0, 1, 1, 0, 10, 0, 0, 20), (5.0, 0, 0, 0, 0, 0, 0, 0))
    )
    assert found["pool_utilization"] == pytest.approx(0.3)
    assert found["mean_running"] == 1.5
    assert found["queueing_share"] == 0


def test_the_shares_of_memory_add_up_to_one():
    shares = memory_shares(
        steps((7.0, 5, 2, 1, 33, 20, 14, 90), (3.0, 5, 4, 2, 71, 13, 9, 93), (1.0, 1, 1, 3, 1, 0, 2, 3))
    )
    assert set(shares) == {"tokens", "reservation", "internal", "external", "remainder"}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
    assert shares["remainder"] == 0


def test_shares_are_of_the_budget_and_what_buys_no_unit_is_one_of_them():
    one = steps((7.0, 5, 2, 1, 30, 20, 10, 90))
    assert memory_shares(one, 125.0) == pytest.approx(
        {"tokens": 0.24, "reservation": 0.16, "internal": 0.08, "external": 0.32, "remainder": 0.2}
    )
    found = memory_metrics(one, 125.0)
    assert (found["pool_utilization"], found["remainder_waste"]) == (pytest.approx(0.24), pytest.approx(0.2))
    assert found["allocated_utilization"] == pytest.approx(30 / 90)


def test_a_memory_that_never_held_anything_lay_idle_as_a_whole():
    found = memory_metrics(steps((0.0, 0, 0, 1, 0, 0, 0, 0), (0.0, 0, 0, 0, 0, 0, 0, 0)))
    assert found["peak_running"] == found["mean_running"] == found["pool_utilization"] == found["steps"] == 0
    assert found["external_waste"] == 1
    assert "allocated_utilization" not in found
    assert all(math.isfinite(value) for value in found.values())


def test_the_glossary_and_the_modelled_metrics_speak_of_metrics_that_exist():
    found = request_metrics(requests((0, [1.0, 2.0]))) | memory_metrics(steps((1.0, 5, 2, 1, 50, 20, 10, 90)))
    assert found.keys() >= MODELLED
    of_the_comparison = {
        *("tokens_reference", "tokens_compared", "tokens_equal", "near_tie_differences"),
        *("budget_tokens", "capacity_tokens"),
    }
    assert all(any(metric.startswith(word) for metric in found) for word in GLOSSARY.keys() - of_the_comparison)
