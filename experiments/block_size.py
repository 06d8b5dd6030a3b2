"""What the size of a block decides: how much of a saturated server's memory holds tokens, and how fast it serves.

Of large blocks the last one of each request stays half empty, so that fewer requests run at once. Small ones are slower
to read, which is a matter of kernels and cannot be modelled: it comes from a run of `kernel_bench` on a GPU or TPU, or
is left out, and then the report says so. Without it small blocks look best.
"""

import dataclasses
import pathlib
import statistics
from typing import Any, Literal

import polars as pl

from experiments import files, metrics, plots, published
from experiments.progress import Progress
from experiments.published import Published
from experiments.results import Results, Table
from experiments.run_directory import RunDirectory
from experiments.simulation import Server, Simulated, make_simulator, simulate_load
from experiments.workloads.config import WorkloadConfig, with_sha256
from paxkv.config import MemoryConfig
from paxkv.simulate import Simulator
from paxkv.sizes import require_int

DESCRIPTION = "Memory, batch and (modelled) speed of a saturated server by block size, with or without a kernel term."
GLOSSARY = {
    "token_states": "share of the KV memory that held tokens at the peak of each step, average while requests queue",
    "token_states_before": "share that held tokens as each step began, before it stored those that it computed",
    "token_states_of_allocated": "share of what was handed out that held tokens",
    "external": "share that nobody had, budget that pays for no whole block included",
    "mean_running": "requests that held memory, average while others were queueing",
    "queueing_share": "share of the busy time in which requests were queueing",
    "preemptions": "how often a running request lost its memory, per request",
    "output_tokens_per_s": "output tokens drawn while requests were queueing over that time",
    "normalized_latency_s": "mean over requests of latency per output token, in s, the wait included",
    "latency_over": "that latency over the one with blocks of the size that the config names",
    "kernel_ratio": "measured time of paged over contiguous attention with blocks of this size; none if it is absent",
}
MODELLED = frozenset({"output_tokens_per_s", "normalized_latency_s", "latency_over"})
_SHARES = ("token_states", "token_states_before", "token_states_of_allocated", "external")
_MEANS = (*_SHARES, "mean_running", "queueing_share", "preemptions", "output_tokens_per_s", "normalized_latency_s")
_POINTS = "points.parquet"


@dataclasses.dataclass(frozen=True)
class Config:
    """One server and memory, several block sizes and loads.

    Attributes:
      experiment: `block_size`.
      seed: the first one.
      num_seeds: of arrivals and lengths; every point is simulated with each.
      server: whose memory it is.
      memory: paged; its block size is replaced by each.
      workloads: by name; each saturates the server.
      block_sizes: tokens in a block, rising.
      compare_to: the one of them to whose latency the others' are compared.
      kernel_bench: directory of a finished run of `kernel_bench` with permuted tables of these block sizes.
      kernel_dtype: of the stored keys and values in that run, in short, as in the names of its results.
      kernel_ratios: time of paged over contiguous decode by block size; read from that run, not to be given.
      published: what sources give.
    """

    experiment: Literal["block_size"] = "block_size"
    seed: int = 0
    num_seeds: int = 1
    server: Server = dataclasses.field(default_factory=Server)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    workloads: dict[str, WorkloadConfig] = dataclasses.field(default_factory=dict)
    block_sizes: tuple[int, ...] = (16,)
    compare_to: int = 16
    kernel_bench: pathlib.Path | None = None
    kernel_dtype: str = "bf16"
    kernel_ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    published: tuple[Published, ...] = ()


