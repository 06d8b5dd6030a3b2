"""Results of a run: metrics by name, as one JSON line, as a table, as words."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import rich.box
import rich.console
import rich.markup
import rich.table

Value = float | int | bool | str | None
"""A metric; None where it is not defined, such as the time between the tokens of one-token answers."""
Results = Mapping[str, Mapping[str, Value]]

FINISHED, FAILED, UNFINISHED = "finished", "failed", "unfinished"


class Table(NamedTuple):
    """A table of text, the same in the terminal and in the report."""

    headings: Sequence[str]  # the first one is of the rows' names
    rows: Sequence[Sequence[str]]
    title: str = ""


def plain(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Value]]:
    """Results as Python numbers, scalars of NumPy and JAX included.

    Raises:
      ValueError: a metric is NaN or infinite, or is no number, truth value, text or None.
    """
    return {
        name: {metric: _plain(value, f"{name}.{metric}") for metric, value in metrics.items()}
        for name, metrics in results.items()
    }


def summary(experiment: str, run_dir: str, status: str, results: Results) -> dict[str, Any]:
    """What `summary.json` holds and the last line of standard output says."""
    return {"experiment": experiment, "run_dir": run_dir, "status": status, "results": results}


def summary_line(value: Mapping[str, Any]) -> str:
    """A summary as one compact line."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def render(tables: Sequence[Table], console: rich.console.Console) -> None:
    """Prints tables."""
    for headings, rows, title in tables:
        grid = rich.table.Table(title=title or None, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for index, heading in enumerate(headings):
            numbers = index > 0 and all(stands_right(row[index]) for row in rows)
            grid.add_column(rich.markup.escape(heading), justify="right" if numbers else "left", no_wrap=index == 0)
        for row in rows:
            grid.add_row(*map(rich.markup.escape, row))
        console.print(grid)


def table(results: Results, modelled: frozenset[str]) -> Table:
    """Results as one table, in the shape that suits them.

    Names that share most of their metrics make a grid, the longer side down the page; others a line per metric.
    """
    metrics = list(dict.fromkeys(metric for values in results.values() for metric in values))
    shared = sum(map(len, results.values())) >= len(metrics) * len(results) / 2
    if not shared:
        lines = [(name, metric) for name, values in results.items() for metric in values]
        firsts = {(name, next(iter(values))) for name, values in results.items() if values}
        rows = [
            [name if (name, metric) in firsts else "", label(metric, modelled), show(results[name].get(metric))]
            for name, metric in lines
        ]
        return Table(["", "metric", "value"], rows)
    labels = [label(metric, modelled) for metric in metrics]
    if len(metrics) >= len(results):
        rows = [[text, *(show(v.get(m)) for v in results.values())] for text, m in zip(labels, metrics, strict=True)]
        return Table(["", *results], rows)
    return Table(["", *labels], [[name, *(show(v.get(m)) for m in metrics)] for name, v in results.items()])


def label(metric: str, modelled: frozenset[str]) -> str:
    """The name of a metric, with the word `modelled` where a cost model gives it."""
    return f"{metric} (modelled)" if metric in modelled and "modelled" not in metric else metric


def show(value: Value) -> str:
    """A metric as text; a dash where it is not defined."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return value


def stands_right(text: str) -> bool:
    """Whether a cell is a number or as short as one, so that it stands to the right under others."""
    return re.fullmatch(r"-|yes|no|-?[\d,.]+(e[-+]?\d+)?%?", text) is not None


def _plain(value: Any, where: str) -> Value:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must be finite, got {value}; leave an undefined metric out or give None")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{where} must be a number, a truth value, a text or None, got a {type(value).__name__}")
    return value
