"""Blocks for what sequences are about to store.

A step of many sequences could take a block for each of thousands of places, and takes a few: they are counted first,
and then taken a few at a time, in order of the places.
"""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.block_tables import put
from paxkv.paged_state import PagedState

if TYPE_CHECKING:
    from paxkv.paged import Paged

AT_ONCE = 64
"""Blocks that are taken in one turn: what decoding takes at most times, and a chunk of a prompt in a few turns."""


class Grown(NamedTuple):
    """What came of it."""

    state: PagedState
    copies: tuple[Int32[Array, " rows"], ...]  # by group, blocks to copy into; the sentinel where none was wanted
    served: Bool[Array, ""]


def grow(
    memory: "Paged",
    state: PagedState,
    missing: tuple[Int32[Array, " rows"], ...],
    copied: tuple[Bool[Array, " rows"], ...],
) -> Grown:
    """Takes blocks for all places, or for none if there are too few.

    They are given out row by row, in each of them group by group, the copy first.

    Args:
      memory: paged memory.
      state: its state.
      missing: by group, blocks that each row's table is to grow by.
      copied: by group, rows that need one more to copy into; nothing for memory without forks.
    """
    rows, none = memory.rows, memory.num_blocks
    groups, kinds = len(missing), len(missing) + len(copied)
    wanted = missing if not copied else [w for g in range(groups) for w in (copied[g].astype(jnp.int32), missing[g])]
    counts = jnp.stack(list(wanted), axis=1).reshape(-1)  # of each row and kind
    ends = jnp.cumsum(counts)
    first = ends - counts
    served = ends[-1] <= state.pool.num_free
    total = jnp.where(served, ends[-1], 0)
    columns = tuple(table.end for table in state.tables)

    def take_some(carry: tuple) -> tuple:
        state, copies, done = carry
        place = done + jnp.arange(AT_ONCE, dtype=jnp.int32)
        state, ids, _ = memory.take_blocks(state, place < total)
        # Of whom each place is: of the last one who begins there or before. Not a search, which takes longer.
        begins = jnp.where((counts > 0) & (ends > done), jnp.maximum(first - done, 0), AT_ONCE)
        of = jnp.zeros(AT_ONCE, jnp.int32).at[begins].max(jnp.arange(counts.size, dtype=jnp.int32), mode="drop")
        at = jnp.where(place < total, jax.lax.cummax(of), counts.size)
        row, kind = at // kinds, at % kinds
        nth = place - first.at[at].get(mode="fill", fill_value=0)
        tables = []
        for g, table in enumerate(state.tables):
            here = jnp.where(kind == (2 * g + 1 if copied else g), row, rows)
            tables.append(put(table, here, columns[g].at[here].get(mode="fill", fill_value=0) + nth, ids))
        copies = tuple(
            copy.at[jnp.where(kind == 2 * g, row, rows)].set(ids, mode="drop") for g, copy in enumerate(copies)
        )
        return dataclasses.replace(state, tables=tuple(tables)), copies, done + AT_ONCE

    copies = tuple(jnp.full(rows, none, jnp.int32) for _ in copied)
    state, copies, _ = jax.lax.while_loop(lambda carry: carry[2] < total, take_some, (state, copies, jnp.int32(0)))
    tables = tuple(
        dataclasses.replace(table, end=table.end + jnp.where(served, more, 0))
        for table, more in zip(state.tables, missing, strict=True)
    )
    return Grown(dataclasses.replace(state, tables=tables), copies, served)
