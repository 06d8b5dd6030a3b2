"""A buddy allocator without lists: which ranges are taken is the whole state, and free blocks follow from it.

A block of order k is `2**k` leaves, aligned to its size; its buddy is the other half of the block of order k + 1
that holds both. The textbook allocator (Knuth, The Art of Computer Programming, vol. 1, section 2.5) keeps a
list of free blocks for each order, splits a larger one when a list is empty, and merges buddies that are both
free. The blocks on its lists are exactly those that are free while something in their buddy is taken: whatever
could be merged has been. One pass up the tree of blocks finds them, so nothing is kept, split or merged, and
there is nothing that could get out of step.

An arena of any number of leaves is a tree padded to a power of two whose surplus leaves are taken for good; what
is left for use is the binary decomposition of the number.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def ceil_log2(n: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The smallest `k` with `2**k >= n`, for `n >= 1`; 0 for less."""
    return 32 - jax.lax.clz(jnp.maximum(n, 1) - 1)


def largest_order(num_leaves: Int32[Array, ""]) -> Int32[Array, ""]:
    """Order of the largest block of an empty arena."""
    return 31 - jax.lax.clz(num_leaves)


def best_fit(
    starts: Int32[Array, " n"],
    orders: Int32[Array, " n"],
    taken: Bool[Array, " n"],
    order: Int32[Array, ""],
    num_leaves: int,
    usable: Int32[Array, ""],
) -> tuple[Int32[Array, ""], Bool[Array, ""]]:
    """Finds room for a block in the smallest free block that holds it, of those the lowest.

    Args:
      starts: first leaf of each range.
      orders: order of each range, which is a block: aligned, and disjoint from all others.
      taken: ranges that count; the others are ignored.
      order: order of the wanted block.
      num_leaves: leaves that there may be.
      usable: leaves of the arena, the first of them.

    Returns:
      The first leaf of the block, and whether there is room (if not, the leaf is `num_leaves`).
    """
    top = (num_leaves - 1).bit_length()
    # The tree, breadth first: its root is node 1, and the blocks of order k begin at node 2**(top - k).
    node = (1 << (top - orders)) + (starts >> orders)
    marks = jnp.zeros(2 << top, jnp.bool).at[jnp.where(taken, node, 2 << top)].set(True, mode="drop")

    below = jnp.arange(1 << top, dtype=jnp.int32) >= usable  # something in the block is taken
    firsts = []
    for k in range(top + 1):
        width = 1 << (top - k)
        busy = marks[width : 2 * width] | below
        pairs = busy.reshape(-1, 2) if k < top else jnp.stack([busy, ~busy], axis=1)  # the root has no buddy
        below = jnp.any(pairs, axis=1)
        whole = (~pairs & pairs[:, ::-1]).reshape(-1)[:width]
        index = jnp.min(jnp.where(whole, jnp.arange(width, dtype=jnp.int32), width))
        firsts.append(jnp.where(index < width, index << k, num_leaves))
    first = jnp.stack(firsts)
    usable = (first < num_leaves) & (jnp.arange(top + 1) >= order)
    found = jnp.any(usable)
    return jnp.where(found, first[jnp.argmax(usable)], num_leaves), found
