"""How much load a server bears under each way to hand out its memory: latency against request rate, up to the knee.

The question of PagedAttention's figure 12. A memory sustains the largest rate at which normalised latency, the mean
over requests of latency over output length, stays within a limit; it is interpolated between the rates that are
simulated, on a logarithmic axis of latency, since latency rises by orders of magnitude there.

Latency counts from arrival, so it includes the wait. A trace is finite, and so is the wait in it: beyond the knee a
queue grows for as long as requests keep coming, and latency there says how long the trace was. An hour of requests puts
the crossing where two do; a minute of them puts it too high. All of it rests on a modelled clock: it compares memories,
and forecasts no server.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import polars as pl

from experiments import jax_setup, metrics, published, rate_figures
from experiments.bootstrap import mean_interval
from experiments.progress import Progress
from experiments.published import Published
from experiments.results import Results, Table, columns
from experiments.run_directory import RunDirectory
from experiments.simulation import Server, Simulated, make_simulator, to_requests, to_tables
from experiments.workloads.config import WorkloadConfig, load_workload, with_sha256
from experiments.workloads.workload import Workload
from paxkv.config import MemoryConfig, MemoryKind
from paxkv.simulate import Simulator
from paxkv.simulate_points import Point, simulate_points
from paxkv.sizes import require_int

DESCRIPTION = "Normalised latency against request rate under each memory, and the rate that each sustains (modelled)."
_OVER, _LOW, _HIGH = "over_", "_low", "_high"
_AT_RATE = ("mean_running", "token_states", "token_states_of_allocated")
GLOSSARY = {
    "sustained_rate": "largest rate in requests/s at which normalised latency is within the limit, interpolated "
    "between simulated rates; mean over the seeds",
    "sustained_rate_low": "lower end of its 95 % bootstrap interval over the seeds",
    "sustained_rate_high": "upper end of that interval",
    **{f"{_OVER}{kind}": f"sustained rate over that of {kind}" for kind in get_args(MemoryKind)},
    "normalized_latency_s": "mean over requests of latency per output token, in s, the wait included",
    "mean_running": "requests that held memory, average over the busy time in which requests arrive",
    "token_states": "share of the KV memory that held tokens, average over that time; while nobody waits, no more than "
    "what was asked for",
    "token_states_of_allocated": "share of what was handed out that held tokens",
    "queueing_share": "share of that time in which requests were queueing",
    "preemptions": "how often a running request lost its memory, per request",
}
MODELLED = frozenset(GLOSSARY)


@dataclasses.dataclass(frozen=True)
class Case:
    """One memory, and the load that is put on it.

    Attributes:
      memory: how memory is handed out.
      rates: requests per second, rising; from within the limit to beyond it.
    """

    memory: MemoryConfig
    rates: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Config:
    """Several memories of one server, each under rising load.

    Attributes:
      experiment: `capacity_vs_rate`.
      seed: the first one.
      num_seeds: of arrivals and lengths; each case is simulated with every one.
      server: whose memory it is.
      workload: what is asked of it, but for its rate.
      limit_s: most normalised latency of a server that copes, in s.
      common_rate: in requests/s, one of every case's; the cases' running requests and memory are compared at it.
      cases: by name.
      cpu_devices: that a CPU is made to look like; the rates of a case are dealt to them. Changes nothing but how long
        that takes.
      rising: names of cases that must sustain more the later they stand; each is compared with those before it.
      published: what sources give.
    """

    experiment: Literal["capacity_vs_rate"] = "capacity_vs_rate"
    seed: int = 0
    num_seeds: int = 1
    server: Server = dataclasses.field(default_factory=Server)
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    limit_s: float = 0.5
    common_rate: float = 1.0
    cases: dict[str, Case] = dataclasses.field(default_factory=dict)
    cpu_devices: int = 1
    rising: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()


def resolve(config: Config) -> Config:
    """Refuses what cannot run, and names a trace by its hash.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    jax_setup.use_cpu_devices(require_int("cpu_devices", config.cpu_devices))
    require_int("num_seeds", config.num_seeds)
    if not 0 < config.limit_s < math.inf:
        raise ValueError(f"limit_s: expected a finite number above 0, got {config.limit_s}")
    if config.workload.rate is not None:
        raise ValueError(f"workload.rate: expected null, as each case has its rates, got {config.workload.rate}")
    if not config.cases:
        raise ValueError("cases: expected at least one, got none")
    for name, case in config.cases.items():
        if len(case.rates) < 2 or list(case.rates) != sorted(set(case.rates)) or case.rates[0] <= 0:
            raise ValueError(f"cases.{name}.rates: expected two or more above 0, rising, got {list(case.rates)}")
        if config.common_rate not in case.rates:
            raise ValueError(
                f"common_rate: expected one of {list(case.rates)}, those of {name}, got {config.common_rate}"
            )
        make_simulator(config.server, case.memory)
    if unknown := [name for name in config.rising if name not in config.cases]:
        raise ValueError(f"rising: expected cases out of {', '.join(config.cases)}, got {', '.join(unknown)}")
    at_some_rate = dataclasses.replace(config.workload, rate=config.common_rate)
    return dataclasses.replace(config, workload=dataclasses.replace(with_sha256(at_some_rate), rate=None))


