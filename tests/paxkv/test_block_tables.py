"""Where sequences lie: boundaries of blocks, columns before and behind a sequence, and no id of a former owner."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.block_tables import BlockTable, blocks_for, cdiv, init_block_table, put, slot_of

NONE = 20
PUT = jax.jit(put)
SLOT_OF = jax.jit(slot_of, static_argnums=(3, 4))


def ints(*values) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))


def table(*rows: list[int | None], width: int = 6) -> BlockTable:
    """Rows of ids, in front of which None stands for what has left the window."""
    ids = np.full((len(rows), width), NONE, np.int32)
    for row, blocks in enumerate(rows):
        ids[row, : len(blocks)] = [NONE if block is None else block for block in blocks]
    return BlockTable(jnp.asarray(ids), ints(*[row.count(None) for row in rows]), ints(*map(len, rows)))


def seen(table: BlockTable) -> list[list[int | None]]:
    """The reverse of `table`, once nothing stands where nothing should."""
    first, end, rows = np.asarray(table.first).tolist(), np.asarray(table.end).tolist(), np.asarray(table.ids).tolist()
    for row, ids in enumerate(rows):
        assert all(block == NONE for block in ids[: first[row]] + ids[end[row] :])
    return [[None] * first[row] + ids[first[row] : end[row]] for row, ids in enumerate(rows)]


@pytest.mark.parametrize(
    ("tokens", "block_size", "num_blocks"),
    [(33, 16, 3), (32, 16, 2), (1, 16, 1), (0, 16, 0), (3, 1, 3), (63, 64, 1), (64, 64, 1), (65, 64, 2), (257, 256, 2)],
)
def test_tokens_take_whole_blocks(tokens, block_size, num_blocks):
    assert int(blocks_for(jnp.int32(tokens), block_size)) == num_blocks
    assert int(cdiv(jnp.int32(tokens), block_size)) == num_blocks


def test_a_new_table_has_no_blocks():
    new = init_block_table(3, 6, NONE)
    assert seen(new) == [[], [], []]
    assert new.ids.shape == (3, 6)


def test_blocks_are_written_where_they_are_told_and_nowhere_else():
    held = table([], [3, 4], [None, None, 5], [6, 7])
    after = PUT(held, ints(0, 2, 4, 2, 0), ints(0, 3, 0, 5, 1), ints(8, 14, 19, 16, 9))  # there is no row 4
    ends = dataclasses.replace(after, end=ints(2, 2, 6, 2))
    ends = dataclasses.replace(ends, ids=ends.ids.at[2, 4].set(15))
    assert seen(ends) == [[8, 9], [3, 4], [None, None, 5, 14, 15, 16], [6, 7]]
    assert after.ids[2, 4] == NONE


def test_a_column_behind_the_last_one_disturbs_nobody():
    held = table([1, 2, 3, 4, 5, 9], [6])
    assert seen(PUT(held, ints(0, 1), ints(6, 7), ints(10, 11))) == [[1, 2, 3, 4, 5, 9], [6]]


def test_slots_follow_the_table():
    held = dataclasses.replace(
        table([3, 1]), ids=ints(3, 1, 4, 4).reshape(1, 4)
    )  # four blocks in all, so 4 is nobody's
    rows, positions = ints(*[0] * 5), ints(0, 62, 63, 64, 127)
    assert np.asarray(SLOT_OF(held, rows, positions, 64, 4)).tolist() == [192, 254, 255, 64, 127]


def test_what_has_no_slot_gets_the_sentinel_and_never_another_rows_slot():
    held = BlockTable(ints(0, 4, 1, 2).reshape(2, 2), ints(0, 0), ints(1, 2))
    rows = ints(0, 0, 0, 1, -1, 2, 1, -2)
    positions = ints(4, 7, -1, -4, 0, 0, 8, 3)
    assert np.asarray(SLOT_OF(held, rows, positions, 4, 4)).tolist() == [16] * 8


def test_what_has_left_the_window_has_no_slot():
    held = table([None, None, 7, 8])
    assert np.asarray(SLOT_OF(held, ints(0, 0, 0, 0), ints(0, 7, 8, 15), 4, NONE)).tolist() == [80, 80, 28, 35]
