"""One simulated server under one load: what its users feel, and where its memory goes. The one to sweep.

Points of a sweep are simulated by as few compiled programs as possible: policies, sizes of the memory, watermarks,
rates and seeds are values of one. Each point is what it would be alone, bit for bit. All times are modelled.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import files, jax_setup, metrics, plots, slo
from experiments.progress import Progress
from experiments.results import Results, Table, columns
from experiments.run_directory import RunDirectory
from experiments.simulation import Server, Simulated, make_simulator, require_served, to_requests, to_tables
from experiments.workloads.config import WorkloadConfig, load_workload, with_sha256
from experiments.workloads.streams import stream
from experiments.workloads.transcripts import SystemPrompts, transcripts, with_system_prompts
from experiments.workloads.workload import Workload
from paxkv.config import MemoryConfig
from paxkv.simulate_points import Point, simulate_points
from paxkv.sizes import require_int

DESCRIPTION = "One simulated server under one load: latency, goodput, memory, preemptions; made to be swept (modelled)."
GLOSSARY = {
    **metrics.GLOSSARY,
    **slo.PRESET_GLOSSARY,
    "stored_share": "share of the tokens of admitted requests that memory had stored already: hits, over hits and what "
    "was read",
}
MODELLED = metrics.MODELLED | slo.PRESET_GLOSSARY.keys()


@dataclasses.dataclass(frozen=True)
class Config:
    """A server, a memory and a load.

    Attributes:
      experiment: `simulated_server`.
      seed: of arrivals, lengths and predictions.
      server: whose memory it is.
      memory: how it is handed out.
      workload: what is asked of the server.
      system_prompts: texts with which prompts begin, on top of their lengths; null for none. For a cache to share.
      prediction_error: how far predicted output lengths are off: the standard deviation of the binary logarithm of
        predicted over real length, so that 1 is a factor of two; 0 for a predictor that knows. For policies that look.
      slos: MLPerf's bounds under which requests are served well enough, by their names in `experiments.slo`.
      cpu_devices: that a CPU is made to look like; the points of a sweep are dealt to them. Changes nothing but how
        long a sweep takes.
    """

    experiment: Literal["simulated_server"] = "simulated_server"
    seed: int = 0
    server: Server = dataclasses.field(default_factory=Server)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    system_prompts: SystemPrompts | None = None
    prediction_error: float = 0.0
    slos: tuple[str, ...] = ("llama2_70b", "llama2_70b_interactive")
    cpu_devices: int = 1


def resolve(config: Config) -> Config:
    """Refuses what cannot run, and names a trace by its hash.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    jax_setup.use_cpu_devices(require_int("cpu_devices", config.cpu_devices))
    policy = config.server.policy
    if policy.order in ("priority", "deadline") or policy.victim == "priority":
        raise ValueError(
            "server.policy: expected no order or victim by priority or deadline, as the requests of a workload are "
            f"alike in both, got order {policy.order} and victim {policy.victim}"
        )
    if policy.max_adapters is not None:
        raise ValueError(f"server.policy.max_adapters: expected null, as no request has one, got {policy.max_adapters}")
    if config.memory.forks or not config.memory.free_windows:
        raise ValueError(
            "memory.forks, memory.free_windows: expected false and true, as no request has several sequences and no "
            f"layer a window, got {config.memory.forks} and {config.memory.free_windows}; they would change nothing"
        )
    if config.system_prompts is not None:
        config.system_prompts.check()
    if config.memory.prefix_caching and config.workload.kind != "mooncake" and config.system_prompts is None:
        raise ValueError(
            "memory.prefix_caching: expected false where no prompts share a beginning, got true; set system_prompts, "
            "or take a trace that says what its prompts share (workload.kind: mooncake)"
        )
    if not 0 <= config.prediction_error < 8:
        raise ValueError(f"prediction_error: expected a number from 0 to below 8, got {config.prediction_error}")
    if config.prediction_error and policy.order != "shortest" and not policy.reserve_output:
        raise ValueError(
            "prediction_error: expected 0 with a policy that asks for no prediction, got "
            f"{config.prediction_error}; set server.policy.order: shortest, or reserve_output: true"
        )
    for name in config.slos:
        slo.preset(name)
    make_simulator(config.server, config.memory)
    config = dataclasses.replace(config, workload=with_sha256(config.workload))
    workload = _load(config.workload, config.system_prompts, config.server.max_model_len, config.seed)
    to_requests(workload, config.seed)
    return config


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Simulates the load.

    Args:
      config: what to simulate.
      run_dir: where `steps.parquet` and `requests.parquet` go.
      progress: shown while it works.
    """
    return next(run_together([config], [run_dir], progress))()


def run_together(
    configs: Sequence[Config], run_dirs: Sequence[RunDirectory], progress: Progress
) -> Iterator[Callable[[], dict[str, dict[str, Any]]]]:
    """The same for several points of a sweep: of each in order what gives its results, or raises what went wrong."""
    # Most points of a sweep are asked the same, and the tokens of whole requests take much memory.
    load, tokens_of = functools.cache(_load), functools.cache(_tokens_of)
    asked = [_ask(config, load, tokens_of) for config in configs]
    with progress.task("simulate", total=sum(each.workload.num_requests for each in asked)) as advance:
        simulated = simulate_points([each.point for each in asked], on_dispatch=advance)
        for config, each, run_dir, found in zip(configs, asked, run_dirs, simulated, strict=True):
            yield functools.partial(_keep, config, each, run_dir, found)


class _Asked(NamedTuple):
    workload: Workload
    point: Point


def _load(asked: WorkloadConfig, system: SystemPrompts | None, max_model_len: int, seed: int) -> Workload:
    workload = load_workload(asked, max_model_len, seed)
    return workload if system is None else with_system_prompts(workload, system, max_model_len, seed)


def _tokens_of(workload: Workload) -> jax.Array:
    return jnp.asarray(transcripts(workload))


def _ask(config: Config, load: Callable[..., Workload], tokens_of: Callable[[Workload], jax.Array]) -> _Asked:
    workload = load(config.workload, config.system_prompts, config.server.max_model_len, config.seed)
    predicted = predict(workload, config.prediction_error, config.seed) if config.prediction_error else None
    requests = to_requests(workload, config.seed, predicted_lens=predicted)
    simulator = make_simulator(config.server, config.memory)
    return _Asked(workload, Point(simulator, requests, tokens_of(workload) if simulator.memory.publishes else None))


def _keep(config: Config, asked: _Asked, run_dir: RunDirectory, simulated: Callable[[], Any]) -> dict[str, Any]:
    tables = to_tables(asked.point.simulator, asked.workload, *simulated())
    run_dir.add_manifest(workload=dataclasses.asdict(asked.workload.provenance))
    run_dir.write_parquet("steps.parquet", tables.steps)
    run_dir.write_parquet("requests.parquet", tables.requests)
    return {"server": measure(config, tables)}


def predict(workload: Workload, error: float, seed: int) -> np.ndarray:
    """What a predictor says of output lengths that is off by a log-normal factor: i32[requests], at least 1.

    Args:
      workload: whose outputs are predicted.
      error: standard deviation of the factor's binary logarithm.
      seed: of the experiment.
    """
    factors = np.exp2(stream(seed, "predictions").normal(0.0, error, workload.num_requests))
    return np.clip(np.round(workload.output_len * factors), 1, 2**24).astype(np.int32)


def measure(config: Config, simulated: Simulated) -> dict[str, Any]:
    """The metrics of one simulation.

    Raises:
      ValueError: nobody was served, which says nothing of a server.
    """
    require_served(int(simulated.requests["generated"].sum()))
    found: dict[str, Any] = {**metrics.request_metrics(simulated.requests)}
    found |= metrics.memory_metrics(simulated.steps, config.server.budget_tokens())
    read = int(simulated.steps["prefill_tokens"].sum())
    found["stored_share"] = found["hit_tokens"] / max(found["hit_tokens"] + read, 1)
    return found | slo.preset_metrics(simulated.requests, config.slos)


_ROWS = {
    "served": ("requests served", "{:,}"),
    "refused_or_empty": ("refused, or asked for nothing", "{:,}"),
    "requests_per_s": ("requests per s (modelled)", "{:,.2f}"),
    "output_tokens_per_s": ("output tokens per s (modelled)", "{:,.0f}"),
    "normalized_latency_ms": ("normalised latency, ms a token (modelled)", "{:,.1f}"),
    **metrics.LATENCY_ROWS,
    "mean_running": ("mean running requests", "{:.1f}"),
    "peak_running": ("most running requests", "{:,}"),
    "queueing_share": ("time with requests queueing", "{:.1%}"),
    "pool_utilization": ("memory that held tokens", "{:.1%}"),
    "reservation_waste": ("reserved for later", "{:.1%}"),
    "internal_waste": ("never filled by its owner", "{:.1%}"),
    "external_waste": ("nobody's", "{:.1%}"),
    "stored_share": ("tokens found stored by admitted requests", "{:.1%}"),
    "preemptions": ("preemptions", "{:,}"),
    "recompute_tokens": ("tokens to be computed again", "{:,}"),
    "steps": ("steps", "{:,}"),
}


def tables(results: Results) -> list[Table]:
    """Everything in one column."""
    return [columns(results, _ROWS | slo.preset_rows(results), "A simulated server")]


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """The server over time, and how latency is distributed."""
    steps = files.read_parquet(run_path / "steps.parquet")
    requests = files.read_parquet(run_path / "requests.parquet")
    seconds = (steps["clock_ms"] / 1000).to_list()
    figure, (top, bottom) = plots.canvas(2, 1, sharex=True)
    plots.over_time(top, {name: (seconds, steps[name].to_list()) for name in ("running", "waiting")}, "")
    top.set_ylabel("requests")
    capacity = steps["tokens"] + steps["reserved"] + steps["internal"] + steps["external"]
    held = {"hold tokens": steps["tokens"] / capacity, "handed out": steps["allocated"] / capacity}
    plots.over_time(bottom, {name: (seconds, share.to_list()) for name, share in held.items()}, "modelled time in s")
    bottom.set_ylabel("share of the memory")
    times = metrics.latencies(requests.filter(requests["generated"] > 1))
    latency, (left, right) = plots.canvas(columns=2, height=2.9)
    plots.cdf(left, {"first token": times.ttft_ms.tolist(), "last token": times.latency_ms.tolist()}, "ms", log=True)
    plots.cdf(right, {"between tokens": times.tpot_ms.tolist()}, "ms")
    return [
        plots.Figure("Over time", "Requests that run and that wait, and the memory they have.", figure),
        plots.Figure("Latency", "Modelled. From arrival to the first and the last token, and between tokens.", latency),
    ]
