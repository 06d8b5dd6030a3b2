"""Blocks that move from one paged memory to another, as from a server that reads prompts to one that answers.

What moves is named by content: the source looks up the blocks of a prompt in its prefix cache, the destination looks up
which of them it has, and takes the rest into its own cache under the same hashes. A request that is admitted there then
hits them as it would have hit its own. Nothing else of the two servers changes, and a block that could not be taken, or
was evicted again, is computed anew. Scales lie beside their blocks and move along.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paxkv.admission import look_up
from paxkv.kv_cache import KVCache, copy_blocks_between, map_blocks
from paxkv.memory import Ask, Content
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.paged_state import PagedState


class Taken(NamedTuple):
    """What a destination did with what it was offered."""

    blocks: Int32[Array, " blocks"]  # where each block of the prompt has to be written; num_blocks for nowhere
    there: Int32[Array, ""]  # blocks that were there already
    moved: Int32[Array, ""]  # blocks that have to be written
    outcome: Int32[Array, ""]  # OK, or LATER where no room is, or NEVER


def check_transfers(memory: Paged) -> None:
    """Refuses a memory whose blocks cannot be named by their content.

    Raises:
      ValueError: it has no prefix cache, or several groups of layers.
    """
    if memory.cache is None:
        raise ValueError("memory.cache: expected a PrefixCache, by which blocks that move are known, got None")
    groups = list(memory.layer_groups)
    if len(groups) > 1 or not groups[0].sees_all:
        raise ValueError(f"memory.groups: expected none where blocks are to move, got {memory.groups}")


def find_blocks(
    memory: Paged, state: PagedState, content: Content, tokens: Int32[Array, ""]
) -> tuple[Int32[Array, " blocks"], Int32[Array, ""]]:
    """The full blocks of a prompt's first `tokens` tokens that a memory has, from the beginning on.

    Returns:
      Their ids, `num_blocks` beyond, and how many they are.
    """
    hit = look_up(memory, state, content, tokens + 1)
    return hit.blocks[0], hit.end[0]


def take_blocks(
    memory: Paged, state: PagedState, content: Content, offered: Int32[Array, ""]
) -> tuple[PagedState, Taken]:
    """Makes room for a prompt's first `offered` blocks and counts them as cached; what is there already stays.

    The caller writes the blocks that are asked for before anything else happens to the memory.
    """
    size, width = memory.block_size, content.tokens.shape[0]
    tokens = offered * size
    # One token more than is stored, as the last one of a prompt is never looked up.
    state, row, outcome = memory.admit(state, Ask(tokens + 1, tokens + 1, tokens + 1, content))
    there = jnp.where(outcome == Outcome.OK, state.seqs.lengths.at[row].get(mode="fill", fill_value=0), tokens)
    rows = jnp.arange(memory.rows, dtype=jnp.int32)
    new = jnp.where(rows == row, tokens - there, 0)
    state, _ = memory.append(state, new, width)
    column = jnp.arange(width // size, dtype=jnp.int32)
    ids = state.tables[0].ids.at[row, column].get(mode="fill", fill_value=memory.num_blocks)
    blocks = jnp.where((column >= there // size) & (column < offered), ids, memory.num_blocks)
    own = content.tokens.at[there + jnp.arange(width, dtype=jnp.int32)].get(mode="fill", fill_value=0)
    cu_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new)])
    state = memory.publish(state, own, cu_lens, width)
    state = memory.release(state, rows == row)
    moved = jnp.sum(blocks < memory.num_blocks, dtype=jnp.int32)
    return state, Taken(blocks, jnp.where(outcome == Outcome.OK, there // size, 0), moved, outcome)


def pack(memory: Paged, cache: KVCache, ids: Int32[Array, " blocks"]) -> KVCache:
    """What blocks hold, as a cache of just these blocks; zeros for `num_blocks`."""

    def read(array: jax.Array, rows: int) -> jax.Array:
        blocks = memory.read_blocks(array.reshape(-1, rows, *array.shape[1:]), ids)
        return blocks.reshape(-1, *array.shape[1:])

    # What was clipped is counted where it was.
    layers = map_blocks(read, memory.block_size, cache).layers
    return KVCache(tuple(layer and dataclasses.replace(layer, clipped=jnp.zeros(1, jnp.int32)) for layer in layers))


def unpack(memory: Paged, cache: KVCache, parcel: KVCache, ids: Int32[Array, " blocks"]) -> KVCache:
    """The cache with what was packed in blocks `ids`; none for `num_blocks`.

    Raises:
      ValueError: the two were made for different formats or models.
    """
    kinds = [[(x.dtype.name, x.shape[1:]) for x in jax.tree.leaves(some)] for some in (parcel, cache)]
    if kinds[0] != kinds[1]:
        raise ValueError("parcel: expected keys and values of the cache's format, got others")
    every = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return copy_blocks_between(parcel, cache, every, memory.own_blocks(ids), memory.block_size)
