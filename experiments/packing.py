"""How many requests of a trace fit at once under each way to hand out memory, and what its blocks leave empty."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import matplotlib.ticker
import numpy as np
import polars as pl
import rich.console

from experiments import files, plots, published, results
from experiments.progress import Progress
from experiments.published import Published
from experiments.results import Results, Table
from experiments.run_directory import RunDirectory
from experiments.workloads import WorkloadConfig, load_workload, with_sha256
from paxkv.capacity import (
    KVShape,
    PageGroups,
    blocks_for,
    model_shape,
    packed_requests,
    parse_size,
    plan_blocks,
    tokens_in,
    waste_by_kind,
)
from paxkv.sizes import require_int

DESCRIPTION = "Static packing of public traces: requests that fit at once at their final length, waste by block size."
GLOSSARY: Mapping[str, str] = {
    "requests": "Requests that the memory holds at once, let in by the order of the trace up to the first that does "
    "not fit, each with all the tokens that it has at its end.",
    "token_percent": "Share of the memory that the tokens of these requests fill.",
    "internal_waste_percent": "Share of the slots handed out that stay empty, all requests of the trace at their end.",
}
_MAX_TOKENS = 2**31 - 1  # of a request: nothing is cut
_WASTE = "internal_waste_percent"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How memory is handed out.

    Attributes:
      kind: `paged`: whole blocks; `vattention`: whole page groups; `naive`: for each request as much as the longest of
        its trace needs, rounded up to a power of two tokens.
      block_size: tokens of a block. `paged` only.
      page: bytes of a page, with their unit. `vattention` only.
    """

    kind: Literal["paged", "vattention", "naive"]
    block_size: int | None = None
    page: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("block_size", "paged"), ("page", "vattention")):
            given = getattr(self, name)
            if (given is not None) != (self.kind == kind):
                raise ValueError(f"{name}: expected with kind: {kind} and with no other, got {given} with {self.kind}")


@dataclasses.dataclass(frozen=True)
class Config:
    """Traces and ways to pack them.

    Attributes:
      experiment: `packing`.
      seed: nothing here is random; part of every run's name.
      model: whose keys and values are stored.
      tensor_parallel: devices that share them.
      element_bytes: bytes of an element: 2 for bf16, 1 for fp8.
      memory: for keys and values on each device, with its unit.
      traces: by the name that results have.
      schemes: likewise.
      block_sizes: whose internal waste is computed, in tokens.
      published: what sources give.
    """

    experiment: Literal["packing"] = "packing"
    seed: int = 0
    model: str = "Llama-3-8B"
    tensor_parallel: int = 2
    element_bytes: int = 2
    memory: str = "60 GiB"
    traces: dict[str, WorkloadConfig] = dataclasses.field(default_factory=dict)
    schemes: dict[str, Scheme] = dataclasses.field(default_factory=dict)
    block_sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
    published: tuple[Published, ...] = ()


def resolve(config: Config) -> Config:
    """Names the traces by their hashes; refuses what packs nothing.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    for name in ("traces", "schemes", "block_sizes"):
        if not getattr(config, name):
            raise ValueError(f"{name}: expected at least one, got none")
    for name in [*config.traces, *config.schemes]:
        if "/" in name:
            raise ValueError(f"traces, schemes: expected names without '/', which stands between the two, got {name!r}")
    if len(set(config.block_sizes)) < len(config.block_sizes):
        raise ValueError(f"block_sizes: expected none twice, got {list(config.block_sizes)}")
    for block_size in config.block_sizes:
        require_int("block_sizes", block_size)
    shape, memory = _shape(config), parse_size(config.memory, "memory")
    for scheme in config.schemes.values():
        _packed(scheme, shape, memory, [1])  # a size that cannot be is refused here
    return dataclasses.replace(config, traces={name: with_sha256(trace) for name, trace in config.traces.items()})


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Packs every trace in every way, and writes `packing.parquet` and `waste.parquet`.

    Args:
      config: what to pack.
      run_dir: where the tables go.
      progress: ticks once a trace.

    Returns:
      For each trace and scheme, `<trace>/<scheme>`, its `requests` and `token_percent`; for each trace and block size,
      `<trace>/waste/<size>`, and for reservations as long as the trace's longest request, `<trace>/waste/longest`, its
      `internal_waste_percent`; beside them what sources give.
    """
    shape, memory = _shape(config), parse_size(config.memory, "memory")
    packing: list[dict[str, Any]] = []
    waste: list[dict[str, Any]] = []
    provenance: dict[str, Any] = {}
    for trace, workload_config in progress.track(list(config.traces.items()), "traces"):
        workload = load_workload(workload_config, _MAX_TOKENS, config.seed)
        provenance[trace] = dataclasses.asdict(workload.provenance)
        tokens = (workload.prompt_len.astype(np.int64) + workload.output_len).tolist()
        packing += [{"trace": trace} | row for row in _packing(config.schemes, shape, memory, tokens)]
        waste += [{"trace": trace} | row for row in _waste(config.block_sizes, tokens)]
    run_dir.add_manifest(workloads=provenance)
    run_dir.write_parquet("packing.parquet", pl.DataFrame(packing))
    run_dir.write_parquet("waste.parquet", pl.DataFrame(waste))
    found = {
        f"{row['trace']}/{row['scheme']}": {name: row[name] for name in ("requests", "token_percent")}
        for row in packing
    } | {f"{row['trace']}/waste/{row['block_size'] or 'longest'}": {_WASTE: row[_WASTE]} for row in waste}
    return published.compared(found, config.published)


