"""What it costs to take a request's memory away: computing again what it had, or moving it to the host and back.

Figure 19 of PagedAttention (SOSP'23), both halves. What one preempted sequence costs is arithmetic on the roofline: a
step that computes so many tokens again, or its blocks over PCIe in both directions, each copied by itself. What that
does to a server is simulated: the same requests under both policies. All times are modelled. That small blocks are slow
to swap follows from `copy_launch_us`; no copy is measured here.
"""

import dataclasses
import itertools
import pathlib
import statistics
from typing import Any, Literal, get_args

import jax.numpy as jnp
import polars as pl

from experiments import files, metrics, plots, published
from experiments.progress import Progress
from experiments.published import Published
from experiments.results import Results, Table
from experiments.run_directory import RunDirectory
from experiments.serving import TICK_MS
from experiments.simulation import Server, Simulated, make_simulator, simulate_load
from experiments.workloads.config import WorkloadConfig, with_sha256
from paxkv.config import MemoryConfig
from paxkv.cost_model import CostModel, StepWork
from paxkv.policy import Preemption
from paxkv.simulate import Simulator
from paxkv.sizes import require_int

DESCRIPTION = "Recomputing against swapping what preempted requests had, by block size (modelled)."
HOW = get_args(Preemption)
GLOSSARY = {
    "sequence_ms": "what preempting one sequence of the config's length costs: a step that computes it again, or its "
    "blocks to the host and back",
    "preemptions": "how often a running request lost its memory",
    "recompute_tokens": "tokens thrown away, to be computed again",
    "swapped_blocks": "blocks copied to the host and back",
    "moved_tokens": "tokens computed again, or slots copied one way and the other, for each preemption",
    "swap_ms": "what copies took, for each preemption",
    "normalized_latency_s": "mean over requests of latency per output token, in s, the wait included",
    "output_tokens_per_s": "output tokens of all requests over the time from the first arrival to the last token",
    "sequence_ratio": "sequence_ms of recomputing over that of swapping",
    "latency_ratio": "normalised latency under recomputing over that under swapping",
}
MODELLED = frozenset(
    {"sequence_ms", "swap_ms", "normalized_latency_s", "output_tokens_per_s", "sequence_ratio", "latency_ratio"}
)
_MEASURED = ("preemptions", "recompute_tokens", "swapped_blocks", "moved_tokens", "swap_ms", "normalized_latency_s",
             "output_tokens_per_s")  # fmt: skip
_POINTS = "points.parquet"


@dataclasses.dataclass(frozen=True)
class Config:
    """One server, one load, two policies, several block sizes.

    Attributes:
      experiment: `preemption`.
      seed: the first one.
      num_seeds: of arrivals and lengths; every point is simulated with each.
      server: asked for more memory than it has; what its policy says of preemption is replaced by both.
      memory: paged, with swap space; its block size is replaced by each.
      workload: what is asked of the server.
      block_sizes: tokens in a block, rising.
      sequence_tokens: stored by the sequence whose preemption `sequence_ms` costs.
      published: what sources give.
    """

    experiment: Literal["preemption"] = "preemption"
    seed: int = 0
    num_seeds: int = 1
    server: Server = dataclasses.field(default_factory=Server)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    block_sizes: tuple[int, ...] = (16,)
    sequence_tokens: int = 256
    published: tuple[Published, ...] = ()


