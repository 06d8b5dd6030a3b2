"""Which sizes suit a kernel on a device? Tries candidates, each in a process that may crash or hang, keeps the best.

On the device that is here, candidates are timed and their outputs compared with the reference. For a TPU that is not
here, what the compiler's schedule costs is all there is to go by, and entries say that they are modelled.
"""

import concurrent.futures
import dataclasses
import fnmatch
import importlib.metadata
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import rich.console

from experiments import config as configs
from experiments import files, results
from experiments.errors import UserError, require_matches
from experiments.progress import Progress
from pallas_kernels import offline, tuning
from pallas_kernels.paged_attention.shapes import AttentionCase
from pallas_kernels.targets import TOPOLOGIES

BACKENDS = {"gpu": "triton", "tpu": "mosaic_tpu"}
MEASURE = "experiments.tune_job:measure"
COMPILE = "pallas_kernels.offline_cases:compile_case"
MIB = 2**20
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


@dataclasses.dataclass(frozen=True)
class Config:
    """What is tried.

    Attributes:
      seed: of keys, values, queries and tables.
      target: a TPU of `experiments compile`; null for the device that is here.
      cases: patterns of kernel/case, such as paged_decode/d128_*.
      grids: for `decode` and `prefill`, values to try by field of the kernel's sizes; each with each other.
      backend: whose kernels; null for those of the device.
      repeats: rounds in which a candidate is timed.
      calls: calls of a round, one after another without a wait.
      jobs: processes at once; more than 1 only for a target that is not here.
      time_limit_s: of each process.
      least_gain: by how much a candidate must beat the default to be kept, as a fraction of its own cost.
    """

    seed: int = 0
    target: str | None = None
    cases: tuple[str, ...] = ("paged_decode/*",)
    grids: dict[str, dict[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    backend: str | None = None
    repeats: int = 11
    calls: int = 10
    jobs: int = 1
    time_limit_s: float = 120.0
    least_gain: float = 0.03


class Device(NamedTuple):
    """What is tuned for."""

    platform: str
    kind: str
    here: bool


class Trial(NamedTuple):
    """What became of one candidate for one case; `value` in the metric, None unless it ran."""

    sizes: dict[str, int]
    status: str
    message: str
    value: float | None


def load(path: pathlib.Path, overrides: Mapping[str, str]) -> Config:
    """The config of a file, with overrides.

    Raises:
      UserError: the file, a key or a value is wrong.
    """
    return configs.decode(Config, configs.override(configs.read_yaml(path), overrides))


def command(
    path: pathlib.Path,
    overrides: Mapping[str, str],
    install: bool,
    out: pathlib.Path | None,
    console: rich.console.Console,
) -> int:
    """`python -m experiments tune`: prints what was found and, as one line of JSON, the summary.

    Args:
      path: of the config.
      overrides: values for keys of the config.
      install: whether the entries go into the table of the device's kind, from which kernels take their sizes.
      out: a file that gets the summary, every trial included, as JSON.
      console: of the tables.

    Returns:
      The exit code: 1 if no candidate of some case ran.

    Raises:
      UserError: the config is wrong, there is nothing to rank candidates by, or what is found cannot be written.
    """
    if out is not None:
        files.require_writable(out)
    config = load(path, overrides)
    try:
        device = describe(config)
        work = cases(config, device)
    except ValueError as error:
        raise UserError(str(error)) from error
    if install:
        require_installable(config, device, work)
    found: dict[str, dict[str, results.Value]] = {}
    trials: dict[str, list[Trial]] = {}
    tried = [(kernel, case, sizes) for kernel, case in work for sizes in candidates(config, case)]
    with concurrent.futures.ThreadPoolExecutor(config.jobs) as pool, Progress().task("tune", len(tried)) as advance:
        done = pool.map(lambda one: attempt(config, device, *one), tried)
        for (kernel, case), group in itertools.groupby(zip(tried, done, strict=True), key=lambda pair: pair[0][:2]):
            name = f"{kernel}/{case.name}"
            trials[name] = []
            for _, trial in group:
                advance(note=f"{name} {trial.sizes or 'default'}")
                trials[name].append(trial)
            found[name] = judge(trials[name], config.least_gain)
            if install and "sizes" in found[name]:
                keep(device, case.entry_name(kernel), found[name], metric(device))
    unit = metric(device)
    results.render(tables(found, trials, unit), console)
    better = sum(row.get("sizes", "{}") != "{}" for row in found.values())
    where = "installed in" if install else "that --install would keep in"
    print(f"{better} of {len(found)} cases have better sizes {where} {tuning.table_path(device.kind)}", file=sys.stderr)
    failures = [name for name, row in found.items() if row["best"] is None]
    for name in failures:
        print(f"no candidate of {name} ran", file=sys.stderr)
    status = results.FAILED if failures else results.FINISHED
    summary = results.summary("tune", "", status, found) | {"device_kind": device.kind, "metric": unit}
    print(results.summary_line(summary))
    if out is not None:
        every = {name: [trial._asdict() for trial in each] for name, each in trials.items()}
        files.write_text(out, json.dumps(summary | {"trials": every}, indent=1) + "\n")
    return 1 if failures else 0


def describe(config: Config) -> Device:
    """The device that a config asks for.

    Raises:
      ValueError: there is no such target, it is a GPU that is not here, or no device answers.
    """
    if config.target is not None:
        if config.target in TOPOLOGIES and TOPOLOGIES[config.target].target.platform != "tpu":
            raise ValueError(
                f"target must be a TPU or null, got {config.target}: the compiler for GPUs does not say how long a "
                "kernel takes, so that candidates must be timed on the device itself"
            )
        if config.target not in tpus():
            raise ValueError(f"target must be one of {', '.join(tpus())}, got {config.target!r}")
        target = TOPOLOGIES[config.target].target
        return Device(target.platform, target.device_kind, here=False)
    outcome = offline.run_job("experiments.tune_job:describe_device", {}, environment=_environment(), time_limit_s=120)
    if outcome.status != "ok":
        raise ValueError(f"target must be given, as the device here does not answer: {outcome.message}")
    return Device(outcome.report["platform"], outcome.report["kind"], here=True)


def tpus() -> list[str]:
    """The targets whose compiler says what a kernel costs."""
    return [name for name, each in TOPOLOGIES.items() if each.target.platform == "tpu" and each.num_devices == 1]


def cases(config: Config, device: Device) -> list[tuple[str, AttentionCase]]:
    """The kernels and cases that a config asks for.

    Raises:
      ValueError: a pattern matches none, a grid is of no kind, a count is below 1, or no kernels run on the device.
    """
    from pallas_kernels import offline_cases

    if unknown := sorted(set(config.grids) - {"decode", "prefill"}):
        raise ValueError(f"grids must be of decode and prefill, got {unknown}")
    if config.backend is None and device.platform not in BACKENDS:
        raise ValueError(
            f"target must be one of {', '.join(tpus())} where there is no GPU or TPU, got null: JAX finds a "
            f"{device.platform} here. If there is one, install the jax that uses it: jax[cuda13] or jax[tpu]"
        )
    for name in ("jobs", "repeats", "calls"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.jobs > 1 and device.here:
        raise ValueError(f"jobs must be 1 where candidates are timed, got {config.jobs}")
    kernels = [f"{memory}_{kind}" for memory in ("paged", "contiguous") for kind in ("decode", "prefill")]
    known = [
        (kernel, case)
        for kernel in kernels
        for case in offline_cases.KERNELS[kernel].cases
        if device.platform in case.platforms and kernel.endswith(case.kind) and (device.here or case.offline)
    ]
    require_matches(config.cases, [f"{kernel}/{case.name}" for kernel, case in known], device.kind)
    chosen = [
        (kernel, case)
        for kernel, case in known
        if any(fnmatch.fnmatch(f"{kernel}/{case.name}", pattern) for pattern in config.cases)
    ]
    if not device.here and any(case.kind == "prefill" for _, case in chosen):
        raise ValueError(
            "cases must be of decode for a TPU that is not here: a schedule does not say what larger tiles of queries "
            "save"
        )
    return chosen


def require_installable(config: Config, device: Device, work: Sequence[tuple[str, AttentionCase]]) -> None:
    """Refuses to install what kernels on the device would not use, or what could not be kept.

    Raises:
      UserError: the backend is not the device's, two cases would write one entry, or the table is damaged or cannot be
        written.
    """
    if config.backend not in (None, BACKENDS.get(device.platform)):
        raise UserError(f"--install is for kernels that run on the device, got the backend {config.backend}")
    names: dict[str, list[str]] = {}
    for kernel, case in work:
        names.setdefault(case.entry_name(kernel), []).append(f"{kernel}/{case.name}")
    for entry, sharing in names.items():
        if len(sharing) > 1:
            raise UserError(f"--install needs one case for each entry, got {' and '.join(sharing)} for {entry}")
    path = tuning.table_path(device.kind)
    files.require_writable(path)
    try:
        tuning.read_table(path)
    except tuning.SizesError as error:
        raise UserError(str(error)) from error


def candidates(config: Config, case: AttentionCase) -> list[dict[str, int]]:
    """The default, which changes nothing, and the grid's combinations."""
    grid = config.grids.get(case.kind, {})
    return [{}, *(dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()) if grid)]


def attempt(config: Config, device: Device, kernel: str, case: AttentionCase, sizes: dict[str, int]) -> Trial:
    """Tries a candidate in a process of its own."""
    arguments: dict[str, Any] = {"kernel": kernel, "case": case.name, "sizes": sizes}
    if device.here:
        arguments |= {"backend": config.backend or BACKENDS[device.platform]}
        arguments |= {name: getattr(config, name) for name in ("seed", "repeats", "calls")}
        job, environment = MEASURE, _environment()
    else:
        from pallas_kernels import offline_cases

        assert config.target is not None
        arguments |= {"target": config.target}
        job, environment = COMPILE, offline_cases.environment(config.target, kernel)
    outcome = offline.run_job(job, arguments, environment=environment, time_limit_s=config.time_limit_s)
    if outcome.status == "missing":
        raise UserError(outcome.message)
    value = None
    if outcome.status == "ok":
        value = outcome.report["ms"] if device.here else cycles_per_seq(case, outcome.report)
    return Trial(sizes, outcome.status, outcome.message, value)


def cycles_per_seq(case: AttentionCase, report: Mapping[str, float]) -> float:
    """Cycles of the schedule for one sequence as long as it can be: those of its keys and values, and those around."""
    slots = case.blocks_per_seq * case.block_size
    kv_bytes = 2 * slots * case.kv_heads * case.head_dim * jnp.dtype(case.kv_dtype).itemsize
    return report["cycles_per_mib"] * kv_bytes / MIB + report["outer_cycles"]


def metric(device: Device) -> str:
    """What trials are ranked by."""
    return "ms" if device.here else "cycles_per_seq (modelled)"


def judge(trials: Sequence[Trial], least_gain: float) -> dict[str, results.Value]:
    """The best of the trials, the default's among them, and its `sizes` if it is worth keeping: {} for the default."""
    ran = [trial for trial in trials if trial.value is not None]
    row: dict[str, results.Value] = {"tried": len(trials), "failed": len(trials) - len(ran)}
    default = next((trial.value for trial in ran if not trial.sizes), None)
    best = min(ran, key=lambda trial: trial.value or 0.0, default=None)
    row |= {"default": default, "best": None if best is None else best.value}
    if best is None or best.value is None:
        return row
    gain = None if default is None else default / best.value - 1
    kept = best.sizes if gain is None or gain >= least_gain else {}
    return row | {"gain": gain, "sizes": json.dumps(kept)}


def keep(device: Device, name: str, row: Mapping[str, results.Value], unit: str) -> None:
    """Writes an entry into the table of the device's kind, or takes it out where the default is best."""
    path = tuning.table_path(device.kind)
    entries = dict(tuning.read_table(path))
    entries.pop(name, None)
    sizes = json.loads(str(row["sizes"]))
    if sizes:
        entries[name] = {
            "sizes": sizes,
            "how": "measured" if device.here else "modelled",
            "metric": unit.split()[0],
            "value": row["best"],
            "default": row["default"],
            "versions": _versions(),
        }
    table = {"device_kind": device.kind, "entries": dict(sorted(entries.items()))}
    files.write_text(path, json.dumps(table, indent=1) + "\n")
    tuning.read_table.cache_clear()


def tables(
    found: Mapping[str, dict[str, results.Value]], trials: Mapping[str, Sequence[Trial]], unit: str
) -> list[results.Table]:
    """The best of each case, and what did not run."""
    columns = ("tried", "failed", "default", "best", "gain", "sizes")
    rows = [row | {"sizes": "default"} if row.get("sizes") == "{}" else row for row in found.values()]
    shown = [results.show([row.get(column) for row in rows]) for column in columns]
    best = results.Table(
        ["", *columns], [[name, *row] for name, row in zip(found, zip(*shown, strict=True), strict=True)], unit
    )
    failures = [
        [name, json.dumps(trial.sizes), trial.status, trial.message]
        for name, each in trials.items()
        for trial in each
        if trial.status != "ok"
    ]
    return [best, *([results.Table(["did not run", "sizes", "status", "why"], failures)] if failures else [])]


def _environment() -> dict[str, str]:
    """Of a process that uses the device: JAX chooses the platform as in this one, and takes no more than it needs."""
    return {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