def resolve(config: Config) -> Config:
    """Refuses what cannot run, reads the kernel term, and names traces by their hashes.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    require_int("num_seeds", config.num_seeds)
    if not config.block_sizes or list(config.block_sizes) != sorted(set(config.block_sizes)):
        raise ValueError(f"block_sizes: expected at least one, rising, got {list(config.block_sizes)}")
    if config.compare_to not in config.block_sizes:
        raise ValueError(f"compare_to: expected one of {list(config.block_sizes)}, got {config.compare_to}")
    if not config.workloads:
        raise ValueError("workloads: expected at least one, got none")
    if config.kernel_bench is not None:
        ratios = read_kernel_ratios(config.kernel_bench, config.block_sizes, config.kernel_dtype)
        if config.kernel_ratios not in ({}, ratios):
            raise ValueError(
                f"kernel_ratios: expected {ratios}, as {config.kernel_bench} has them, or none, got others"
            )
        config = dataclasses.replace(config, kernel_ratios=ratios)
    elif config.kernel_ratios:
        raise ValueError("kernel_ratios: expected none without a run to read them from; name it in kernel_bench")
    for block_size in config.block_sizes:
        _simulator(config, block_size)
    workloads = {name: with_sha256(workload) for name, workload in config.workloads.items()}
    return dataclasses.replace(config, workloads=workloads)


def read_kernel_ratios(run_path: pathlib.Path, block_sizes: tuple[int, ...], dtype: str) -> dict[str, float]:
    """Measured time of decode through permuted tables over that of contiguous decode, by block size.

    Args:
      run_path: directory of a run of `kernel_bench`.
      block_sizes: to be found there.
      dtype: of keys and values, in short.

    Raises:
      ValueError: the run lacks a block size, or attention ran there on XLA's reference instead of a kernel.
      UserError: there is no such run, or it is not finished.
    """
    found = files.read_json(run_path / "summary.json")["results"]
    ratios = {}
    for block_size in block_sizes:
        name = f"decode_{dtype}_b{block_size}_permuted"
        ratio = found.get(name, {}).get("paged_over_contiguous")
        if ratio is None:
            raise ValueError(f"kernel_bench: expected {name} with paged_over_contiguous in {run_path}, got none")
        if found[name]["backend"] == "xla":
            raise ValueError(f"kernel_bench: expected a kernel's time of {name}, got that of XLA's reference")
        ratios[str(block_size)] = float(ratio)
    return ratios


def parts(config: Config) -> list[str]:
    """Every point under every seed can be resumed by itself."""
    seeds = range(config.seed, config.seed + config.num_seeds)
    return [_part(name, size, seed) for size in config.block_sizes for name in config.workloads for seed in seeds]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Simulates every block size under every load and seed.

    Args:
      config: what to simulate.
      run_dir: where the requests of every point go, and `points.parquet`, one row a point and seed.
      progress: shown while it works.
    """
    server, rows = config.server, []
    budget_tokens = server.budget_tokens()
    for block_size in config.block_sizes:
        simulator = _simulator(config, block_size)
        for name, load in config.workloads.items():
            for seed in range(config.seed, config.seed + config.num_seeds):
                place = _part(name, block_size, seed)
                if run_dir.finished_part(place) is None:
                    simulated = simulate_load(server, simulator, load, seed, progress, place)
                    with run_dir.part(place) as part:
                        part.write_parquet("requests.parquet", simulated.requests)
                        part.write_parquet("point.parquet", pl.DataFrame([measure(simulated, budget_tokens)]))
                point = run_dir.require_part(place).read_parquet("point.parquet")
                rows.append(point.with_columns(load=pl.lit(name), block_size=pl.lit(block_size), seed=pl.lit(seed)))
    points = pl.concat(rows).with_columns(with_kernel=pl.lit(bool(config.kernel_ratios)))
    run_dir.write_parquet(_POINTS, points)
    return published.compared(_results(config, points), config.published)


def measure(simulated: Simulated, budget_tokens: float) -> dict[str, float]:
    """Memory and speed of one simulation, while requests were queueing; latency of all of them."""
    held = metrics.memory_metrics(simulated.steps, budget_tokens)
    of_requests = metrics.request_metrics(simulated.requests)
    queueing = simulated.steps.filter((pl.col("new_tokens") > 0) & (pl.col("waiting") > 0))
    queueing_ms = float(queueing["duration_ms"].sum())
    stored_ms = float((queueing["new_tokens"] * queueing["duration_ms"]).sum())
    just_stored = stored_ms / queueing_ms / budget_tokens if queueing_ms else 0.0
    return {
        "token_states": held["pool_utilization"],
        "token_states_before": held["pool_utilization"] - just_stored,
        "token_states_of_allocated": held["allocated_utilization"],
        "external": held["external_waste"] + held["remainder_waste"],
        "mean_running": held["mean_running"],
        "queueing_share": held["queueing_share"],
        "preemptions": of_requests["preemptions"] / of_requests["requests"],
        "output_tokens_per_s": float(queueing["sampled"].sum()) / queueing_ms * 1000 if queueing_ms else 0.0,
        "normalized_latency_s": of_requests["normalized_latency_ms"] / 1000,
    }


