"""Block tables: where the logical blocks of each sequence lie."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockTable:
    """One row a sequence. Its blocks stand in the columns from `first` to `end`; everywhere else is the sentinel.

    What stood before `first` has left the window of the layers that this table is for.
    """

    ids: jax.Array  # i32[rows, blocks_per_seq]
    first: jax.Array  # i32[rows]
    end: jax.Array  # i32[rows]


def cdiv(a: jax.Array, b: int) -> jax.Array:
    """`ceil(a / b)` for non-negative integers."""
    return (a + (b - 1)) // b


def blocks_for(tokens: jax.Array, block_size: int) -> jax.Array:
    """Blocks that `tokens` tokens take."""
    return cdiv(tokens, block_size)


def init_block_table(rows: int, blocks_per_seq: int, none: int) -> BlockTable:
    """A table without blocks; `none` is the sentinel."""
    return BlockTable(
        ids=jnp.full((rows, blocks_per_seq), none, jnp.int32),
        first=jnp.zeros(rows, jnp.int32),
        end=jnp.zeros(rows, jnp.int32),
    )


def begin_row(
    table: BlockTable,
    row: Int32[Array, ""],
    ids: Int32[Array, " n"],
    first: Int32[Array, ""],
    end: Int32[Array, ""],
    none: int,
) -> BlockTable:
    """Writes these blocks into a row, beginning with its first column; a row out of range changes nothing."""
    width = table.ids.shape[1]
    ids = jnp.concatenate([ids, jnp.full(width, none, jnp.int32)])[:width]
    return BlockTable(
        ids=table.ids.at[row].set(ids, mode="drop"),
        first=table.first.at[row].set(first, mode="drop"),
        end=table.end.at[row].set(end, mode="drop"),
    )


def put(
    table: BlockTable, rows: Int32[Array, " n"], columns: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> BlockTable:
    """Writes blocks into the table; one of a row out of range is dropped. `end` stays as it is."""
    return dataclasses.replace(table, ids=table.ids.at[rows, columns].set(ids, mode="drop"))


def slot_of(
    table: BlockTable,
    row: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    block_size: int,
    num_blocks: int,
) -> Int32[Array, " tokens"]:
    """The slot `block * block_size + offset` of each position; `num_blocks * block_size` where there is none."""
    block = table.ids.at[row, position // block_size].get(
        mode="fill", fill_value=num_blocks, wrap_negative_indices=False
    )
    slot = block * block_size + position % block_size
    return jnp.where(block < num_blocks, slot, num_blocks * block_size)
