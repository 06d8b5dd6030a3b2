"""Swap: sequences leave for a pool of host blocks and come back to where they were, sharing kept.

These transitions say who owns what, and which blocks have to be copied; the caller copies them, with
`kv_cache.copy_blocks_between`: those of `swap_out` before anything else is written to the device blocks, those of
`swap_in` before anything reads them, each call's before the next call's in the other direction.

A block goes to the host once, however many of the sequences that leave refer to it, and not at all if an unchanged
copy is there already. It comes back only if the device does not have it any more: a block that somebody still refers
to, or whose content is still cached, is used as it is.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv import prefix_cache, sharing
from paxkv.block_pool import give_back, is_free, retain, take
from paxkv.block_tables import BlockTable, begin_row, blocks_for
from paxkv.outcomes import Outcome, record, select_outcome
from paxkv.paged_state import PagedState
from paxkv.seqs import blame, lowest_free_row, occupy
from paxkv.swap_state import (
    Moves,
    SwapState,
    add_moves,
    make_twins,
    no_moves_in,
    no_moves_out,
    twins_on_device,
    twins_on_host,
)

if TYPE_CHECKING:
    from paxkv.paged import Paged


def swap_out(
    memory: "Paged", state: PagedState, rows: Bool[Array, " rows"]
) -> tuple[PagedState, Int32[Array, " rows"], Int32[Array, ""], Moves]:
    """Parks the masked sequences on the host and frees their rows: all of them, or none.

    What they had published stays cached on the device until it is evicted.

    Args:
      memory: paged memory with `host_blocks`.
      state: its state, in which every token stored was also computed.
      rows: sequences to park.

    Returns:
      The state; the parking place of each masked row (`memory.rows` elsewhere); the `Outcome`: `OK`; `LATER` if there
      are too few free host blocks or places now; `NEVER` if the host pool is too small even when it is empty;
      `OUT_OF_RANGE`, also recorded as a fault, if a masked row is free or waits for a copy of its own; and the copies
      to make. Unless it is `OK`, nothing else changed and there are no copies.
    """
    swap = _swap(memory, state)
    wrong = rows & ~state.seqs.active
    if state.copies is not None:
        wrong |= rows & sharing.pending(state.copies, memory.rows, memory.num_blocks)
    rank = jnp.cumsum(rows, dtype=jnp.int32)
    blocks, fresh = _count_blocks(memory, state, swap, rows & ~jnp.any(wrong))
    later = (fresh > swap.pool.num_free) | (rank[-1] > jnp.sum(~swap.parked, dtype=jnp.int32))
    outcome = select_outcome(
        (jnp.any(wrong), Outcome.OUT_OF_RANGE), (blocks > memory.host_blocks, Outcome.NEVER), (later, Outcome.LATER)
    )
    leaves = rows & (outcome == Outcome.OK)
    free_places = jnp.argsort(swap.parked, stable=True).astype(jnp.int32)
    places = jnp.where(leaves, free_places[rank - 1], memory.rows)

    def park_one(carry: tuple) -> tuple:
        pool, host_twins, device_twins, tables, moves, todo = carry
        row = jnp.argmax(todo).astype(jnp.int32)
        now = dataclasses.replace(swap, host_twins=host_twins, device_twins=device_twins)
        ids = _stored_blocks(memory, state, row)
        there = twins_on_host(now, ids)
        is_new = (ids != memory.num_blocks) & (there == memory.host_blocks)
        pool = retain(pool, there, distinct=True)
        pool, taken, _ = take(pool, is_new)
        now = make_twins(now, jnp.where(is_new, ids, memory.num_blocks), taken)
        moves = add_moves(moves, ids, taken, is_new)
        tables = _put_tables(tables, places[row], jnp.where(is_new, taken, there), memory, state, row)
        return pool, now.host_twins, now.device_twins, tables, moves, todo.at[row].set(False)

    start = (
        swap.pool,
        swap.host_twins,
        swap.device_twins,
        swap.tables,
        no_moves_out(memory.num_blocks, memory.host_blocks),
        leaves,
    )
    pool, host_twins, device_twins, tables, moves, left = jax.lax.while_loop(
        lambda carry: jnp.any(carry[-1]), park_one, start
    )

    def park(place_values: jax.Array, row_values: jax.Array) -> jax.Array:
        return place_values.at[places].set(row_values, mode="drop")

    swap = SwapState(
        pool=pool,
        tables=tables,
        parked=swap.parked.at[places].set(True, mode="drop"),
        lengths=park(swap.lengths, state.seqs.lengths),
        promised=park(swap.promised, state.seqs.promised),
        chains=jax.tree.map(park, swap.chains, state.chains),
        host_twins=host_twins,
        device_twins=device_twins,
    )
    faults = record(state.seqs.faults, Outcome.OUT_OF_RANGE, wrong)
    state = dataclasses.replace(state, seqs=dataclasses.replace(state.seqs, faults=faults), swap=swap)
    # `left` is empty. It only tells the compiler that the rows are cleared after they were read.
    return memory.release(state, leaves & ~left), places, outcome, moves


def _stored_blocks(memory: "Paged", state: PagedState, row: Int32[Array, ""]) -> Int32[Array, " entries"]:
    """The table entries of a row, group after group, without those that hold no token yet."""
    entries = []
    for group, table in zip(memory.layer_groups, state.tables, strict=True):
        column = jnp.arange(table.ids.shape[1], dtype=jnp.int32)
        holds = column < blocks_for(state.seqs.lengths[row], group.block_size)
        entries.append(jnp.where(holds, table.ids[row], memory.num_blocks))
    return jnp.concatenate(entries)


def _count_blocks(
    memory: "Paged", state: PagedState, swap: SwapState, rows: Bool[Array, " rows"]
) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """Blocks of these rows, each counted once, and how many free host blocks they take."""

    def count_one(carry: tuple) -> tuple:
        seen, blocks, fresh, todo = carry
        row = jnp.argmax(todo)
        ids = _stored_blocks(memory, state, row)
        word, bit = ids // 32, (ids % 32).astype(jnp.uint32)
        was_seen = (seen.at[word].get(mode="fill", fill_value=0) >> bit & jnp.uint32(1)) != 0
        is_first = (ids != memory.num_blocks) & ~was_seen
        there = twins_on_host(swap, ids)
        takes = is_first & ((there == memory.host_blocks) | is_free(swap.pool, there))
        seen = seen.at[word].add(jnp.where(is_first, jnp.uint32(1) << bit, jnp.uint32(0)), mode="drop")
        blocks += jnp.sum(is_first, dtype=jnp.int32)
        fresh += jnp.sum(takes, dtype=jnp.int32)
        return seen, blocks, fresh, todo.at[row].set(False)

    seen = jnp.zeros(memory.num_blocks // 32 + 1, jnp.uint32)  # a bit for each block
    start = (seen, jnp.int32(0), jnp.int32(0), rows)
    _, blocks, fresh, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[-1]), count_one, start)
    return blocks, fresh


def _put_tables(
    tables: tuple[BlockTable, ...],
    place: Int32[Array, ""],
    hosts: Int32[Array, " entries"],
    memory: "Paged",
    state: PagedState,
    row: Int32[Array, ""],
) -> tuple[BlockTable, ...]:
    """Writes a row's blocks, which are on the host now, into a parking place."""
    parked = []
    parts = _by_group(tables, hosts)
    for group, table, source, ids in zip(memory.layer_groups, tables, state.tables, parts, strict=True):
        end = jnp.minimum(source.end[row], blocks_for(state.seqs.lengths[row], group.block_size))
        parked.append(begin_row(table, place, ids, jnp.minimum(source.first[row], end), end, memory.host_blocks))
    return tuple(parked)


