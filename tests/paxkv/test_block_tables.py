"""Where sequences lie: boundaries of blocks, refusal, and no id of a former owner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.block_pool import init_block_pool
from paxkv.block_tables import blocks_for, empty_rows, grow, slot_of

GROW = jax.jit(grow, static_argnums=(4, 5))
EMPTY_ROWS = jax.jit(empty_rows)
SLOT_OF = jax.jit(slot_of, static_argnums=(3, 4))


def ints(*values) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))


def fresh(rows: int, width: int, num_blocks: int):
    return jnp.full((rows, width), num_blocks, jnp.int32), init_block_pool(num_blocks)


@pytest.mark.parametrize(
    ("tokens", "block_size", "num_blocks"),
    [(33, 16, 3), (32, 16, 2), (1, 16, 1), (0, 16, 0), (3, 1, 3), (63, 64, 1), (64, 64, 1), (65, 64, 2), (257, 256, 2)],
)
def test_tokens_take_whole_blocks(tokens, block_size, num_blocks):
    assert int(blocks_for(jnp.int32(tokens), block_size)) == num_blocks


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
    tables, pool = fresh(rows=2, width=16, num_blocks=20)
    tables, pool, _ = GROW(tables, pool, ints(0, 0), ints(0, length), block_size, 9)
    before = int(pool.num_free)
    grown, pool, ok = GROW(tables, pool, ints(0, length), ints(0, new_length), block_size, 9)
    assert bool(ok)
    assert before - int(pool.num_free) == new_blocks
    held = -(-new_length // block_size)
    assert np.asarray(grown[1]).tolist() == [*range(held), *[20] * (16 - held)]
    assert np.asarray(grown[0]).tolist() == [20] * 16


def test_rows_take_their_blocks_in_order():
    tables, pool = fresh(rows=3, width=4, num_blocks=9)
    tables, pool, _ = GROW(tables, pool, ints(0, 0, 0), ints(5, 0, 4), 2, 5)
    tables, pool, _ = GROW(tables, pool, ints(5, 0, 4), ints(7, 1, 5), 2, 2)
    assert np.asarray(tables).tolist() == [[0, 1, 2, 5], [6, 9, 9, 9], [3, 4, 7, 9]]


def test_growth_that_does_not_fit_changes_no_table_and_no_pool():
    tables, pool = fresh(rows=2, width=4, num_blocks=3)
    tables, pool, _ = GROW(tables, pool, ints(0, 0), ints(4, 4), 4, 4)
    for lengths in ((5, 5), (12, 4)):
        grown, after, ok = GROW(tables, pool, ints(4, 4), ints(*lengths), 4, 8)
        assert not bool(ok)
        for old, new in zip(jax.tree.leaves((tables, pool)), jax.tree.leaves((grown, after)), strict=True):
            np.testing.assert_array_equal(new, old)


def test_released_rows_hold_no_old_ids_and_their_blocks_come_back_tail_first():
    tables, pool = fresh(rows=3, width=4, num_blocks=8)
    tables, pool, _ = GROW(tables, pool, ints(0, 0, 0), ints(3, 2, 3), 1, 3)
    tables, pool, bad = EMPTY_ROWS(tables, pool, jnp.asarray([True, False, True]))
    assert not np.asarray(bad).any()
    assert np.asarray(tables).tolist() == [[8, 8, 8, 8], [3, 4, 8, 8], [8, 8, 8, 8]]
    assert np.asarray(pool.free_ids)[: int(pool.num_free)][::-1].tolist() == [7, 6, 5, 2, 1, 0]


def test_a_row_whose_blocks_are_free_already_is_named_and_takes_nobody_elses():
    tables, pool = fresh(rows=2, width=4, num_blocks=8)
    tables, pool, _ = GROW(tables, pool, ints(0, 0), ints(2, 2), 1, 2)
    stale = tables
    tables, pool, _ = EMPTY_ROWS(tables, pool, jnp.asarray([True, False]))
    tables, after, bad = EMPTY_ROWS(stale, pool, jnp.asarray([True, False]))
    assert np.asarray(bad).tolist() == [True, False]
    assert np.asarray(tables[0]).tolist() == [8] * 4
    assert np.asarray(after.ref_counts).tolist() == np.asarray(pool.ref_counts).tolist()
    assert int(after.num_free) == int(pool.num_free)


def test_slots_follow_the_table():
    tables = ints(3, 1, 4, 4).reshape(1, 4)  # four blocks in all, so 4 is nobody's
    rows, positions = ints(*[0] * 5), ints(0, 62, 63, 64, 127)
    assert np.asarray(SLOT_OF(tables, rows, positions, 64, 4)).tolist() == [192, 254, 255, 64, 127]


def test_what_has_no_slot_gets_the_sentinel_and_never_another_rows_slot():
    tables = ints(0, 4, 1, 2).reshape(2, 2)
    rows = ints(0, 0, 0, 1, -1, 2, 1, -2)
    positions = ints(4, 7, -1, -4, 0, 0, 8, 3)
    assert np.asarray(SLOT_OF(tables, rows, positions, 4, 4)).tolist() == [16] * 8
