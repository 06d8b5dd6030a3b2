"""How fast a whole trace is simulated: alone, again, and as many points of a sweep in one compiled program."""

import dataclasses
import hashlib
import itertools
import math
import statistics
import time
from typing import Any, Literal

import jax
import numpy as np
import polars as pl

from experiments import jax_setup, metrics
from experiments.progress import Progress
from experiments.results import Results, Table, columns
from experiments.run_directory import RunDirectory
from experiments.simulation import Server, make_simulator, to_requests, to_tables
from experiments.workloads.config import WorkloadConfig, load_workload, with_sha256
from experiments.workloads.workload import Workload
from paxkv.config import MemoryConfig
from paxkv.memory import limits
from paxkv.policy import Policy, choices
from paxkv.requests import Reason
from paxkv.simulate import Simulation, Simulator, init_simulation, require_sound, take_records
from paxkv.simulate import run as run_simulation
from paxkv.simulate_points import point_mesh, run_points, stack
from paxkv.sizes import require_int

DESCRIPTION = "Simulating a whole trace: seconds, requests and steps a second, and what a sweep costs beside one run."
GLOSSARY = {
    "seconds": "wall time of a simulation once it is compiled, median",
    "seconds_low": "the fastest",
    "seconds_high": "the slowest",
    "requests_per_s": "requests simulated in a second of wall time",
    "steps_per_s": "steps of the server simulated in a second of wall time",
    "steps": "steps of the server",
    "turns": "strides in which they were taken; in between nothing changes but lengths",
    "compile_s": "wall time to compile one simulation",
    "repeated_equal": "whether every repetition gave the same records and requests, bit for bit",
    "points": "points of the sweep",
    "sweep_seconds": "wall time of all of them",
    "sweep16_over_one": "the same over `seconds`, for 16 points",
    "sweep_compile_s": "wall time to compile the sweep, once for all points",
    "swept_equal": "whether the first point, which is the run alone, is the same in the sweep, bit for bit",
    "mean_running": metrics.GLOSSARY["mean_running"],
    "makespan_s": "modelled time from the first arrival to the last token",
}
MODELLED = frozenset({"makespan_s"})


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Points: every combination of these.

    Attributes:
      num_blocks: blocks that may be used; the memory's `num_blocks` first.
      watermarks: blocks kept back from admissions.
      policies: of the scheduler; the server's first.
      time_scales: factors on the arrival times; 1 first.
    """

    num_blocks: tuple[int, ...]
    watermarks: tuple[int, ...]
    policies: tuple[Policy, ...]
    time_scales: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Config:
    """One server and trace, alone and swept.

    Attributes:
      experiment: `simulator_bench`.
      seed: nothing here is drawn unless the workload is.
      server: what is simulated; its policy is the first of the sweep.
      memory: paged.
      workload: what is asked of it.
      sweep: the points that are simulated together.
      cpu_devices: that a CPU is made to look like; the sweep is dealt to them.
      repeats: simulations of the run alone that are timed.
      max_records: steps for which there is room on the device.
      max_seconds: that the run alone may take; null for any.
      max_sweep_over_one: times that of the run alone that the sweep may take; null for any.
    """

    server: Server
    workload: WorkloadConfig
    sweep: Sweep
    experiment: Literal["simulator_bench"] = "simulator_bench"
    seed: int = 0
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    cpu_devices: int = 2
    repeats: int = 3
    max_records: int = 2**18
    max_seconds: float | None = None
    max_sweep_over_one: float | None = None


def resolve(config: Config) -> Config:
    """Refuses what cannot run, and names the trace by its hash.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    jax_setup.use_cpu_devices(require_int("cpu_devices", config.cpu_devices))
    require_int("repeats", config.repeats)
    require_int("max_records", config.max_records)
    if config.memory.kind != "paged" or config.memory.num_blocks is None:
        raise ValueError("memory: expected kind: paged with num_blocks, which the sweep varies, got another")
    own = _points(config.sweep)[0]
    watermark = make_simulator(config.server, config.memory).memory.own_limits.watermark
    for name, first, wanted in (
        ("num_blocks", own[0], config.memory.num_blocks),
        ("watermarks", own[1], int(watermark)),
        ("policies", own[2], config.server.policy),
        ("time_scales", own[3], 1.0),
    ):
        if first != wanted:
            raise ValueError(f"sweep.{name}: expected {wanted!r} first, as in the run alone, got {first!r}")
    if max(config.sweep.num_blocks) > config.memory.num_blocks:
        raise ValueError(
            f"sweep.num_blocks: expected at most memory.num_blocks = {config.memory.num_blocks}, got "
            f"{max(config.sweep.num_blocks)}"
        )
    _require_points(config)
    return dataclasses.replace(config, workload=with_sha256(config.workload))


