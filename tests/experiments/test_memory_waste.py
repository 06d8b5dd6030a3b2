"""Where memory goes, for requests so alike that every share can be worked out by hand."""

import dataclasses
import pathlib

import polars as pl
import pytest

from experiments import config, memory_waste
from experiments.cost_config import CostConfig
from experiments.memory_waste import Case, Config
from experiments.progress import Progress
from experiments.published import Published
from experiments.run_directory import RunDirectory
from experiments.simulation import Server
from experiments.workloads.config import WorkloadConfig
from paxkv.config import MemoryConfig

PAPER = pathlib.Path(__file__).parents[2] / "configs/memory_waste/paper.yaml"
ALIKE = WorkloadConfig(
    kind="synthetic", lengths="constant", prompt_mean=100, output_mean=60, rate=float("inf"), num_requests=80
)
# 12 GiB hold 15,728.64 tokens of OPT-13B; whole slots are 15,728.
SLOTS, BUDGET = 15_728, 12 * 2**30 / 819_200


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    asked = Config(
        num_seeds=2,
        server=Server("OPT-13B", kv_memory="12 GiB", rows=90, cost=CostConfig(step_ns=10_000_000)),
        cases={
            "max": Case(MemoryConfig("reserved_max"), ALIKE),
            "paged": Case(MemoryConfig("paged"), ALIKE, over="max"),
        },
        published=(Published("over", ranges={"paged": (1.0, float("inf"))}),),
    )
    with RunDirectory.open(tmp_path_factory.mktemp("runs") / "run") as run_dir:
        run_dir.write_json("manifest.json", {"inputs": {}, "earlier_sessions": []})
        return memory_waste.run(memory_waste.resolve(asked), run_dir, Progress())


def test_reserving_the_maximum_wastes_what_can_be_worked_out(found):
    values = found["max"]
    held = 7 * 2048  # all that fit
    assert values["mean_running"] == pytest.approx(7, abs=1e-12)
    assert values["external"] == pytest.approx(1 - held / BUDGET, abs=1e-12)
    assert values["internal"] == pytest.approx(7 * (2048 - 159) / BUDGET, abs=1e-12)  # the last token is never stored
    assert values["token_states"] + values["reservation"] == pytest.approx(7 * 159 / BUDGET, abs=1e-12)
    assert 7 * 100 / BUDGET < values["token_states"] < 7 * 159 / BUDGET


def test_shares_are_of_the_whole_budget_and_add_up(found):
    for values in found.values():
        total = sum(values[kind] for kind in ("token_states", "reservation", "internal", "external"))
        assert total == pytest.approx(1, abs=1e-12)
        assert values["token_states_low"] <= values["token_states"] <= values["token_states_high"]


def test_what_is_too_small_too_far_from_a_source_or_says_nothing_fails(found):
    assert memory_waste.failed_checks({"max": found["max"]}) == []
    short = dict(found["paged"], over=0.5, over_holds=False)
    assert any("over is 0.5, published at least 1" in text for text in memory_waste.failed_checks({"paged": short}))
    idle = dict(found["max"], queueing_share=0.2)
    assert "requests queued during 20% of the busy time" in memory_waste.failed_checks({"max": idle})[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cases": {}}, "cases: expected at least one, got none"),
        ({"num_seeds": 0}, "num_seeds must be"),
        ({"cases": {"a": Case(MemoryConfig(), ALIKE, over="b")}}, "cases.a.over: expected one of a, got 'b'"),
    ],
)
def test_configs_that_cannot_run_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        memory_waste.resolve(dataclasses.replace(Config(cases={"a": Case(MemoryConfig(), ALIKE)}), **changes))


def test_a_workload_of_which_nothing_is_served_says_nothing_about_memory():
    with pytest.raises(ValueError, match="workload: expected a request that can be served, got none"):
        memory_waste.measure(pl.DataFrame({"new_tokens": [0, 0]}), 100.0)


def test_the_committed_config_asks_for_the_papers_server():
    asked = config.decode(Config, config.read_yaml(PAPER))
    assert int(asked.server.budget_bytes() / asked.server.shape().token_bytes) == SLOTS
    assert asked.num_seeds == 8
