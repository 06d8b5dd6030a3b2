"""`calibrate`: the affine clock that is nearest to what a run measured, from its table of steps.

A run measures how long a dispatch of several steps took, and says what each step did. Non-negative least squares give
what a step, a computed token and a stored token that attention reads take; what is left over is said too.
"""

import pathlib
from typing import NamedTuple

import numpy as np
import polars as pl
import rich.console
import scipy.optimize

from experiments import config as configs
from experiments import files, results
from experiments.errors import UserError
from experiments.run_directory import CONFIG

LEAST_DISPATCHES = 4
"""That differ: one more than there are figures to be found."""


class Fit(NamedTuple):
    """An affine clock, and how near it comes to what was measured."""

    step_ns: int
    token_ns: int
    kv_token_ns: int
    r_squared: float  # share of the variance of dispatches that it explains; below 0 if their mean is nearer
    mean_error_ms: float  # mean absolute one, of a dispatch
    mean_dispatch_ms: float  # as measured
    dispatches: int


def command(run: pathlib.Path, out: pathlib.Path | None, console: rich.console.Console) -> int:
    """Fits each part of a run, prints what was found, and writes it.

    Args:
      run: directory of a run whose steps were measured; nothing in it is changed.
      out: a file for the results; `<run>.calibration.json` beside the run if None.
      console: for the table.

    Raises:
      UserError: the run has no such steps, or they do not tell the figures apart.
    """
    out = run.with_name(f"{run.resolve().name}.calibration.json") if out is None else out
    files.require_writable(out)
    if out.resolve().is_relative_to(run.resolve()):
        raise UserError(f"--out {out} lies in {run}, which stays as it is; choose another folder")
    steps_per_dispatch = configs.read_yaml(run / CONFIG).get("steps_per_dispatch", 16)
    if type(steps_per_dispatch) is not int or steps_per_dispatch < 1:
        raise UserError(
            f"steps_per_dispatch of {run / CONFIG}: expected a whole number of at least 1, got {steps_per_dispatch!r}"
        )
    steps = files.read_parquet(run / "steps.parquet")
    fits = {name: fit(part, steps_per_dispatch, name) for name, part in _parts(steps, run).items()}
    found = {name: one._asdict() for name, one in fits.items()}
    results.render([results.table(found, frozenset())], console)
    for name, one in fits.items():
        console.print(f"{name}:\n  {yaml_of(one)}", markup=False)
    files.write_json(out, {"run": str(run), "steps_per_dispatch": steps_per_dispatch, "fits": found})
    print(results.summary_line(results.summary("calibrate", str(run), results.FINISHED, found)))
    return 0


def yaml_of(found: Fit) -> str:
    """The key of a config that takes this clock."""
    return f"cost: {{step_ns: {found.step_ns}, token_ns: {found.token_ns}, kv_token_ns: {found.kv_token_ns}}}"


def fit(steps: pl.DataFrame, steps_per_dispatch: int, name: str = "steps") -> Fit:
    """The clock that is nearest to these steps.

    Args:
      steps: of one server, with `step`, `wall_ms` (of a dispatch, shared out over its steps), `new_tokens` and
        `kv_tokens`; steps in which nothing happened may be missing, and count.
      steps_per_dispatch: steps that were measured together.
      name: of the server, for errors.

    Raises:
      UserError: too few dispatches differ, or two of the figures cannot be told apart.
    """
    dispatches = (
        steps.group_by(pl.col("step") // steps_per_dispatch)
        .agg(pl.first("wall_ms") * steps_per_dispatch, pl.col("new_tokens", "kv_tokens").cast(pl.Int64).sum())
        .sort("step")
    )
    distinct = dispatches.select("new_tokens", "kv_tokens").n_unique()
    if distinct < LEAST_DISPATCHES:
        raise UserError(
            f"{name}: a fit needs at least {LEAST_DISPATCHES} dispatches that differ in their tokens, got {distinct}; "
            "measure a longer run, or one with a lower steps_per_dispatch"
        )
    measured_ms = dispatches["wall_ms"].to_numpy()
    if np.ptp(measured_ms) == 0:
        raise UserError(
            f"{name}: expected dispatches that take longer the more they compute, got {measured_ms[0]:g} ms for all of "
            "them; measure the run again"
        )
    counts = dispatches.select("new_tokens", "kv_tokens").to_numpy().astype(np.float64)
    work = np.column_stack([np.full(len(counts), float(steps_per_dispatch)), counts])
    scales = work.max(axis=0)
    if not scales.all() or np.linalg.matrix_rank(work / scales, tol=1e-6) < work.shape[1]:
        raise UserError(
            f"{name}: new_tokens and kv_tokens of its dispatches are constant or in proportion, so that their costs "
            "cannot be told apart; measure a run with prompts and outputs of several lengths"
        )
    scaled_ms, _ = scipy.optimize.nnls(work / scales, measured_ms)
    step_ns, token_ns, kv_token_ns = (round(float(ns)) for ns in scaled_ms / scales * 1e6)
    step_ns = max(1, step_ns)  # a step always takes some time
    error_ms = measured_ms - work @ np.array([step_ns, token_ns, kv_token_ns]) / 1e6
    return Fit(
        step_ns,
        token_ns,
        kv_token_ns,
        r_squared=1 - float(np.sum(error_ms**2) / np.sum((measured_ms - measured_ms.mean()) ** 2)),
        mean_error_ms=float(np.abs(error_ms).mean()),
        mean_dispatch_ms=float(measured_ms.mean()),
        dispatches=len(dispatches),
    )


def _parts(steps: pl.DataFrame, run: pathlib.Path) -> dict[str, pl.DataFrame]:
    """The steps of each server, by name, without those that were not measured."""
    needed = {"step", "wall_ms", "new_tokens", "kv_tokens"}
    if not needed <= set(steps.columns):
        raise UserError(
            f"{run} has no measured steps: steps.parquet lacks {', '.join(sorted(needed - set(steps.columns)))}; "
            "calibrate takes runs that serve a model, such as those of paged_vs_contiguous"
        )
    measured = steps.filter(pl.col("wall_ms").is_not_null())
    if measured.is_empty():
        raise UserError(f"{run} has no measured steps: none has a wall_ms; calibrate takes runs that serve a model")
    for column in sorted(needed):
        dtype = measured.schema[column]
        if not (dtype.is_numeric() if column == "wall_ms" else dtype.is_integer()):
            wanted = "numbers" if column == "wall_ms" else "whole numbers"
            raise UserError(f"{run}: expected {wanted} in {column} of steps.parquet, got {dtype}")
    if odd := measured.filter(~pl.col("wall_ms").is_finite())["wall_ms"].to_list():
        raise UserError(f"{run}: expected finite times in wall_ms of steps.parquet, got {odd[0]} in {len(odd)} steps")
    names = [name for name, kind in measured.schema.items() if kind == pl.String or name == "replica"]
    if not names:
        return {"steps": measured}
    groups = measured.partition_by(names, as_dict=True, maintain_order=True)
    return {"-".join(map(str, key)): part for key, part in groups.items()}
