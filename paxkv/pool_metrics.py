"""How a pool of blocks is used: what is free, held, cached and shared, how it is scattered, and how long blocks live.

Reductions of a state, to be called when somebody looks; a memory that nobody looks at pays nothing for them.
"""

import dataclasses
import typing
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from paxkv.memory import Usage, usage_of_rows
from paxkv.paged_state import PagedState, required
from paxkv.sizes import require_int

if TYPE_CHECKING:
    from paxkv.paged import Paged


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PoolMetrics:
    """Blocks of a pool, all i32[]. Free and held ones are all there are."""

    free: jax.Array  # to be had, with what is cached in them or without
    held: jax.Array  # somebody refers to them
    cached: jax.Array  # hold a content
    cached_free: jax.Array  # hold a content that nobody uses now: the cache, which makes way when memory is short
    shared: jax.Array  # held by more than one row or pin
    pinned: jax.Array  # kept by a pin
    saved: jax.Array  # references beyond each block's first: blocks that would be held more if nothing were shared


@jax.jit
def pool_metrics(state: PagedState) -> PoolMetrics:
    """Counts the blocks of a pool by what they are used for. Pins count as references, pending copies do not."""
    references = state.pool.ref_counts
    held, cached = references > 0, _cached(state)
    if state.copies is not None:
        ends = jnp.concatenate([state.copies.sources, state.copies.destinations])
        references = references.at[ends].add(-1, mode="drop")
    pinned = jnp.zeros_like(held) if state.pins is None else state.pins > 0
    return PoolMetrics(
        free=_count(~held),
        held=_count(held),
        cached=_count(cached),
        cached_free=_count(cached & ~held),
        shared=_count(references > 1),
        pinned=_count(pinned),
        saved=jnp.sum(jnp.maximum(references - 1, 0)),
    )


def usage(state: PagedState) -> Float32[Array, ""]:
    """Share of the blocks that somebody refers to, from 0 to 1: `1 - free / usable`."""
    units = state.limits.units
    return (units - state.pool.num_free).astype(jnp.float32) / units.astype(jnp.float32)


@jax.jit
def run_lengths(state: PagedState) -> Int32[Array, " bins"]:
    """How long the stretches of a sequence's blocks are that lie one after another in memory, over all tables.

    A stretch is a run of entries of one table row whose ids ascend by one. Long ones can be read in one go.

    Returns:
      Entry b counts the stretches of 2**b to 2**(b+1) - 1 blocks; the last bin has the widest table.
    """
    widest = max(table.ids.shape[1] for table in state.tables)
    bins = jnp.zeros(widest.bit_length(), jnp.int32)
    for table in state.tables:
        width = table.ids.shape[1]
        column = jnp.arange(width, dtype=jnp.int32)[None, :]
        filled = (column >= table.first[:, None]) & (column < table.end[:, None])
        follows = filled[:, 1:] & filled[:, :-1] & (table.ids[:, 1:] == table.ids[:, :-1] + 1)
        edge = jnp.zeros((table.ids.shape[0], 1), jnp.bool)
        begins = filled & ~jnp.concatenate([edge, follows], axis=1)
        ends = filled & ~jnp.concatenate([follows, edge], axis=1)
        begin = jax.lax.cummax(jnp.where(begins, column, 0), axis=1)
        bins = _add_to_bins(bins, (column - begin + 1).reshape(-1), ends.reshape(-1))
    return bins


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageGroupMetrics:
    """What the blocks in use would keep mapped if physical memory were handed out in groups of blocks; all i32[]."""

    used_blocks: jax.Array  # held or cached
    pinned: jax.Array  # groups that hold at least one of them, so that none of their memory can be returned
    needed: jax.Array  # groups that they would fill if they lay side by side