def _require_points(config: Config) -> None:
    """Refuses a sweep that would fail once the run alone is done."""
    sweep = config.sweep
    for scale in sweep.time_scales:
        if not 0 <= scale < math.inf:
            raise ValueError(f"sweep.time_scales: expected finite numbers from 0, got {scale}")
    for units, watermark in itertools.product(sweep.num_blocks, sweep.watermarks):
        limits(units, watermark)
    for policy in sweep.policies:
        choices(policy, sweep.policies)
    points = _points(sweep)
    if len(points) % config.cpu_devices:
        raise ValueError(
            f"sweep: expected a multiple of cpu_devices = {config.cpu_devices} points, one share a device, got "
            f"{len(points)}"
        )


def _points(sweep: Sweep) -> list[tuple[int, int, Policy, float]]:
    for field in dataclasses.fields(sweep):
        if not getattr(sweep, field.name):
            raise ValueError(f"sweep.{field.name}: expected at least one value, got none")
    return list(itertools.product(sweep.num_blocks, sweep.watermarks, sweep.policies, sweep.time_scales))


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Times the run alone, then the sweep.

    Args:
      config: what to simulate.
      run_dir: where `steps.parquet`, `requests.parquet` and `points.parquet` go.
      progress: shown while it works.
    """
    workload = load_workload(config.workload, config.server.max_model_len, config.seed)
    simulator = dataclasses.replace(make_simulator(config.server, config.memory), max_records=config.max_records)
    with progress.task("alone", total=config.repeats) as advance:
        alone, found = _time_alone(simulator, workload, config, advance)
    count = int(alone.count)
    if count >= config.max_records:
        raise ValueError(f"max_records: expected room for all steps, got {config.max_records}; raise it")
    records = take_records(alone.records, count)
    tables = to_tables(simulator, workload, records, alone.scheduler.progress, int(alone.turns))
    run_dir.write_parquet("steps.parquet", tables.steps)
    run_dir.write_parquet("requests.parquet", tables.requests)
    with progress.task("sweep"):
        found |= _time_sweep(simulator, workload, config, run_dir, _digest(alone))
    found["sweep16_over_one"] = found["sweep_seconds"] / found["seconds"] if found["points"] == 16 else None
    memory = metrics.memory_metrics(tables.steps)
    requests = metrics.request_metrics(tables.requests)
    found |= {"mean_running": memory["mean_running"], "makespan_s": requests["makespan_s"]}
    for name in ("max_seconds", "max_sweep_over_one"):
        found[name] = getattr(config, name)
    return {config.workload.kind: found}


def _time_alone(
    simulator: Simulator, workload: Workload, config: Config, advance: Any
) -> tuple[Simulation, dict[str, Any]]:
    requests = to_requests(workload, config.seed)
    begin = time.perf_counter()
    compiled = run_simulation.lower(simulator, requests, init_simulation(simulator, requests)).compile()
    compile_s = time.perf_counter() - begin
    seconds, digests = [], set()
    simulation = compiled(requests, init_simulation(simulator, requests))  # warms up
    for _ in range(config.repeats):
        simulation = jax.block_until_ready(init_simulation(simulator, requests))
        begin = time.perf_counter()
        simulation = jax.block_until_ready(compiled(requests, simulation))
        seconds.append(time.perf_counter() - begin)
        digests.add(_digest(simulation))
        advance()
    require_sound(simulator, simulation)
    median = statistics.median(seconds)
    return simulation, {
        "seconds": median,
        "seconds_low": min(seconds),
        "seconds_high": max(seconds),
        "requests_per_s": workload.num_requests / median,
        "steps_per_s": int(simulation.count) / median,
        "steps": int(simulation.count),
        "turns": int(simulation.turns),
        "compile_s": compile_s,
        "repeated_equal": len(digests) == 1,
    }


def _time_sweep(
    simulator: Simulator, workload: Workload, config: Config, run_dir: RunDirectory, alone: str
) -> dict[str, Any]:
    points, begun = _points(config.sweep), []
    devices = jax.devices()[: config.cpu_devices]
    if len(points) % len(devices):
        raise ValueError(f"sweep: expected a multiple of {len(devices)} points, one share a device, got {len(points)}")
    mesh = point_mesh(devices)
    by_scale = {
        scale: to_requests(dataclasses.replace(workload, arrival_ms=workload.arrival_ms * scale), config.seed)
        for scale in config.sweep.time_scales
    }
    requests = [by_scale[scale] for *_, scale in points]
    chosen = [choices(policy, config.sweep.policies) for _, _, policy, _ in points]
    for (num_blocks, watermark, _, _), asked in zip(points, requests, strict=True):
        begun.append(init_simulation(simulator, asked, limits(num_blocks, watermark)))
    placed = jax.device_put((stack(requests), stack(begun), stack(chosen)), jax.NamedSharding(mesh, jax.P("points")))
    begin = time.perf_counter()
    compiled = run_points.lower(simulator, mesh, *placed).compile()
    compile_s = time.perf_counter() - begin
    jax.block_until_ready(placed)
    begin = time.perf_counter()
    ended = jax.block_until_ready(compiled(*placed))
    seconds = time.perf_counter() - begin
    ended = jax.tree.map(np.asarray, ended)
    rows = []
    for i, (num_blocks, watermark, policy, scale) in enumerate(points):
        point: Simulation = jax.tree.map(lambda leaf, i=i: leaf[i], ended)
        require_sound(simulator, point)
        if np.any(point.scheduler.progress.reason == Reason.NONE):
            raise ValueError(f"max_records: expected room for all steps of every point, got {config.max_records}")
        rows.append(
            {
                "num_blocks": num_blocks,
                "watermark": watermark,
                "policy": str(dataclasses.asdict(policy)),
                "time_scale": scale,
                "steps": int(point.count),
                "turns": int(point.turns),
                "preemptions": int(point.scheduler.progress.preemptions.sum()),
                "digest": _digest(point),
            }
        )
    run_dir.write_parquet("points.parquet", pl.DataFrame(rows))
    return {
        "points": len(points),
        "sweep_seconds": seconds,
        "sweep_compile_s": compile_s,
        "swept_equal": rows[0]["digest"] == alone,
    }


def _digest(simulation: Simulation) -> str:
    """Of all records and of what became of all requests."""
    digest = hashlib.sha256()
    records = take_records(simulation.records, int(simulation.count))
    for leaf in jax.tree.leaves((records, simulation.scheduler.progress)):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def failed_checks(results: Results) -> list[str]:
    """The same bits each time, and no slower than the config allows."""
    failures = []
    for name, values in results.items():
        for equal, what in (("repeated_equal", "repeated"), ("swept_equal", "in the sweep")):
            if values[equal] is not True:
                failures.append(f"{name}: {what} it gave other records or requests")
        for metric, limit in (("seconds", "max_seconds"), ("sweep16_over_one", "max_sweep_over_one")):
            ours, most = values.get(metric), values.get(limit)
            if isinstance(ours, float) and isinstance(most, float | int) and ours > most:
                failures.append(f"{name}: {metric} is {ours:.3g}, at most {most:g} was asked for")
    return failures


_ROWS = {
    "seconds": ("seconds", "{:.2f}"),
    "seconds_low": ("fastest", "{:.2f}"),
    "seconds_high": ("slowest", "{:.2f}"),
    "requests_per_s": ("requests a second", "{:,.0f}"),
    "steps_per_s": ("steps a second", "{:,.0f}"),
    "steps": ("steps", "{:,.0f}"),
    "turns": ("strides", "{:,.0f}"),
    "compile_s": ("seconds to compile", "{:.1f}"),
    "repeated_equal": ("repeated: the same bits", "{}"),
    "points": ("points of the sweep", "{}"),
    "sweep_seconds": ("seconds of the sweep", "{:.2f}"),
    "sweep16_over_one": ("16 points over one", "{:.2f}"),
    "swept_equal": ("swept: the same bits", "{}"),
    "mean_running": ("mean running requests", "{:.1f}"),
    "makespan_s": ("makespan, s (modelled)", "{:,.0f}"),
}


def tables(results: Results) -> list[Table]:
    """What it took."""
    return [columns(results, _ROWS, "Simulating a whole trace")]
