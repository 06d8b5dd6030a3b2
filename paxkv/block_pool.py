"""Physical blocks: which are free, and how many tables refer to each that is not.

The free blocks are a sparse set (Briggs and Torczon, 1993): a packed stack of ids, and for each id its place on the
stack. A block is free if the place it remembers lies on the stack and holds its id, so taking a block off the stack
writes nothing at all, and whether a block is free is one look-up. Taking and giving back cost what is moved, never
what the pool holds: a step of 256 rows costs the same over 22,888 blocks as over eight times as many.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """`num_blocks` blocks. The sentinel for "no block" is `num_blocks`: scatters drop it, gathers fill it."""

    free_ids: jax.Array  # i32[num_blocks]; the first num_free are free, the last of those is taken next
    free_places: jax.Array  # i32[num_blocks]; where a free block stands in free_ids; anything for a held one
    num_free: jax.Array  # i32[]
    extra_refs: jax.Array  # i32[num_blocks]; table entries that refer to a block beyond the first

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return self.free_ids.shape[0]

    @property
    def ref_counts(self) -> jax.Array:
        """Table entries that refer to each block, 0 for a free one: i32[num_blocks]."""
        everyone = jnp.arange(self.num_blocks, dtype=jnp.int32)
        return jnp.where(is_free(self, everyone), 0, 1 + self.extra_refs)


def init_block_pool(num_blocks: int) -> BlockPool:
    """A pool of free blocks, handed out in ascending order of id."""
    descending = jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32)
    return BlockPool(
        free_ids=descending,
        free_places=jnp.copy(descending),
        num_free=jnp.int32(num_blocks),
        extra_refs=jnp.zeros(num_blocks, jnp.int32),
    )


def is_free(pool: BlockPool, ids: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Whether each block is free; False for an id that is not of this pool."""
    places = pool.free_places.at[ids].get(mode="fill", fill_value=pool.num_blocks)
    there = pool.free_ids.at[places].get(mode="fill", fill_value=pool.num_blocks)
    return (places < pool.num_free) & (there == ids)


def take(pool: BlockPool, wanted: Bool[Array, " n"]) -> tuple[BlockPool, Int32[Array, " n"], Bool[Array, ""]]:
    """Takes one block for each wanted place, all of them or none.

    Returns:
      The pool, the ids (the sentinel where none was wanted, and everywhere if there were too few), and
      whether the pool could serve.
    """
    rank = jnp.cumsum(wanted, dtype=jnp.int32)  # 1 for the first block taken
    count = rank[-1]
    ok = count <= pool.num_free
    # Look only at the top of the stack: a gather from all of it would be charged, and split over threads, as if it
    # read all of it.
    depth = min(wanted.shape[0], pool.num_blocks)
    base = jnp.maximum(pool.num_free - depth, 0)
    top = jax.lax.dynamic_slice(pool.free_ids, (base,), (depth,))
    source = jnp.where(wanted & ok, pool.num_free - rank - base, depth)
    ids = top.at[source].get(mode="fill", fill_value=pool.num_blocks)
    return dataclasses.replace(pool, num_free=pool.num_free - jnp.where(ok, count, 0)), ids, ok


def give_back(pool: BlockPool, ids: Int32[Array, " n"]) -> tuple[BlockPool, Bool[Array, ""]]:
    """Drops one reference to each block; a block that nobody refers to any more becomes free.

    The sentinel marks places with nothing to return. The last block given back is the first taken again: its
    memory is the warmest, and the tail of a finished sequence is the part that nobody else wants.

    Returns:
      The pool, and whether every id was a held block of this pool and none was listed twice. If not, nothing is
      given back at all.
    """
    none = pool.num_blocks
    known = (ids >= 0) & (ids < none)
    held = known & ~is_free(pool, ids)

    # Each place writes itself beside its block; of a block that is listed twice, one place finds the other's mark.
    # What a held block remembers there means nothing, so this needs no undoing.
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    marks = pool.free_places.at[jnp.where(held, ids, none)].set(place, mode="drop")
    twice = held & (marks.at[ids].get(mode="fill", fill_value=none) != place)
    ok = ~jnp.any((ids != none) & (~held | twice))

    shared = pool.extra_refs.at[ids].get(mode="fill", fill_value=0) > 0
    freed = held & ~shared & ok
    top = pool.num_free + jnp.cumsum(freed, dtype=jnp.int32)  # height of the stack once this block lies on it
    freed_ids = jnp.where(freed, ids, none)
    return BlockPool(
        free_ids=pool.free_ids.at[jnp.where(freed, top - 1, none)].set(ids, mode="drop"),
        free_places=marks.at[freed_ids].set(top - 1, mode="drop"),
        num_free=top[-1],
        extra_refs=pool.extra_refs.at[jnp.where(held & shared & ok, ids, none)].add(-1, mode="drop"),
    ), ok