@jax.jit(static_argnames="blocks_per_group")
def page_groups(state: PagedState, blocks_per_group: int) -> PageGroupMetrics:
    """How many groups of `blocks_per_group` consecutive blocks the blocks in use pin, and how few would do.

    The difference is what eviction block by block strands where memory is mapped page by page, as vAttention
    (arXiv 2405.04437) does: a single cached block pins its whole group. The last group may be a smaller one.

    Raises:
      ValueError: if `blocks_per_group` is not positive.
    """
    require_int("blocks_per_group", blocks_per_group)
    used = (state.pool.ref_counts > 0) | _cached(state)
    groups = -(-state.pool.num_blocks // blocks_per_group)
    padded = jnp.concatenate([used, jnp.zeros(groups * blocks_per_group - used.shape[0], jnp.bool)])
    return PageGroupMetrics(
        used_blocks=_count(used),
        pinned=_count(jnp.any(padded.reshape(groups, blocks_per_group), axis=1)),
        needed=(_count(used) + (blocks_per_group - 1)) // blocks_per_group,
    )


_BINS = 31


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """How long blocks were held, and how long cached blocks lay idle, in whatever unit the clock has.

    Entry b of a histogram counts times of 2**b to 2**(b+1) - 1; 0 counts as 1.
    """

    since: jax.Array  # i32[num_blocks]; when each block was last taken or let go
    held: jax.Array  # i32[31]; from being taken or hit to being let go by everybody
    idle_until_hit: jax.Array  # i32[31]; from being let go, with a content, to being hit: the gap between two uses
    idle_until_lost: jax.Array  # i32[31]; from being let go, with a content, to being evicted or forgotten


def init_lifetimes(num_blocks: int, now: Int32[Array, ""]) -> Lifetimes:
    """Nothing was seen so far; all blocks count as free since `now`."""
    empty = jnp.zeros(_BINS, jnp.int32)
    return Lifetimes(
        since=jnp.full(num_blocks, now, jnp.int32),
        held=empty,
        idle_until_hit=jnp.copy(empty),
        idle_until_lost=jnp.copy(empty),
    )


@jax.jit
def observe_lifetimes(lifetimes: Lifetimes, before: PagedState, after: PagedState, now: Int32[Array, ""]) -> Lifetimes:
    """Adds what ended between two states, the second of which is of the time `now`.

    What begins and ends between the two is not seen, and what is let go and taken up again goes on: look as often as
    the times that matter are long.
    """
    was_held, is_held = before.pool.ref_counts > 0, after.pool.ref_counts > 0
    was_cached = _cached(before)
    if before.contents is None or after.contents is None:
        kept = jnp.zeros_like(was_held)
    else:
        kept = before.contents.records[:, 0] == after.contents.records[:, 0]
    time = now - lifetimes.since
    idle = ~was_held & was_cached
    return Lifetimes(
        since=jnp.where(was_held != is_held, now, lifetimes.since),
        held=_add_to_bins(lifetimes.held, time, was_held & ~is_held),
        idle_until_hit=_add_to_bins(lifetimes.idle_until_hit, time, idle & kept & is_held),
        idle_until_lost=_add_to_bins(lifetimes.idle_until_lost, time, idle & ~kept),
    )


def usage_of_cached(memory: "Paged", state: PagedState, final_lengths: Int32[Array, " rows"]) -> Usage:
    """What `usage_of_blocks` counts, without a look at each table, where sequences share full blocks and no others.

    So it is with a prefix cache alone, and one group of layers: whoever shares a block has filled it, so that each
    reference beyond the first is a block of tokens that is not there twice.
    """
    given = memory.held(state) * memory.block_size
    capacity = memory.block_size * state.limits.units
    alone = usage_of_rows(capacity, state.seqs, given, given, final_lengths)
    named = _count(state.pool.ref_counts > required(state.pins))
    saved = jnp.sum(given) - memory.block_size * named
    held = capacity - memory.block_size * state.pool.num_free
    tokens = alone.tokens - saved
    return Usage(
        tokens=tokens,
        reserved=alone.reserved,
        internal=held - tokens - alone.reserved,
        external=capacity - held,
        allocated=held,
        saved=saved,
    )


def usage_of_blocks(memory: "Paged", state: PagedState, final_lengths: Int32[Array, " rows"]) -> Usage:
    """Counts a shared block once: what the sequence furthest in has stored there, and will."""
    tokens = fillable = named = jnp.zeros(memory.num_blocks, jnp.int32)
    final = jnp.maximum(final_lengths, state.seqs.lengths)
    for group, table in zip(memory.layer_groups, state.tables, strict=True):
        begin = group.block_size * jnp.arange(table.ids.shape[1], dtype=jnp.int32)[None, :]
        stored = jnp.clip(state.seqs.lengths[:, None] - begin, 0, group.block_size)
        to_come = jnp.clip(final[:, None] - begin, 0, group.block_size)
        # A full block of any group is worth the slots of a block: its bytes are the same.
        tokens = tokens.at[table.ids].max(stored * memory.block_size // group.block_size, mode="drop")
        fillable = fillable.at[table.ids].max(to_come * memory.block_size // group.block_size, mode="drop")
        named = named.at[table.ids].set(1, mode="drop")
    held = memory.block_size * (state.limits.units - state.pool.num_free)
    return Usage(
        tokens=jnp.sum(tokens),
        reserved=jnp.sum(fillable - tokens),
        internal=held - jnp.sum(fillable),
        external=memory.block_size * state.limits.units - held,
        allocated=held,
        saved=memory.block_size * (jnp.sum(memory.held(state)) - jnp.sum(named)),  # not those that only pins hold
    )


def _cached(state: PagedState) -> Bool[Array, " num_blocks"]:
    if state.contents is None:
        return jnp.zeros(state.pool.num_blocks, jnp.bool)
    return state.contents.records[:, 0] != 0


def _count(blocks: Bool[Array, " n"]) -> Int32[Array, ""]:
    return jnp.sum(blocks, dtype=jnp.int32)


def _add_to_bins(
    bins: Int32[Array, " bins"], values: Int32[Array, " n"], wanted: Bool[Array, " n"]
) -> Int32[Array, " bins"]:
    """Counts each wanted value v in bin floor(log2(v))."""
    exponent = 31 - jax.lax.clz(jnp.maximum(values, 1))
    return bins.at[jnp.where(wanted, exponent, bins.shape[0])].add(1, mode="drop")
