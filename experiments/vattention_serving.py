"""How long the steps of a vAttention server wait for its driver, with and without mapping in the background.

The driver calls are those of `paxkv.contiguous.VAttention`; a step waits for the ones that are made before it computes.
A step that begins to answer a request maps the prompt's pages while it waits, under any memory: so the first pages of
every row are warm-up, which lasts until as many requests as there are rows have got a token. After that, and in every
step that only decodes, what is waited for is what nobody mapped ahead.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import polars as pl
from jaxtyping import Float64, Int64

from experiments import files, metrics, plots, published
from experiments.progress import Progress
from experiments.published import Published
from experiments.results import Results, Table, label
from experiments.run_directory import RunDirectory
from experiments.simulation import Server, make_simulator, require_served, simulate_load, simulated_part
from experiments.vattention_sizes import require_call_us
from experiments.workloads.config import WorkloadConfig, with_sha256
from paxkv.config import MemoryConfig
from paxkv.contiguous import VAttention
from paxkv.simulate import Simulator

DESCRIPTION = "vAttention: what steps wait for mapping with and without a background, and how fast memory has to come."
GLOSSARY = {
    "group_map_ms": "time to map one page group: a driver call for each of its pages, one after another",
    "spikes": "steps after warm-up that waited for the driver; warm-up lasts until as many requests as there are rows "
    "have got a token",
    "decode_spikes": "the same among all steps that only decode, warm-up included",
    "longest_wait_ms": "longest wait of a step that only decodes",
    "most_groups": "most page groups that such a step waited for",
    "sync_wait_ms": "all that steps waited for the driver, prompts included",
    "sync_calls": "driver calls that a step waited for",
    "background_calls": "driver calls that map beside the computation",
    "unmap_calls": "driver calls that unmap",
    "demand_mb_per_s": "bytes that sequences grew by on each device, in MB (1e6), in that second of steps that only "
    "decode in which it was most",
    "mapped_mb_per_s": "bytes that were mapped on each device, likewise: growth comes in whole page groups",
    "supply_gb_per_s": "bytes that one device can map in a second, in GB (1e9)",
    "makespan_s": "from the first arrival to the last token",
    "output_tokens_per_s": "output tokens of all requests over that time",
}
MODELLED = frozenset(
    {"group_map_ms", "longest_wait_ms", "sync_wait_ms", "demand_mb_per_s", "mapped_mb_per_s", "supply_gb_per_s"}
    | {"makespan_s", "output_tokens_per_s"}
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Every server with every memory.

    Attributes:
      experiment: `vattention_serving`.
      seed: of arrivals.
      workload: what is asked of all of them.
      servers: by name.
      memories: by name, all of kind `vattention`.
      map_call_us: microseconds of the driver to map a page and make it accessible, by page; takes the place of what a
        server's cost says.
      published: what sources give, of `<server>/<memory>`.
    """

    experiment: Literal["vattention_serving"] = "vattention_serving"
    seed: int = 0
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    servers: dict[str, Server] = dataclasses.field(default_factory=dict)
    memories: dict[str, MemoryConfig] = dataclasses.field(default_factory=dict)
    map_call_us: dict[str, float] = dataclasses.field(default_factory=dict)
    published: tuple[Published, ...] = ()


def resolve(config: Config) -> Config:
    """Refuses what cannot run, and names a trace by its hash.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    for name in ("servers", "memories"):
        if not getattr(config, name):
            raise ValueError(f"{name}: expected at least one, got none")
    for name, memory in config.memories.items():
        if memory.kind != "vattention":
            raise ValueError(f"memories.{name}.kind: expected vattention, got {memory.kind}")
        if memory.page not in config.map_call_us:
            known = ", ".join(config.map_call_us) or "none"
            raise ValueError(f"map_call_us: expected every page of the memories, got {known}, without {memory.page}")
    require_call_us(config.map_call_us)
    for server, memory in _cases(config):
        _simulator(config, server, memory)
    return dataclasses.replace(config, workload=with_sha256(config.workload))


def parts(config: Config) -> list[str]:
    """Every server with every memory can be resumed by itself."""
    return ["-".join(case) for case in _cases(config)]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Simulates the workload on every server with every memory.

    Args:
      config: what to simulate.
      run_dir: where steps and requests of every simulation go, and `waits.parquet`, a row for each step that waited.
      progress: shown while it works.
    """
    found: dict[str, dict[str, Any]] = {}
    waits = []
    for server, memory in _cases(config):
        simulator, name = _simulator(config, server, memory), f"{server}-{memory}"
        asked = (config.servers[server], simulator, config.workload, config.seed, progress, name)
        steps, requests = simulated_part(run_dir, name, functools.partial(simulate_load, *asked))
        token_bytes = config.servers[server].shape().token_bytes
        found[f"{server}/{memory}"] = measure(simulator, steps, requests, token_bytes)
        waited = steps.filter(pl.col("sync_map_calls") > 0)
        waits.append(
            waited.select(
                pl.lit(server).alias("server"),
                pl.lit(memory).alias("memory"),
                "clock_ms",
                pl.col("sync_mapping_ms").alias("wait_ms"),
                (pl.col("prefill_tokens") == 0).alias("decodes"),
            )
        )
    run_dir.write_parquet("waits.parquet", pl.concat(waits))
    return published.compared(found, config.published)


