"""Values that sources give, held against ours: both stand in the report, with what may lie between them."""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from experiments.errors import did_you_mean
from experiments.results import Results, Table, Value

_PUBLISHED, _TOLERANCE, _HOLDS, _DEVIATES = "_published", "_tolerance", "_holds", "_deviates"


@dataclasses.dataclass(frozen=True)
class Published:
    """What sources give for one metric.

    Attributes:
      metric: its name in the results.
      values: by the name of the result.
      tolerance: by how much ours may differ; half a unit of the last digit where a source prints so many.
      ranges: lowest and highest by the name of the result, where sources give both; `.inf` for no highest, `-.inf` for
        no lowest.
      deviates: why ours differs by more than that, where it is known to. It then must: once it holds, that is an error.
    """

    metric: str
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    tolerance: float = 0.0
    ranges: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    deviates: str = ""

    def __post_init__(self) -> None:
        if not self.values and not self.ranges:
            raise ValueError(f"values of {self.metric!r} must not be empty; give those that sources print")
        if self.tolerance < 0:
            raise ValueError(f"tolerance of {self.metric!r} must be at least 0, got {self.tolerance}")
        for name, (low, high) in self.ranges.items():
            if not low < high:
                raise ValueError(f"ranges of {self.metric!r}: expected {name!r} to rise, got {low} to {high}")

    def given(self) -> Iterable[tuple[str, float, float, float | str]]:
        """Of each result its name, the least and the most that it may be, and what the source says."""
        for name, value in self.values.items():
            yield name, value - self.tolerance, value + self.tolerance, value
        for name, (low, high) in self.ranges.items():
            said = f"{_text(low)} to {_text(high)}" if math.isfinite(high - low) else _one_sided(low, high)
            yield name, low - self.tolerance, high + self.tolerance, said


def _one_sided(low: float, high: float) -> str:
    return f"at most {_text(high)}" if low == -math.inf else f"at least {_text(low)}"


def compared(results: Results, published: Iterable[Published]) -> dict[str, dict[str, Value]]:
    """The results, and beside each metric that a source gives `<metric>_published`, `_tolerance` and `_holds`.

    Raises:
      ValueError: a source gives what the results do not have, or twice.
    """
    found = {name: dict(metrics) for name, metrics in results.items()}
    for source in published:
        metric = source.metric
        for name, low, high, said in source.given():
            if metric not in results.get(name, {}):
                near = did_you_mean(metric, results[name]) if name in results else did_you_mean(name, results)
                raise ValueError(f"published: there is no {metric!r} of {name!r} in the results{near}")
            if metric + _PUBLISHED in found[name]:
                raise ValueError(f"published: {metric!r} of {name!r} is given twice; keep one of them")
            ours = results[name][metric]
            if isinstance(ours, bool) or not isinstance(ours, int | float):
                raise ValueError(f"published: {metric!r} of {name!r} must be a number to compare, got {ours!r}")
            found[name] |= {
                metric + _PUBLISHED: said,
                metric + _TOLERANCE: source.tolerance,
                metric + _HOLDS: low <= ours <= high,
            }
            if source.deviates:
                found[name][metric + _DEVIATES] = source.deviates
    return found


def failed_checks(results: Results) -> list[str]:
    """One sentence for each value that is too far from the published one, or declared to be and is not."""
    failures = []
    for row in _rows(results):
        if row.holds and row.deviates:
            failures.append(f"{row.name}: {row.metric} is {row.ours}, as published, though declared to deviate")
        elif not row.holds and not row.deviates:
            given = f"published {row.published}, which may differ by {row.tolerance}"
            failures.append(f"{row.name}: {row.metric} is {row.ours}, {given}")
    return failures


def table(results: Results) -> Table:
    """One line for each value that a source gives."""
    rows = [
        [row.name, row.metric, row.published, row.tolerance, row.ours, "yes" if row.holds else "NO", row.deviates]
        for row in _rows(results)
    ]
    columns = 7 if any(row[-1] for row in rows) else 6
    headings = ["", "metric", "published", "may differ by", "ours", "holds", "known to deviate, as"]
    return Table(headings[:columns], [row[:columns] for row in rows], headline(results))


def headline(results: Results) -> str:
    """How many published values there are, and how many do not hold."""
    rows = list(_rows(results))
    known = sum(bool(row.deviates) for row in rows)
    said = f", {known} of them known to" if known else ""
    return f"Published values: {len(rows)} compared, {sum(not row.holds for row in rows)} differ{said}"


class _Row(NamedTuple):
    name: str
    metric: str
    published: str
    tolerance: str
    ours: str
    holds: bool
    deviates: str


def _rows(results: Results) -> Iterable[_Row]:
    for name, metrics in results.items():
        for metric in metrics:
            if metric + _PUBLISHED in metrics:
                said, tolerance, ours = (_text(metrics[metric + end]) for end in (_PUBLISHED, _TOLERANCE, ""))
                holds, deviates = metrics[metric + _HOLDS] is True, metrics.get(metric + _DEVIATES) or ""
                yield _Row(name, metric, said, tolerance, ours, holds, str(deviates))


def _text(value: Value) -> str:
    if isinstance(value, str):
        return value
    assert isinstance(value, int | float)
    return f"{value:,.0f}" if value == round(value) else f"{value:,.6g}"
