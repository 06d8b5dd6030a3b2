"""Values that sources give, held against ours: both stand in the report, with what may lie between them."""

import dataclasses
from collections.abc import Iterable

from experiments.errors import did_you_mean
from experiments.results import Results, Table, Value

_PUBLISHED, _TOLERANCE, _HOLDS = "_published", "_tolerance", "_holds"


@dataclasses.dataclass(frozen=True)
class Published:
    """What sources give for one metric.

    Attributes:
      metric: its name in the results.
      values: by the name of the result.
      tolerance: by how much ours may differ; half a unit of the last digit where a source prints so many.
    """

    metric: str
    values: dict[str, float]
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"values of {self.metric!r} must not be empty; give those that sources print")
        if self.tolerance < 0:
            raise ValueError(f"tolerance of {self.metric!r} must be at least 0, got {self.tolerance}")


def compared(results: Results, published: Iterable[Published]) -> dict[str, dict[str, Value]]:
    """The results, and beside each metric that a source gives `<metric>_published`, `_tolerance` and `_holds`.

    Raises:
      ValueError: a source gives what the results do not have, or twice.
    """
    found = {name: dict(metrics) for name, metrics in results.items()}
    for given in published:
        for name, value in given.values.items():
            if given.metric not in results.get(name, {}):
                near = did_you_mean(given.metric, results[name]) if name in results else did_you_mean(name, results)
                raise ValueError(f"published: there is no {given.metric!r} of {name!r} in the results{near}")
            if given.metric + _PUBLISHED in found[name]:
                raise ValueError(f"published: {given.metric!r} of {name!r} is given twice; keep one of them")
            ours = results[name][given.metric]
            if isinstance(ours, bool) or not isinstance(ours, int | float):
                raise ValueError(f"published: {given.metric!r} of {name!r} must be a number to compare, got {ours!r}")
            found[name] |= {
                given.metric + _PUBLISHED: value,
                given.metric + _TOLERANCE: given.tolerance,
                given.metric + _HOLDS: abs(ours - value) <= given.tolerance,
            }
    return found


def failed_checks(results: Results) -> list[str]:
    """One sentence for each value that is too far from the published one."""
    return [
        f"{name}: {metric} is {ours}, published {value}, which may differ by {tolerance}"
        for name, metric, value, tolerance, ours, holds in _rows(results)
        if not holds
    ]


def table(results: Results) -> Table:
    """One line for each value that a source gives."""
    rows = [
        [name, metric, value, tolerance, ours, "yes" if holds else "NO"]
        for name, metric, value, tolerance, ours, holds in _rows(results)
    ]
    return Table(["", "metric", "published", "may differ by", "ours", "holds"], rows, headline(results))


def headline(results: Results) -> str:
    """How many published values there are, and how many do not hold."""
    rows = list(_rows(results))
    return f"Published values: {len(rows)} compared, {sum(not row[-1] for row in rows)} differ"


def _rows(results: Results) -> Iterable[tuple[str, str, str, str, str, bool]]:
    for name, metrics in results.items():
        for metric in metrics:
            if metric + _PUBLISHED in metrics:
                value, tolerance, ours = (_text(metrics[metric + end]) for end in (_PUBLISHED, _TOLERANCE, ""))
                yield name, metric, value, tolerance, ours, metrics[metric + _HOLDS] is True


def _text(value: Value) -> str:
    assert isinstance(value, int | float)
    return f"{value:,.0f}" if value == round(value) else f"{value:,.6g}"
