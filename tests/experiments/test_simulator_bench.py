"""The benchmark of the simulator: the same bits, alone and swept, and limits that are kept or told."""

import dataclasses

import polars as pl
import pytest

from experiments import files, simulator_bench
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.simulation import Server
from experiments.simulator_bench import Config, Sweep
from experiments.workloads.config import WorkloadConfig
from paxkv.config import MemoryConfig
from paxkv.policy import Policy

ASKED = Config(
    server=Server("Llama-3-8B", rows=8, max_model_len=256, token_budget=64),
    workload=WorkloadConfig(
        kind="synthetic", lengths="uniform", prompt_mean=50, output_mean=30, rate=100, num_requests=30
    ),
    sweep=Sweep((60, 30), (2,), (Policy(),), (1.0,)),
    memory=MemoryConfig("paged", num_blocks=60, watermark="0.04"),
    cpu_devices=1,
    repeats=2,
    max_records=4096,
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    with RunDirectory.open(path) as run_dir:
        run_dir.write_json("manifest.json", {"inputs": {}, "earlier_sessions": []})
        return simulator_bench.run(simulator_bench.resolve(ASKED), run_dir, Progress())["synthetic"], path


def test_it_says_how_much_was_simulated_and_that_it_was_the_same(ran):
    values, path = ran
    steps, requests = (files.read_parquet(path / f"{name}.parquet") for name in ("steps", "requests"))
    assert values["repeated_equal"] is True
    assert values["swept_equal"] is True
    assert values["steps"] >= len(steps) > values["turns"] > 30
    assert requests["generated"].to_list() == requests["output_len"].to_list()
    assert int(steps["sampled"].sum()) == int(requests["output_len"].sum())
    assert values["requests_per_s"] == pytest.approx(30 / values["seconds"])
    assert values["sweep16_over_one"] is None  # there are two points
    points = files.read_parquet(path / "points.parquet")
    assert points["num_blocks"].to_list() == [60, 30]
    assert points["preemptions"].to_list()[1] > 0
    assert points.filter(pl.col("digest") == points["digest"][0]).height == 1


def test_a_run_that_is_slow_or_not_the_same_fails(ran):
    values, _ = ran
    assert simulator_bench.failed_checks({"a": values}) == []
    slow = dict(values, seconds=12.0, max_seconds=10, sweep16_over_one=9.0, max_sweep_over_one=8, swept_equal=False)
    assert simulator_bench.failed_checks({"a": slow}) == [
        "a: in the sweep it gave other records or requests",
        "a: seconds is 12, at most 10 was asked for",
        "a: sweep16_over_one is 9, at most 8 was asked for",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": MemoryConfig("reserved_max")}, "memory: expected kind: paged with num_blocks"),
        ({"sweep": Sweep((30, 60), (2,), (Policy(),), (1.0,))}, "sweep.num_blocks: expected 60 first"),
        ({"sweep": Sweep((60, 70), (2,), (Policy(),), (1.0,))}, "sweep.num_blocks: expected at most .* 60, got 70"),
        ({"sweep": Sweep((60,), (3,), (Policy(),), (1.0,))}, "sweep.watermarks: expected 2 first"),
        ({"sweep": Sweep((60,), (2,), (), (1.0,))}, "sweep.policies: expected at least one value"),
        ({"sweep": Sweep((60, 0), (2,), (Policy(),), (1.0,))}, "units must be at least 1, got 0"),
        ({"sweep": Sweep((60,), (2, -1), (Policy(),), (1.0,))}, "watermark must be at least 0, got -1"),
        ({"sweep": Sweep((60,), (2,), (Policy(), Policy(preemption="swap")), (1.0,))}, "one kind of preemption"),
        ({"sweep": Sweep((60,), (2,), (Policy(),), (1.0, float("nan")))}, "sweep.time_scales: expected finite"),
    ],
)
def test_sweeps_that_do_not_begin_with_the_run_alone_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        simulator_bench.resolve(dataclasses.replace(ASKED, **changes))
