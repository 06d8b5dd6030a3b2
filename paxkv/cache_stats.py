"""What the prefix cache was asked for, what it had, and why it did not have the rest. Most counts are of tokens."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer

from paxkv.sizes import require_int

MISS_REASONS = ("below_block", "last_token", "alignment", "hole", "evicted", "other_key", "cold")
"""Counts of `CacheStats` that say why tokens were not hit. With the hits they add up to the queries."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheStats:
    """Counts since the start, all i32[]; they wrap around at 2**31, so the difference of two readings stays right.

    A request counts when it is admitted. One that was preempted and comes back is counted apart: it mostly hits what
    it left behind itself, which says nothing of the workload. Tokens that were not hit are counted under one reason
    each; the reasons are of first admissions, and count whole blocks but for the first. `evicted` and `other_key` stay
    zero unless misses are explained. Old keys are forgotten when there are too many of them: what was evicted then
    counts as `other_key` if its tokens are still known, and as `cold` if not.
    """

    queries: jax.Array  # tokens of requests admitted for the first time
    hits: jax.Array  # of these, tokens found
    resumed_queries: jax.Array
    resumed_hits: jax.Array
    below_block: jax.Array  # in the last block of the prompt, which they do not fill
    last_token: jax.Array  # in a block that is cached, but holds the last token, which must be computed
    alignment: jax.Array  # in a block that is cached, but groups of layers agree on a shorter prefix only
    hole: jax.Array  # in a block that is cached, but one before it is not
    evicted: jax.Array  # in a block that was cached once
    other_key: jax.Array  # in a block whose tokens were cached, as far as is known for another adapter, salt or epoch
    cold: jax.Array  # in a block that was never seen, or is not explained
    evictions: jax.Array  # blocks whose content was given up for another
    unpublished: jax.Array  # full blocks that could not be cached for lack of room in the hash table
    resets: jax.Array  # times that everything was forgotten


class MissedBlocks(typing.NamedTuple):
    """What is known of each full block of a prompt beyond the hit."""

    cached: Bool[Array, " n"]
    was_cached: Bool[Array, " n"]
    known: Bool[Array, " n"]


def no_stats() -> CacheStats:
    """Nothing was asked for."""
    return CacheStats(**{field.name: jnp.int32(0) for field in dataclasses.fields(CacheStats)})


def count_admission(
    stats: CacheStats,
    tokens: Int32[Array, ""],
    hit_tokens: Int32[Array, ""],
    resumed: Bool[Array, ""],
    block_size: int,
    missed: MissedBlocks,
    ok: Bool[Array, ""],
    groups: int = 1,
) -> CacheStats:
    """Counts a prompt of `tokens` tokens of which `hit_tokens` were found; nothing unless `ok`.

    The blocks are those of the first of `groups` groups of layers.
    """
    block = jnp.arange(missed.cached.shape[0], dtype=jnp.int32)
    full = tokens // block_size
    unhit = (block >= hit_tokens // block_size) & (block < full)
    holds_last = (block + 1) * block_size == tokens
    without_hole = jnp.cumsum(unhit & ~missed.cached, dtype=jnp.int32) == 0
    first = ok & ~resumed
    left = unhit
    counts = {}
    for name, is_so in (
        ("last_token", missed.cached & holds_last & (block == hit_tokens // block_size)),
        ("alignment", missed.cached & without_hole & (groups > 1)),
        ("hole", missed.cached),
        ("evicted", missed.was_cached),
        ("other_key", missed.known),
        ("cold", jnp.ones_like(left)),
    ):
        counts[name] = block_size * jnp.sum(left & is_so, dtype=jnp.int32)
        left = left & ~is_so
    now = {"queries": tokens, "hits": hit_tokens, "below_block": tokens % block_size, **counts}
    changes = {name: getattr(stats, name) + jnp.where(first, value, 0) for name, value in now.items()}
    again = ok & resumed
    return dataclasses.replace(
        stats,
        resumed_queries=stats.resumed_queries + jnp.where(again, tokens, 0),
        resumed_hits=stats.resumed_hits + jnp.where(again, hit_tokens, 0),
        **changes,
    )


def recent_hit_rate(
    requests: Integer[np.ndarray, " looks"],
    queries: Integer[np.ndarray, " looks"],
    hits: Integer[np.ndarray, " looks"],
    most_requests: int,
) -> float:
    """Host side: the share of tokens that the last requests hit, 0 if they asked for none.

    The share since the start hides what a cache has become: it also counts the requests that found it empty. Looks are
    taken whole, from the newest back as many as hold at most so many requests; the newest counts in any case.

    Args:
      requests: admitted between a look at the counts and the next, oldest first.
      queries: their tokens.
      hits: of these, tokens found.
      most_requests: that are to count.

    Raises:
      ValueError: if `most_requests` is not positive.
    """
    require_int("most_requests", most_requests)
    and_newer = np.cumsum(requests[::-1])[::-1]
    recent = and_newer <= most_requests
    recent[-1:] = True
    asked = int(queries[recent].sum(dtype=np.int64))
    return int(hits[recent].sum(dtype=np.int64)) / asked if asked else 0.0
