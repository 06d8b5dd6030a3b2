"""What the block manager's transitions cost on this machine, inside a scan, and whether that depends on the pool."""

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import polars as pl
import rich.box
from rich.console import Console
from rich.table import Table

from experiments.allocator_cases import (
    admit_scan,
    cached_prompts,
    decode_cached_scan,
    decode_scan,
    free_scan,
    hash_scan,
    started,
)
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from paxkv.outcomes import raise_on_fault
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache

DESCRIPTION = "Cost of the paged allocator's transitions, with and without a prefix cache, and with a larger pool."
MODELLED: frozenset[str] = frozenset()
GLOSSARY = {
    "us": "microseconds: the difference between long and short scans, divided by the steps between, median of repeats",
    "ratio": "cost with the larger pool over cost with the smaller one",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """One measurement of each transition, in two pools.

    Attributes:
      experiment: `allocator_bench`.
      seed: of the tokens.
      rows: sequences that decode.
      num_blocks: blocks of the smaller pool.
      block_size: tokens in a block.
      scale: the larger pool has this many times the blocks.
      short_steps: decode steps of a short scan; what a dispatch costs once is in both and drops out.
      long_steps: decode steps of a long scan.
      prompt_tokens: length of the prompts that are admitted and freed.
      prompts: how many of them a long scan admits or frees; a short one does a quarter.
      hash_tokens: length of the prompt that is hashed.
      repeats: measurements of each.
    """

    experiment: str = "allocator_bench"
    seed: int = 0
    rows: int = 256
    num_blocks: int = 22_888
    block_size: int = 16
    scale: int = 8
    short_steps: int = 128
    long_steps: int = 1280
    prompt_tokens: int = 8192
    prompts: int = 40
    hash_tokens: int = 50_000
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
        if not 4 <= self.prompts <= self.rows:
            raise ValueError(
                f"prompts: expected 4 (of which a short scan takes a quarter) to rows = {self.rows}, got {self.prompts}"
            )
        needed = self.prompts * -(-self.prompt_tokens // self.block_size)
        if needed > self.num_blocks:
            raise ValueError(
                f"num_blocks: expected at least {needed}, so that {self.prompts} prompts of {self.prompt_tokens} "
                f"tokens are cached together, got {self.num_blocks}; raise it, or lower prompts"
            )


class Case(NamedTuple):
    """One transition in one pool: a compiled scan of each length, and the state they start from."""

    operation: str
    scale: int
    steps: tuple[int, int]
    scans: tuple[Callable[[Any], Any], Callable[[Any], Any]]
    state: Any


def cases(config: Config, scale: int) -> list[Case]:
    """Every transition in a pool of `scale` times the blocks. Compiles and warms up."""
    num_blocks = config.num_blocks * scale
    plain = Paged(
        rows=config.rows,
        max_len=config.block_size + config.long_steps,
        block_size=config.block_size,
        num_blocks=num_blocks,
    )
    cached = dataclasses.replace(plain, cache=PrefixCache())
    steps = (config.short_steps, config.long_steps)

    prompts = Paged(
        rows=config.rows,
        max_len=config.prompt_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        cache=PrefixCache(),
    )
    tokens = jax.random.randint(
        jax.random.key(config.seed), (config.prompts, config.prompt_tokens), 0, 128_000, jnp.int32
    )
    held, free = cached_prompts(prompts, tokens)
    some = (config.prompts // 4, config.prompts)
    hashed = jax.random.randint(jax.random.key(config.seed), (config.hash_tokens,), 0, 128_000, jnp.int32)

    def case(operation: str, steps: tuple[int, int], make: Callable[[int], Callable[[Any], Any]], state: Any) -> Case:
        scans = (make(steps[0]), make(steps[1]))
        for scan in scans:
            end = jax.block_until_ready(scan(_copy(state)))
            if operation != "hash_50000":
                raise_on_fault(end.seqs.faults)
        return Case(operation, scale, steps, scans, state)

    return [
        case("decode_step", steps, lambda n: decode_scan(plain, n), started(plain, config.seed)),
        case("decode_step_cached", steps, lambda n: decode_cached_scan(cached, n), started(cached, config.seed)),
        case("admit_cached_8192", some, lambda n: admit_scan(prompts, tokens[:n]), free),
        case("free_8192", some, lambda n: free_scan(prompts, n), held),
        case("hash_50000", some, lambda n: hash_scan(hashed, config.block_size, n), jnp.zeros(2, jnp.uint32)),
    ]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Times long and short scans of both pools in turn; a step costs their difference over the steps between.

    The difference leaves out what is paid once for a dispatch (entering the program, first touch of the arrays).
    """
    everything = [case for scale in sorted({1, config.scale}) for case in cases(config, scale)]
    timings: list[dict[str, Any]] = []
    with progress.task("timing", total=config.repeats) as advance:
        for repeat in range(config.repeats):
            for case in everything:
                for steps, scan in zip(case.steps, case.scans, strict=True):
                    state = jax.block_until_ready(_copy(case.state))
                    begin = time.perf_counter()
                    jax.block_until_ready(scan(state))
                    timings.append(
                        {
                            "operation": case.operation,
                            "repeat": repeat,
                            "scale": case.scale,
                            "steps": steps,
                            "wall_us": 1e6 * (time.perf_counter() - begin),
                        }
                    )
            advance()
    frame = pl.DataFrame(timings)
    run_dir.write_parquet("timings.parquet", frame)
    names = frame["operation"].unique(maintain_order=True)
    return {name: summarise(frame.filter(pl.col("operation") == name), config) for name in names}


def summarise(timings: pl.DataFrame, config: Config) -> dict[str, Any]:
    """Cost of a step in each pool: median and quartiles, over the repeats, of what the long scan took longer."""
    short_steps, long_steps = sorted(timings["steps"].unique())
    wide = timings.pivot(on="steps", index=["scale", "repeat"], values="wall_us")
    each = wide.select("scale", us=(pl.col(str(long_steps)) - pl.col(str(short_steps))) / (long_steps - short_steps))

    def quantiles(scale: int) -> tuple[float, float, float]:
        us = each.filter(pl.col("scale") == scale)["us"]
        return tuple(float(us.quantile(q, "linear")) for q in (0.25, 0.5, 0.75))  # pyright: ignore[reportReturnType, reportArgumentType]

    lower, median, upper = quantiles(1)
    larger_lower, larger_median, larger_upper = quantiles(config.scale)
    key = f"us_{config.scale}x"
    return {
        "us": median,
        key: larger_median,
        "ratio": larger_median / median,
        "us_lower_quartile": lower,
        "us_upper_quartile": upper,
        f"{key}_lower_quartile": larger_lower,
        f"{key}_upper_quartile": larger_upper,
        "rows": config.rows,
        "num_blocks": config.num_blocks,
    }


def render(results: dict[str, dict[str, Any]], console: Console) -> None:
    """Prints one line an operation."""
    table = Table(title="Block manager inside a scan: medians, and quartiles of the repeats", box=rich.box.SIMPLE_HEAD)
    for column in ("operation", "us", "us, larger pool", "ratio"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for name, values in results.items():
        larger = next(key for key in values if re.fullmatch(r"us_\d+x", key))
        table.add_row(name, _spread(values, "us"), _spread(values, larger), f"{values['ratio']:.2f}")
    console.print(table)


def _spread(values: dict[str, Any], key: str) -> str:
    return f"{values[key]:.2f} ({values[key + '_lower_quartile']:.2f} to {values[key + '_upper_quartile']:.2f})"


def _copy(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)
