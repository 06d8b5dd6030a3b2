"""Prompts read on one server and answered on another, against one server of as many devices that does both.

Two simulations in a row. The first server gives every request its first token; then the keys and values of its prompt
move over the link between the two, one request after another; when they are there, the request arrives at the second
server, which computes none of its prompt. While a prompt moves, nobody's memory counts it: that takes a millisecond.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl
from jaxtyping import Float64, Int64

from experiments import files, metrics, plots, slo
from experiments.progress import Progress
from experiments.results import Results, Table, columns
from experiments.run_directory import RunDirectory
from experiments.simulation import (
    Kept,
    Server,
    Simulated,
    make_simulator,
    simulate_workload,
    simulated_part,
    to_requests,
)
from experiments.workloads.config import WorkloadConfig, load_workload, with_sha256
from experiments.workloads.workload import Workload
from pallas_kernels.targets import TARGETS
from paxkv.config import MemoryConfig

DESCRIPTION = "Prompts and answers on separate servers against one server of as many devices: TTFT, TPOT, goodput."
GLOSSARY = {
    **metrics.GLOSSARY,
    **slo.PRESET_GLOSSARY,
    "devices": "of all servers of the arrangement",
    "unfinished": "requests that did not get all the tokens that they asked for",
    "moved_blocks": "blocks of prompts that went over the link",
    "moved_gb": "their bytes, of all devices together, in GB (1e9)",
    "link_ms_mean": "from a request's first token to its arrival at the server that answers it",
    "link_busy_share": "share of the time from first arrival to last token in which something moved",
    "prompt_tokens_again": "tokens of prompts that the answering server computed, as a preemption had thrown them away",
}
MODELLED = metrics.MODELLED | slo.PRESET_GLOSSARY.keys() | {"link_ms_mean", "link_busy_share"}


@dataclasses.dataclass(frozen=True)
class Split:
    """Two servers, whose costs must be rooflines: the link between them is that of their hardware.

    Attributes:
      prefill: reads the prompts.
      decode: answers them.
    """

    prefill: Server = dataclasses.field(default_factory=Server)
    decode: Server = dataclasses.field(default_factory=Server)

    def link(self) -> "Link":
        """Every device of the smaller server sends or receives its share at once; the slower hardware decides."""
        costs = [self.prefill.cost, self.decode.cost]
        rates = [TARGETS[cost.hardware].link_bytes_per_s * cost.efficiencies.link_bandwidth for cost in costs]
        devices = min(self.prefill.tensor_parallel, self.decode.tensor_parallel)
        return Link(min(rates) * devices, max(cost.efficiencies.link_latency_us for cost in costs))


class Link(NamedTuple):
    """Between two servers."""

    bytes_per_s: float
    latency_us: float  # of a transfer, however small


@dataclasses.dataclass(frozen=True)
class Config:
    """The same requests served in several arrangements.

    Attributes:
      experiment: `disaggregation`.
      seed: of arrivals.
      workload: what is asked.
      memory: how memory is handed out, everywhere; paged.
      colocated: servers that do both, by name.
      split: pairs of servers, by name.
      slos: MLPerf's bounds under which requests are served well enough, by their names in `experiments.slo`.
    """

    experiment: Literal["disaggregation"] = "disaggregation"
    seed: int = 0
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    colocated: dict[str, Server] = dataclasses.field(default_factory=dict)
    split: dict[str, Split] = dataclasses.field(default_factory=dict)
    slos: tuple[str, ...] = ("llama2_70b", "llama2_70b_interactive")


def resolve(config: Config) -> Config:
    """Refuses what cannot run, and names a trace by its hash.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    if not (config.colocated or config.split):
        raise ValueError("colocated, split: expected at least one arrangement, got none")
    if both := sorted(config.colocated.keys() & config.split.keys()):
        raise ValueError(f"split: expected other names than those of colocated, got {', '.join(both)}")
    if config.memory.kind != "paged" or config.memory.prefix_caching:
        raise ValueError("memory: expected a paged one without a prefix cache, as whole blocks of prompts move")
    for name in config.slos:
        slo.preset(name)
    for name, pair in config.split.items():
        if any(server.cost.kind != "roofline" for server in (pair.prefill, pair.decode)):
            raise ValueError(f"split.{name}: expected costs of kind 'roofline', whose hardware has a link")
        if pair.prefill.model != pair.decode.model or pair.prefill.element_bytes != pair.decode.element_bytes:
            raise ValueError(f"split.{name}.decode: expected the keys and values of prefill's {pair.prefill.model}")
    servers = list(_servers(config))
    for _, server in servers:
        make_simulator(server, config.memory)
    if len(longest := {server.max_model_len for _, server in servers}) > 1:
        raise ValueError(f"max_model_len: expected the same of all servers, got {sorted(longest)}")
    return dataclasses.replace(config, workload=with_sha256(config.workload))


