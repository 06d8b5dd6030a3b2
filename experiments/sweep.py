"""`sweep`: the product of axes over one config, each point a run of its own, compared in one table, figure and page."""

import contextlib
import functools
import hashlib
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import rich.console

from experiments import config as configs
from experiments import files, jax_setup, manifest, results, sweep_report
from experiments import run as runs
from experiments.config import show_value
from experiments.errors import UserError
from experiments.progress import Progress
from experiments.run_directory import MANIFEST, SUMMARY, SWEEP, RunDirectory
from experiments.sweep_axes import Axis, Condition, Point, make_points, parse_axis, parse_condition
from pallas_kernels import choices

_MOST_TOGETHER = 128
"""Points whose directories are held open at once; systems open some hundred files."""


class Asked(NamedTuple):
    """What the command line says."""

    path: pathlib.Path  # of the config
    overrides: Mapping[str, str]
    axes: Sequence[str]  # as `parse_axis` reads them
    conditions: Sequence[Sequence[str]]  # pairs, as `parse_condition` reads them
    metric: str | None  # that the figure shows; None for the first one
    out_dir: pathlib.Path
    argv: Sequence[str]


def command(asked: Asked, experiments: Mapping[str, str], console: rich.console.Console) -> int:
    """Runs the points that are not finished, and shows all of them together.

    Returns:
      The exit code: 1 if a check of a point failed, or a point could not be computed.

    Raises:
      UserError: an axis, a key or a value is wrong, before anything runs; or a file cannot be read or written.
    """
    axes = [parse_axis(text) for text in asked.axes]
    conditions = [parse_condition(where, then) for where, then in asked.conditions]
    text = configs.read_text(asked.path)
    raw, comment = configs.override(configs.parse_yaml(text, asked.path), asked.overrides), configs.header(text)

    def make(changes: Mapping[str, Any]) -> runs.Prepared:
        return runs.prepare(runs.from_raw(configs.assign(raw, changes), comment, asked.path, experiments))

    jax_setup.configure()
    points = make_points(axes, conditions, asked.overrides, make)
    digest = _digest(axes, points)
    with RunDirectory.open(asked.out_dir / f"sweep-{points[0].run.experiment.name}-{digest[:8]}") as sweep_dir:
        facts = _facts(sweep_dir, asked, points, digest) | _described(axes, conditions)
        sweep_dir.write_json(SWEEP, facts)
        found: list[dict[str, Any]] = []
        for summary in _outcomes(points, asked, sweep_dir.path):
            if asked.metric is not None and not any(earlier["results"] for earlier in found):
                # Said at once, rather than when all is computed.
                sweep_report.require_metric(asked.metric, summary["results"])
            found.append(summary)
        facts |= {"finished": manifest.now(), "points": [_entry(*pair) for pair in zip(points, found, strict=True)]}
        sweep_dir.write_json(SWEEP, facts)
        sweep_report.write_points(sweep_dir, points, found)
    return sweep_report.show(sweep_dir.path, points[0].run.experiment, console)


def _digest(axes: Sequence[Axis], points: Sequence[Point]) -> str:
    """Of what is computed: the axes by their order, and the runs."""
    identity = [
        [[axis.key, [show_value(value) for value in axis.values]] for axis in axes],
        [[point.run.digest, point.run.config.seed] for point in points],
    ]
    return hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()


def _facts(sweep_dir: RunDirectory, asked: Asked, points: Sequence[Point], digest: str) -> dict[str, Any]:
    """What the sweep is of, with the versions that compute it; one that is taken up keeps those it had before."""
    facts = manifest.begin(sweep_dir.path.name, digest, points[0].run.config.seed, asked.argv)
    if (sweep_dir.path / SWEEP).exists():
        facts = manifest.resume(facts, sweep_dir.read_json(SWEEP))
    return facts | {
        "experiment": points[0].run.experiment.name,
        "question": points[0].run.comment,
        "seeds": sorted({point.run.config.seed for point in points}),
        "metric": asked.metric,
        "points": [_entry(point, None) for point in points],
    }


