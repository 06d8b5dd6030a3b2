"""How much a prefix cache saves: over block sizes, cache sizes and eviction policies, beside what is possible."""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any, Literal

import polars as pl

from experiments import prefix_figures, published
from experiments.prefix_bounds import Chains, block_chains
from experiments.prefix_measure import (
    Asked,
    Case,
    Eviction,
    ask_synthetic,
    ask_trace,
    cache_blocks,
    make_memory,
    measure,
)
from experiments.prefix_prompts import SyntheticPrompts
from experiments.prefix_replay import replay
from experiments.progress import Progress
from experiments.published import Published
from experiments.results import Results, Table
from experiments.run_directory import RunDirectory
from experiments.workloads import WorkloadConfig, load_workload, with_sha256
from paxkv.model_shapes import model_shape
from paxkv.sizes import require_int

DESCRIPTION = "Prefix cache: hit rate and memory saved over block sizes, cache sizes and eviction policies."
GLOSSARY = prefix_figures.GLOSSARY
"""What each metric means, in a sentence."""
figures = prefix_figures.figures


@dataclasses.dataclass(frozen=True)
class Config:
    """One sequence of prompts through many prefix caches.

    Attributes:
      experiment: `prefix_sharing`.
      seed: of the synthetic prompts.
      trace: prompts of a trace with hash ids; give this,
      synthetic: or drawn ones.
      max_model_len: most tokens of a request of the trace, prompt and output.
      partial_blocks: count as the trace's publishers do: each hash id is a block, that of a partly filled last block
        too. `block_sizes` is then the trace's own size alone. Otherwise only whole blocks count, and the last token of
        a prompt is always computed.
      block_sizes: in tokens.
      evictions: which cached block makes way. A trace gives its prompts no priorities: `priority` is `lru` there.
      cache_tokens: sizes of the cache in tokens, so that block sizes are compared at equal memory. `unbounded` never
        evicts, and is computed once for all policies.
      crossed: whether every policy meets every block size. Otherwise the policies are compared with blocks of the
        first size, and the block sizes under the first policy.
      resident: most prompts held at a time. The oldest makes way for the next one.
      chunk_tokens: tokens stored in one call: costs time, changes no result.
      explain_misses: also count the tokens that were not hit by the reason why. Not with `partial_blocks`, whose
        blocks stand for hash ids.
      kv_model: whose keys and values the bytes are of.
      published: what must come out, by the names of configurations.
    """

    experiment: Literal["prefix_sharing"] = "prefix_sharing"
    seed: int = 0
    trace: WorkloadConfig | None = None
    synthetic: SyntheticPrompts | None = None
    max_model_len: int = 131_072
    partial_blocks: bool = False
    block_sizes: tuple[int, ...] = (8, 16, 32, 64)
    evictions: tuple[Eviction, ...] = ("lru", "lfu", "fifo", "priority")
    cache_tokens: tuple[int | Literal["unbounded"], ...] = ("unbounded",)
    crossed: bool = True
    resident: int = 1
    chunk_tokens: int = 1024
    explain_misses: bool = False
    kv_model: str = "Llama-3-8B"
    published: tuple[Published, ...] = ()


def cases(config: Config) -> list[Case]:
    """Every configuration once. Without bound nothing is evicted: that is one for all policies."""
    every = (
        Case(block_size, "lru", None) if size == "unbounded" else Case(block_size, eviction, size)
        for block_size in config.block_sizes
        for eviction in config.evictions
        if config.crossed or block_size == config.block_sizes[0] or eviction == config.evictions[0]
        for size in config.cache_tokens
    )
    return list(dict.fromkeys(every))


def resolve(config: Config) -> Config:
    """Names the trace by its hash; refuses what describes no comparison.

    Raises:
      ValueError: naming the field, what was expected and what came.
    """
    if (config.trace is None) == (config.synthetic is None):
        got = "neither" if config.trace is None else "both"
        raise ValueError(f"trace, synthetic: expected one of the two to say which prompts to replay, got {got}")
    for name in ("block_sizes", "evictions", "cache_tokens"):
        values = getattr(config, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}: expected at least one value and none twice, got {list(values)}")
    for name in ("resident", "chunk_tokens"):
        require_int(name, getattr(config, name))
    for block_size in config.block_sizes:
        require_int("block_sizes", block_size)
    for size in config.cache_tokens:
        if size != "unbounded":
            require_int("cache_tokens", size, minimum=max(config.block_sizes))
    named = {name for source in config.published for name, *_ in source.given()}
    if unknown := sorted(named - set(parts(config))):
        known = ", ".join(parts(config))
        raise ValueError(f"published: expected names of configurations ({known}), got {', '.join(unknown)}")
    model_shape(config.kv_model)
    if config.explain_misses and config.partial_blocks:
        raise ValueError(
            "explain_misses: expected false with partial_blocks, as reasons are counted in tokens, got true; leave out "
            "one of the two"
        )
    if config.synthetic is not None:
        config.synthetic.check()
        if config.partial_blocks:
            raise ValueError("partial_blocks: only a trace has hash ids to count as blocks; leave it out")
    return config if config.trace is None else dataclasses.replace(config, trace=with_sha256(config.trace))


