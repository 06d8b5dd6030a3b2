"""A tiny experiment with two parts, for tests of the command line. The environment makes it stumble where asked."""

import dataclasses
import os
import pathlib
import signal
import time
from typing import Literal

import polars as pl

from experiments import files, plots

DESCRIPTION = "A tiny experiment that <counts>."
GLOSSARY = {"peak_running": "Most requests in flight at once.", "ttft_ms": "Time until the first token, in ms."}
MODELLED = frozenset({"ttft_ms_p50"})


@dataclasses.dataclass(frozen=True)
class Memory:
    """A memory.

    Attributes:
      block_size: tokens in a block.
    """

    block_size: int
    policy: Literal["lru", "fifo"] = "lru"


@dataclasses.dataclass(frozen=True)
class Config:
    experiment: Literal["fake"]
    memory: Memory
    seed: int = 0
    rows: int = 4
    names: tuple[str, ...] = ("paged", "vattention")
    trace: pathlib.Path | None = None
    bad: bool = False


def resolve(config):
    if os.environ.get("FAKE_STUMBLE") == "find nothing":
        raise FileNotFoundError("no checkpoint at models/none")
    return config


def parts(config):
    return list(config.names)


def run(config, run_dir, progress):
    # What must not be part of the config, so that the run that resumes has the same one.
    stumble = os.environ.get("FAKE_STUMBLE", "")
    run_dir.add_manifest(trace_sha256=os.environ.get("FAKE_TRACE", "abc"))
    if stumble == "refuse" or stumble == f"refuse seed {config.seed}":
        raise ValueError(f"rows must fit the pool, got {config.rows}; raise pool")
    for name in progress.track(config.names, "parts"):
        if run_dir.finished_part(name) is None:
            with run_dir.part(name) as part:
                print(f"computing {name}", flush=True)
                if stumble == f"die in {name}":
                    os.kill(os.getpid(), signal.SIGKILL)
                if stumble == f"wait in {name}":
                    time.sleep(60)
                part.write_parquet("steps.parquet", _steps(config, name))
    run_dir.write_parquet(
        "steps.parquet", pl.concat(run_dir.finished_part(name).read_parquet("steps.parquet") for name in config.names)
    )
    return {
        name: {
            "peak_running": config.rows,
            "ttft_ms_p50": 24 / config.memory.block_size,
            "ok": not config.bad,
            "undefined": None,
        }
        for name in config.names
    }


def failed_checks(results):
    return [f"{name} is not ok" for name, metrics in results.items() if not metrics["ok"]]


def figures(run_path):
    steps = files.read_parquet(run_path / "steps.parquet")
    figure, axes = plots.canvas()
    by_name = {str(name): frame for (name,), frame in steps.group_by("memory", maintain_order=True)}
    plots.over_time(axes, {name: (f["step"].to_list(), f["running"].to_list()) for name, f in by_name.items()}, "step")
    other, other_axes = plots.canvas()
    plots.cdf(other_axes, {name: f["running"].to_list() for name, f in by_name.items()}, "requests")
    return [plots.Figure("Running & waiting", "More is better.", figure), plots.Figure("Spread", "", other)]


def _steps(config, name):
    return pl.DataFrame(
        {
            "memory": [name] * 3,
            "step": [0, 1, 2],
            "running": [config.seed, config.rows, config.rows],
            "wall_s": [time.time()] * 3,
        }
    )
