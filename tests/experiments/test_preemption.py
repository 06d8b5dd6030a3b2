"""What preempting one sequence costs, by hand, and a small server under both policies."""

import dataclasses
import pathlib

import polars as pl
import pytest

from experiments import config, preemption, simulation
from experiments.cost_config import CostConfig
from experiments.preemption import Config, sequence_ms
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.simulation import Server, make_simulator
from experiments.workloads import WorkloadConfig
from paxkv.config import MemoryConfig
from paxkv.cost_model import StepCost
from paxkv.roofline import Efficiencies

CONFIG = pathlib.Path(__file__).parents[2] / "configs/preemption/recompute_vs_swap.yaml"
# 64 tokens of memory for requests of 32: the third one has to make way for the first two.
SMALL = Config(
    server=Server(
        kv_memory="8 MiB",
        rows=3,
        max_model_len=32,
        token_budget=32,
        cost=CostConfig(step_ns=1_000_000, token_ns=100_000, kv_token_ns=0, swap_block_ns=2_000_000),
        max_stride=1,
    ),
    memory=MemoryConfig(swap_space="8 MiB"),
    workload=WorkloadConfig(lengths="constant", prompt_mean=8, output_mean=24, rate=100, num_requests=12),
    block_sizes=(8,),
    sequence_tokens=20,
)


def simulated(asked, path):
    with RunDirectory.open(path) as run_dir:
        run_dir.write_json("manifest.json", {"inputs": {}, "earlier_sessions": []})
        return preemption.run(preemption.resolve(asked), run_dir, Progress())


def test_one_sequence_costs_its_tokens_or_its_blocks_both_ways():
    cost = StepCost(step_ns=1_000_000, token_ns=100_000, kv_token_ns=10_000, swap_block_ns=2_000_000)
    assert sequence_ms(cost, "recompute", 20, 8) == pytest.approx(1 + 20 * 0.1 + 20 * 0.01)
    assert [sequence_ms(cost, "swap", 20, size) for size in (8, 16, 20, 32)] == [12, 8, 4, 4]


def test_on_an_a100_a_sequence_of_256_tokens_takes_what_its_bytes_and_its_products_take():
    launched = CostConfig(
        "roofline", model="OPT-13B", hardware="a100_40gb", efficiencies=Efficiencies(copy_launch_us=3.5)
    )
    server = Server(model="OPT-13B", kv_memory="12 GiB", rows=2, cost=launched)

    def ms(how, block_size):
        return sequence_ms(make_simulator(server, MemoryConfig(block_size=block_size)).cost, how, 256, block_size)

    for block_size in (1, 16, 256):
        blocks, copies = 256 // block_size, 2 * 40  # of 40 layers keys and values
        bytes_ms, launches_ms = 256 * 800 * 1024 / 25e9 * 1e3, blocks * copies * 3.5e-3
        assert ms("swap", block_size) == pytest.approx(2 * (bytes_ms + launches_ms), rel=1e-3)
        # 12.6e9 weights, twice, for each token, at 0.76 of 312e12 FLOP/s, and little else.
        assert ms("recompute", block_size) == pytest.approx(256 * 2 * 12.6e9 / (0.76 * 312e12) * 1e3, rel=0.05)


def test_each_policy_pays_in_its_own_way(tmp_path, monkeypatch):
    swapping, simulate = preemption._simulator(SMALL, "swap", 8), simulation.simulate_workload

    def one_program(simulator, *arguments):
        """Recomputing is made up, as compiling takes long: five tokens are thrown away where swapping moves blocks."""
        moved = simulate(swapping, *arguments)
        if simulator == swapping:
            return moved
        assert (simulator.policy.preemption, simulator.memory.host_blocks) == ("recompute", 0)
        thrown = pl.when(pl.col("swapped_out_blocks") > 0).then(5).otherwise(0)
        nothing = {name: pl.lit(0) for name in ("swapped_out_blocks", "swapped_in_blocks", "swap_ms")}
        return moved._replace(steps=moved.steps.with_columns(recompute_tokens=thrown, **nothing))

    monkeypatch.setattr(simulation, "simulate_workload", one_program)
    found = simulated(SMALL, tmp_path / "run")
    again, moved = found["recompute/8"], found["swap/8"]
    assert moved["preemptions"] > 0 == moved["recompute_tokens"] < moved["swapped_blocks"]
    assert moved["moved_tokens"] == pytest.approx(moved["swapped_blocks"] * 8 / moved["preemptions"])
    assert moved["swap_ms"] == pytest.approx(2 * moved["swapped_blocks"] / moved["preemptions"])
    assert again["swapped_blocks"] == again["swap_ms"] == 0 < again["recompute_tokens"]
    assert again["moved_tokens"] == pytest.approx(again["recompute_tokens"] / again["preemptions"])
    assert found["ratio/8"] == {"sequence_ratio": pytest.approx((1 + 20 * 0.1) / (2 * 3 * 2)), "latency_ratio": 1}
    requests = pl.read_parquet(tmp_path / "run/parts/swap-8-0/requests.parquet")
    assert requests["generated"].to_list() == [24] * 12
    token_ms = ((requests["ended_ms"] - requests["arrival_ms"]) / 24).to_numpy()
    assert moved["normalized_latency_s"] == pytest.approx(token_ms.mean() / 1000)
    assert preemption.failed_checks(found) == []
    (figure,) = preemption.figures(tmp_path / "run")
    assert [line.get_label() for line in figure.figure.axes[0].lines] == ["recompute", "swap"]


def results(recompute=(5.0, 5.0), swap=(20.0, 4.0), preemptions=3.0):
    return {
        f"{how}/{size}": {"sequence_ms": ms, "preemptions": preemptions}
        for how, costs in (("recompute", recompute), ("swap", swap))
        for size, ms in zip((8, 16), costs, strict=True)
    }


def test_a_cost_that_runs_the_other_way_fails():
    assert preemption.failed_checks(results()) == []
    assert preemption.failed_checks(results(recompute=(5.0, 5.2))) == ["recompute: costs 5.00 to 5.20 ms by block size"]
    assert "swap/16: 20.00 ms, no less than the 20.00 ms of 8" in preemption.failed_checks(results(swap=(20.0, 20.0)))
    assert "swap/8: 4.50 ms, no more than recomputing" in preemption.failed_checks(results(swap=(4.5, 4.0)))[0]
    assert len(preemption.failed_checks(results(preemptions=0.0))) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_sizes": (16, 8)}, r"block_sizes: expected at least one, rising, got \[16, 8\]"),
        ({"memory": MemoryConfig()}, "policy.preemption: 'swap' needs a memory with host blocks"),
        ({"server": dataclasses.replace(SMALL.server, cost=CostConfig())}, "server.cost: expected copies to the host"),
        ({"sequence_tokens": 0}, "sequence_tokens must be at least 1"),
    ],
)
def test_what_cannot_run_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        preemption.resolve(dataclasses.replace(SMALL, **change))


@pytest.mark.soak
def test_the_published_shape(tmp_path):
    asked = config.decode(Config, config.read_yaml(CONFIG))
    assert preemption.failed_checks(simulated(asked, tmp_path / "run")) == []
