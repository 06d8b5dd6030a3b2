"""What a sweep shows: one table, one figure and one page, made from the files of the sweep alone.

sweep.json        axes, points with their runs, and what they were computed with
points.parquet    a row for each point and result: axis values, run, status, metrics; also as points.csv
report.html       everything for a reader
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import rich.console

from experiments import files, page, page_parts, plots, registry, results
from experiments.config import show_value
from experiments.errors import UserError, did_you_mean
from experiments.page_parts import section
from experiments.results import Table, Value
from experiments.run_directory import REPORT, SWEEP, RunDirectory
from experiments.sweep_axes import Point

_LINES = 20  # lines that a legend can tell apart


def write_points(sweep_dir: RunDirectory, points: Sequence[Point], summaries: Sequence[Mapping[str, Any]]) -> None:
    """Writes a row for each point and each of its results; a point without results has a row all the same."""
    rows: list[dict[str, Any]] = []
    for point, summary in zip(points, summaries, strict=True):
        place = {key: _plain(value) for key, value in point.values.items()}
        place |= {"run": point.run.name, "status": summary["status"]}
        for name, metrics in (summary["results"] or {None: {}}).items():
            # A metric that has the name of an axis steps back.
            named = {f"{metric} (result)" if metric in place else metric: value for metric, value in metrics.items()}
            rows.append(place | {"result": name} | named)
    names = dict.fromkeys(name for row in rows for name in row)
    frame = pl.DataFrame([_series(name, [row.get(name) for row in rows]) for name in names])
    sweep_dir.write_parquet("points.parquet", frame)
    files.write_text(sweep_dir.path / "points.csv", frame.write_csv())


def show(path: pathlib.Path, experiment: registry.Experiment, console: rich.console.Console) -> int:
    """Prints the table of a sweep, writes its page, and prints its summary as the last line.

    Returns:
      The exit code: 1 if a point failed or could not be computed.

    Raises:
      UserError: a file is missing or damaged, or no point has the metric that the figure should show.
    """
    facts, points = files.read_json(path / SWEEP), files.read_parquet(path / "points.parquet")
    metrics = [name for name in points.columns if name not in {*facts["axes"], "run", "status", "result"}]
    metric = _plotted(facts["metric"], points, metrics)
    files.write_text(path / REPORT, _page(facts, points, metric, metrics, experiment))
    results.render([_table(facts, points, metric, metrics, experiment, console.width)], console)
    for failure in _failures(facts):
        print(f"check failed: {failure}", file=sys.stderr)
    print(f"report: {path / REPORT}", file=sys.stderr)
    status = _status(facts)
    entries = [{"values": point["values"], "run": point["run"], "status": point["status"]} for point in facts["points"]]
    summary = {"experiment": experiment.name, "run_dir": str(path), "status": status, "points": entries}
    print(results.summary_line(summary))
    return 0 if status == results.FINISHED else 1


def report(path: pathlib.Path, experiments: Mapping[str, str], console: rich.console.Console) -> int:
    """The same for a sweep that is over.

    Raises:
      UserError: it has not come to its end, or a file is damaged.
    """
    if not (path / "points.parquet").exists():
        raise UserError(f"{path} has not come to its end; running the same command again resumes it")
    return show(path, registry.load(files.read_json(path / SWEEP)["experiment"], experiments), console)


def require_metric(metric: str, found: results.Results) -> None:
    """Refuses a metric to plot that these results, if there are any, do not have or that is no number.

    Raises:
      UserError: naming those there are.
    """
    there = [name for metrics in found.values() for name, value in metrics.items() if _is_number(value)]
    if there and metric not in there:
        near = did_you_mean(metric, there)
        raise UserError(f"--plot {metric}: expected a number out of {', '.join(dict.fromkeys(there))}{near}")


def _is_number(value: Value) -> bool:
    """Whether a point may have a number here: None is one that is not defined."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _plotted(asked: str | None, points: pl.DataFrame, metrics: Sequence[str]) -> str | None:
    """The metric that is asked for, or else the first that is a fraction, or else a number; None if there is none."""
    if asked in metrics:
        return asked
    floats, whole = ([name for name in metrics if points[name].dtype == kind] for kind in (pl.Float64, pl.Int64))
    return next(iter([*floats, *whole]), None)


def _plain(value: Any) -> Value:
    return value if isinstance(value, bool | int | float | str) else show_value(value)


