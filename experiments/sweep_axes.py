"""The points of a sweep, and the proof that each differs from all others by what was asked for.

A sweep whose points are secretly one run looks like a result: the key was misspelt, a script passed a constant, a
condition never held. So nothing runs before every swept value was found again in the resolved config of its points, and
no two points are the same run.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import config as configs
from experiments.config import show_value
from experiments.errors import UserError, did_you_mean
from experiments.run import Prepared

Make = Callable[[Mapping[str, Any]], Prepared]
"""The run whose config has these values at these dotted keys."""


class Axis(NamedTuple):
    """A dotted key of the config, and the values that it takes."""

    key: str
    values: tuple[Any, ...]


class Condition(NamedTuple):
    """Where the axis has this value, another key has that one."""

    axis: str
    value: Any
    key: str
    then: Any


class Point(NamedTuple):
    """A run of a sweep."""

    values: Mapping[str, Any]  # by axis
    changes: Mapping[str, Any]  # those, and what conditions add
    run: Prepared

    def __str__(self) -> str:
        return ", ".join(f"{key}={show_value(value)}" for key, value in self.values.items())


def parse_axis(text: str) -> Axis:
    """`kv.block_size=8,16,32`: each value is YAML.

    Raises:
      UserError: there is no key, no value, or one twice.
    """
    key, values = _split(text, "--axis", "kv.block_size=8,16,32")
    found = configs.parse_value(f"[{values}]", f"--axis {key}")
    if not found or values.rstrip().endswith(","):
        raise UserError(f"--axis {key}: expected values between commas, got {values!r}")
    shown = [show_value(value) for value in found]
    if twice := [value for index, value in enumerate(shown) if value in shown[:index]]:
        raise UserError(f"--axis {key}: expected every value once, got {', '.join(dict.fromkeys(twice))} again")
    return Axis(key, tuple(found))


def parse_condition(where: str, then: str) -> Condition:
    """`kv.block_size=256` and `rows=4`: of the points with such blocks, `rows` is 4.

    Raises:
      UserError: one of the two has no key or no value.
    """
    (axis, value), (key, change) = (_split(text, "--when", "kv.block_size=256 rows=4") for text in (where, then))
    return Condition(
        axis, configs.parse_value(value, f"--when {axis}"), key, configs.parse_value(change, f"--when {key}")
    )


def make_points(
    axes: Sequence[Axis], conditions: Sequence[Condition], overrides: Mapping[str, str], make: Make
) -> list[Point]:
    """The product of the axes, the last one fastest.

    Args:
      axes: at least one.
      conditions: what else changes at some of the points.
      overrides: keys that are the same at all points.
      make: prepares the run of a point.

    Raises:
      UserError: a key is unknown or set twice, a value does not reach the config, changes nothing, or makes the same
        run as another one, or a condition holds nowhere.
    """
    _check_keys(axes, conditions, overrides)
    points: list[Point] = []
    for combination in itertools.product(*(axis.values for axis in axes)):
        values = {axis.key: value for axis, value in zip(axes, combination, strict=True)}
        changes: dict[str, Any] = dict(values)
        for condition in conditions:
            if show_value(values[condition.axis]) == show_value(condition.value):
                if condition.key in changes:
                    raise UserError(f"--when: {condition.key} is set twice where {_labels(values)}")
                changes[condition.key] = condition.then
        points.append(Point(values, changes, make(changes)))
    for point in points:
        for key, value in point.changes.items():
            _check_reached(point, key, value)
    _check_distinct(points)
    _check_changes(axes, points, make)
    return points


def _split(text: str, option: str, example: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals or not value.strip():
        raise UserError(f"{option}: expected a key and what it is, as in {option} {example}, got {text!r}")
    return key, value


def _labels(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={show_value(value)}" for key, value in values.items())


def _check_keys(axes: Sequence[Axis], conditions: Sequence[Condition], overrides: Mapping[str, str]) -> None:
    """Refuses keys that replace one another, and conditions that hold nowhere."""
    if not axes:
        raise UserError("sweep needs an axis, as in --axis kv.block_size=8,16,32")
    keys = [axis.key for axis in axes]
    for index, key in enumerate(keys):
        if key == "experiment":
            raise UserError("--axis experiment: a sweep is of one experiment")
        for other in keys[:index] + keys[index + 1 :] + [condition.key for condition in conditions]:
            if _within(other, key):
                raise UserError(f"--axis {key}: {other} is set beside it; give one of the two")
        for other in overrides:
            if _within(other, key):
                raise UserError(f"--axis {key}: --{other} would change nothing; leave it out")
    by_key = {axis.key: axis for axis in axes}
    for condition in conditions:
        if condition.axis not in by_key:
            near = did_you_mean(condition.axis, by_key)
            raise UserError(f"--when {condition.axis}: expected an axis of the sweep, one of {', '.join(keys)}{near}")
        values = [show_value(value) for value in by_key[condition.axis].values]
        if show_value(condition.value) not in values:
            raise UserError(
                f"--when {condition.axis}={show_value(condition.value)} holds at no point, so {condition.key} would "
                f"never change; the axis has {', '.join(values)}"
            )


def _within(key: str, group: str) -> bool:
    return key == group or key.startswith(f"{group}.")


def _check_reached(point: Point, key: str, value: Any) -> None:
    """Refuses a value that the resolved config does not have where it should."""
    node: Any = configs.resolved(point.run.config)
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            if value is None:
                return  # the group of keys was taken out
            raise UserError(f"{key}={show_value(value)} did not reach the resolved config, which has no {key}")
        node = node[name]
    if not isinstance(value, Mapping | list) and node != value:
        raise UserError(f"{key}={show_value(value)} did not reach the resolved config, which has {show_value(node)}")


def _check_distinct(points: Sequence[Point]) -> None:
    first: dict[str, Point] = {}
    for point in points:
        other = first.setdefault(point.run.name, point)
        if other is not point:
            keys = [key for key in point.values if show_value(point.values[key]) != show_value(other.values[key])]
            raise UserError(
                f"{' and '.join(keys)} must change what is computed, but the points {other} and {point} are the same "
                f"run {point.run.name}"
            )


def _check_changes(axes: Sequence[Axis], points: Sequence[Point], make: Make) -> None:
    """Refuses a key with which a point is the run that it would be without: points that differ prove their axes."""
    proven = {axis.key for axis in axes if len(axis.values) > 1}
    for point in points:
        for key in point.changes.keys() - proven:
            without = {other: value for other, value in point.changes.items() if other != key}
            try:
                same = make(without).name == point.run.name
            except UserError:
                same = False  # without the key it is no config at all
            if same:
                raise UserError(
                    f"{key}={show_value(point.changes[key])} changes nothing at the point {point}; leave it out"
                )
