"""Where the memory of a saturated server goes under each way to hand it out, held against PagedAttention's figures.

Figures 2 and 13 of PagedAttention (SOSP'23) are averages over a server that is asked for more than it can serve. So
are these: only time in which requests queue counts, and every step counts for as long as it lasts. How long it lasts is
modelled, which hardly matters here: memory is a matter of lengths.
"""

import dataclasses
import functools
import pathlib
import statistics
from typing import Any, Literal

import polars as pl

from experiments import files, metrics, plots, published
from experiments.bootstrap import mean_interval
from experiments.progress import Progress
from experiments.published import Published
from experiments.results import Results, Table, columns
from experiments.run_directory import RunDirectory
from experiments.simulation import Server, make_simulator, require_served, simulate_load, simulated_part
from experiments.workloads.config import WorkloadConfig, with_sha256
from paxkv.config import MemoryConfig
from paxkv.sizes import require_int

DESCRIPTION = "Token states, reservation and waste in the memory of a saturated server, as PagedAttention's figure 2."
GLOSSARY = {
    "token_states": "share of the KV memory that held tokens, average while requests were queueing",
    "reservation": "share that its owner had not filled yet, but would",
    "internal": "share that its owner would never fill",
    "external": "share that nobody had: free, or lost between requests; budget that pays for no whole unit included",
    "mean_running": "requests that held memory, average while others were queueing",
    "queueing_share": "share of the busy time in which requests were queueing",
    "token_states_of_allocated": "share of what was handed out that held tokens",
    "over": "mean_running over that of the case that the config names",
}
_MEANS = ("token_states", "reservation", "internal", "external", "mean_running", "token_states_of_allocated")
_LOW, _HIGH = "_low", "_high"
GLOSSARY |= {f"{name}{_LOW}": f"lower end of the 95 % bootstrap interval of {name} over the seeds" for name in _MEANS}
GLOSSARY |= {f"{name}{_HIGH}": f"upper end of the 95 % bootstrap interval of {name} over the seeds" for name in _MEANS}


@dataclasses.dataclass(frozen=True)
class Case:
    """One memory under one load.

    Attributes:
      memory: how memory is handed out.
      workload: what is asked of the server; saturates it.
      over: name of a case to whose running requests these are compared; empty for none.
    """

    memory: MemoryConfig
    workload: WorkloadConfig
    over: str = ""


@dataclasses.dataclass(frozen=True)
class Config:
    """Several memories of one server.

    Attributes:
      experiment: `memory_waste`.
      seed: the first one.
      num_seeds: of arrivals and lengths; each case is simulated with every one.
      server: whose memory it is.
      cases: by name.
      published: what sources give.
    """

    experiment: Literal["memory_waste"] = "memory_waste"
    seed: int = 0
    num_seeds: int = 3
    server: Server = dataclasses.field(default_factory=Server)
    cases: dict[str, Case] = dataclasses.field(default_factory=dict)
    published: tuple[Published, ...] = ()


def resolve(config: Config) -> Config:
    """Refuses what cannot run, and names traces by their hashes.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    require_int("num_seeds", config.num_seeds)
    if not config.cases:
        raise ValueError("cases: expected at least one, got none")
    for name, case in config.cases.items():
        if case.over and case.over not in config.cases:
            raise ValueError(f"cases.{name}.over: expected one of {', '.join(config.cases)}, got {case.over!r}")
        make_simulator(config.server, case.memory)
    cases = {
        name: dataclasses.replace(case, workload=with_sha256(case.workload)) for name, case in config.cases.items()
    }
    return dataclasses.replace(config, cases=cases)


def parts(config: Config) -> list[str]:
    """Every case under every seed can be resumed by itself."""
    return [_part(name, seed) for name in config.cases for seed in _seeds(config)]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Simulates every case under every seed.

    Args:
      config: what to simulate.
      run_dir: where steps and requests of every simulation go, and `shares.parquet`, one row a case and seed.
      progress: shown while it works.
    """
    server, rows = config.server, []
    budget_tokens = server.budget_tokens()
    for name, case in config.cases.items():
        simulator = make_simulator(server, case.memory)
        for seed in _seeds(config):
            asked = (server, simulator, case.workload, seed, progress, _part(name, seed))
            kept = simulated_part(run_dir, _part(name, seed), functools.partial(simulate_load, *asked))
            rows.append({"case": name, "seed": seed, **measure(kept.steps, budget_tokens)})
    table = pl.DataFrame(rows)
    run_dir.write_parquet("shares.parquet", table)
    return published.compared(_results(config, table), config.published)