def _described(axes: Sequence[Axis], conditions: Sequence[Condition]) -> dict[str, Any]:
    return {
        "axes": {axis.key: [show_value(value) for value in axis.values] for axis in axes},
        "conditions": [
            {"where": {c.axis: show_value(c.value)}, "then": {c.key: show_value(c.then)}} for c in conditions
        ],
    }


def _entry(point: Point, summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `sweep.json` says of a point."""
    failures: list[str] = []
    if summary is not None:
        error = summary.get("error")
        failures = [error] if error else point.run.experiment.failed_checks(summary["results"])
    return {
        "values": {key: show_value(value) for key, value in point.values.items()},
        "run": point.run.name,
        "status": results.UNFINISHED if summary is None else summary["status"],
        "failures": failures,
    }


def _outcomes(points: Sequence[Point], asked: Asked, path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The summary of each point, in order; with `error` and without results for one that could not be computed."""
    finished = {point.run.name: summary for point in points if (summary := _finished(point, asked.out_dir)) is not None}
    waiting = [point for point in points if point.run.name not in finished]
    if waiting and points[0].run.experiment.run_together is not None:
        print(f"computing {len(waiting)} of {len(points)} points together", file=sys.stderr)
        parts = (waiting[first : first + _MOST_TOGETHER] for first in range(0, len(waiting), _MOST_TOGETHER))
        computed = itertools.chain.from_iterable(_together(part, asked, path) for part in parts)
    else:
        computed = (_attempt(point, asked, functools.partial(_alone, point, asked)) for point in waiting)
    for index, point in enumerate(points, 1):
        where = f"[{index}/{len(points)}] {point}: {point.run.name}"
        if point.run.name in finished:
            print(f"{where} is finished", file=sys.stderr)
            yield finished[point.run.name]
        else:
            print(where, file=sys.stderr)
            yield next(computed)


def _finished(point: Point, out_dir: pathlib.Path) -> dict[str, Any] | None:
    path = out_dir / point.run.name
    if not (path / SUMMARY).exists():
        return None
    if files.read_json(path / MANIFEST)["config_sha256"] != point.run.digest:
        raise UserError(f"{path} belongs to another config with the same short hash; choose another --out_dir")
    runs.warn_of_other_code(path)
    return files.read_json(path / SUMMARY)


def _attempt(point: Point, asked: Asked, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it computes, or an unfinished point that says why: others lose nothing by it, and may be tried again."""
    try:
        return compute()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        experiment = point.run.experiment.name
        summary = results.summary(experiment, str(asked.out_dir / point.run.name), results.UNFINISHED, {})
        return summary | {"error": str(error)}


def _alone(point: Point, asked: Asked) -> dict[str, Any]:
    return runs.run_one(point.run, asked.out_dir, _argv(point, asked), Progress())


def _together(points: Sequence[Point], asked: Asked, path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The summary of each point, all of which the experiment computes in one go."""
    experiment = points[0].run.experiment
    assert experiment.run_together is not None
    with contextlib.ExitStack() as stack:
        run_dirs = [stack.enter_context(runs.begun(p.run, asked.out_dir, _argv(p, asked))) for p in points]
        kernels = stack.enter_context(choices.recording())
        stack.enter_context(runs.refusals_told(path))
        found = experiment.run_together([point.run.config for point in points], run_dirs, Progress())
        for point, run_dir, of_point in zip(points, run_dirs, found, strict=True):
            yield _attempt(point, asked, functools.partial(_finish, point.run, run_dir, of_point, kernels))


def _finish(
    prepared: runs.Prepared, run_dir: RunDirectory, compute: Callable[[], Any], kernels: Mapping[str, Any]
) -> dict[str, Any]:
    with runs.refusals_told(run_dir.path):
        found = compute()
    return runs.finish(prepared, run_dir, found, kernels)


def _argv(point: Point, asked: Asked) -> list[str]:
    """The arguments that make this one run."""
    values = dict(asked.overrides) | {key: show_value(value) for key, value in point.changes.items()}
    flags = [f"--{key}={value}" for key, value in values.items()]
    return ["run", str(asked.path), *flags, "--out_dir", str(asked.out_dir)]