def resolve(config: Config) -> Config:
    """Refuses what cannot run, and names a trace by its hash.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    require_int("num_seeds", config.num_seeds)
    require_int("sequence_tokens", config.sequence_tokens)
    if not config.block_sizes or list(config.block_sizes) != sorted(set(config.block_sizes)):
        raise ValueError(f"block_sizes: expected at least one, rising, got {list(config.block_sizes)}")
    for block_size in config.block_sizes:
        simulator = _simulator(config, "swap", block_size)
        if simulator.cost.swap_block_ns == 0:
            raise ValueError("server.cost: expected copies to the host to take time, got none; see swap_block_ns")
    return dataclasses.replace(config, workload=with_sha256(config.workload))


def parts(config: Config) -> list[str]:
    """Every point under every seed can be resumed by itself."""
    return [
        _part(how, size, config.seed + nth)
        for size in config.block_sizes
        for how in HOW
        for nth in range(config.num_seeds)
    ]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Simulates both policies with every block size and seed.

    Args:
      config: what to simulate.
      run_dir: where the requests of every point go, and `points.parquet`, one row a point and seed.
      progress: shown while it works.
    """
    rows = []
    for block_size in config.block_sizes:
        for how in HOW:
            simulator = _simulator(config, how, block_size)
            for seed in range(config.seed, config.seed + config.num_seeds):
                name = _part(how, block_size, seed)
                if run_dir.finished_part(name) is None:
                    simulated = simulate_load(config.server, simulator, config.workload, seed, progress, name)
                    with run_dir.part(name) as part:
                        part.write_parquet("requests.parquet", simulated.requests)
                        part.write_parquet("point.parquet", pl.DataFrame([measure(simulated, block_size)]))
                point = run_dir.require_part(name).read_parquet("point.parquet")
                rows.append(
                    point.with_columns(
                        how=pl.lit(how),
                        block_size=pl.lit(block_size),
                        seed=pl.lit(seed),
                        sequence_ms=pl.lit(sequence_ms(simulator.cost, how, config.sequence_tokens, block_size)),
                    )
                )
    points = pl.concat(rows)
    run_dir.write_parquet(_POINTS, points)
    return published.compared(_results(config, points), config.published)


def measure(simulated: Simulated, block_size: int) -> dict[str, float]:
    """What preemption did in one simulation, and what became of the requests."""
    of_requests = metrics.request_metrics(simulated.requests)
    of_steps = metrics.memory_metrics(simulated.steps)
    blocks = of_steps["swapped_out_blocks"] + of_steps["swapped_in_blocks"]
    preemptions = of_requests["preemptions"]
    each = max(preemptions, 1)
    return {
        "preemptions": float(preemptions),
        "recompute_tokens": float(of_steps["recompute_tokens"]),
        "swapped_blocks": float(blocks),
        "moved_tokens": (of_steps["recompute_tokens"] + blocks * block_size) / each,
        "swap_ms": of_steps["swap_ms"] / each,
        "normalized_latency_s": of_requests["normalized_latency_ms"] / 1000,
        "output_tokens_per_s": float(of_requests["output_tokens_per_s"]),
    }


