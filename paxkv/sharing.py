"""Several sequences in one block: forks, and the copy that a write into a shared block needs.

A fork refers to its parent's blocks. Full ones are never written again, so only the last, partly filled one can be
torn by two writers: who writes into it while others refer to it gets a block of its own, and the pair goes to the copy
list, for the data to follow before the step's keys and values are written.
"""

import dataclasses
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.block_pool import BlockPool, count_mentions, look_at, retain
from paxkv.block_tables import BlockTable
from paxkv.control_flow import run_if


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """Blocks whose data must be copied before anything is written. The sentinel marks empty places.

    Each has one reference more than its tables give it, so that neither end is given away before the copy ran. Each
    row has a place in every group, and cannot be written or forked while that is taken: no copy has another's
    destination for its source.
    """

    sources: jax.Array  # i32[groups * rows]
    destinations: jax.Array  # i32[groups * rows]


class TailWrites(NamedTuple):
    """What writing into the last, partly filled block of each row takes."""

    blocks: Int32[Array, " rows"]  # the block; the sentinel if the row writes into none
    copies: Bool[Array, " rows"]  # rows that need a copy of it first
    keeps: Bool[Array, " rows"]  # rows that write into the block as it is


def no_copies(places: int, none: int) -> Copies:
    """An empty list."""
    sentinel = jnp.full(places, none, jnp.int32)
    return Copies(sources=sentinel, destinations=jnp.copy(sentinel))


def pending(copies: Copies, rows: int, none: int) -> Bool[Array, " rows"]:
    """Rows whose copy has not been made yet."""
    return jnp.any(copies.destinations.reshape(-1, rows) != none, axis=0)


def add(copies: Copies, new: Copies, none: int) -> Copies:
    """Both lists together; no row is in both."""
    is_new = new.destinations != none
    return jax.tree.map(lambda old, added: jnp.where(is_new, added, old), copies, new)


def tail_writes(
    table: BlockTable,
    pool: BlockPool,
    lengths: Int32[Array, " rows"],
    new_lengths: Int32[Array, " rows"],
    block_size: int,
) -> TailWrites:
    """Which rows write into a partly filled block, and which of them have to copy it.

    If all that refer to a block write into it, the last of them keeps it.
    """
    none = pool.num_blocks
    writes = (new_lengths > lengths) & (lengths % block_size != 0)
    row = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    block = table.ids.at[row, lengths // block_size].get(mode="fill", fill_value=none)
    block = jnp.where(writes, block, none)
    writers, last = count_mentions(block)
    references = 1 + look_at(pool, block).extra_refs
    keeps = (writers == references) & last
    return TailWrites(block, copies=(block != none) & ~keeps, keeps=(block != none) & keeps)


def replace_tail(
    table: BlockTable, columns: Int32[Array, " rows"], ids: Int32[Array, " rows"], copied: Bool[Array, " rows"]
) -> BlockTable:
    """Puts each copied row's own block where it shared one."""
    row = jnp.where(copied, jnp.arange(copied.shape[0], dtype=jnp.int32), copied.shape[0])
    return dataclasses.replace(table, ids=table.ids.at[row, columns].set(ids, mode="drop"))


def hold(pool: BlockPool, pairs: list[tuple[Int32[Array, " rows"], Int32[Array, " rows"]]]) -> tuple[BlockPool, Copies]:
    """The copy list of these pairs. The reference that a row had to its source holds the source from now on."""
    copies = Copies(
        sources=jnp.concatenate([source for source, _ in pairs]),
        destinations=jnp.concatenate([destination for _, destination in pairs]),
    )
    return retain(pool, copies.destinations, distinct=True), copies


def share_row(
    table: BlockTable, source: Int32[Array, ""], row: Int32[Array, ""], blocks: Int32[Array, ""], none: int
) -> tuple[BlockTable, Int32[Array, " blocks_per_seq"]]:
    """Gives `row` the first `blocks` entries of `source`; `row` may be out of range, to change nothing.

    Returns:
      The table, and the ids that have one more reference now.
    """
    column = jnp.arange(table.ids.shape[1], dtype=jnp.int32)

    def read(_: jax.Array) -> jax.Array:
        return jnp.where(column < blocks, table.ids.at[source].get(mode="fill", fill_value=none), none)

    # Read in a loop of its own: a program that reads one row of an array while it writes another copies all of it.
    ids = run_if(row < table.ids.shape[0], read, jnp.full(table.ids.shape[1], none, jnp.int32))
    first = jnp.minimum(table.first.at[source].get(mode="fill", fill_value=0), blocks)
    shared = BlockTable(
        ids=table.ids.at[row].set(ids, mode="drop"),
        first=table.first.at[row].set(first, mode="drop"),
        end=table.end.at[row].set(blocks, mode="drop"),
    )
    return shared, ids
