"""Block tables: where the logical blocks of each sequence lie, and the transitions that grow and empty them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.block_pool import BlockPool, give_back, take


def cdiv(a: jax.Array, b: int) -> jax.Array:
    """`ceil(a / b)` for non-negative integers."""
    return (a + (b - 1)) // b


def blocks_for(tokens: jax.Array, block_size: int) -> jax.Array:
    """Blocks that `tokens` tokens take."""
    return cdiv(tokens, block_size)


def grow(
    tables: Int32[Array, "rows blocks_per_seq"],
    pool: BlockPool,
    lengths: Int32[Array, " rows"],
    new_lengths: Int32[Array, " rows"],
    block_size: int,
    max_new_tokens: int,
) -> tuple[Int32[Array, "rows blocks_per_seq"], BlockPool, Bool[Array, ""]]:
    """Adds to each table the blocks that its sequence needs to grow from `lengths` to `new_lengths`.

    Args:
      tables: block ids, the sentinel `pool.num_blocks` where a table has no block yet.
      pool: where the blocks come from.
      lengths: tokens stored.
      new_lengths: tokens to make room for, at most `lengths + max_new_tokens`.
      block_size: tokens in a block.
      max_new_tokens: most tokens that any one sequence grows by; a static bound on the work.

    Returns:
      The tables, the pool, and whether the pool could serve. If not, nothing changed.
    """
    rows = tables.shape[0]
    have = blocks_for(lengths, block_size)
    need = blocks_for(new_lengths, block_size)
    width = -(-max_new_tokens // block_size)  # growing by n tokens starts at most ceil(n / block_size) blocks
    column = have[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    wanted = column < need[:, None]
    pool, ids, ok = take(pool, wanted.reshape(-1))
    # Where nothing was granted the row is out of range, so the write is dropped rather than clamped.
    row = jnp.where(wanted & ok, jnp.arange(rows, dtype=jnp.int32)[:, None], rows)
    tables = tables.at[row, column].set(ids.reshape(rows, width), mode="drop")
    return tables, pool, ok


def empty_rows(
    tables: Int32[Array, "rows blocks_per_seq"], pool: BlockPool, rows_mask: Bool[Array, " rows"]
) -> tuple[Int32[Array, "rows blocks_per_seq"], BlockPool, Bool[Array, " rows"]]:
    """Gives back every block of the masked rows and leaves their tables without a single old id.

    One row at a time: few rows end in a step, and a pass over all tables would cost as much as all of them. The
    rows are read in one loop and cleared in the next: a loop that did both would copy all tables to keep a row.

    Returns:
      The tables, the pool, and the mask of rows whose table named a block that was free already.
    """

    def return_one(carry: tuple) -> tuple:
        pool, todo, bad = carry
        row = jnp.argmax(todo)
        pool, ok = give_back(pool, tables[row])
        return pool, todo.at[row].set(False), bad.at[row].set(~ok)

    def clear_one(carry: tuple) -> tuple:
        tables, todo = carry
        row = jnp.argmax(todo)
        return tables.at[row].set(pool.num_blocks), todo.at[row].set(False)

    pool, left, bad = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), return_one, (pool, rows_mask, jnp.zeros_like(rows_mask))
    )
    # `left` is empty. It only tells the compiler that the second loop comes after the first.
    cleared, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), clear_one, (tables, rows_mask & ~left))
    return cleared, pool, bad


def slot_of(
    tables: Int32[Array, "rows blocks_per_seq"],
    row: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    block_size: int,
    num_blocks: int,
) -> Int32[Array, " tokens"]:
    """The slot `block * block_size + offset` of each position; `num_blocks * block_size` where there is none."""
    block = tables.at[row, position // block_size].get(mode="fill", fill_value=num_blocks, wrap_negative_indices=False)
    slot = block * block_size + position % block_size
    return jnp.where(block < num_blocks, slot, num_blocks * block_size)
