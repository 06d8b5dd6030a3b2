"""Curves against a queue worked out by hand, knees against straight lines, and one program for all rates."""

import dataclasses
import pathlib

import numpy as np
import polars as pl
import pytest

from experiments import capacity_vs_rate, config
from experiments.capacity_vs_rate import Case, Config, sustained_rate
from experiments.cost_config import CostConfig
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.simulation import Server
from experiments.workloads import WorkloadConfig, load_workload
from paxkv.config import MemoryConfig
from paxkv.simulate_points import run_points

CONFIG = pathlib.Path(__file__).parents[2] / "configs/capacity_vs_rate/sharegpt.yaml"
# Room for one request: who comes while it runs waits for its end, 8 steps of 5 ms after its start.
QUEUE = Config(
    num_seeds=2,
    server=Server(
        kv_memory="2 MiB",
        rows=1,
        max_model_len=16,
        token_budget=8,
        cost=CostConfig(step_ns=5_000_000, token_ns=0, kv_token_ns=0),
        max_stride=1,
    ),
    workload=WorkloadConfig(lengths="constant", prompt_mean=8, output_mean=8, num_requests=150),
    limit_s=0.015,
    common_rate=40,
    cases={"one": Case(MemoryConfig("reserved_max"), (5, 15, 22, 40))},
)


def simulated(asked, path):
    with RunDirectory.open(path) as run_dir:
        run_dir.write_json("manifest.json", {"inputs": {}, "earlier_sessions": []})
        return capacity_vs_rate.run(capacity_vs_rate.resolve(asked), run_dir, Progress())


def waited(rate, seed):
    """Mean latency for each of 8 tokens, in s, as requests follow one another."""
    workload = load_workload(dataclasses.replace(QUEUE.workload, rate=rate), 16, seed)
    end, latencies = 0.0, []
    for arrival in workload.arrival_ms:
        end = max(arrival, end) + 8 * 5
        latencies.append((end - arrival) / 8 / 1000)
    return np.mean(latencies)


def test_a_curve_is_that_of_its_queue_and_all_of_it_is_one_program(tmp_path):
    compiled = run_points._cache_size()
    found = simulated(QUEUE, tmp_path / "run")
    assert run_points._cache_size() == compiled + 1
    rates = QUEUE.cases["one"].rates
    by_seed = [[waited(rate, seed) for rate in rates] for seed in (0, 1)]
    curve = [found[f"one/{rate}"]["normalized_latency_s"] for rate in rates]
    assert curve == pytest.approx(np.mean(by_seed, axis=0), abs=2e-5)
    assert curve == sorted(curve)
    knees = [sustained_rate(rates, latencies, 0.015) for latencies in by_seed]
    assert 15 < min(knees) < max(knees) < 25  # of 25 requests a second that are served
    assert found["one"]["sustained_rate"] == pytest.approx(np.mean(knees), rel=1e-3)
    # The prompt of 8 tokens, then one more each step: 11.5 of 16 at an average.
    assert found["one"]["mean_running"] == pytest.approx(1, abs=0.01)
    assert found["one"]["token_states"] == pytest.approx(11.5 / 16, abs=0.02)
    assert found["one/5"]["mean_running"] < found["one/15"]["mean_running"] + 0.01
    assert found["one/5"]["queueing_share"] < 0.3 < 0.9 < found["one/40"]["queueing_share"]
    assert capacity_vs_rate.failed_checks(found) == []

    latency, memory = capacity_vs_rate.figures(tmp_path / "run")
    line = latency.figure.axes[0].lines[0]
    assert line.get_ydata() == pytest.approx(curve)
    assert "modelled" in latency.figure.axes[0].get_ylabel()
    assert len(memory.figure.axes) == 2
    assert pl.read_parquet(tmp_path / "run/curves.parquet").height == 2 * len(rates)


def test_the_knee_is_on_the_straight_line_between_logarithms():
    assert sustained_rate((1, 2, 3), (0.1, 0.1, 10), 1) == pytest.approx(2.5)
    assert sustained_rate((1, 2, 4), (0.1, 1, 10), 1) == pytest.approx(2)  # what is just within is within
    assert sustained_rate((1, 2, 3, 4), (0.1, 2, 0.1, 10), 1) == pytest.approx(3.5)  # the largest
    assert sustained_rate((1, 2), (0.1, 0.2), 1) is None
    assert sustained_rate((1, 2), (2, 3), 1) is None


def test_a_memory_out_of_order_and_a_curve_without_a_knee_fail():
    good = {
        "reserved_max": {"sustained_rate": 1.0},
        "paged": {"sustained_rate": 3.0, "over_reserved_max": 3.0},
    }
    assert capacity_vs_rate.failed_checks(good) == []
    (said,) = capacity_vs_rate.failed_checks(good | {"paged": {"sustained_rate": 0.9, "over_reserved_max": 0.9}})
    assert said == "paged: sustains 0.9 times the rate of reserved_max, and should sustain more"
    (said,) = capacity_vs_rate.failed_checks(good | {"paged": {"sustained_rate": None, "over_reserved_max": None}})
    assert said.startswith("paged: no sustained rate")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cases": {}}, "cases: expected at least one"),
        ({"cases": {"a": Case(MemoryConfig(), (40, 5))}}, "cases.a.rates: expected two or more above 0, rising"),
        ({"common_rate": 7}, "common_rate: expected one of .*, those of one, got 7"),
        ({"rising": ("two",)}, "rising: expected cases out of one, got two"),
        ({"limit_s": 0}, "limit_s: expected a finite number above 0"),
        ({"workload": dataclasses.replace(QUEUE.workload, rate=1.0)}, "workload.rate: expected null"),
    ],
)
def test_what_cannot_run_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        capacity_vs_rate.resolve(dataclasses.replace(QUEUE, **change))


@pytest.mark.soak
def test_the_published_order_and_ratios(tmp_path):
    asked = config.decode(Config, config.read_yaml(CONFIG))
    assert capacity_vs_rate.failed_checks(simulated(asked, tmp_path / "run")) == []
