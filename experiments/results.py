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

_SHORT = 32  # characters of a row's name that a narrow terminal still has room for
FINISHED, FAILED, UNFINISHED = "finished", "failed", "unfinished"


class Table(NamedTuple):
    """A table of text, the same in the terminal and in the report."""

    headings: Sequence[str]  # the first one is of the rows' names
    rows: Sequence[Sequence[str]]
    title: str = ""

    def aligned_right(self, column: int) -> bool:
        """Whether a column holds nothing but numbers, so that they stand under one another."""
        number = re.compile(r"|-|yes|no|-?[\d,.]+(e[-+]?\d+)?%?")
        return column > 0 and all(number.fullmatch(row[column]) for row in self.rows)


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
    for table in tables:
        grid = rich.table.Table(
            title=table.title or None, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False
        )
        for index, heading in enumerate(table.headings):
            numbers = table.aligned_right(index)
            # A number that is cut short or broken reads as another number; names stay whole while they are short.
            whole = numbers or (index == 0 and max((len(row[0]) for row in table.rows), default=0) <= _SHORT)
            justify = "right" if numbers else "left"
            grid.add_column(rich.markup.escape(heading), justify=justify, no_wrap=whole, overflow="fold")
        for row in table.rows:
            grid.add_row(*map(rich.markup.escape, row))
        console.print(grid)


def columns(results: Results, rows: Mapping[str, tuple[str, str]], title: str) -> Table:
    """A table with a column for each name, and a row for each metric that is given a label and a format."""

    def cell(value: Value, form: str) -> str:
        match value:
            case None:
                return "-"
            case bool():
                return "yes" if value else "no"
        return form.format(value)

    cells = [
        [label, *(cell(values.get(metric), form) for values in results.values())]
        for metric, (label, form) in rows.items()
    ]
    return Table(["", *results], cells, title)


def table(results: Results, modelled: frozenset[str]) -> Table:
    """Results as one table, in the shape that suits them.

    Names that share most of their metrics make a grid, the longer side down the page; others a line per metric.
    """
    metrics = list(dict.fromkeys(metric for values in results.values() for metric in values))
    labels = [label(metric, modelled) for metric in metrics]
    if sum(map(len, results.values())) < len(metrics) * len(results) / 2:
        rows = [
            [name if index == 0 else "", label(metric, modelled), *show([values[metric]])]
            for name, values in results.items()
            for index, metric in enumerate(values)
        ]
        return Table(["", "metric", "value"], rows)
    columns = [show([values.get(metric) for values in results.values()]) for metric in metrics]
    if len(metrics) >= len(results):
        return Table(["", *results], [[text, *column] for text, column in zip(labels, columns, strict=True)])
    return Table(["", *labels], [[name, *row] for name, row in zip(results, zip(*columns, strict=True), strict=True)])


def label(metric: str, modelled: frozenset[str]) -> str:
    """The name of a metric, with the word `modelled` where a cost model gives it."""
    return f"{metric} (modelled)" if metric in modelled and "modelled" not in metric else metric


def show(values: Sequence[Value]) -> list[str]:
    """One metric of several names as text, with as many decimals for all as the smallest of them needs."""
    sizes = [abs(value) for value in values if isinstance(value, float) and value != 0]
    # Four digits of the largest, two of the smallest.
    decimals = max((3 - _exponent(max(sizes)), 1 - _exponent(min(sizes)), 0)) if sizes else 0
    return [_show(value, decimals) for value in values]


def _exponent(size: float) -> int:
    return math.floor(math.log10(size))


def _show(value: Value, decimals: int) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.{decimals}f}" if decimals <= 6 else f"{value:.3g}"
    return value


def _plain(value: Any, where: str) -> Value:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must be finite, got {value}; leave an undefined metric out or give None")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{where} must be a number, a truth value, a text or None, got a {type(value).__name__}")
    return value