def parts(config: Config) -> list[str]:
    """Every case under every seed, with all its rates, can be resumed by itself."""
    return [_part(name, seed) for name in config.cases for seed in _seeds(config)]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Simulates every case under every rate and seed; those of one case share one compiled program.

    Args:
      config: what to simulate.
      run_dir: where the requests of every case and seed go, and `curves.parquet`, one row a case, seed and rate.
      progress: shown while it works.
    """
    rows = []
    for name, case in config.cases.items():
        simulator = make_simulator(config.server, case.memory)
        for seed in _seeds(config):
            part = run_dir.finished_part(_part(name, seed))
            if part is None:
                curve, requests = _simulate_rates(config, simulator, case.rates, seed, progress, _part(name, seed))
                with run_dir.part(_part(name, seed)) as part:
                    part.write_parquet("curve.parquet", curve)
                    part.write_parquet("requests.parquet", requests)
                part = run_dir.require_part(_part(name, seed))
            labels = {"case": pl.lit(name), "seed": pl.lit(seed), "limit_s": pl.lit(config.limit_s)}
            rows.append(part.read_parquet("curve.parquet").with_columns(**labels))
    curves = pl.concat(rows)
    run_dir.write_parquet(rate_figures.CURVES, curves)
    return published.compared(_results(config, curves), config.published)


def _simulate_rates(
    config: Config, simulator: Simulator, rates: Sequence[float], seed: int, progress: Progress, name: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The curve of one seed, one row a rate, and all requests. Only arrivals differ from rate to rate."""
    budget_tokens = config.server.budget_tokens()
    loads = [dataclasses.replace(config.workload, rate=rate) for rate in rates]
    workloads = [load_workload(load, config.server.max_model_len, seed) for load in loads]
    points, requests = [], []
    with progress.task(name, total=sum(workload.num_requests for workload in workloads)) as advance:
        asked = [Point(simulator, to_requests(workload, seed)) for workload in workloads]
        for rate, workload, found in zip(rates, workloads, simulate_points(asked, on_dispatch=advance), strict=True):
            simulated = to_tables(simulator, workload, *found())
            points.append({"rate": rate, **measure(simulated, workload, budget_tokens)})
            requests.append(simulated.requests.with_columns(rate=pl.lit(rate)))
    return pl.DataFrame(points), pl.concat(requests)


def measure(simulated: Simulated, workload: Workload, budget_tokens: float) -> dict[str, float]:
    """Latency of all requests, and memory while they arrive: what is left of a trace afterwards is no load.

    Raises:
      ValueError: no request was served, or a step outlasted all arrivals.
    """
    latency_ms = metrics.request_metrics(simulated.requests).get("normalized_latency_ms")
    busy = simulated.steps.filter((pl.col("new_tokens") > 0) & (pl.col("clock_ms") <= workload.arrival_ms[-1]))
    if latency_ms is None or busy.is_empty():
        raise ValueError("workload: expected requests that are served while others arrive, got none; lower the rate")
    weights = busy["duration_ms"].to_numpy()
    held = {name: float(np.average(busy[name], weights=weights)) for name in ("running", "tokens", "allocated")}
    return {
        "normalized_latency_s": latency_ms / 1000,
        "mean_running": held["running"],
        "token_states": held["tokens"] / budget_tokens,
        "token_states_of_allocated": held["tokens"] / held["allocated"],
        "queueing_share": float(np.average(busy["waiting"] > 0, weights=weights)),
        "preemptions": float(simulated.requests["preemptions"].sum()) / workload.num_requests,
    }


