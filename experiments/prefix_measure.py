"""One prefix cache and one sequence of prompts: what was hit, what could have been, and what sharing saved."""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl
from jaxtyping import Int32, Int64

from experiments.prefix_bounds import Chains, optimal_hits, unbounded_hits
from experiments.prefix_prompts import Prompts, SyntheticPrompts, synthetic_prompts, trace_prompts
from experiments.prefix_replay import Replayed
from experiments.workloads import Workload
from paxkv.cache_stats import MISS_REASONS, recent_hit_rate
from paxkv.model_shapes import KVShape
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache

Eviction = Literal["lru", "lfu", "fifo", "priority"]
RECENT_PROMPTS = 100  # over which the hit rate of a filled cache is taken


class Case(NamedTuple):
    """One configuration of the cache."""

    block_size: int
    eviction: Eviction
    cache_tokens: int | None  # None is without bound

    @property
    def name(self) -> str:
        """What results call it. Without bound nothing is evicted, so that the policy is no part of the name."""
        if self.cache_tokens is None:
            return f"block{self.block_size}-unbounded"
        return f"block{self.block_size}-{self.eviction}-{self.cache_tokens}"


class Asked(NamedTuple):
    """Prompts as they are replayed, and what they stand for."""

    prompts: Prompts
    known_tokens: Int32[np.ndarray, " prompts"]  # of the replay; at least the length of each prompt
    tokens: Int64[np.ndarray, " prompts"]  # real length of each prompt
    scale: int  # real tokens that one of the replay stands for: 1, or all of a block

    def block_size(self, case: Case) -> int:
        """Block size of the replay."""
        return case.block_size // self.scale


def ask_synthetic(config: SyntheticPrompts, seed: int) -> Asked:
    """Drawn prompts, token by token."""
    prompts = synthetic_prompts(config, seed)
    return Asked(prompts, prompts.lengths, prompts.lengths.astype(np.int64), scale=1)


def ask_trace(workload: Workload, partial_blocks: bool) -> Asked:
    """Prompts of a trace with hash ids: token by token, or with `partial_blocks` one token for each id.

    The second is how published hit rates are counted: the last block of a prompt is one that can be hit, however few
    tokens it has. As the manager never looks up the last token it is asked for, it is then asked for one more.
    """
    prompts = trace_prompts(workload, whole_pieces=partial_blocks)
    more, scale = (1, workload.hash_block_size) if partial_blocks else (0, 1)
    return Asked(prompts, prompts.lengths + np.int32(more), workload.prompt_len.astype(np.int64), scale)


def cache_blocks(case: Case, asked: Asked) -> int:
    """Blocks of a cache; one without bound has room for all blocks as if nothing were shared."""
    if case.cache_tokens is not None:
        return case.cache_tokens // case.block_size
    return sum(math.ceil(tokens / asked.block_size(case)) for tokens in asked.known_tokens.tolist())


def make_memory(cases: Iterable[Case], asked: Asked, resident: int, explain_misses: bool = False) -> Paged:
    """A block manager that serves caches of all sizes of one block size and one policy.

    What it remembers of evicted blocks, to explain misses, grows with it: it is then as large as one without bound.
    """
    cases = list(cases)
    sizes = [*cases, cases[0]._replace(cache_tokens=None)] if explain_misses else cases
    return Paged(
        rows=resident,
        max_len=int(asked.known_tokens.max()),
        block_size=asked.block_size(cases[0]),
        num_blocks=max(cache_blocks(case, asked) for case in sizes),
        cache=PrefixCache(eviction=cases[0].eviction, explain=explain_misses),
    )


def measure(
    case: Case, asked: Asked, replayed: Replayed, chains: Chains, shape: KVShape
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Counts what came of a replay, beside what is possible.

    Args:
      case: the configuration.
      asked: the prompts.
      replayed: what the block manager did with them.
      chains: the prompts' blocks, named independently of it.
      shape: of the keys and values, for bytes.

    Returns:
      A row a prompt, in real tokens and in blocks, and the metrics of the configuration.
    """
    block_size = asked.block_size(case)
    blocks = asked.prompts.lengths // np.int32(block_size)
    hit_blocks = replayed.frame["hit_tokens"].to_numpy() // np.int32(block_size)
    hit_tokens = np.minimum(hit_blocks.astype(np.int64) * case.block_size, asked.tokens)
    frame = replayed.frame.with_columns(
        tokens=asked.tokens, hit_tokens=hit_tokens, blocks=blocks, hit_blocks=hit_blocks
    )
    held, saved = (frame[name].to_numpy() for name in ("held_blocks", "unshared_blocks"))
    saved = saved - held
    found: dict[str, Any] = {
        "requests": len(asked.prompts),
        "tokens": int(asked.tokens.sum()),
        "hit_tokens": int(hit_tokens.sum()),
        "blocks": int(blocks.sum(dtype=np.int64)),
        "blocks_saved": int(hit_blocks.sum(dtype=np.int64)),
        "evictions": int(frame["evictions"].to_numpy().sum(dtype=np.int64)),
        "cache_blocks": cache_blocks(case, asked),
        "peak_blocks_held": int(held.max()),
        "peak_blocks_saved": int(saved.max()),
        "peak_bytes_saved": int(saved.max()) * shape.block_bytes(case.block_size),
        "shared_blocks": replayed.shared_blocks,
        "most_sharers": replayed.most_sharers,
    }
    missed = [name for name in (f"missed_{reason}" for reason in MISS_REASONS) if name in frame]
    found |= {name: int(frame[name].to_numpy().sum(dtype=np.int64)) for name in missed}
    lookups = ((asked.known_tokens - 1) // block_size).tolist()
    if case.cache_tokens is None:
        counted = np.array(unbounded_hits(chains, lookups))
        found["optimal_blocks_saved"] = int(counted.sum())
        found["miscounted_requests"] = int((counted != hit_blocks).sum())
    else:
        found["optimal_blocks_saved"] = optimal_hits(chains, lookups, found["cache_blocks"])
    rates = {
        "block_hit_rate": found["blocks_saved"] / max(1, found["blocks"]),
        "token_hit_rate": found["hit_tokens"] / found["tokens"],
        "recent_token_hit_rate": recent_hit_rate(np.ones_like(hit_tokens), asked.tokens, hit_tokens, RECENT_PROMPTS),
        "optimal_block_hit_rate": found["optimal_blocks_saved"] / max(1, found["blocks"]),
    }
    return frame, rates | found
