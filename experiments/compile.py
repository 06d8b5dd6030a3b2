"""Do the kernels fit the machines they are for? Compiled for devices that need not be there, and held to limits.

Cases are compiled in processes, a few in each; those of one that aborts or hangs are compiled again one by one, so that
it costs one case alone. The figures are the compilers' own, counted once as they stand in the code; nothing is run.
"""

import concurrent.futures
import dataclasses
import fnmatch
import itertools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console

from experiments import config as configs
from experiments import files, results
from experiments.errors import UserError, require_matches
from experiments.progress import Progress
from pallas_kernels import offline
from pallas_kernels.targets import TOPOLOGIES

DESCRIPTION = "Kernels compiled for GPUs and TPUs that need not be there, and held to limits."

METRICS: Mapping[str, Sequence[str]] = {
    "gpu": (
        "registers",
        "spills",
        "shared_memory_bytes",
        "resident_warps",
        "wide_loads",
        "async_copies",
        "wgmma",
        "temp_bytes",
        "collectives",
    ),
    "tpu": (
        "bundles_per_mib",
        "cycles_per_mib",
        "cycles_over_allowed",
        "vmem_bytes",
        "spills",
        "temp_bytes",
        "collectives",
    ),
}

TOGETHER = 6  # cases of a process

GLOSSARY: Mapping[str, str] = {
    "registers": "registers of a thread; fewer let more warps be resident",
    "spills": "bytes (GPU) or vector registers (TPU) that did not fit the registers and go through memory",
    "shared_memory_bytes": "shared memory of a thread block",
    "resident_warps": "warps that a multiprocessor holds at once, of 64",
    "wide_loads": "16-byte loads from global memory in the code, through registers or asynchronous",
    "async_copies": "loads from global to shared memory that no thread waits for",
    "wgmma": "tensor-core instructions of a whole warp group",
    "bundles_per_mib": "instructions issued by the inner loop for each MiB of keys and values",
    "cycles_per_mib": "the same with the empty slots of the schedule, which is its time without a stall",
    "cycles_over_allowed": "those cycles over the cycles in which memory delivers a MiB: below 1 the kernel keeps up",
    "vmem_bytes": "vector memory that the kernel asks for",
    "temp_bytes": "memory of each device that the program needs besides arguments and results",
    "collectives": "operations that exchange data between devices",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compiled, and what must hold.

    Attributes:
      experiment: compile.
      seed: has no effect.
      targets: devices and groups of them, such as h100, h100x8, v6e, tpu7x-8.
      cases: patterns of kernel/case, such as paged_decode/d128_*.
      on_demand: whether cases are compiled as well that every change is not held to.
      jobs: processes that compile at once.
      time_limit_s: of each process, for each of its cases.
      at_most: largest values by pattern of target/kernel/case and metric.
      at_least: smallest values likewise.
    """

    experiment: str = "compile"
    seed: int = 0
    targets: tuple[str, ...] = ("h100", "v5e", "v6e", "tpu7x")
    cases: tuple[str, ...] = ("*/*",)
    on_demand: bool = False
    jobs: int = 2
    time_limit_s: float = 300.0
    at_most: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    at_least: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


def resolve(config: Config) -> Config:
    """Refuses targets and cases that do not exist, and compilers that are not installed."""
    for target in config.targets:
        if target not in TOPOLOGIES:
            raise ValueError(f"targets must be of {', '.join(TOPOLOGIES)}, got {target!r}")
    if config.jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {config.jobs}")
    known = [f"{kernel}/{case}" for _, kernel, case in jobs(dataclasses.replace(config, cases=("*/*",)))]
    require_matches(config.cases, known, ", ".join(config.targets))
    return config


def jobs(config: Config) -> list[tuple[str, str, str]]:
    """Target, kernel and case of all that a config asks for."""
    from pallas_kernels import offline_cases

    return [
        (target, kernel, case)
        for target in config.targets
        for kernel in offline_cases.KERNELS
        for case in offline_cases.cases(kernel, TOPOLOGIES[target].target.platform, on_demand=config.on_demand)
        if any(fnmatch.fnmatch(f"{kernel}/{case}", pattern) for pattern in config.cases)
    ]


def run(config: Config, run_dir: Any, progress: Progress) -> results.Results:
    """Compiles every case that a config asks for.

    Returns:
      Metrics by target/kernel/case, with `broken` where they are past a limit; `status` and `message` where there is
      nothing to measure.

    Raises:
      ValueError: a compiler is not installed.
    """
    from pallas_kernels import offline_cases

    del run_dir  # the results are all there is
    work = jobs(config)
    found: dict[str, dict[str, results.Value]] = {}
    chunks: list[tuple[str, list[tuple[str, str]]]] = []
    # Those of a process have one environment.
    for _, group in itertools.groupby(work, key=lambda job: (job[0], offline_cases.environment(job[0], job[1]))):
        together = list(group)
        target, names = together[0][0], [(kernel, case) for _, kernel, case in together]
        chunks += [(target, names[i : i + TOGETHER]) for i in range(0, len(names), TOGETHER)]
    with concurrent.futures.ThreadPoolExecutor(config.jobs) as pool, progress.task("compile", len(work)) as advance:
        done = pool.map(lambda chunk: _compile(chunk[0], chunk[1], config.time_limit_s), chunks)
        outcomes = (outcome for chunk in done for outcome in chunk)
        for (target, kernel, case), outcome in zip(work, outcomes, strict=True):
            name = f"{target}/{kernel}/{case}"
            advance(note=name)
            if outcome.status == "missing":
                pool.shutdown(cancel_futures=True)
                raise ValueError(outcome.message)
            if outcome.status == "ok":
                metrics = METRICS[TOPOLOGIES[target].target.platform]
                found[name] = {metric: outcome.report[metric] for metric in metrics if metric in outcome.report}
                found[name] |= broken_limits(name, found[name], config)
            else:
                found[name] = {"status": outcome.status, "message": outcome.message}
    return found


def _compile(target: str, names: Sequence[tuple[str, str]], time_limit_s: float) -> list[offline.Outcome]:
    """Compiles kernels and cases in one process, and if that does not end well, each in one of its own."""
    from pallas_kernels import offline_cases

    outcome = offline.run_job(
        "pallas_kernels.offline_cases:compile_cases",
        {"target": target, "names": names},
        environment=offline_cases.environment(target, names[0][0]),
        time_limit_s=time_limit_s * len(names),
    )
    if outcome.status == "ok":
        return [offline.Outcome(**each, seconds=outcome.seconds) for each in outcome.report["outcomes"]]
    if len(names) == 1:
        return [outcome]
    return [one for name in names for one in _compile(target, [name], time_limit_s)]


def broken_limits(name: str, row: Mapping[str, results.Value], config: Config) -> dict[str, results.Value]:
    """`broken`, a text that says which limits the metrics of a target/kernel/case are past; nothing if none."""
    broken = []
    for limits, words, sign in ((config.at_most, "at most", 1), (config.at_least, "at least", -1)):
        for pattern, metrics in limits.items():
            for metric, limit in metrics.items() if fnmatch.fnmatch(name, pattern) else ():
                value = row.get(metric)
                if not isinstance(value, int | float) or sign * value > sign * limit:
                    broken.append(f"{metric} must be {words} {limit:g}, got {value}")
    return {"broken": "; ".join(broken)} if broken else {}


def failed_checks(found: results.Results) -> list[str]:
    """A sentence for each case that did not compile or is past a limit of the config."""
    return [f"{name} was {row['status']}: {row['message']}" for name, row in found.items() if "status" in row] + [
        f"{name}: {row['broken']}" for name, row in found.items() if "broken" in row
    ]


def tables(found: results.Results) -> list[results.Table]:
    """A table for each kind of device, one of what its metrics mean, and one of what did not compile."""
    shown = []
    for platform, metrics in METRICS.items():
        rows = {
            name: row
            for name, row in found.items()
            if "status" not in row and TOPOLOGIES[name.split("/")[0]].target.platform == platform
        }
        if rows:
            columns = [results.show([row.get(metric) for row in rows.values()]) for metric in metrics]
            body = [[name, *row] for name, row in zip(rows, zip(*columns, strict=True), strict=True)]
            shown.append(results.Table(["", *metrics], body))
    explained = [metric for metric in GLOSSARY if any(metric in table.headings for table in shown)]
    if explained:
        shown.append(results.Table(["metric", "meaning"], [[metric, GLOSSARY[metric]] for metric in explained]))
    failures = [[name, str(row["status"]), str(row["message"])] for name, row in found.items() if "status" in row]
    return [*shown, *([results.Table(["not compiled", "status", "why"], failures)] if failures else [])]


def load(what: str, overrides: Mapping[str, str]) -> Config:
    """The config of a file, or of a pattern of kernel/case, with overrides.

    Raises:
      UserError: the file, a key or a value is wrong.
    """
    path = pathlib.Path(what)
    raw = configs.read_yaml(path) if path.suffix in (".yaml", ".yml") else {"cases": [what], "on_demand": True}
    return configs.decode(Config, configs.override(raw, overrides))


def command(what: str, overrides: Mapping[str, str], out: pathlib.Path | None, console: rich.console.Console) -> int:
    """`python -m experiments compile`: prints the tables and, as one line of JSON, the summary.

    Args:
      what: a config, or a pattern of kernel/case.
      overrides: values for keys of the config.
      out: a file that gets the summary as JSON as well.
      console: of the tables.

    Returns:
      The exit code: 1 if a case did not compile or is past a limit.

    Raises:
      UserError: the config is wrong, a compiler is not installed, or `out` cannot be written.
    """
    if out is not None:
        files.require_writable(out)
    config = load(what, overrides)
    try:
        found = run(resolve(config), None, Progress())
    except ValueError as error:
        raise UserError(str(error)) from error
    results.render(tables(found), console)
    failures = failed_checks(found)
    for failure in failures:
        print(f"check failed: {failure}", file=sys.stderr)
    summary = results.summary("compile", "", results.FAILED if failures else results.FINISHED, found)
    print(results.summary_line(summary))
    if out is not None:
        files.write_text(out, json.dumps(summary, indent=1) + "\n")
    return 1 if failures else 0