def sequence_ms(cost: CostModel, how: Preemption, tokens: int, block_size: int) -> float:
    """What preempting a sequence costs that has so many tokens stored, in ms.

    Args:
      cost: of steps and copies.
      how: a step by itself in which all tokens are computed again, or all blocks to the host and back.
      tokens: stored.
      block_size: tokens in a block.
    """
    if how == "swap":
        return 2 * -(-tokens // block_size) * cost.swap_block_ns / 1e6
    stored, none = jnp.int32(tokens), jnp.int32(0)
    pairs = stored * (stored + 1) // 2
    return int(cost.ticks(StepWork(stored, jnp.int32(1), stored, pairs, none, none))) * TICK_MS


def _simulator(config: Config, how: Preemption, block_size: int) -> Simulator:
    policy = dataclasses.replace(config.server.policy, preemption=how)
    memory = dataclasses.replace(config.memory, block_size=block_size)
    if how == "recompute":
        memory = dataclasses.replace(memory, swap_space=MemoryConfig().swap_space)
    return make_simulator(dataclasses.replace(config.server, policy=policy), memory)


def _results(config: Config, points: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Means over the seeds by policy and block size, and recomputing over swapping by block size."""
    found: dict[str, dict[str, Any]] = {}
    for how in HOW:
        for size in config.block_sizes:
            own = points.filter((pl.col("how") == how) & (pl.col("block_size") == size))
            found[f"{how}/{size}"] = {name: statistics.fmean(own[name]) for name in ("sequence_ms", *_MEASURED)}
    for size in config.block_sizes:
        again, moved = (found[f"{how}/{size}"] for how in HOW)
        found[f"ratio/{size}"] = {
            "sequence_ratio": again["sequence_ms"] / moved["sequence_ms"],
            "latency_ratio": again["normalized_latency_s"] / moved["normalized_latency_s"],
        }
    return found


def failed_checks(results: Results) -> list[str]:
    """Servers that preempt nobody, a cost of recomputing that depends on blocks, one of swapping that does not fall."""
    failures = published.failed_checks(results)
    for name, values in results.items():
        if values.get("preemptions") == 0:
            failures.append(f"{name}: nobody was preempted; raise the load, or give it less memory")
    again, moved = (_by_size(results, how) for how in HOW)
    if max(again.values()) > 1.01 * min(again.values()):
        failures.append(f"recompute: costs {min(again.values()):.2f} to {max(again.values()):.2f} ms by block size")
    for small, large in itertools.pairwise(sorted(moved)):
        if moved[large] >= moved[small]:
            failures.append(f"swap/{large}: {moved[large]:.2f} ms, no less than the {moved[small]:.2f} ms of {small}")
    smallest = min(moved)
    if moved[smallest] <= again[smallest]:
        failures.append(f"swap/{smallest}: {moved[smallest]:.2f} ms, no more than recomputing, though blocks are small")
    return failures


def _by_size(results: Results, how: str) -> dict[int, float]:
    named = {name.removeprefix(f"{how}/"): values for name, values in results.items() if name.startswith(f"{how}/")}
    return {int(size): float(values["sequence_ms"] or 0) for size, values in named.items()}


def tables(results: Results) -> list[Table]:
    """Policies by block size, how they compare, and what is published."""
    points = {name: v for name, v in results.items() if not name.startswith("ratio/")}
    rows = [
        [name, f"{v['sequence_ms']:.2f}", f"{v['preemptions']:,.0f}", f"{v['moved_tokens']:.0f}",
         f"{v['swap_ms']:.2f}", f"{v['normalized_latency_s']:.3f}", f"{v['output_tokens_per_s']:.0f}"]
        for name, v in points.items()
    ]  # fmt: skip
    headings = [
        "policy/block",
        "sequence, ms",
        "preemptions",
        "tokens each",
        "copies, ms each",
        "s a token",
        "tokens/s",
    ]
    ratios = [
        [name.removeprefix("ratio/"), f"{v['sequence_ratio']:.2f}", f"{v['latency_ratio']:.3f}"]
        for name, v in results.items()
        if name not in points
    ]
    compared = ["block size", "one sequence", "normalised latency"]
    return [
        Table(headings, rows, "What preemption costs (modelled)"),
        Table(compared, ratios, "Recomputing over swapping (modelled)"),
        published.table(results),
    ]


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """One sequence, and a server, by block size."""
    points = files.read_parquet(run_path / _POINTS)
    figure, (one, server) = plots.canvas(1, 2, height=3.2)
    for axes, metric, label in (
        (one, "sequence_ms", "one sequence, ms (modelled)"),
        (server, "normalized_latency_s", "normalised latency, s a token (modelled)"),
    ):
        for how in HOW:
            own = points.filter(pl.col("how") == how).group_by("block_size").agg(pl.col(metric).mean())
            own = own.sort("block_size")
            axes.plot(own["block_size"], own[metric], marker="o", markersize=3, label=how)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens in a block")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    one.set_yscale("log")
    plots.legend(one)
    return [
        plots.Figure("Recompute or swap", "Recomputing does not know of blocks; small ones are slow to copy.", figure)
    ]


def _part(how: str, block_size: int, seed: int) -> str:
    return f"{how}-{block_size}-{seed}"
