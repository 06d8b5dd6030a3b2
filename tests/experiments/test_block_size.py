"""Memory by block size against counting by hand, and a kernel term that is measured or absent."""

import dataclasses
import json
import pathlib

import polars as pl
import pytest

from experiments import block_size, config
from experiments.block_size import Config
from experiments.cost_config import CostConfig
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.simulation import Server
from experiments.workloads import WorkloadConfig
from paxkv.config import MemoryConfig

CONFIG = pathlib.Path(__file__).parents[2] / "configs/block_size/sharegpt_alpaca.yaml"
ROOFLINE = CostConfig("roofline", model="Llama-3-8B", hardware="h100")
# 64 tokens of memory, for requests of 4 tokens and 4 more that never grow out of a block.
SMALL = Config(
    server=Server(kv_memory="8 MiB", rows=8, max_model_len=32, token_budget=32, cost=ROOFLINE, max_stride=1),
    memory=MemoryConfig(),
    workloads={"short": WorkloadConfig(lengths="constant", prompt_mean=4, output_mean=4, rate=1e4, num_requests=80)},
    block_sizes=(8, 32),
    compare_to=8,
)


def simulated(asked, path):
    with RunDirectory.open(path) as run_dir:
        run_dir.write_json("manifest.json", {"inputs": {}, "earlier_sessions": []})
        return block_size.run(block_size.resolve(asked), run_dir, Progress())


@pytest.fixture
def kernel_run(tmp_path):
    """A finished run of `kernel_bench` whose paged decode took so many times the contiguous one."""

    def write(ratios, backend="triton"):
        path = tmp_path / "kernel_bench"
        path.mkdir(exist_ok=True)
        found = {
            f"decode_bf16_b{size}_permuted": {"paged_over_contiguous": ratio, "backend": backend}
            for size, ratio in ratios.items()
        }
        (path / "summary.json").write_text(json.dumps({"results": found}))
        return path

    return write


def test_a_block_for_each_is_all_that_a_saturated_server_has(tmp_path):
    found = simulated(dataclasses.replace(SMALL, block_sizes=(32,), compare_to=32), tmp_path / "run")
    (values,) = found.values()
    # While others wait both blocks are taken, each by a request of 4, 5, 6, 7 tokens in turn.
    assert values["mean_running"] == pytest.approx(2, rel=0.05)
    assert values["token_states_of_allocated"] == pytest.approx(5.5 / 32, rel=0.02)
    assert values["token_states"] == pytest.approx(2 * 5.5 / 64, rel=0.05)
    # A step stores 4 tokens of a prompt or one of each answer: of 4, 5, 6, 7 were there before 0, 4, 5, 6.
    assert values["token_states_before"] == pytest.approx(2 * (0 + 4 + 5 + 6) / 4 / 64, rel=0.05)
    assert values["external"] == pytest.approx(0, abs=0.03)
    # All 80 wait from the start, and every other one ends a turn of 4 steps later.
    requests = pl.read_parquet(tmp_path / "run/parts/short-32-0/requests.parquet")
    span_s = (requests["ended_ms"].max() - requests["arrival_ms"].min()) / 1000
    assert values["output_tokens_per_s"] == pytest.approx(80 * 4 / span_s, rel=0.1)
    assert values["normalized_latency_s"] == pytest.approx(span_s / 2 / 4, rel=0.1)
    assert (values["latency_over"], values["kernel_ratio"]) == (1, None)
    assert block_size.failed_checks(found) == []
    assert "without kernel term" in block_size.tables(found)[0].title
    (figure,) = block_size.figures(tmp_path / "run")
    assert "without kernel term" in figure.figure.axes[2].get_ylabel()


def test_a_measured_kernel_term_is_read_and_slows_what_it_is_measured_for(kernel_run):
    asked = dataclasses.replace(SMALL, kernel_bench=kernel_run({8: 1.5, 32: 0.99}))
    asked = block_size.resolve(asked)
    assert asked.kernel_ratios == {"8": 1.5, "32": 0.99}
    read = {size: block_size._simulator(asked, size).cost.kv_token for size in (8, 32)}
    plain = {size: block_size._simulator(SMALL, size).cost.kv_token for size in (8, 32)}
    assert read[8] == pytest.approx(1.5 * plain[8], rel=1e-3)
    assert read[32] == pytest.approx(0.99 * plain[32], rel=1e-3)
    assert block_size.resolve(asked) == asked


def test_a_kernel_term_that_nobody_measured_is_refused(kernel_run):
    with pytest.raises(ValueError, match="expected decode_bf16_b32_permuted with paged_over_contiguous"):
        block_size.resolve(dataclasses.replace(SMALL, kernel_bench=kernel_run({8: 1.5})))
    with pytest.raises(ValueError, match="expected a kernel's time of decode_bf16_b8_permuted, got that of XLA's"):
        block_size.resolve(dataclasses.replace(SMALL, kernel_bench=kernel_run({8: 1.5, 32: 1.0}, "xla")))
    with pytest.raises(ValueError, match="kernel_ratios: expected none without a run to read them from"):
        block_size.resolve(dataclasses.replace(SMALL, kernel_ratios={"8": 1.5}))
    other = dataclasses.replace(SMALL, kernel_bench=kernel_run({8: 1.5, 32: 1.0}), kernel_ratios={"8": 1.4, "32": 1.0})
    with pytest.raises(ValueError, match=r"kernel_ratios: expected \{'8': 1.5, '32': 1.0\}"):
        block_size.resolve(other)


def test_shares_that_rise_with_blocks_and_idle_servers_fail():
    good = {"a/8": {"token_states": 0.9, "queueing_share": 0.9}, "a/16": {"token_states": 0.8, "queueing_share": 0.9}}
    other = {"b/8": {"token_states": 0.95, "queueing_share": 0.9}}
    assert block_size.failed_checks(good | other) == []
    (said,) = block_size.failed_checks(good | {"a/16": {"token_states": 0.9, "queueing_share": 0.9}})
    assert said == "a/16: token states are 90.00%, no less than the 90.00% of a/8"
    (said,) = block_size.failed_checks(good | {"a/16": {"token_states": 0.8, "queueing_share": 0.4}})
    assert said.startswith("a/16: requests queued during 40%")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_sizes": (8, 8)}, "block_sizes: expected at least one, rising"),
        ({"compare_to": 16}, r"compare_to: expected one of \[8, 32\], got 16"),
        ({"workloads": {}}, "workloads: expected at least one"),
    ],
)
def test_what_cannot_run_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        block_size.resolve(dataclasses.replace(SMALL, **change))


@pytest.mark.soak
def test_the_shares_of_an_independent_simulation(tmp_path):
    asked = config.decode(Config, config.read_yaml(CONFIG))
    assert block_size.failed_checks(simulated(asked, tmp_path / "run")) == []
