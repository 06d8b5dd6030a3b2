"""A tiny experiment with two parts, for tests of the command line: it can stop, fail or stumble where asked."""

import dataclasses
import os
import pathlib
import signal
import time
from typing import Literal

import polars as pl

from experiments import plots

DESCRIPTION = "A tiny experiment that counts."
GLOSSARY = {"peak_running": "Most requests in flight at once.", "ttft_ms": "Time until the first token, in ms."}
MODELLED = frozenset({"ttft_ms_p50"})


@dataclasses.dataclass(frozen=True)
class Memory:
    block_size: int
    policy: Literal["lru", "fifo"] = "lru"

    def __post_init__(self):
        if self.block_size < 1:
            raise ValueError(f"memory.block_size must be at least 1, got {self.block_size}")


@dataclasses.dataclass(frozen=True)
class Config:
    experiment: Literal["fake"]
    memory: Memory
    seed: int = 0
    rows: int = 4
    rate: float = 1.0
    names: tuple[str, ...] = ("paged", "vattention")
    limit: int | None = None
    trace: pathlib.Path | None = None
    bad: bool = False


def parts(config):
    return list(config.names)


def run(config, run_dir, progress):
    stop = os.environ.get("FAKE_STOP", "")  # not part of the config, so that a resumed run has the same one
    run_dir.add_manifest(trace_sha256=os.environ.get("FAKE_TRACE", "abc"))
    if stop == "raise":
        raise ValueError("rows must fit the pool, got 4; raise pool")
    with progress.task("parts", total=len(config.names)) as advance:
        for name in parts(config):
            if run_dir.finished_part(name) is None:
                with run_dir.part(name) as part:
                    print(f"computing {name}", flush=True)
                    if stop == f"in:{name}":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if stop == f"wait:{name}":
                        time.sleep(60)
                    part.write_parquet("steps.parquet", _steps(config, name))
            advance(1, note=name)
    if stop == "before summary":
        os.kill(os.getpid(), signal.SIGKILL)
    steps = pl.concat([run_dir.finished_part(name).read_parquet("steps.parquet") for name in config.names])
    run_dir.write_parquet("steps.parquet", steps)
    return {
        name: {"peak_running": config.rows, "ttft_ms_p50": 1.5 * config.rate, "ok": not config.bad, "undefined": None}
        for name in config.names
    }


def failed_checks(results):
    return [f"{name} is not ok" for name, metrics in results.items() if not metrics["ok"]]


def figures(run_path):
    steps = pl.read_parquet((run_path / "steps.parquet").read_bytes())
    figure, axes = plots.canvas()
    by_name = {str(name): frame for (name,), frame in steps.group_by("memory", maintain_order=True)}
    plots.over_time(axes, {name: (f["step"].to_list(), f["running"].to_list()) for name, f in by_name.items()}, "step")
    return [plots.Figure("Running requests", "More is better.", figure)]


def _steps(config, name):
    return pl.DataFrame(
        {
            "memory": [name] * 3,
            "step": [0, 1, 2],
            "running": [config.seed, config.rows, config.rows],
            "wall_s": [time.time()] * 3,
        }
    )