def _by_group(tables: tuple[BlockTable, ...], entries: Int32[Array, " entries"]) -> list[Int32[Array, " columns"]]:
    """The entries of each group's table, which were put one after another."""
    parts, at = [], 0
    for table in tables:
        parts.append(entries[at : at + table.ids.shape[1]])
        at += table.ids.shape[1]
    return parts


def swap_in(
    memory: "Paged", state: PagedState, place: Int32[Array, ""], keep_back: Bool[Array, ""] | bool = True
) -> tuple[PagedState, Int32[Array, ""], Int32[Array, ""], Moves]:
    """Lets a parked sequence go on, in the lowest free row: with its length, its promise and its chain of contents.

    It needs room for the next token too, or it would be the first to be preempted again. Its blocks count as used
    anew: where their content was evicted meanwhile, it is not cached again.

    Args:
      memory: paged memory with `host_blocks`.
      state: its state.
      place: where the sequence is parked.
      keep_back: whether to leave the watermark free; not for one without whom those who run cannot go on.

    Returns:
      The state; the row (`memory.rows` if none); the `Outcome`: `OK`; `LATER` if there is no free row, or there are
      too few blocks; `NEVER` if the sequence has grown as large as the memory and cannot have another token;
      `OUT_OF_RANGE`, also recorded as a fault, if nobody is parked there; and the copies to make. Unless it is `OK`,
      nothing else changed and there are no copies.
    """
    swap, none = _swap(memory, state), memory.num_blocks
    row, has_row = lowest_free_row(state.seqs)
    parked, hosts = _look_at(swap, place)
    length, promised, first, held = (
        values.at[place].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        for values in (
            swap.lengths,
            swap.promised,
            jnp.stack([table.first for table in swap.tables], axis=-1),
            jnp.stack([table.end - table.first for table in swap.tables], axis=-1),
        )
    )
    devices = twins_on_device(swap, hosts)
    free = is_free(state.pool, devices)
    kept = ~free  # a free block without content may have been wiped
    if state.contents is not None:
        kept |= prefix_cache.content_of(state.contents, devices) != 0
    kept &= devices != none
    copied = (hosts != memory.host_blocks) & ~kept

    promised = jnp.maximum(promised, jnp.minimum(length + 1, memory.max_len))
    most = jnp.maximum(memory.most_held(promised, first), held)
    need = jnp.sum(most - held) + jnp.sum(copied | (kept & free), dtype=jnp.int32)
    reserve = jnp.where(jnp.any(state.seqs.active) & keep_back, state.limits.watermark, 0)
    later = ~has_row | (need + memory.owed(state) + reserve > state.pool.num_free)
    outcome = select_outcome(
        (~parked, Outcome.OUT_OF_RANGE), (jnp.sum(most) > none, Outcome.NEVER), (later, Outcome.LATER)
    )
    ok = outcome == Outcome.OK
    row = jnp.where(ok, row, memory.rows)
    state = dataclasses.replace(state, seqs=blame(state.seqs, place, ~parked, Outcome.OUT_OF_RANGE))

    pool = retain(state.pool, jnp.where(kept & ok, devices, none), distinct=True)
    state, taken, _ = memory.take_blocks(dataclasses.replace(state, pool=pool), copied & ok)
    ids = jnp.where(copied, taken, devices)
    tables = tuple(
        begin_row(table, row, part, source.first[place], source.end[place], none)
        for table, source, part in zip(state.tables, swap.tables, _by_group(state.tables, ids), strict=True)
    )
    state = dataclasses.replace(
        state,
        seqs=occupy(state.seqs, row, promised, ok, stored=length),
        tables=tables,
        chains=jax.tree.map(lambda to, parked: to.at[row].set(parked[place], mode="drop"), state.chains, swap.chains),
    )
    came = copied & ok
    swap = make_twins(_swap(memory, state), jnp.where(came, taken, none), jnp.where(came, hosts, memory.host_blocks))
    moves = add_moves(no_moves_in(memory.num_blocks, memory.host_blocks), hosts, taken, came)
    return dataclasses.replace(state, swap=_leave(swap, place, hosts, ok)), row, outcome, moves


