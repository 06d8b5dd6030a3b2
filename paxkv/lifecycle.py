"""What can happen to paged memory between steps: forks, pins, evictions on demand, resets, new weights."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv import chains, prefix_cache, sharing
from paxkv.admission import identity_of
from paxkv.block_pool import BlockPool, is_free, mark_kept, retain
from paxkv.block_tables import BlockTable, blocks_for
from paxkv.chain_hash import hash_of_length, seed
from paxkv.control_flow import run_if
from paxkv.memory import Content
from paxkv.outcomes import Outcome, record, select_outcome
from paxkv.paged_state import PagedState, required
from paxkv.prefix_cache import BROKEN
from paxkv.seqs import blame, lowest_free_row, occupy, vacate

if TYPE_CHECKING:
    from paxkv.paged import Paged


def _require_forks(memory: "Paged") -> None:
    if not memory.forks:
        raise ValueError(
            "forks: expected memory that copies before it writes, got forks=False; pass forks=True to Paged"
        )


def fork(
    memory: "Paged",
    state: PagedState,
    parent: Int32[Array, ""],
    length: Int32[Array, ""],
    promised: Int32[Array, ""],
    content: Content | None = None,
) -> tuple[PagedState, Int32[Array, ""], Int32[Array, ""]]:
    """Starts a sequence in a free row with the first `length` tokens of another one, in the same blocks.

    Args:
      memory: paged memory with `forks`.
      state: its state.
      parent: row of the other sequence.
      length: at most what the parent has stored.
      promised: tokens that the new sequence has room for, as in an admission.
      content: of the new sequence, needed with a prefix cache.

    Returns:
      The state, the row (`rows` if none), and the `Outcome`: `OK`; `LATER` if no row is free, there is no room for what
      it is promised, or the parent waits for a copy of its own or has not published so many tokens yet; `OUT_OF_RANGE`,
      also recorded as a fault, if the parent does not hold so many tokens or the promise is none that can be kept.
      Unless it is `OK`, nothing else changed.
    """
    _require_forks(memory)
    none = memory.num_blocks
    asked = parent
    parent = jnp.where(parent < 0, memory.rows, parent)  # a negative index would count from the end
    row, has_row = lowest_free_row(state.seqs)
    held = state.seqs.lengths.at[parent].get(mode="fill", fill_value=-1)
    alive = state.seqs.active.at[parent].get(mode="fill", fill_value=False)
    wrong = ~alive | (length < 0) | (length > held) | (promised < length) | (promised > memory.max_len)
    # A shorter fork of a windowed sequence may need blocks that have left the window.
    for g, group in enumerate(memory.layer_groups):
        gone = state.tables[g].first.at[parent].get(mode="fill", fill_value=0)
        wrong |= gone > group.out_of_view(length) // group.block_size
    # It gets what it was promised without what is full; its first write into a half-filled block takes one.
    shared = jnp.stack([length // group.block_size for group in memory.layer_groups])
    promised_blocks = jnp.sum(memory.most_held(jnp.maximum(promised, length + 1), shared))
    later = ~has_row | (promised_blocks + memory.owed(state) > state.pool.num_free)
    if state.copies is not None:
        waits = sharing.pending(state.copies, memory.rows, none)
        later |= waits.at[parent].get(mode="fill", fill_value=False)
    if state.chains is not None:
        later |= length > state.chains.hashed.at[parent].get(mode="fill", fill_value=0)
    outcome = select_outcome((wrong, Outcome.OUT_OF_RANGE), (later, Outcome.LATER))
    ok = outcome == Outcome.OK
    at = jnp.where(ok, row, memory.rows)

    pool, tables = state.pool, []
    for g, group in enumerate(memory.layer_groups):
        table, ids = sharing.share_row(state.tables[g], parent, at, blocks_for(length, group.block_size), none)
        pool = retain(pool, ids, distinct=True)
        tables.append(table)
    seqs = occupy(state.seqs, row, promised, ok, stored=length)
    seqs = blame(seqs, asked, wrong, Outcome.OUT_OF_RANGE)
    state = dataclasses.replace(state, seqs=seqs, pool=pool, tables=tuple(tables))
    if state.chains is not None:
        state = dataclasses.replace(state, chains=_fork_chain(memory, state, parent, at, length, content))
    return state, at, outcome


def _fork_chain(
    memory: "Paged",
    state: PagedState,
    parent: Int32[Array, ""],
    row: Int32[Array, ""],
    length: Int32[Array, ""],
    content: Content | None,
) -> chains.Chains:
    """The chain of the new row: hashed anew, continued from what the last full block it shares holds."""
    if content is None:
        raise ValueError("content: expected the new sequence's Content, as the memory has a prefix cache, got None")
    contents = required(state.contents)
    chain = required(state.chains)
    config = required(memory.cache)
    epoch = chain.identities.at[parent, 2].get(mode="fill", fill_value=0)  # of the weights that computed it
    last = []
    for g, group in enumerate(memory.layer_groups):
        full = length // group.block_size
        block = state.tables[g].ids.at[parent, jnp.maximum(full - 1, 0)].get(mode="fill", fill_value=memory.num_blocks)
        held = prefix_cache.content_of(contents, block)
        last.append(jnp.where(full == 0, chains.root_of(g), jnp.where(held == 0, BROKEN, held)))
    start = seed(content.adapter, content.salt, epoch, config.kv_format)
    return chains.start_chain(
        chain,
        row,
        content.tokens,
        length,
        hash_of_length(content.tokens, length, start),
        jnp.stack(last),
        identity_of(content, epoch),
        content.priority,
    )


def reorder(memory: "Paged", state: PagedState, sources: Int32[Array, " rows"]) -> PagedState:
    """Every row takes over the sequence of row `sources[row]`, which keeps it: how beams survive or die.

    Args:
      memory: paged memory with `forks`.
      state: its state.
      sources: of each row, itself where nothing changes. A row that changes and its source must be active, equally
        long and without a pending copy, and the source must not change; anything else is an `OUT_OF_RANGE` fault, and
        then nothing changes.
    """
    _require_forks(memory)
    rows, none = memory.rows, memory.num_blocks
    row = jnp.arange(rows, dtype=jnp.int32)
    moved = sources != row
    known = (sources >= 0) & (sources < rows)
    source = jnp.where(known, sources, row)
    seqs = state.seqs
    alike = seqs.active & seqs.active[source] & (seqs.lengths == seqs.lengths[source])
    wrong = moved & ~(known & alike & ~moved[source])
    if state.copies is not None:
        waits = sharing.pending(state.copies, rows, none)
        wrong |= moved & (waits | waits[source])
    faults = record(seqs.faults, Outcome.OUT_OF_RANGE, wrong)
    moved &= ~jnp.any(wrong)

    # What the source was given for tokens to come stays its own: no two rows may write into a block.
    taken = []
    for group, table in zip(memory.layer_groups, state.tables, strict=True):
        end = jnp.minimum(table.end, blocks_for(seqs.lengths, group.block_size))
        column = jnp.arange(table.ids.shape[1], dtype=jnp.int32)[None, :]
        taken.append(BlockTable(jnp.where(column < end[:, None], table.ids, none), jnp.minimum(table.first, end), end))

    def move_one(carry: tuple) -> tuple:
        pool, todo = carry
        at = jnp.argmax(todo)
        new = jnp.concatenate([table.ids[source[at]] for table in taken])
        old = jnp.concatenate([table.ids[at] for table in state.tables])
        pool = retain(pool, new, distinct=True)
        pool, _ = memory.give_back(pool, old, distinct=True)
        return pool, todo.at[at].set(False)

    pool, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), move_one, (state.pool, moved))
    source = jnp.where(moved, source, row)

    def take_over(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(moved.reshape(-1, *[1] * (old.ndim - 1)), new[source], old)

    return dataclasses.replace(
        state,
        seqs=dataclasses.replace(seqs, promised=seqs.promised[source], faults=faults),
        pool=pool,
        tables=jax.tree.map(take_over, state.tables, tuple(taken)),
        chains=jax.tree.map(lambda leaf: leaf[source], state.chains),
    )


def release(memory: "Paged", state: PagedState, rows: Bool[Array, " rows"]) -> PagedState:
    """Ends sequences, one row at a time: few end in a step, and a pass over all tables would cost as much as all rows.

    The rows are read in one loop and cleared in the next: a loop that did both would copy all tables to keep a row.
    """
    seqs, released = vacate(state.seqs, rows)

    def return_one(carry: tuple) -> tuple:
        pool, todo, bad = carry
        row = jnp.argmax(todo)
        ids = jnp.concatenate([table.ids[row] for table in state.tables])
        pool, ok = memory.give_back(pool, ids, distinct=True)
        return pool, todo.at[row].set(False), bad.at[row].set(~ok)

    def clear_one(carry: tuple) -> tuple:
        tables, todo = carry
        row = jnp.argmax(todo)
        return tuple(ids.at[row].set(memory.num_blocks) for ids in tables), todo.at[row].set(False)

    pool, left, bad = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), return_one, (state.pool, released, jnp.zeros_like(released))
    )
    # `left` is empty. It only tells the compiler that the second loop comes after the first.
    ids, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]),
        clear_one,
        (tuple(table.ids for table in state.tables), released & ~left),
    )
    return dataclasses.replace(
        state,
        seqs=dataclasses.replace(seqs, faults=record(seqs.faults, Outcome.DOUBLE_FREE, bad)),
        pool=pool,
        tables=tuple(
            BlockTable(i, jnp.where(released, 0, table.first), jnp.where(released, 0, table.end))
            for i, table in zip(ids, state.tables, strict=True)
        ),
        chains=None if state.chains is None else chains.clear_chains(state.chains, released),
    )


def end_copies(memory: "Paged", state: PagedState) -> PagedState:
    """Lets go of both ends of every pending copy, now that the data was copied."""
    copies = required(state.copies)
    ids = jnp.concatenate([copies.sources, copies.destinations])

    def let_go(pool: BlockPool) -> BlockPool:
        return memory.give_back(pool, ids)[0]

    pool = run_if(jnp.any(ids != memory.num_blocks), let_go, state.pool)
    empty = sharing.no_copies(copies.sources.shape[0], memory.num_blocks)
    return dataclasses.replace(state, pool=pool, copies=empty)


def free_out_of_view(memory: "Paged", state: PagedState) -> PagedState:
    """Gives back the blocks that no later token can see. Only for tokens whose step was computed.

    With a prefix cache a block stays in its table until it was published.

    In rounds, in each of which every row gives back the oldest of its blocks that are out of view: while decoding one
    block leaves a row at most, so there is one round or none.
    """
    pool, tables, bad = state.pool, [], jnp.zeros(memory.rows, jnp.bool)
    stored = state.seqs.lengths
    if state.chains is not None:
        stored = jnp.minimum(stored, state.chains.hashed)
    for group, table in zip(memory.layer_groups, state.tables, strict=True):
        if not group.sees_all:
            keep_from = jnp.minimum(group.out_of_view(stored) // group.block_size, table.end)
            pool, table, bad = _free_columns(memory, pool, table, keep_from, bad)
        tables.append(table)
    faults = record(state.seqs.faults, Outcome.DOUBLE_FREE, bad)
    return dataclasses.replace(
        state, seqs=dataclasses.replace(state.seqs, faults=faults), pool=pool, tables=tuple(tables)
    )


def _free_columns(
    memory: "Paged",
    pool: BlockPool,
    table: BlockTable,
    until: Int32[Array, " rows"],
    bad: Bool[Array, " rows"],
) -> tuple[BlockPool, BlockTable, Bool[Array, " rows"]]:
    """Gives back the blocks of each row in the columns before `until`; `bad` rows are those that held none there.

    The columns are read in one loop and cleared in the next: a loop that did both would copy the whole table.
    """
    none, row = memory.num_blocks, jnp.arange(memory.rows, dtype=jnp.int32)

    def return_oldest(carry: tuple) -> tuple:
        pool, first, bad = carry
        leaves = first < until
        ids = table.ids.at[jnp.where(leaves, row, memory.rows), first].get(mode="fill", fill_value=none)
        pool, ok = memory.give_back(pool, ids)
        return pool, first + leaves.astype(jnp.int32), bad | (leaves & ~ok)

    def clear_oldest(carry: tuple) -> tuple:
        ids, first = carry
        leaves = first < until
        ids = ids.at[jnp.where(leaves, row, memory.rows), first].set(none, mode="drop")
        return ids, first + leaves.astype(jnp.int32)

    def any_left(carry: tuple) -> Bool[Array, ""]:
        return jnp.any(carry[1] < until)

    pool, end, bad = jax.lax.while_loop(any_left, return_oldest, (pool, table.first, bad))
    # Not before `table.first`, so it is that. It only tells the compiler that the second loop comes after the first.
    first = jnp.minimum(table.first, end)
    ids, first = jax.lax.while_loop(any_left, clear_oldest, (table.ids, first))
    return pool, dataclasses.replace(table, ids=ids, first=first), bad


def evict(memory: "Paged", state: PagedState, ids: Int32[Array, " n"]) -> PagedState:
    """Forgets what these blocks hold. Held ones stay with their rows; free ones keep their place in the queue."""
    known = jnp.where((ids >= 0) & (ids < memory.num_blocks), ids, memory.num_blocks)
    config, contents = _cached(memory, state)
    contents, _ = prefix_cache.forget(config, contents, known)
    return dataclasses.replace(state, contents=contents, pool=mark_kept(state.pool, known, kept=False))


def pin(memory: "Paged", state: PagedState, ids: Int32[Array, " n"]) -> tuple[PagedState, Int32[Array, ""]]:
    """Keeps these blocks and what they hold, whatever becomes of their rows, until they are unpinned as often.

    Returns:
      The state and the `Outcome`: `OUT_OF_RANGE` if a block neither is held nor holds a content, and then nothing
      changed. The sentinel marks empty places.
    """
    none = memory.num_blocks
    _, contents = _cached(memory, state)
    known = (ids >= 0) & (ids < none)
    useful = ~is_free(state.pool, ids) | (prefix_cache.content_of(contents, jnp.where(known, ids, none)) != 0)
    ok = ~jnp.any((ids != none) & ~(known & useful))
    at = jnp.where(ok, ids, none)
    state = dataclasses.replace(
        state, pool=retain(state.pool, at), pins=required(state.pins).at[at].add(1, mode="drop")
    )
    return state, jnp.where(ok, Outcome.OK, Outcome.OUT_OF_RANGE).astype(jnp.int32)


def unpin(memory: "Paged", state: PagedState, ids: Int32[Array, " n"]) -> tuple[PagedState, Int32[Array, ""]]:
    """Drops a reference that `pin` added to each of these blocks.

    Returns:
      The state and the `Outcome`: `DOUBLE_FREE` if a block is not pinned so often, and then nothing changed.
    """
    none = memory.num_blocks
    known = (ids >= 0) & (ids < none)
    at = jnp.where(known, ids, none)
    pins = required(state.pins).at[at].add(-1, mode="drop")
    ok = ~jnp.any((ids != none) & ~(known & (pins.at[at].get(mode="fill", fill_value=0) >= 0)))
    pins = pins.at[jnp.where(ok, none, at)].add(1, mode="drop")  # as it was, if anything is wrong
    at = jnp.where(ok, ids, none)
    pool, _ = memory.give_back(state.pool, at)
    state = dataclasses.replace(state, pool=pool, pins=pins)
    return state, jnp.where(ok, Outcome.OK, Outcome.DOUBLE_FREE).astype(jnp.int32)


def reset_cache(memory: "Paged", state: PagedState) -> tuple[PagedState, Int32[Array, ""]]:
    """Forgets everything that is cached.

    Returns:
      The state and the `Outcome`: `LATER` while any block has a reference, and then nothing changed.
    """
    config, contents = _cached(memory, state)
    ok = (state.pool.num_free == state.limits.units) & ~jnp.any(state.seqs.active)
    everything = jnp.where(ok, jnp.arange(memory.num_blocks, dtype=jnp.int32), memory.num_blocks)
    stats = required(state.stats)
    stats = dataclasses.replace(stats, resets=stats.resets + ok.astype(jnp.int32))
    contents, _ = prefix_cache.forget(config, contents, everything)
    pool = mark_kept(state.pool, everything, kept=False)
    state = dataclasses.replace(state, contents=contents, pool=pool, stats=stats)
    return state, jnp.where(ok, Outcome.OK, Outcome.LATER).astype(jnp.int32)


def bump_epoch(state: PagedState) -> PagedState:
    """New weights: nothing that was cached before is hit again. Rows in flight keep the epoch they began with."""
    return dataclasses.replace(state, epoch=state.epoch + 1)


def _cached(memory: "Paged", state: PagedState) -> tuple[prefix_cache.PrefixCache, prefix_cache.Contents]:
    if memory.cache is None or state.contents is None:
        raise ValueError("cache: this needs a memory with a prefix cache, got cache=None; pass cache=PrefixCache()")
    return memory.cache, state.contents
