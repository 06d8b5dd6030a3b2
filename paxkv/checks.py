"""What must hold in every state of a memory, as counts of the places where it does not.

The counts are reductions, so they can run inside a jitted step; `require_invariants` asks on the host.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.block_pool import BlockPool
from paxkv.block_tables import blocks_for
from paxkv.contiguous import VAttention, VAttentionState
from paxkv.hash_table import WIDTH
from paxkv.memory import KVMemory
from paxkv.paged import Paged
from paxkv.paged_state import PagedState, required
from paxkv.prefix_cache import BROKEN
from paxkv.reserved import Reserved, ReservedState
from paxkv.seqs import Seqs
from paxkv.swap_state import SwapState, twins_on_device, twins_on_host

Counts = dict[str, Int32[Array, ""]]


class InvariantError(RuntimeError):
    """A state that no sequence of transitions should lead to."""


@jax.jit(static_argnames="memory")
def violations(memory: KVMemory[Any], state: Any) -> Counts:
    """How often each invariant is broken; all zero for a sound state.

    Args:
      memory: a `Paged`, `VAttention` or `Reserved` memory.
      state: its state.

    Returns:
      By the name of the invariant, the places where it is broken: rows, blocks, table entries, or units by which
      a sum is off.

    Raises:
      TypeError: if the invariants of this kind of memory are not known.
    """
    if type(memory) not in _OF_MEMORY:
        known = ", ".join(kind.__name__ for kind in _OF_MEMORY)
        raise TypeError(f"memory must be one of {known}, got {type(memory).__name__}")
    return {
        **_of_seqs(memory, memory.seqs(state)),
        **_OF_MEMORY[type(memory)](memory, state),
        **_of_usage(memory, state),
    }


def require_invariants(memory: KVMemory[Any], state: Any) -> None:
    """Host side: raises if an invariant is broken. Waits for the device.

    Raises:
      InvariantError: naming what is broken, and in how many places.
    """
    broken = {name: int(count) for name, count in violations(memory, state).items() if int(count) != 0}
    if broken:
        listed = ", ".join(f"{name} ({count})" for name, count in broken.items())
        raise InvariantError(f"{type(memory).__name__} memory is in a state that breaks: {listed}")


def _count(broken: Bool[Array, "..."]) -> Int32[Array, ""]:
    return jnp.sum(broken, dtype=jnp.int32)


def _of_seqs(memory: KVMemory[Any], seqs: Seqs) -> Counts:
    outside = (seqs.lengths < 0) | (seqs.lengths > memory.max_len)
    promised_outside = (seqs.promised < 0) | (seqs.promised > memory.max_len)
    return {
        "lengths_are_possible": _count(outside),
        "promises_are_possible": _count(promised_outside),
        "free_rows_hold_nothing": _count(~seqs.active & ((seqs.lengths != 0) | (seqs.promised != 0))),
    }


def _of_paged(memory: Paged, state: PagedState) -> Counts:
    pool, none = state.pool, memory.num_blocks
    entries = sum((_mentions(table.ids, none) for table in state.tables), jnp.zeros(none, jnp.int32))
    mentions = entries
    if state.copies is not None:
        mentions += _mentions(state.copies.sources, none) + _mentions(state.copies.destinations, none)
    if state.pins is not None:
        mentions += state.pins
    counts = {
        **_of_pool(pool, mentions, state.limits.units),
        "tables_cover_lengths": jnp.int32(0),
        "tables_hold_no_old_ids": jnp.int32(0),
        "no_block_twice_in_a_table": jnp.int32(0),
        "shared_blocks_hold_tokens": jnp.int32(0),
        "shared_blocks_are_full_unless_forked": jnp.int32(0),
    }
    for group, table in zip(memory.layer_groups, state.tables, strict=True):
        column = jnp.arange(table.ids.shape[1], dtype=jnp.int32)[None, :]
        needed = column < blocks_for(state.seqs.lengths, group.block_size)[:, None]
        filled = (column >= table.first[:, None]) & (column < table.end[:, None])
        known = (table.ids >= 0) & (table.ids < none)
        in_order = jnp.sort(table.ids, axis=1)
        out_of_view = (group.out_of_view(state.seqs.lengths) // group.block_size)[:, None]
        full = (column + 1) * group.block_size <= state.seqs.lengths[:, None]
        shared = entries.at[table.ids].get(mode="fill", fill_value=0) > 1
        counts["tables_cover_lengths"] += _count(needed & ~known & (column >= out_of_view)) + _count(filled & ~known)
        counts["tables_hold_no_old_ids"] += _count(~filled & (table.ids != none)) + _count(
            (table.first < 0) | (table.first > table.end) | (~state.seqs.active & (table.end != 0))
        )
        counts["no_block_twice_in_a_table"] += _count((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] < none))
        counts["shared_blocks_hold_tokens"] += _count(shared & filled & ~needed)
        if state.copies is None:
            counts["shared_blocks_are_full_unless_forked"] += _count(shared & filled & ~full)
    if memory.cache is not None:
        counts |= _of_contents(memory, state)
    if state.swap is not None:
        counts |= _of_swap(memory, state.swap)
    return counts


def _of_pool(pool: BlockPool, mentions: Int32[Array, " num_blocks"], usable: Int32[Array, ""]) -> Counts:
    """A block is either once in the queue, or has the references that `mentions` says."""
    none, extra = pool.num_blocks, pool.marks[:, 1]
    there = jnp.arange(none, dtype=jnp.int32) < usable
    place = jnp.arange(pool.queue.shape[0], dtype=jnp.int32)
    free_at = jnp.where((place >= pool.head) & (place < pool.tail), pool.queue, none)
    times_free = _mentions(free_at, none)
    stands = free_at.at[pool.marks[:, 0]].get(mode="fill", fill_value=none) == jnp.arange(none, dtype=jnp.int32)
    return {
        "free_ids_are_unique_blocks": _count(times_free > 1) + jnp.abs(jnp.sum(times_free) - pool.num_free),
        "free_blocks_have_no_references": _count((times_free > 0) != (there & (pool.ref_counts == 0))),
        "free_blocks_know_their_places": _count((times_free > 0) & ~stands),
        "free_blocks_were_not_shared": _count(((extra < 0) & there) | ((times_free > 0) & (extra != 0))),
        "free_and_used_are_all": jnp.abs(pool.num_free + _count(pool.ref_counts > 0) - usable),
        "references_are_table_entries": _count(mentions != pool.ref_counts),
    }


def _of_swap(memory: Paged, swap: SwapState) -> Counts:
    """The host pool keeps the rules of the other one, and a parked sequence has all that it stored."""
    none = memory.host_blocks
    mentions = sum((_mentions(table.ids, none) for table in swap.tables), jnp.zeros(none, jnp.int32))
    counts = {f"host_{name}": count for name, count in _of_pool(swap.pool, mentions, jnp.int32(none)).items()}
    counts["parked_places_hold_all_they_stored"] = jnp.int32(0)
    counts["free_places_hold_nothing"] = _count(~swap.parked & ((swap.lengths != 0) | (swap.promised != 0)))
    for leaf in jax.tree.leaves(swap.chains):
        counts["free_places_hold_nothing"] += _count(~swap.parked & jnp.any(leaf != 0, axis=tuple(range(1, leaf.ndim))))
    for group, table in zip(memory.layer_groups, swap.tables, strict=True):
        column = jnp.arange(table.ids.shape[1], dtype=jnp.int32)[None, :]
        stored = blocks_for(swap.lengths, group.block_size)
        gone = group.out_of_view(swap.lengths) // group.block_size
        filled = (column >= table.first[:, None]) & (column < table.end[:, None])
        known = (table.ids >= 0) & (table.ids < none)
        counts["parked_places_hold_all_they_stored"] += _count(
            swap.parked & ((table.end != stored) | (table.first < 0) | (table.first > jnp.minimum(gone, stored)))
        ) + _count(filled & ~known)
        counts["free_places_hold_nothing"] += _count(~filled & (table.ids != none)) + _count(
            ~swap.parked & (table.end != 0)
        )
    devices, hosts = jnp.arange(memory.num_blocks, dtype=jnp.int32), jnp.arange(none, dtype=jnp.int32)
    counts["twins_are_blocks"] = _count((swap.host_twins < 0) | (swap.host_twins > none)) + _count(
        (swap.device_twins < 0) | (swap.device_twins > memory.num_blocks)
    )
    counts["twins_name_each_other"] = jnp.abs(
        _count(twins_on_host(swap, devices) != none) - _count(twins_on_device(swap, hosts) != memory.num_blocks)
    )
    return counts


def _of_contents(memory: Paged, state: PagedState) -> Counts:
    """What a prefix cache adds: records, hash table and chains say the same."""
    contents, chain, none = required(state.contents), required(state.chains), memory.num_blocks
    content, parent, entry = (contents.records[:, column] for column in range(3))
    cached = content != 0
    blocks = contents.table[:, WIDTH:].reshape(-1)
    listed = _mentions(blocks, none)
    there = blocks.at[entry].get(mode="fill", fill_value=none)
    everyone = jnp.arange(none, dtype=jnp.int32)
    covered = jnp.where(chain.contents == BROKEN, 0, chain.contents)
    return {
        "cached_blocks_are_listed_once": _count(listed != cached.astype(jnp.int32)),
        "entries_lead_to_their_blocks": _count(cached & (there != everyone)),
        "no_entry_is_left_claimed": _count((blocks < 0) | (blocks > none)),
        "contents_are_younger_than_their_parents": _count(cached & (content <= parent)),
        "contents_were_given_out": _count((content < 0) | (content >= contents.next_content))
        + _count(covered >= contents.next_content),
        "cached_blocks_are_marked": _count(cached != (state.pool.marks[:, 2] == 1)),
        "uncached_blocks_have_no_record": _count(~cached[:, None] & (contents.records != 0)),
        "chains_cover_stored_tokens": _count((chain.hashed < 0) | (chain.hashed > state.seqs.lengths)),
    }


def _mentions(ids: Int32[Array, "..."], none: int) -> Int32[Array, " num_blocks"]:
    return jnp.zeros(none, jnp.int32).at[ids].add(1, mode="drop", wrap_negative_indices=False)


def _of_vattention(memory: VAttention, state: VAttentionState) -> Counts:
    total = jnp.sum(state.mapped)
    most = memory.groups_for(jnp.int32(memory.max_len))
    calls = state.calls
    return {
        "mapped_groups_exist": jnp.maximum(total - state.limits.units, 0),
        "mapped_groups_cover_lengths": _count(state.mapped < memory.groups_for(state.seqs.lengths)),
        "mapped_groups_lie_in_their_row": _count((state.mapped < 0) | (state.mapped > most)),
        "calls_account_for_mapped_groups": jnp.abs(
            calls.sync + calls.background - calls.unmap - total * memory.buffers
        ),
    }


def _of_reserved(memory: Reserved, state: ReservedState) -> Counts:
    active = state.seqs.active
    blocks = memory.held(state) * memory.min_block
    ends = state.starts + blocks
    by_start = jnp.argsort(jnp.where(active, state.starts, memory.num_slots))
    live, starts, ends_by_start = active[by_start], state.starts[by_start], ends[by_start]
    end_of_arena = state.limits.units * memory.min_block
    left_behind = (state.starts != 0) | (state.sizes != 0) | (state.orders != 0)
    return {
        "ranges_lie_in_the_arena": _count(active & ((state.starts < 0) | (ends > end_of_arena))),
        "ranges_are_aligned": _count(active & (state.starts % jnp.maximum(blocks, 1) != 0)),
        "ranges_are_disjoint": _count(live[1:] & (starts[1:] < ends_by_start[:-1])),
        "ranges_cover_lengths": _count((state.sizes < state.seqs.lengths) | (state.sizes > blocks)),
        "free_rows_reserve_nothing": _count(~active & left_behind),
    }


def _of_usage(memory: KVMemory[Any], state: Any) -> Counts:
    seqs = memory.seqs(state)
    used = memory.usage(state, jnp.maximum(seqs.promised, seqs.lengths))
    kinds = jnp.stack([used.tokens, used.reserved, used.internal, used.external])
    given = used.tokens + used.reserved + used.internal
    return {
        "usage_is_not_negative": _count(kinds < 0),
        "allocated_covers_what_was_given": _count((used.allocated < given) | (used.allocated > memory.capacity)),
    }


_OF_MEMORY: dict[type, Callable[[Any, Any], Counts]] = {
    Paged: _of_paged,
    VAttention: _of_vattention,
    Reserved: _of_reserved,
}