def discard(memory: "Paged", state: PagedState, place: Int32[Array, ""]) -> tuple[PagedState, Int32[Array, ""]]:
    """Ends a parked sequence: its request was aborted.

    Returns:
      The state and the `Outcome`: `DOUBLE_FREE`, also recorded as a fault, if nobody is parked there, and then nothing
      else changed.
    """
    swap = _swap(memory, state)
    parked, hosts = _look_at(swap, place)
    state = dataclasses.replace(state, seqs=blame(state.seqs, place, ~parked, Outcome.DOUBLE_FREE))
    state = dataclasses.replace(state, swap=_leave(swap, place, hosts, parked))
    return state, select_outcome((~parked, Outcome.DOUBLE_FREE))


def _look_at(swap: SwapState, place: Int32[Array, ""]) -> tuple[Bool[Array, ""], Int32[Array, " entries"]]:
    """Whether a sequence is parked there, and its host blocks, group after group."""
    places, host_blocks = swap.parked.shape[0], swap.device_twins.shape[0]
    known = (place >= 0) & (place < places)
    parked = known & swap.parked[place]
    hosts = jnp.full(sum(table.ids.shape[1] for table in swap.tables), host_blocks, jnp.int32)

    def read(_: tuple) -> tuple:
        return jnp.concatenate([table.ids[place] for table in swap.tables]), jnp.bool(False)

    # Read in a loop, which must be over before the place is cleared: otherwise all tables would be copied to be read
    # still. `left` is false; it only tells the compiler so.
    hosts, left = jax.lax.while_loop(lambda carry: carry[1], read, (hosts, parked))
    return parked & ~left, hosts


def _leave(swap: SwapState, place: Int32[Array, ""], hosts: Int32[Array, " entries"], ok: Bool[Array, ""]) -> SwapState:
    """Empties a parking place, if `ok`. The block that has been free for longest is written over first."""
    places, host_blocks = swap.parked.shape[0], swap.device_twins.shape[0]
    at = jnp.where(ok, place, places)
    pool, _ = give_back(swap.pool, jnp.where(ok, hosts, host_blocks), jnp.ones(hosts.shape, jnp.bool), distinct=True)

    def clear(values: jax.Array) -> jax.Array:
        return values.at[at].set(jnp.zeros_like(values[0]), mode="drop")

    empty = jnp.int32(0)
    return dataclasses.replace(
        swap,
        pool=pool,
        tables=tuple(begin_row(table, at, jnp.zeros(0, jnp.int32), empty, empty, host_blocks) for table in swap.tables),
        parked=clear(swap.parked),
        lengths=clear(swap.lengths),
        promised=clear(swap.promised),
        chains=jax.tree.map(clear, swap.chains),
    )


def _swap(memory: "Paged", state: PagedState) -> SwapState:
    if state.swap is None:
        raise ValueError(f"host_blocks: this needs a memory with host blocks, got {memory.host_blocks}")
    return state.swap