def measure(simulator: Simulator, steps: pl.DataFrame, requests: pl.DataFrame, token_bytes: int) -> dict[str, Any]:
    """The metrics of one simulation.

    Args:
      simulator: the server, with a memory of vAttention.
      steps: what happened in each step.
      requests: what became of each request.
      token_bytes: of one token's keys and values on one device.

    Raises:
      ValueError: no request got a token.
    """
    memory, call_ns = _pages(simulator), simulator.cost.map_call_ns
    first_tokens = requests["first_token_ms"].drop_nulls().sort()
    require_served(len(first_tokens))
    warm_ms = first_tokens[min(memory.rows, len(first_tokens)) - 1]
    waited = pl.col("sync_map_calls") > 0
    decode = steps.filter((pl.col("new_tokens") > 0) & (pl.col("prefill_tokens") == 0))
    duration_ms = decode["duration_ms"].to_numpy()
    mapped = (decode["map_calls"].cast(pl.Int64) * memory.page_bytes).to_numpy()
    grown = (decode["new_tokens"].cast(pl.Int64) * token_bytes).to_numpy()
    most_calls = int(decode["sync_map_calls"].max() or 0)  # pyright: ignore[reportArgumentType]
    served = metrics.request_metrics(requests)
    return {
        "group_map_ms": memory.buffers * call_ns / 1e6,
        "spikes": len(steps.filter(waited & (pl.col("clock_ms") >= warm_ms))),
        "decode_spikes": len(decode.filter(waited)),
        "longest_wait_ms": most_calls * call_ns / 1e6,
        "most_groups": most_calls // memory.buffers,
        "sync_wait_ms": int(steps["sync_map_calls"].sum()) * call_ns / 1e6,
        "sync_calls": int(steps["sync_map_calls"].sum()),
        "background_calls": int(steps["background_map_calls"].sum()),
        "unmap_calls": int(steps["unmap_calls"].sum()),
        "demand_mb_per_s": peak_per_s(duration_ms, grown) / 1e6,
        "mapped_mb_per_s": peak_per_s(duration_ms, mapped) / 1e6,
        "supply_gb_per_s": memory.page_bytes / call_ns,
        "makespan_s": served["makespan_s"],
        "output_tokens_per_s": served["output_tokens_per_s"],
    }


def peak_per_s(duration_ms: Float64[np.ndarray, " steps"], amount: Int64[np.ndarray, " steps"]) -> float:
    """The most of something in any second of steps laid end to end, each of which spreads its amount evenly."""
    if not len(amount):
        return 0.0
    ends = np.concatenate([[0.0], np.cumsum(duration_ms)])
    so_far = np.concatenate([[0.0], np.cumsum(amount)])
    # What a second holds is linear between the moments in which it begins or ends with a step.
    begins = np.concatenate([ends, np.maximum(ends - 1000, 0)])
    return float(np.max(np.interp(begins + 1000, ends, so_far) - np.interp(begins, ends, so_far)))


failed_checks = published.failed_checks

_COLUMNS = {
    "What steps wait for": (
        *("group_map_ms", "spikes", "decode_spikes", "longest_wait_ms", "most_groups", "sync_wait_ms", "makespan_s"),
    ),
    "What is mapped": (
        *("sync_calls", "background_calls", "unmap_calls", "demand_mb_per_s", "mapped_mb_per_s", "supply_gb_per_s"),
    ),
}


def tables(results: Results) -> list[Table]:
    """Waits, calls and bytes, a line for each server and memory; what is published beside them."""
    found = []
    for title, columns in _COLUMNS.items():
        rows = [[name, *(_cell(values[metric]) for metric in columns)] for name, values in results.items()]
        found.append(Table(["", *(label(metric, MODELLED) for metric in columns)], rows, title))
    return [*found, published.table(results)]


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """Each wait as a point, a panel for each server."""
    waits = files.read_parquet(run_path / "waits.parquet")
    servers = waits["server"].unique(maintain_order=True).to_list()
    if not servers:
        return []
    styles = plots.memory_styles(waits["memory"].unique(maintain_order=True))
    figure, grid = plots.canvas(len(servers), height=2.2, squeeze=False)
    for axes, server in zip(grid[:, 0], servers, strict=True):
        for memory, look in styles.items():
            own = waits.filter(pl.col("server") == server, pl.col("memory") == memory, pl.col("decodes"))
            axes.scatter(own["clock_ms"] / 1000, own["wait_ms"], s=9, color=look["color"], label=look["label"])
        axes.set_title(server)
        axes.set_ylabel("wait, ms")
        axes.set_ylim(bottom=0)
    grid[-1, 0].set_xlabel("modelled time, s")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return [plots.Figure("Waits", "Steps that only decode, and wait for pages that nobody mapped ahead.", figure)]


def _cases(config: Config) -> Iterator[tuple[str, str]]:
    return ((server, memory) for server in config.servers for memory in config.memories)


def _simulator(config: Config, server: str, memory: str) -> Simulator:
    """With the cost of mapping a page of the memory's size."""
    own, pages = config.servers[server], config.memories[memory]
    us = config.map_call_us[pages.page]
    if own.cost.kind == "affine":
        cost = dataclasses.replace(own.cost, map_call_ns=round(1000 * us))
    else:
        cost = dataclasses.replace(
            own.cost, efficiencies=dataclasses.replace(own.cost.efficiencies, map_call_us=float(us))
        )
    return make_simulator(dataclasses.replace(own, cost=cost), pages)


def _pages(simulator: Simulator) -> VAttention:
    memory = simulator.memory
    assert isinstance(memory, VAttention)  # `resolve` has seen to it
    return memory


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