failed_checks = published.failed_checks


def tables(found: Results) -> list[Table]:
    """Requests by trace and scheme, waste by trace and block size, and what is published beside both."""
    grids = [
        _grid(found, "requests", "{:,}", "Requests that fit at once"),
        _grid(found, _WASTE, "{:.3f}%", "Slots that stay empty, by block size"),
    ]
    return [*grids, published.table(found)]


def render(found: Results, console: rich.console.Console) -> None:
    """In the terminal the grids alone, and how many published values hold."""
    *grids, _ = tables(found)
    results.render(grids, console)
    console.print(published.headline(found))


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """Requests by scheme, and waste over block size, one line a trace."""
    packing, waste = (files.read_parquet(run_path / name) for name in ("packing.parquet", "waste.parquet"))
    styles = plots.memory_styles(packing["trace"].to_list())
    schemes = packing["scheme"].unique(maintain_order=True).to_list()
    figure, axes = plots.canvas()
    for name, style in styles.items():
        axes.plot(schemes, packing.filter(trace=name)["requests"], marker="o", **style)
    axes.set_yscale("log")
    axes.set_ylabel("requests")
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,g}"))
    plots.legend(axes, columns=3)
    waste_figure, waste_axes = plots.canvas()
    for name, style in styles.items():
        one = waste.filter(trace=name).drop_nulls().sort("block_size")  # without the reservation
        waste_axes.plot(one["block_size"], one[_WASTE], marker="o", **style)
    waste_axes.set_xscale("log", base=2)
    waste_axes.set_yscale("log")
    waste_axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    waste_axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}%"))
    waste_axes.set_xlabel("tokens in a block")
    plots.legend(waste_axes, columns=3)
    return [
        plots.Figure(
            "Requests that fit at once",
            "The more tokens the smallest unit of memory holds, the fewer requests; how many fewer depends on how long "
            "they are beside it.",
            figure,
        ),
        plots.Figure(
            "Slots that stay empty",
            "Half a block a request on average: the waste doubles with the block until blocks are as long as requests.",
            waste_figure,
        ),
    ]


def _shape(config: Config) -> KVShape:
    return dataclasses.replace(
        model_shape(config.model), tensor_parallel=config.tensor_parallel, element_bytes=config.element_bytes
    )


def _packing(schemes: Mapping[str, Scheme], shape: KVShape, memory: int, tokens: list[int]) -> Iterator[dict[str, Any]]:
    for name, scheme in schemes.items():
        requests = _packed(scheme, shape, memory, tokens)
        filled = sum(tokens[:requests]) * shape.token_bytes
        yield {"scheme": name, "requests": requests, "token_percent": 100 * filled / memory}


def _packed(scheme: Scheme, shape: KVShape, memory: int, tokens: list[int]) -> int:
    """Requests of these lengths that `memory` bytes of each device hold at once; see `packed_requests`."""
    if scheme.block_size is not None:
        block_size = scheme.block_size
        pool = plan_blocks(shape, block_size, memory).num_blocks
        return packed_requests((blocks_for(count, block_size) for count in tokens), pool)
    if scheme.page is not None:
        groups = PageGroups(shape, parse_size(scheme.page, "page"))
        return packed_requests(map(groups.groups_for, tokens), memory // groups.group_bytes)
    reserved = 1 << (max(tokens) - 1).bit_length()
    return packed_requests([reserved] * len(tokens), tokens_in(shape, memory))


def _waste(block_sizes: tuple[int, ...], tokens: list[int]) -> Iterator[dict[str, Any]]:
    """Internal waste by block size, and last, without one, that of reservations as long as the longest request."""
    lengths = collections.Counter(tokens)  # fewer than requests
    handed_out: list[tuple[int | None, int]] = [
        (size, sum(times * blocks_for(count, size) for count, times in lengths.items()) * size) for size in block_sizes
    ]
    final = sum(tokens)
    for block_size, slots in [*handed_out, (None, max(tokens) * len(tokens))]:
        share = waste_by_kind(stored=final, final=final, allocated=slots).internal
        yield {"block_size": block_size, _WASTE: float(100 * share)}


def _grid(found: Results, metric: str, form: str, title: str) -> Table:
    cells: dict[str, dict[str, str]] = {}
    for name, metrics in found.items():
        if metric in metrics:
            trace, *_, column = name.split("/")
            cells.setdefault(trace, {})[column] = form.format(metrics[metric])
    headings = list(next(iter(cells.values())))
    return Table(["trace", *headings], [[trace, *row.values()] for trace, row in cells.items()], title)