def _simulator(config: Config, block_size: int) -> Simulator:
    """The server with blocks of one size, as fast as kernels read them if that is known."""
    server = config.server
    if config.kernel_ratios:
        efficiencies = dataclasses.replace(server.cost.efficiencies, paged_decode=config.kernel_ratios[str(block_size)])
        server = dataclasses.replace(server, cost=dataclasses.replace(server.cost, efficiencies=efficiencies))
    return make_simulator(server, dataclasses.replace(config.memory, block_size=block_size))


def _results(config: Config, points: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Means over the seeds by load and block size."""
    found: dict[str, dict[str, Any]] = {}
    for name in config.workloads:
        for size in config.block_sizes:
            own = points.filter((pl.col("load") == name) & (pl.col("block_size") == size))
            found[f"{name}/{size}"] = {metric: statistics.fmean(own[metric]) for metric in _MEANS}
            found[f"{name}/{size}"]["kernel_ratio"] = config.kernel_ratios.get(str(size))
        known = found[f"{name}/{config.compare_to}"]["normalized_latency_s"]
        for size in config.block_sizes:
            found[f"{name}/{size}"]["latency_over"] = found[f"{name}/{size}"]["normalized_latency_s"] / known
    return found


def failed_checks(results: Results) -> list[str]:
    """Values too far from those given, memory that larger blocks use better, and servers that were not saturated."""
    failures = published.failed_checks(results)
    for before, name in zip(results, list(results)[1:], strict=False):
        smaller, larger = results[before]["token_states"], results[name]["token_states"]
        if before.split("/")[0] == name.split("/")[0] and float(larger or 0) >= float(smaller or 0):
            failures.append(f"{name}: token states are {larger:.2%}, no less than the {smaller:.2%} of {before}")
    for name, values in results.items():
        if float(values["queueing_share"] or 0) < 0.5:
            failures.append(
                f"{name}: requests queued during {values['queueing_share']:.0%} of the busy time; raise the rate"
            )
    return failures


def tables(results: Results) -> list[Table]:
    """A line for each load and block size, and what is published."""
    rows = [
        [name, *(f"{v[share]:.1%}" for share in _SHARES), f"{v['mean_running']:.1f}", f"{v['preemptions']:.2f}",
         f"{v['output_tokens_per_s']:,.0f}", f"{v['latency_over']:.2f}",
         "absent" if v["kernel_ratio"] is None else f"{v['kernel_ratio']:.3f}"]
        for name, v in results.items()
    ]  # fmt: skip
    headings = ["load/block", "tokens", "before", "of handed out", "nobody's", "running", "preempted", "tokens/s",
                "latency", "kernel term"]  # fmt: skip
    return [Table(headings, rows, _title(any(row[-1] != "absent" for row in rows))), published.table(results)]


def _title(with_kernel: bool) -> str:
    told = "with the measured kernel term" if with_kernel else "without kernel term: no measured table was given"
    return f"A saturated server by block size (modelled; {told})"


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """Memory, batch and throughput by block size."""
    points = files.read_parquet(run_path / _POINTS)
    kernel = "with" if points["with_kernel"][0] else "without"
    figure, panels = plots.canvas(1, 3, height=3.0)
    for axes, metric, label in zip(
        panels,
        ("token_states", "mean_running", "output_tokens_per_s"),
        ("share of memory with tokens", "running requests", f"tokens/s (modelled, {kernel} kernel term)"),
        strict=True,
    ):
        for name in points["load"].unique(maintain_order=True):
            own = points.filter(pl.col("load") == name).group_by("block_size").agg(pl.col(metric).mean())
            own = own.sort("block_size")
            axes.plot(own["block_size"], own[metric], marker="o", markersize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens in a block")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    plots.legend(panels[0])
    caption = "Larger blocks leave more of the last one empty." + (
        "" if kernel == "with" else " That small blocks are slower to read is not in these figures."
    )
    return [plots.Figure("Block size", caption, figure)]


def _part(load: str, block_size: int, seed: int) -> str:
    return f"{load}-{block_size}-{seed}"