def sustained_rate(rates: Sequence[float], latencies: Sequence[float], limit: float) -> float | None:
    """The largest rate within the limit, latency being taken as exponential between two rates.

    Args:
      rates: rising.
      latencies: at each, above 0.
      limit: most latency.

    Returns:
      The rate; None if the curve never leaves the limit, or is never within it.
    """
    within = [latency <= limit for latency in latencies]
    if within[-1] or not any(within):
        return None
    last = max(index for index, is_within in enumerate(within) if is_within)
    low, high = (math.log(latency) for latency in latencies[last : last + 2])
    share = (math.log(limit) - low) / (high - low)
    return rates[last] + share * (rates[last + 1] - rates[last])


def _results(config: Config, curves: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Means over the seeds: of each case what it sustains, and of each case and rate a point of its curve."""
    found: dict[str, dict[str, Any]] = {name: {} for name in config.cases}
    for name, case in config.cases.items():
        own = curves.filter(pl.col("case") == name)
        by_seed = [of_seed["normalized_latency_s"].to_list() for of_seed in own.partition_by("seed")]
        sustained = [sustained_rate(case.rates, latencies, config.limit_s) for latencies in by_seed]
        known = [rate for rate in sustained if rate is not None]
        found[name]["sustained_rate"] = statistics.fmean(known) if len(known) == len(sustained) else None
        if len(known) == len(sustained) > 1:
            interval = mean_interval(known, seed=config.seed)
            found[name] |= {f"sustained_rate{_LOW}": interval.low, f"sustained_rate{_HIGH}": interval.high}
        for rate in case.rates:
            point = own.filter(pl.col("rate") == rate)
            means = {metric: statistics.fmean(point[metric]) for metric in _POINT}
            found[f"{name}/{rate:g}"] = means
            if rate == config.common_rate:
                found[name] |= {metric: means[metric] for metric in _AT_RATE}
    for place, name in enumerate(config.rising):
        for before in config.rising[:place]:
            rates = [found[either]["sustained_rate"] for either in (name, before)]
            found[name][_OVER + before] = None if None in rates else rates[0] / rates[1]
    return found


_POINT = ("normalized_latency_s", *_AT_RATE, "queueing_share", "preemptions")


def failed_checks(results: Results) -> list[str]:
    """Curves that do not cross the limit, memories in another order than the published one, and values too far off."""
    failures = published.failed_checks(results)
    for name, values in results.items():
        if "sustained_rate" in values and values["sustained_rate"] is None:
            failures.append(f"{name}: no sustained rate, as some curve does not cross the limit; give other rates")
        for metric, ratio in values.items():
            other = metric.removeprefix(_OVER)
            if other in results and isinstance(ratio, float) and ratio <= 1:
                failures.append(f"{name}: sustains {ratio:.3g} times the rate of {other}, and should sustain more")
    return failures


def tables(results: Results) -> list[Table]:
    """What each memory sustains, its curve, and what is published beside both."""
    cases = {name: values for name, values in results.items() if "sustained_rate" in values}
    points = {name: values for name, values in results.items() if name not in cases}
    over = dict.fromkeys(m for values in cases.values() for m in values if m.removeprefix(_OVER) in cases)
    rows = {
        "sustained_rate": ("sustained requests/s", "{:.2f}"),
        f"sustained_rate{_LOW}": ("lower end, 95 % bootstrap", "{:.2f}"),
        f"sustained_rate{_HIGH}": ("upper end", "{:.2f}"),
        **{metric: (f"over {metric.removeprefix(_OVER)}", "{:.2f}") for metric in over},
        "mean_running": ("running requests at the common rate", "{:.2f}"),
        "token_states": ("token states at that rate", "{:.1%}"),
        "token_states_of_allocated": ("token states, of what was handed out", "{:.1%}"),
    }
    shown = [
        [name, f"{v['normalized_latency_s']:.3f}", f"{v['mean_running']:.2f}", f"{v['token_states']:.1%}",
         f"{v['queueing_share']:.1%}", f"{v['preemptions']:.2f}"]
        for name, v in points.items()
    ]  # fmt: skip
    headings = ["memory/rate", "s a token", "running", "token states", "queueing", "preemptions a request"]
    return [
        columns(cases, rows, "Load that a server sustains (modelled)"),
        Table(headings, shown, "Latency and memory against requests/s (modelled)"),
        published.table(results),
    ]


figures = rate_figures.figures


def _seeds(config: Config) -> range:
    return range(config.seed, config.seed + config.num_seeds)


def _part(case: str, seed: int) -> str:
    return f"{case}-{seed}"