def measure(steps: pl.DataFrame, budget_tokens: float) -> dict[str, float]:
    """The shares of one simulation.

    Args:
      steps: what happened in each step.
      budget_tokens: tokens that the memory's budget pays for.

    Raises:
      ValueError: nothing was computed, so that the memory lay idle.
    """
    require_served(int(steps["new_tokens"].sum()))
    found = metrics.memory_metrics(steps, budget_tokens)
    return {
        "token_states": found["pool_utilization"],
        "reservation": found["reservation_waste"],
        "internal": found["internal_waste"],
        "external": found["external_waste"] + found["remainder_waste"],
        "mean_running": found["mean_running"],
        "token_states_of_allocated": found["allocated_utilization"],
        "queueing_share": found["queueing_share"],
    }


def _results(config: Config, table: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Means over the seeds, and where the bootstrap puts them."""
    found: dict[str, dict[str, Any]] = {}
    for name in config.cases:
        own = table.filter(pl.col("case") == name)
        found[name] = {metric: statistics.fmean(own[metric]) for metric in (*_MEANS, "queueing_share")}
        for metric in _MEANS if config.num_seeds > 1 else ():
            interval = mean_interval(own[metric].to_list(), seed=config.seed)
            found[name] |= {metric + _LOW: interval.low, metric + _HIGH: interval.high}
    for name, case in config.cases.items():
        if case.over:
            found[name]["over"] = found[name]["mean_running"] / found[case.over]["mean_running"]
    return found


def failed_checks(results: Results) -> list[str]:
    """Values too far from the published ones, and servers that were not saturated."""
    failures = published.failed_checks(results)
    for name, values in results.items():
        if float(values["queueing_share"] or 0) < 0.5:
            failures.append(
                f"{name}: requests queued during {values['queueing_share']:.0%} of the busy time; raise the rate, as "
                "an idle server says nothing about its memory"
            )
    return failures


_ROWS = {
    "token_states": ("token states", "{:.1%}"),
    "reservation": ("reservation", "{:.1%}"),
    "internal": ("internal fragmentation", "{:.1%}"),
    "external": ("external fragmentation and others", "{:.1%}"),
    "token_states_of_allocated": ("token states, of what was handed out", "{:.1%}"),
    "mean_running": ("mean running requests", "{:.2f}"),
    "over": ("times those of the case compared to", "{:.2f}"),
    "queueing_share": ("time with requests queueing", "{:.1%}"),
}


def tables(results: Results) -> list[Table]:
    """The shares, a column for each case, and what is published beside them."""
    return [columns(results, _ROWS, "KV memory of a saturated server"), published.table(results)]


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """The shares as bars."""
    table = files.read_parquet(run_path / "shares.parquet")
    names = table["case"].unique(maintain_order=True).to_list()
    kinds = {"tokens": "token_states", "reservation": "reservation", "internal": "internal", "external": "external"}
    shares = {
        name: {kind: float(table.filter(pl.col("case") == name)[metric].mean()) for kind, metric in kinds.items()}  # pyright: ignore
        for name in names
    }
    figure, axes = plots.canvas(height=0.5 * len(shares) + 1.0)
    plots.stacked_shares(axes, shares)
    return [plots.Figure("Where the memory goes", "Averages while requests queue, over all seeds.", figure)]


def _seeds(config: Config) -> range:
    return range(config.seed, config.seed + config.num_seeds)


def _part(case: str, seed: int) -> str:
    return f"{case}-{seed}"