def parts(config: Config) -> list[str]:
    """Each configuration is replayed, and can be resumed, by itself."""
    return [case.name for case in cases(config)]


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Replays the prompts with every cache, and computes beside it what is possible."""
    asked = _asked(config, run_dir)
    chains: dict[int, Chains] = {}
    for case in progress.track(cases(config), "caches"):
        if run_dir.finished_part(case.name) is None:
            if case.block_size not in chains:
                chains = {case.block_size: block_chains(asked.prompts, asked.block_size(case))}
            alike = [c for c in cases(config) if c[:2] == case[:2]]
            memory = make_memory(alike, asked, config.resident, config.explain_misses)
            chunk_tokens = min(max(1, config.chunk_tokens // asked.scale), memory.max_len)
            begin = time.perf_counter()
            replayed = replay(memory, asked.prompts, asked.known_tokens, chunk_tokens, cache_blocks(case, asked))
            wall_s = time.perf_counter() - begin
            frame, found = measure(case, asked, replayed, chains[case.block_size], model_shape(config.kv_model))
            with run_dir.part(case.name) as part:
                part.write_parquet("prompts.parquet", frame)
                part.write_json("found.json", found)
                part.write_json("time.json", {"wall_s": wall_s})
    results = {name: run_dir.require_part(name).read_json("found.json") for name in parts(config)}
    run_dir.write_parquet("caches.parquet", _caches(config, results))
    run_dir.write_parquet(
        "prompts.parquet",
        pl.concat(
            run_dir.require_part(name).read_parquet("prompts.parquet").select(pl.lit(name).alias("cache"), pl.all())
            for name in parts(config)
        ),
    )
    return published.compared(results, config.published)


def tables(results: Results) -> list[Table]:
    """Those of `prefix_figures`, and what is published if anything is."""
    compared = published.table(results)
    return [*prefix_figures.tables(results), *([compared] if compared.rows else [])]


def failed_checks(results: Results) -> list[str]:
    """What is published, and what must hold for any prompts: an independent count, the optimum, larger is better."""
    failures = published.failed_checks(results)
    for name, found in results.items():
        if found.get("miscounted_requests"):
            failures.append(
                f"{name}: the hits of {found['miscounted_requests']:,} requests are not those of an independent count"
            )
        missed = [name for name in found if name.startswith("missed_")]
        explained = sum(_count(found, name) for name in [*missed, "hit_tokens"])
        if missed and explained != found["tokens"]:
            failures.append(f"{name}: {explained:,} tokens were hit or explained, of {found['tokens']:,}")
        saved, possible = _count(found, "blocks_saved"), _count(found, "optimal_blocks_saved")
        if saved > possible:
            failures.append(f"{name}: {saved:,} blocks hit, but no cache of its size can hit more than {possible:,}")
    for smaller, larger in _neighbours(results):
        fewer, more = (_count(results[name], "blocks_saved") for name in (smaller, larger))
        if fewer > more:
            failures.append(f"{larger}: {more:,} blocks hit, fewer than the {fewer:,} of {smaller}, which is smaller")
    return failures


def _neighbours(results: Results) -> Iterator[tuple[str, str]]:
    """Pairs of LRU caches of one block size and of neighbouring sizes, the smaller first. LRU is better the larger."""
    by_block: dict[str, list[str]] = {}
    for name in results:
        block, policy, *_ = name.split("-")
        if policy in ("lru", "unbounded"):
            by_block.setdefault(block, []).append(name)
    for names in by_block.values():
        yield from itertools.pairwise(sorted(names, key=lambda name: _count(results[name], "cache_blocks")))


def _count(found: Any, metric: str) -> int:
    return int(found[metric])


def _asked(config: Config, run_dir: RunDirectory) -> Asked:
    """Reads or draws the prompts, and notes in the manifest where a trace is from."""
    if config.synthetic is not None:
        return ask_synthetic(config.synthetic, config.seed)
    workload = load_workload(config.trace or WorkloadConfig(), config.max_model_len, config.seed)
    run_dir.add_manifest(workload=dataclasses.asdict(workload.provenance))
    asked = ask_trace(workload, config.partial_blocks)
    if config.partial_blocks and config.block_sizes != (asked.scale,):
        raise ValueError(
            f"block_sizes: expected [{asked.scale}], the tokens of a hash id, as partial_blocks is set, got "
            f"{list(config.block_sizes)}"
        )
    return asked


def _caches(config: Config, results: Results) -> pl.DataFrame:
    """A row a configuration, for figures: its place on each axis, and its rates."""
    rates = ("block_hit_rate", "token_hit_rate", "optimal_block_hit_rate")
    return pl.DataFrame(
        [{"cache": case.name, **case._asdict(), **{r: results[case.name][r] for r in rates}} for case in cases(config)],
        schema_overrides={"cache_tokens": pl.Int64},
    )
