"""Values that sources give, held against ours: both stand in the report, with what may lie between them."""

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

from experiments.errors import did_you_mean
from experiments.results import Results, Table, Value

_TOLERANCE, _HOLDS = "_tolerance", "_holds"
_SUFFIXES = {"near": "_published", "at_least": "_at_least", "at_most": "_at_most"}


@dataclasses.dataclass(frozen=True)
class Published:
    """What sources give for one metric.

    Attributes:
      metric: its name in the results.
      values: by the name of the result.
      tolerance: by how much ours may differ; half a unit of the last digit where a source prints so many.
      bound: whether ours must be `near` the value, or `at_least` or `at_most` the value, without any tolerance.
    """

    metric: str
    values: dict[str, float]
    tolerance: float = 0.0
    bound: Literal["near", "at_least", "at_most"] = "near"

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"values of {self.metric!r} must not be empty; give those that sources print")
        if self.tolerance < 0:
            raise ValueError(f"tolerance of {self.metric!r} must be at least 0, got {self.tolerance}")
        if self.tolerance and self.bound != "near":
            raise ValueError(f"tolerance of {self.metric!r} must be 0 with {self.bound}, got {self.tolerance}")

    def holds(self, ours: float, value: float) -> bool:
        """Whether ours may stand beside the published value."""
        match self.bound:
            case "at_least":
                return ours >= value
            case "at_most":
                return ours <= value
        return abs(ours - value) <= self.tolerance


def compared(results: Results, published: Iterable[Published]) -> dict[str, dict[str, Value]]:
    """The results, and beside each metric that a source gives what it says and whether that holds.

    That is `<metric>_published`, with its `_tolerance` and `_holds`, or `<metric>_at_least` or `<metric>_at_most` and
    its `_holds`.

    Raises:
      ValueError: a source gives what the results do not have, or twice.
    """
    found = {name: dict(metrics) for name, metrics in results.items()}
    for given in published:
        key = given.metric + _SUFFIXES[given.bound]
        for name, value in given.values.items():
            if given.metric not in results.get(name, {}):
                near = did_you_mean(given.metric, results[name]) if name in results else did_you_mean(name, results)
                raise ValueError(f"published: there is no {given.metric!r} of {name!r} in the results{near}")
            if key in found[name]:
                raise ValueError(f"published: {given.metric!r} of {name!r} is given twice; keep one of them")
            ours = results[name][given.metric]
            if isinstance(ours, bool) or not isinstance(ours, int | float):
                raise ValueError(f"published: {given.metric!r} of {name!r} must be a number to compare, got {ours!r}")
            found[name][key] = value
            if given.bound == "near":
                found[name][given.metric + _TOLERANCE] = given.tolerance
            found[name][_holds_key(given.metric, key)] = given.holds(ours, value)
    return found


def failed_checks(results: Results) -> list[str]:
    """One sentence for each value that is too far from the published one, or beyond its bound."""
    return [
        f"{row.name}: {row.metric} is {row.ours}, published {row.value}, which may differ by {row.tolerance}"
        if row.tolerance
        else f"{row.name}: {row.metric} is {row.ours}, expected {row.value}"
        for row in _rows(results)
        if not row.holds
    ]


def table(results: Results) -> Table:
    """One line for each value that a source gives."""
    rows = [
        [row.name, row.metric, row.value, row.tolerance or "-", row.ours, "yes" if row.holds else "NO"]
        for row in _rows(results)
    ]
    return Table(["", "metric", "published", "may differ by", "ours", "holds"], rows, headline(results))


def headline(results: Results) -> str:
    """How many published values there are, and how many do not hold."""
    rows = list(_rows(results))
    return f"Published values: {len(rows)} compared, {sum(not row.holds for row in rows)} differ"


class _Row(NamedTuple):
    name: str
    metric: str
    value: str
    tolerance: str  # empty for a bound
    ours: str
    holds: bool


def _rows(results: Results) -> Iterable[_Row]:
    for name, metrics in results.items():
        for metric in metrics:
            for bound, suffix in _SUFFIXES.items():
                if (key := metric + suffix) in metrics:
                    words = "" if bound == "near" else bound.replace("_", " ") + " "
                    tolerance = _text(metrics[metric + _TOLERANCE]) if bound == "near" else ""
                    holds = metrics[_holds_key(metric, key)] is True
                    yield _Row(name, metric, words + _text(metrics[key]), tolerance, _text(metrics[metric]), holds)


def _holds_key(metric: str, key: str) -> str:
    return (metric if key == metric + _SUFFIXES["near"] else key) + _HOLDS


def _text(value: Value) -> str:
    assert isinstance(value, int | float)
    return f"{value:,.0f}" if value == round(value) else f"{value:,.6g}"
