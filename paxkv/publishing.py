"""Publishing: the full blocks of running rows become contents that others can hit."""

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Int32

from paxkv import chains, prefix_cache
from paxkv.block_pool import BlockPool, mark_kept, retain
from paxkv.block_tables import BlockTable
from paxkv.outcomes import Outcome, record
from paxkv.paged_state import PagedState, required
from paxkv.prefix_cache import BROKEN

if TYPE_CHECKING:
    from paxkv.paged import Paged


def publish(
    memory: "Paged",
    state: PagedState,
    tokens: Int32[Array, " tokens"],
    cu_lens: Int32[Array, " rows_and_one"],
    max_new_tokens: int,
) -> PagedState:
    """Adds the tokens that each row has stored last to its chain, and publishes the blocks that are full now.

    Args:
      memory: paged memory with a prefix cache.
      state: its state.
      tokens: new tokens, row after row.
      cu_lens: where the tokens of each row begin, from 0 on, and at the end how many there are.
      max_new_tokens: most tokens of one row; one makes for a cheaper program.

    A row that is given more tokens than it has stored beyond its chain, than `max_new_tokens` or than there are records
    an `OUT_OF_RANGE` fault, as does the first row if it does not begin at 0; and then nothing is published.
    """
    config = required(memory.cache)
    chain, stats = required(state.chains), required(state.stats)
    counts = cu_lens[1:] - cu_lens[:-1]
    wrong = (counts < 0) | (counts > max_new_tokens) | (counts > state.seqs.lengths - chain.hashed)
    wrong |= (cu_lens[1:] > tokens.shape[0]) | (cu_lens[:1] != 0)
    faults = record(state.seqs.faults, Outcome.OUT_OF_RANGE, wrong)
    cu_lens = jnp.where(jnp.any(wrong), 0, cu_lens)

    # While decoding, one row in a block's length fills one; twice as many are rare, and cost another round.
    width = 256 if max_new_tokens > 1 else max(16, 2 * memory.rows // memory.block_size)
    extend = chains.extend_by_one if max_new_tokens == 1 else chains.extend
    extension = extend(chain, memory.layer_groups, tokens, cu_lens)
    contents, pool = required(state.contents), state.pool
    last, tables, unpublished = extension.chains.contents, [], jnp.int32(0)
    for g, table in enumerate(state.tables):
        row, index = extension.filled[g][:2]
        filled = chains.filled_rows(config, extension.chains, table, extension.filled[g], g)
        contents, ids, holders = prefix_cache.publish(config, contents, filled, width)
        unpublished += jnp.sum(filled.valid & (ids == BROKEN), dtype=jnp.int32)
        own = filled.valid & (ids != BROKEN) & (holders == filled.blocks)
        pool = mark_kept(pool, jnp.where(own, filled.blocks, memory.num_blocks), kept=True)
        if config.duplicates == "merge":
            table, pool = _merge(memory, table, pool, row, index, filled, holders)
        is_last = filled.valid
        if filled.starts is not None:
            is_last &= jnp.concatenate([row[1:] != row[:-1], jnp.ones(1, jnp.bool)]) | ~jnp.concatenate(
                [filled.valid[1:], jnp.zeros(1, jnp.bool)]
            )
        last = last.at[jnp.where(is_last, row, memory.rows), g].set(ids, mode="drop")
        tables.append(table)
    return dataclasses.replace(
        state,
        seqs=dataclasses.replace(state.seqs, faults=faults),
        pool=pool,
        tables=tuple(tables),
        contents=contents,
        chains=dataclasses.replace(extension.chains, contents=last),
        stats=dataclasses.replace(stats, unpublished=stats.unpublished + unpublished),
    )


def _merge(
    memory: "Paged",
    table: BlockTable,
    pool: BlockPool,
    row: Int32[Array, " n"],
    index: Int32[Array, " n"],
    filled: prefix_cache.Filled,
    holders: Int32[Array, " n"],
) -> tuple[BlockTable, BlockPool]:
    """Points the tables to the blocks that hold the same already, and gives the rows' own ones back."""
    none = pool.num_blocks
    merged = filled.valid & (holders != filled.blocks)
    pool = retain(pool, jnp.where(merged, holders, none))
    pool, _ = memory.give_back(pool, jnp.where(merged, filled.blocks, none))
    at = jnp.where(merged, row, table.ids.shape[0])
    return dataclasses.replace(table, ids=table.ids.at[at, index].set(holders, mode="drop")), pool
