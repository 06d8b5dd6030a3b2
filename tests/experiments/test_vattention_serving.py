"""What steps of vAttention wait for, worked out by hand; the rate of growth against a fine grid; the full config."""

import dataclasses
import itertools
import pathlib

import numpy as np
import polars as pl
import pytest

from experiments import config, simulation, vattention_serving
from experiments.cost_config import CostConfig
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.simulation import Server
from experiments.workloads import WorkloadConfig
from paxkv.config import MemoryConfig

CONFIG = pathlib.Path(__file__).parents[2] / "configs/vattention/sync_vs_async.yaml"
SMALL = vattention_serving.Config(
    workload=WorkloadConfig(lengths="constant", prompt_mean=60, output_mean=20, num_requests=6, rate=float("inf")),
    servers={
        "own": Server(
            tensor_parallel=2, kv_memory="1 GiB", rows=3, max_model_len=128, cost=CostConfig(token_ns=0), max_stride=1
        )
    },
    memories={
        "sync": MemoryConfig("vattention", page="64 KiB", lookahead_steps=0),
        "background": MemoryConfig("vattention", page="64 KiB"),
    },
    map_call_us={"64 KiB": 10.0},
)


def run(asked, path):
    with RunDirectory.open(path) as run_dir:
        run_dir.write_json("manifest.json", {"inputs": {}, "earlier_sessions": []})
        return vattention_serving.run(vattention_serving.resolve(asked), run_dir, Progress())


def test_waits_are_those_of_a_step_in_which_three_sequences_fill_their_page(tmp_path):
    # A page of 64 KiB holds 64 tokens of 4 heads, so the fourth output token, which is the 64th, fills the first page.
    # Three rows: the first three requests begin together, the others find both pages of each row mapped.
    found = run(SMALL, tmp_path / "run")
    sync, background = found["own/sync"], found["own/background"]
    assert sync["group_map_ms"] == background["group_map_ms"] == 64 * 0.01
    assert (sync["sync_calls"], sync["background_calls"]) == (3 * 2 * 64, 0)
    assert (sync["spikes"], sync["decode_spikes"], sync["most_groups"]) == (1, 1, 3)
    assert sync["longest_wait_ms"] == pytest.approx(3 * 0.64)
    assert (background["sync_calls"], background["background_calls"]) == (3 * 64, 3 * 64)
    assert (background["spikes"], background["decode_spikes"], background["longest_wait_ms"]) == (0, 0, 0)
    assert sync["makespan_s"] - background["makespan_s"] == pytest.approx(3 * 0.64e-3, abs=1e-6)
    # All decoding is shorter than a second: three sequences of 19 tokens, twice.
    assert sync["demand_mb_per_s"] == pytest.approx(2 * 3 * 19 * 65_536 / 1e6)
    assert sync["mapped_mb_per_s"] == pytest.approx(3 * 64 * 65_536 / 1e6)


def test_the_most_in_a_second_is_that_of_the_best_place_for_it():
    rng = np.random.default_rng(0)
    duration_ms, amount = rng.uniform(1, 400, 50), rng.integers(0, 100, 50)
    ends = np.concatenate([[0], np.cumsum(duration_ms)])
    begins = np.linspace(0, ends[-1] - 1000, 200_001)
    overlap = [
        np.clip(np.minimum(begins + 1000, end) - np.maximum(begins, begin), 0, None) / (end - begin)
        for begin, end in itertools.pairwise(ends)
    ]
    best = float((amount @ np.array(overlap)).max())
    assert vattention_serving.peak_per_s(duration_ms, amount) == pytest.approx(best, rel=1e-3)
    assert vattention_serving.peak_per_s(np.array([500.0]), np.array([7])) == 7
    assert vattention_serving.peak_per_s(np.array([]), np.array([], int)) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"servers": {}}, "servers: expected at least one"),
        ({"memories": {"blocks": MemoryConfig()}}, "memories.blocks.kind: expected vattention, got paged"),
        ({"map_call_us": {"64 KiB": 0.0}}, "map_call_us: expected a finite number, at least a nanosecond"),
        ({"map_call_us": {"64 KiB": float("nan")}}, "map_call_us: expected a finite number"),
        ({"workload": WorkloadConfig(num_requests=3, lengths="constant")}, "prompt_mean"),
        ({"map_call_us": {"2 MiB": 40.0}}, "map_call_us: expected every page of the memories, got 2 MiB, without 64"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        vattention_serving.resolve(dataclasses.replace(SMALL, **changes))


def test_a_workload_of_which_nothing_is_served_says_nothing_about_mapping():
    server = simulation.make_simulator(SMALL.servers["own"], SMALL.memories["sync"])
    nobody = pl.DataFrame({"first_token_ms": [None, None]}, schema={"first_token_ms": pl.Float64})
    with pytest.raises(ValueError, match="workload: expected a request that can be served, got none"):
        vattention_serving.measure(server, pl.DataFrame(), nobody, 1)


@pytest.mark.soak
def test_the_published_bounds_hold_on_the_published_trace(trace_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("PAXKV_TRACE_DIR", str(trace_dir))
    asked = config.decode(vattention_serving.Config, config.read_yaml(CONFIG))
    found = run(asked, tmp_path / "run")
    assert vattention_serving.failed_checks(found) == []
    assert found["Llama-3-8B/sync"]["longest_wait_ms"] == 5.12
