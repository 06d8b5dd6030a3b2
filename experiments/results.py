"""Results of a run: metrics by name, as one JSON line, as a table, as words."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import rich.box
import rich.console
import rich.table

Value = float | int | bool | str | None
"""A metric; None where it is not defined, such as the time between the tokens of one-token answers."""
Results = Mapping[str, Mapping[str, Value]]

FINISHED, FAILED, UNFINISHED = "finished", "failed", "unfinished"


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


def render(
    results: Results,
    console: rich.console.Console,
    modelled: frozenset[str],
    custom: Callable[[Results, rich.console.Console], None] | None,
) -> None:
    """Prints results the experiment's own way, or as one table."""
    if custom is not None:
        custom(results, console)
        return
    headings, rows = table(results, modelled)
    grid = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if index else "left", no_wrap=index == 0)
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def table(results: Results, modelled: frozenset[str]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of results as text; the longer of names and metrics runs down the page."""
    metrics = list(dict.fromkeys(metric for values in results.values() for metric in values))
    labels = {metric: label(metric, modelled) for metric in metrics}
    if len(metrics) >= len(results):
        rows = [[labels[m], *(show(values, m) for values in results.values())] for m in metrics]
        return ["", *results], rows
    rows = [[name, *(show(values, m) for m in metrics)] for name, values in results.items()]
    return ["", *labels.values()], rows


def label(metric: str, modelled: frozenset[str]) -> str:
    """The name of a metric, with the word `modelled` where a cost model gives it."""
    return f"{metric} (modelled)" if metric in modelled and "modelled" not in metric else metric


def show(values: Mapping[str, Value], metric: str) -> str:
    """A metric as text; a dash where it is not defined."""
    match values.get(metric):
        case None:
            return "-"
        case bool(value):
            return "yes" if value else "no"
        case int(value):
            return f"{value:,}"
        case float(value):
            return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
        case value:
            return str(value)


def _plain(value: Any, where: str) -> Value:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must be finite, got {value}; leave an undefined metric out or give None")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{where} must be a number, a truth value, a text or None, got a {type(value).__name__}")
    return value
