"""Where sequences lie: boundaries of blocks, columns before and behind a sequence, and no id of a former owner."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.block_tables import BlockTable, blocks_for, cdiv, init_block_table, new_columns, put, slot_of

NONE = 20
NEW_COLUMNS = jax.jit(new_columns, static_argnums=2)
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


def test_a_row_grows_into_the_columns_behind_its_blocks_and_into_as_many_as_it_needs():
    held = table([], [3, 4], [None, None, 5])
    columns, needed = NEW_COLUMNS(held, ints(2, 2, 6), 3)
    assert np.asarray(columns).tolist() == [[0, 1, 2], [2, 3, 4], [3, 4, 5]]
    assert np.asarray(needed).tolist() == [[True, True, False], [False] * 3, [True] * 3]


def test_growing_writes_behind_what_is_there_and_changes_nothing_else():
    held = table([], [3, 4], [None, None, 5], [6, 7])
    columns, needed = NEW_COLUMNS(held, ints(2, 2, 6, 1), 3)
    ids = jnp.where(needed, ints(*range(8, 20)).reshape(4, 3), NONE)
    assert seen(PUT(held, columns, ids, needed)) == [[8, 9], [3, 4], [None, None, 5, 14, 15, 16], [6, 7]]


def test_a_growth_that_is_not_served_writes_nothing():
    held = table([1], [3, 4])
    columns, needed = NEW_COLUMNS(held, ints(3, 3), 2)
    after = PUT(held, columns, jnp.full((2, 2), NONE, jnp.int32), needed & False)
    for old, new in zip(jax.tree.leaves(held), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new, old)


def test_the_last_column_can_be_filled_and_what_is_beyond_it_disturbs_nobody():
    held = table([1, 2, 3, 4, 5], [6])
    columns, needed = NEW_COLUMNS(held, ints(6, 1), 4)
    after = PUT(held, columns, jnp.where(needed, 9, NONE), needed)
    assert seen(after) == [[1, 2, 3, 4, 5, 9], [6]]


@pytest.mark.parametrize(
    ("block_size", "length", "new_length", "new_blocks"),
    [
        pytest.param(4, 4, 5, 1, id="the first token of a new block"),
        pytest.param(4, 5, 6, 0, id="the second token of a block"),
        pytest.param(4, 7, 8, 0, id="the last slot of a block"),
        pytest.param(4, 6, 15, 2, id="several blocks at once"),
        pytest.param(1, 2, 3, 1, id="blocks of one token"),
        pytest.param(3, 0, 0, 0, id="nothing"),
    ],
)
def test_growth_takes_a_block_exactly_when_the_last_one_is_full(block_size, length, new_length, new_blocks):
    held = table([], list(range(-(-length // block_size))))
    need = blocks_for(ints(0, new_length), block_size)
    _, needed = NEW_COLUMNS(held, need, 4)
    assert np.asarray(needed).sum(axis=1).tolist() == [0, new_blocks]


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