def parts(config: Config) -> list[str]:
    """Every simulation can be resumed by itself."""
    return [name for name, _ in _servers(config)]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Serves the workload in every arrangement.

    Args:
      config: what to simulate.
      run_dir: where steps and requests of every simulation go, and `requests.parquet`, a row for each arrangement and
        request.
      progress: shown while it works.
    """
    longest = next(_servers(config))[1].max_model_len
    workload = load_workload(config.workload, longest, config.seed)
    run_dir.add_manifest(workload=dataclasses.asdict(workload.provenance))

    def serve(name: str, server: Server, asked: Workload, **labels: Any) -> Kept:
        def simulate() -> Simulated:
            simulator = make_simulator(server, config.memory)
            with progress.task(name, total=asked.num_requests) as advance:
                return simulate_workload(simulator, asked, to_requests(asked, config.seed, **labels), advance)

        return simulated_part(run_dir, name, simulate)

    results: dict[str, dict[str, Any]] = {}
    served: dict[str, pl.DataFrame] = {}
    for name, server in config.colocated.items():
        _, served[name] = serve(name, server, workload)
        results[name] = {"devices": server.tensor_parallel} | _measure(config, served[name])
    for name, pair in config.split.items():
        _, read = serve(f"{name}-prefill", pair.prefill, first_tokens(workload))
        whole = dataclasses.replace(pair.prefill.shape(), tensor_parallel=1)
        moved = move(read, workload, config.memory.block_size, whole.block_bytes(config.memory.block_size), pair.link())
        answers, delivered = to_answer(workload, moved)
        steps, answered = serve(f"{name}-decode", pair.decode, answers, delivered=delivered)
        served[name] = joined(read, moved, answered, workload)
        makespan_ms = metrics.makespan_ms(served[name].filter(pl.col("generated") > 0))
        results[name] = {
            "devices": pair.prefill.tensor_parallel + pair.decode.tensor_parallel,
            **_measure(config, served[name]),
            "moved_blocks": int(moved["blocks"].sum()),
            "moved_gb": int(moved["bytes"].sum()) / 1e9,
            "link_ms_mean": float((moved["there_ms"] - moved["ready_ms"]).mean() or 0),  # pyright: ignore
            "link_busy_share": float(moved["moving_ms"].sum()) / makespan_ms,
            "prompt_tokens_again": int(steps["prefill_tokens"].sum()),
        }
    labelled = [table.select(pl.lit(name).alias("arrangement"), pl.all()) for name, table in served.items()]
    run_dir.write_parquet("requests.parquet", pl.concat(labelled))
    return results


def first_tokens(workload: Workload) -> Workload:
    """The same prompts, of which one token each is asked."""
    return dataclasses.replace(workload, output_len=np.minimum(workload.output_len, 1))


def move(read: pl.DataFrame, workload: Workload, block_size: int, block_bytes: int, link: Link) -> pl.DataFrame:
    """When the prompts of requests that want more than a token are where they will be answered.

    Args:
      read: the requests of the server that read them.
      workload: what was asked in all.
      block_size: tokens of a block.
      block_bytes: of all devices together.
      link: over which they move, one after another in order of their first tokens.

    Returns:
      One row a request that moves, in order of arrival: `request`, `ready_ms`, `there_ms`, `moving_ms`, `blocks` and
      `bytes`.
    """
    wanted = (read["generated"].to_numpy() == 1) & (workload.output_len > 1)
    ready = read["first_token_ms"].fill_null(0).to_numpy()
    requests = np.flatnonzero(wanted)
    requests = requests[np.argsort(ready[requests], kind="stable")]
    blocks = -(-workload.prompt_len[requests].astype(np.int64) // block_size)
    moving_ms = 1000 * (blocks * block_bytes / link.bytes_per_s) + link.latency_us / 1000
    return pl.DataFrame(
        {
            "request": requests,
            "ready_ms": ready[requests],
            "there_ms": one_after_another(ready[requests], moving_ms),
            "moving_ms": moving_ms,
            "blocks": blocks,
            "bytes": blocks * block_bytes,
        }
    )


def one_after_another(
    ready_ms: Float64[np.ndarray, " transfers"], moving_ms: Float64[np.ndarray, " transfers"]
) -> Float64[np.ndarray, " transfers"]:
    """When each transfer is done, in order of readiness: each waits for the one before it."""
    # The link is busy since some transfer became ready: the one with which the later ones are done last.
    moved = np.cumsum(moving_ms)
    return np.maximum.accumulate(ready_ms - (moved - moving_ms)) + moved


def to_answer(workload: Workload, moved: pl.DataFrame) -> tuple[Workload, Int64[np.ndarray, " requests"]]:
    """What the answering server is asked, and the tokens that come with each request: all but its first output."""
    requests = moved["request"].to_numpy()
    prompt = workload.prompt_len[requests]
    answers = dataclasses.replace(
        workload,
        arrival_ms=moved["there_ms"].to_numpy().copy(),
        prompt_len=prompt + 1,
        output_len=workload.output_len[requests] - 1,
        hash_ids=None,
        hash_block_size=0,
    )
    return answers, prompt.astype(np.int64)


def joined(read: pl.DataFrame, moved: pl.DataFrame, answered: pl.DataFrame, workload: Workload) -> pl.DataFrame:
    """One row a request, as if one server had served it."""
    ends = answered.select(
        pl.Series("request", moved["request"].cast(pl.Int32)),
        pl.col("generated").alias("answered"),
        pl.col("ended_ms").alias("answered_ms"),
        pl.col("reason").alias("answered_reason"),
        pl.col("preemptions").alias("answered_preemptions"),
    )
    return (
        read.with_columns(pl.Series("output_len", workload.output_len))
        .join(ends, on="request", how="left", maintain_order="left")
        .with_columns(
            generated=pl.col("generated") + pl.col("answered").fill_null(0),
            ended_ms=pl.coalesce("answered_ms", "ended_ms"),
            reason=pl.coalesce("answered_reason", "reason"),
            preemptions=pl.col("preemptions") + pl.col("answered_preemptions").fill_null(0),
        )
        .drop("answered", "answered_ms", "answered_reason", "answered_preemptions")
    )


_KEPT = (
    *("served", "unfinished", "preemptions", "makespan_s", "output_tokens_per_s", "normalized_latency_ms"),
    *metrics.LATENCY_ROWS,
)


def _measure(config: Config, requests: pl.DataFrame) -> dict[str, Any]:
    found = metrics.request_metrics(requests)
    found["unfinished"] = len(requests.filter(pl.col("generated") < pl.col("output_len")))
    kept = {name: found[name] for name in _KEPT if name in found}
    return kept | slo.preset_metrics(requests, config.slos)


def failed_checks(results: Results) -> list[str]:
    """Requests that did not get all their tokens, and prompts that were computed twice for no reason."""
    failures = []
    for name, values in results.items():
        if values["unfinished"]:
            failures.append(f"{name}: {values['unfinished']} requests did not get all their tokens")
        if values.get("prompt_tokens_again") and not values["preemptions"]:
            failures.append(f"{name}: {values['prompt_tokens_again']} tokens of prompts that had come were computed")
    return failures


_ROWS = {
    "devices": ("devices", "{:,}"),
    "served": ("requests served", "{:,}"),
    "preemptions": ("preemptions", "{:,}"),
    "output_tokens_per_s": ("output tokens per s (modelled)", "{:,.0f}"),
    **metrics.LATENCY_ROWS,
    "moved_blocks": ("blocks moved", "{:,}"),
    "moved_gb": ("GB moved", "{:,.1f}"),
    "link_ms_mean": ("ms on the link, mean (modelled)", "{:,.2f}"),
    "link_busy_share": ("time in which the link is busy (modelled)", "{:.1%}"),
}


def tables(results: Results) -> list[Table]:
    """A column for each arrangement."""
    return [columns(results, _ROWS | slo.preset_rows(results), "One server, or one for prompts and one for answers")]


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """How TTFT and TPOT are distributed."""
    table = files.read_parquet(run_path / "requests.parquet").filter(pl.col("generated") > 1)
    names = table["arrangement"].unique(maintain_order=True).to_list()
    times = {name: metrics.latencies(table.filter(pl.col("arrangement") == name)) for name in names}
    figure, (left, right) = plots.canvas(columns=2, height=2.9)
    plots.cdf(left, {name: of_one.ttft_ms.tolist() for name, of_one in times.items()}, "TTFT, ms", log=True)
    plots.cdf(right, {name: of_one.tpot_ms.tolist() for name, of_one in times.items()}, "TPOT, ms")
    return [plots.Figure("Time to the first token, and between tokens", "Modelled, share of the requests.", figure)]


def _servers(config: Config) -> Iterator[tuple[str, Server]]:
    """Every server by the name of its simulation."""
    yield from config.colocated.items()
    for name, pair in config.split.items():
        yield f"{name}-prefill", pair.prefill
        yield f"{name}-decode", pair.decode
