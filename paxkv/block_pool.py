"""Physical blocks: which are free, and how many tables refer to each that is not.

The free blocks are a packed stack, so taking and returning cost what is moved and never what the pool holds:
a step of 256 rows costs the same over 22,888 blocks as over eight times as many.
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
    num_free: jax.Array  # i32[]
    ref_counts: jax.Array  # i32[num_blocks]; table entries that refer to the block, 0 if it is free

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return self.free_ids.shape[0]


def init_block_pool(num_blocks: int) -> BlockPool:
    """A pool of free blocks, handed out in ascending order of id."""
    return BlockPool(
        free_ids=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.int32(num_blocks),
        ref_counts=jnp.zeros(num_blocks, jnp.int32),
    )


def take(pool: BlockPool, wanted: Bool[Array, " n"]) -> tuple[BlockPool, Int32[Array, " n"], Bool[Array, ""]]:
    """Takes one block for each wanted place, all of them or none.

    Returns:
      The pool, the ids (the sentinel where none was wanted, and everywhere if there were too few), and
      whether the pool could serve.
    """
    rank = jnp.cumsum(wanted, dtype=jnp.int32)  # 1 for the first block taken
    count = rank[-1]
    ok = count <= pool.num_free
    granted = wanted & ok
    source = jnp.where(granted, pool.num_free - rank, pool.num_blocks)
    ids = pool.free_ids.at[source].get(mode="fill", fill_value=pool.num_blocks)
    return (
        dataclasses.replace(
            pool,
            num_free=pool.num_free - jnp.where(ok, count, 0),
            ref_counts=pool.ref_counts.at[ids].set(1, mode="drop"),
        ),
        ids,
        ok,
    )


def give_back(pool: BlockPool, ids: Int32[Array, " n"]) -> tuple[BlockPool, Bool[Array, ""]]:
    """Drops one reference to each block; a block without references becomes free.

    The sentinel marks places with nothing to return. The last block given back is the first taken again: its
    memory is the warmest, and the tail of a finished sequence is the part nobody else wants.

    Returns:
      The pool, and whether every id was one that somebody held and none was listed more often than it was
      held. If not, nothing is returned at all.
    """
    none = pool.num_blocks
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    known = (ids >= 0) & (ids < none)
    at = jnp.where(known, ids, none)
    counts = pool.ref_counts.at[at].add(-1, mode="drop")
    left = counts.at[at].get(mode="fill", fill_value=0)
    ok = ~jnp.any((ids != none) & (~known | (left < 0)))

    # A block that is listed twice must be pushed once. Every mention writes its ticket into the count, one of
    # them remains, and that one pushes: no sort, and nothing as long as the pool.
    idle = known & (left == 0) & ok
    idle_at = jnp.where(idle, ids, none)
    counts = counts.at[idle_at].set(-1 - place, mode="drop")
    pushes = idle & (counts.at[idle_at].get(mode="fill", fill_value=0) == -1 - place)
    counts = counts.at[idle_at].set(0, mode="drop")
    counts = counts.at[jnp.where(ok, none, at)].add(1, mode="drop")  # refused: undo

    rank = jnp.cumsum(pushes, dtype=jnp.int32)
    slot = jnp.where(pushes, pool.num_free + rank - 1, none)
    return (
        BlockPool(
            free_ids=pool.free_ids.at[slot].set(at, mode="drop"),
            num_free=pool.num_free + rank[-1],
            ref_counts=counts,
        ),
        ok,
    )