def _series(name: str, values: Sequence[Value]) -> pl.Series:
    """A column of one type: numbers as numbers, and text where points do not agree on one."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return pl.Series(name, [None if value is None else float(value) for value in values], pl.Float64)
    if len(kinds) > 1:
        return pl.Series(name, [None if value is None else show_value(value) for value in values], pl.String)
    return pl.Series(name, values, None if kinds else pl.String)


def _status(facts: Mapping[str, Any]) -> str:
    """The worst of the points."""
    there = {point["status"] for point in facts["points"]}
    return next(status for status in (results.UNFINISHED, results.FAILED, results.FINISHED) if status in there)


def _failures(facts: Mapping[str, Any]) -> list[str]:
    return [
        f"{', '.join(f'{key}={value}' for key, value in point['values'].items())}: {failure}"
        for point in facts["points"]
        for failure in point["failures"]
    ]


def _table(
    facts: Mapping[str, Any],
    points: pl.DataFrame,
    metric: str | None,
    metrics: Sequence[str],
    experiment: registry.Experiment,
    width: int,
) -> Table:
    """The results that have the plotted metric, with it first and as many others as have room in `width` characters."""
    rows = points if metric is None else points.filter(pl.col(metric).is_not_null() | pl.col("result").is_null())
    shown = [name for name in metrics if name != metric and rows[name].null_count() < len(rows)]
    shown = [metric, *shown] if metric else shown
    table = _grid(rows, facts, shown, experiment)
    while len(shown) > 1 and _width(table) > width:
        shown = shown[:-1]
        table = _grid(rows, facts, shown, experiment)
    title = f"{facts['experiment']} over {', '.join(facts['axes'])}: {len(facts['points'])} points"
    return table._replace(title=title + ("; further metrics are in points.csv" if len(metrics) > len(shown) else ""))


def _width(table: Table) -> int:
    """Characters of a line in a terminal, with the space between columns."""
    return sum(3 + max(map(len, column)) for column in zip(table.headings, *table.rows, strict=True))


def _grid(
    rows: pl.DataFrame, facts: Mapping[str, Any], metrics: Sequence[str], experiment: registry.Experiment
) -> Table:
    names = [*facts["axes"], "result", *metrics, "status"]
    columns = [
        rows[name].to_list() if name in ("result", "status") else results.show(rows[name].to_list()) for name in names
    ]
    if all(status == results.FINISHED for status in columns[-1]):
        names, columns = names[:-1], columns[:-1]
    cells = [["-" if cell is None else cell for cell in row] for row in zip(*columns, strict=True)]
    return Table([results.label(name, experiment.modelled) for name in names], cells)


def _figure(
    facts: Mapping[str, Any], points: pl.DataFrame, metric: str, experiment: registry.Experiment
) -> plots.Figure:
    """The metric over the first axis: a line for each result, and for each value of the other axes."""
    first, *others = facts["axes"]
    others = [axis for axis in others if len(facts["axes"][axis]) > 1]
    there = points.filter(pl.col(metric).is_not_null())
    numbers = there[first].dtype.is_numeric() and there[first].is_finite().all()
    if numbers:
        there = there.sort(first, maintain_order=True)
    lines: dict[str, tuple[list[Any], list[Any]]] = {}
    for row in there.iter_rows(named=True):
        name = ", ".join([row["result"], *(f"{axis}={row[axis]}" for axis in others)])
        places, values = lines.setdefault(name, ([], []))
        places.append(row[first] if numbers else str(row[first]))
        values.append(row[metric])
    few = len(lines) <= _LINES
    figure, axes = plots.canvas(height=3.2 + (0.1 * len(lines) if few else 0))
    for name, style in plots.memory_styles(lines).items():
        axes.plot(*lines[name], marker="o", **style)
    if numbers:
        ticks = there[first].unique().sort().to_list()
        if ticks[0] > 0 and ticks[-1] >= 8 * ticks[0]:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel(first)
    axes.set_ylabel(results.label(metric, experiment.modelled))
    if few:
        plots.legend(axes, columns=2)
    caption = "One line for each result" + (f" and each value of {', '.join(others)}." if others else ".")
    return plots.Figure(
        f"{results.label(metric, experiment.modelled)} by {first}",
        caption if few else f"{caption} They are too many to name here: see the table.",
        figure,
    )


def _page(
    facts: Mapping[str, Any],
    points: pl.DataFrame,
    metric: str | None,
    metrics: Sequence[str],
    experiment: registry.Experiment,
) -> str:
    figure = ""
    if metric is not None and points[metric].dtype.is_numeric():
        with plots.style():
            figure = page_parts.figure(_figure(facts, points, metric, experiment), "f0")
    runs = [[*point["values"].values(), point["run"], point["status"]] for point in facts["points"]]
    sections = (
        page.header(experiment, _status(facts), facts, facts["question"]),
        section("Points that failed", page_parts.failures(_failures(facts))),
        section("Figure", figure),
        section("Results", page_parts.table(_grid(points, facts, metrics, experiment))),
        section("What the numbers mean", page_parts.glossary(metrics, experiment.glossary)),
        section("Runs", page_parts.table(Table([*facts["axes"], "run", "status"], runs))),
        section("How it was computed", page.computed_with(facts)),
    )
    return page_parts.document(f"{experiment.name}: {facts['run']}", sections)
