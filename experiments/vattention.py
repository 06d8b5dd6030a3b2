"""vAttention: what its pages hold and cost, held against what its authors and others published."""

import dataclasses
from typing import Any, Literal

import polars as pl
import rich.console

from experiments import published, results, vattention_sizes
from experiments.progress import Progress
from experiments.published import Published
from experiments.results import Results, Table
from experiments.run_directory import RunDirectory
from experiments.vattention_sizes import Kept, Virtual

DESCRIPTION = "vAttention: block sizes, page groups, waste, mapping time and stranded pages, against published values."
GLOSSARY = vattention_sizes.GLOSSARY
MODELLED = frozenset({"map_ms", "supply_gb_per_s"})


@dataclasses.dataclass(frozen=True)
class Config:
    """Models, pages, and what mapping one costs.

    Attributes:
      experiment: `vattention`.
      seed: nothing here is random; part of every run's name.
      models: degrees of tensor parallelism by model.
      element_bytes: bytes of an element of keys and values: 2 for bf16, 1 for fp8.
      pages: bytes of a page, with their unit.
      map_call_us: microseconds of the driver to map a page and make it accessible, for pages of which it is known.
      virtual: servers whose virtual memory is counted, by name.
      kept: blocks that a prefix cache keeps, and the pages that it strands.
      published: what sources give.
    """

    experiment: Literal["vattention"] = "vattention"
    seed: int = 0
    models: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    element_bytes: tuple[int, ...] = (2, 1)
    pages: tuple[str, ...] = ("64 KiB", "128 KiB", "256 KiB", "2 MiB")
    map_call_us: dict[str, float] = dataclasses.field(default_factory=dict)
    virtual: dict[str, Virtual] = dataclasses.field(default_factory=dict)
    kept: Kept | None = None
    published: tuple[Published, ...] = ()


def resolve(config: Config) -> Config:
    """Refuses what describes no table.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    for name in ("models", "element_bytes", "pages"):
        if not getattr(config, name):
            raise ValueError(f"{name}: expected at least one, got none")
    if unknown := sorted(config.map_call_us.keys() - set(config.pages)):
        raise ValueError(f"map_call_us: expected pages out of {', '.join(config.pages)}, got {', '.join(unknown)}")
    for model, degrees in config.models.items():
        if not degrees:
            raise ValueError(f"models.{model}: expected at least one degree of tensor parallelism, got none")
    vattention_sizes.require_call_us(config.map_call_us)
    _sizes(config)  # whatever else cannot be is refused here
    vattention_sizes.virtual_space(config.virtual)
    return config


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Computes all tables, and writes `sizes.parquet`.

    Args:
      config: what to compute.
      run_dir: where the table goes.
      progress: unused; there is too little to do for a bar.

    Returns:
      The results of `vattention_sizes`, and beside them what sources give.
    """
    sizes = _sizes(config)
    found = sizes | vattention_sizes.virtual_space(config.virtual)
    if config.kept is not None:
        found |= vattention_sizes.stranded(config.kept)
    run_dir.write_parquet("sizes.parquet", pl.DataFrame([{"case": name} | found for name, found in sizes.items()]))
    return published.compared(found, config.published)


failed_checks = published.failed_checks


def tables(found: Results) -> list[Table]:
    """Block sizes by page; bytes, waste and time; virtual memory; stranded pages; what is published beside them."""
    return [*_tables(found), published.table(found)]


def render(found: Results, console: rich.console.Console) -> None:
    """In the terminal all but the published values, of which it says how many hold."""
    results.render(_tables(found), console)
    console.print(published.headline(found))


def _sizes(config: Config) -> dict[str, dict[str, Any]]:
    return vattention_sizes.page_sizes(config.models, config.element_bytes, config.pages, config.map_call_us)


def _tables(found: Results) -> list[Table]:
    blocks: dict[str, dict[str, str]] = {}
    pages: dict[tuple[str, str], list[str]] = {}  # the same for all degrees and elements, but for a token of waste
    for name, metrics in found.items():
        if "block_size" in metrics:
            model, degree, page, *element = name.split("/")
            blocks.setdefault(" ".join((model, degree, *element)), {})[page] = f"{metrics['block_size']:,}"
            pages.setdefault((model, page), [name, *(_cell(metrics, metric) for metric in _PAGE_COLUMNS)])
    headings = list(dict.fromkeys(page for row in blocks.values() for page in row))
    tables = [
        Table(
            ["", *headings],
            [[name, *row.values()] for name, row in blocks.items()],
            "Tokens in a page; 1B: of one-byte elements",
        ),
        Table(
            ["", *(results.label(metric, MODELLED) for metric in _PAGE_COLUMNS)],
            list(pages.values()),
            "A page group, per device",
        ),
    ]
    for title, prefix in (("Virtual memory", "virtual/"), ("Pages that kept blocks strand", "stride/")):
        some = {name: metrics for name, metrics in found.items() if name.startswith(prefix)}
        if some:
            columns = [metric for metric in next(iter(some.values())) if metric in GLOSSARY]
            rows = [[name, *(_cell(metrics, metric) for metric in columns)] for name, metrics in some.items()]
            tables.append(Table(["", *columns], rows, title))
    return tables


_PAGE_COLUMNS = ("page_group_bytes", "worst_waste_bytes", "map_ms", "supply_gb_per_s")


def _cell(metrics: Any, metric: str) -> str:
    value = metrics.get(metric)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
