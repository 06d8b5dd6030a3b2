"""What a step of an allocator costs on this machine, inside a scan, and whether it depends on the pool's size."""

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import polars as pl
import rich.box
from rich.console import Console
from rich.table import Table

from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from paxkv.memory import Ask
from paxkv.outcomes import Outcome, raise_on_fault
from paxkv.paged import Paged, PagedState

DESCRIPTION = "Cost of one decode step of the paged allocator, and of the same with a larger pool."
MODELLED: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Config:
    """One measurement: `rows` sequences grow by a token a step until they have grown by `long_steps`.

    Attributes:
      experiment: `allocator_bench`.
      seed: nothing here is random; part of every run's name.
      rows: sequences.
      num_blocks: of the first pool.
      block_size: tokens in a block.
      scale: the second pool has this many times the blocks.
      short_steps: length of the scan that is subtracted.
      long_steps: length of the scan that it is subtracted from.
      repeats: how often each scan is timed.
    """

    experiment: str = "allocator_bench"
    seed: int = 0
    rows: int = 256
    num_blocks: int = 22_888
    block_size: int = 16
    scale: int = 8
    short_steps: int = 128
    long_steps: int = 1280
    repeats: int = 21

    def __post_init__(self) -> None:
        """Refuses a measurement in which the pool would run dry, or with nothing to subtract."""
        if min(self.rows, self.block_size, self.scale, self.repeats) < 1:
            raise ValueError(
                f"rows, block_size, scale, repeats: expected at least 1, got {self.rows}, {self.block_size}, "
                f"{self.scale} and {self.repeats}"
            )
        if not 0 < self.short_steps < self.long_steps:
            raise ValueError(
                f"short_steps: expected between 0 and long_steps = {self.long_steps}, got {self.short_steps}"
            )
        needed = self.rows * -(-(self.block_size + self.long_steps) // self.block_size)
        if needed > self.num_blocks:
            raise ValueError(
                f"num_blocks: expected at least {needed}, so that {self.rows} rows can grow by {self.long_steps} "
                f"tokens, got {self.num_blocks}; raise it, or lower long_steps"
            )


def started(memory: Paged) -> PagedState:
    """All rows admitted, row r holding r mod block_size tokens, so that as many rows start a block in every step."""
    state = memory.init()
    one = jnp.int32(1)
    admit = jax.jit(memory.admit)
    for _ in range(memory.rows):
        state, _, outcome = admit(state, Ask(known_tokens=one, prompt_tokens=one, final_tokens=one))
        if int(outcome) != Outcome.OK:
            raise RuntimeError(f"expected room for {memory.rows} rows, got {Outcome(int(outcome)).name}")
    phases = jnp.arange(memory.rows, dtype=jnp.int32) % memory.block_size
    state, _ = jax.jit(memory.append, static_argnums=2)(state, phases, memory.block_size)
    return state


def decode_scan(memory: Paged, steps: int) -> Callable[[PagedState], PagedState]:
    """A compiled scan of `steps` decode steps. Donates its argument."""

    def one(state: PagedState, _: None) -> tuple[PagedState, None]:
        return memory.append(state, jnp.ones(memory.rows, jnp.int32), 1)[0], None

    return jax.jit(lambda state: jax.lax.scan(one, state, length=steps)[0], donate_argnums=0)


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Times long and short scans of both pools in turn; a step costs their difference over the steps between.

    The difference leaves out what is paid once for a dispatch (entering the program, first touch of the arrays).
    """
    scans, states = {}, {}
    for scale in (1, config.scale):
        memory = Paged(
            rows=config.rows,
            max_len=config.block_size + config.long_steps,
            block_size=config.block_size,
            num_blocks=config.num_blocks * scale,
        )
        states[scale] = started(memory)
        for steps in (config.short_steps, config.long_steps):
            scans[scale, steps] = decode_scan(memory, steps)
            raise_on_fault(jax.block_until_ready(scans[scale, steps](_copy(states[scale]))).seqs.faults)

    timings: list[dict[str, float | int]] = []
    with progress.task("timing", total=config.repeats) as advance:
        for repeat in range(config.repeats):
            for (scale, steps), scan in scans.items():
                state = jax.block_until_ready(_copy(states[scale]))
                begin = time.perf_counter()
                jax.block_until_ready(scan(state))
                wall_us = 1e6 * (time.perf_counter() - begin)
                timings.append({"repeat": repeat, "scale": scale, "steps": steps, "wall_us": wall_us})
            advance()
    frame = pl.DataFrame(timings)
    run_dir.write_parquet("timings.parquet", frame)
    return {"decode_step": summarise(frame, config)}


def summarise(timings: pl.DataFrame, config: Config) -> dict[str, Any]:
    """Cost of a step in each pool, between the medians over the repeats, and between their quartiles as spread."""
    wall = timings.group_by("scale", "steps").agg(
        pl.col("wall_us").median().alias("median"),
        pl.col("wall_us").quantile(0.25, "linear").alias("lower"),
        pl.col("wall_us").quantile(0.75, "linear").alias("upper"),
    )
    at = {(row["scale"], row["steps"]): row for row in wall.iter_rows(named=True)}
    between = config.long_steps - config.short_steps

    def cost(scale: int) -> dict[str, float]:
        long, short = at[scale, config.long_steps], at[scale, config.short_steps]
        return {name: (long[name] - short[name]) / between for name in ("median", "lower", "upper")}

    base, larger = cost(1), cost(config.scale)
    key = f"us_{config.scale}x"
    return {
        "us": base["median"],
        key: larger["median"],
        "ratio": larger["median"] / base["median"],
        "us_lower_quartile": base["lower"],
        "us_upper_quartile": base["upper"],
        f"{key}_lower_quartile": larger["lower"],
        f"{key}_upper_quartile": larger["upper"],
        "rows": config.rows,
        "num_blocks": config.num_blocks,
    }


def render(results: dict[str, dict[str, Any]], console: Console) -> None:
    """Prints one line an operation."""
    table = Table(title="Allocator inside a scan: medians, and quartiles of the repeats", box=rich.box.SIMPLE_HEAD)
    for column in ("operation", "us", "us, larger pool", "ratio"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for name, values in results.items():
        larger = next(key for key in values if re.fullmatch(r"us_\d+x", key))
        table.add_row(name, _spread(values, "us"), _spread(values, larger), f"{values['ratio']:.2f}")
    console.print(table)


def _spread(values: dict[str, Any], key: str) -> str:
    return f"{values[key]:.2f} ({values[key + '_lower_quartile']:.2f} to {values[key + '_upper_quartile']:.2f})"


def _copy(state: PagedState) -> PagedState:
    return jax.tree.map(jnp.copy, state)
