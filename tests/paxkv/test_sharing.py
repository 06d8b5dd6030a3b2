"""Who must copy before writing, and what a fork and a copy do to tables and references."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import sharing
from paxkv.block_pool import BlockPool, init_block_pool, retain
from paxkv.block_tables import BlockTable
from paxkv.sharing import Copies, no_copies

ROWS, NONE, SIZE = 3, 9, 4
TAIL_WRITES = jax.jit(sharing.tail_writes, static_argnums=4)
RETAIN = jax.jit(retain)


def ints(values) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def table(*rows: list[int], first: tuple[int, ...] = (0, 0, 0)) -> BlockTable:
    ids = np.full((ROWS, 4), NONE, np.int32)
    for row, blocks in enumerate(rows):
        ids[row, first[row] : first[row] + len(blocks)] = blocks
    return BlockTable(jnp.asarray(ids), ints(first), ints([first[row] + len(rows[row]) for row in range(ROWS)]))


def pool(references: dict[int, int]) -> BlockPool:
    ids = [block for block, count in references.items() for _ in range(count)]
    return RETAIN(init_block_pool(NONE), ints(ids + [NONE] * (12 - len(ids))))


# ---- who must copy -------------------------------------------------------------------------------------------------

SHARERS = [  # the last block of each row
    (0, 1, 2),
    (0, 0, 1),
    (0, 1, 0),
    (1, 0, 0),
    (0, 0, 0),
]


@pytest.mark.parametrize("last_blocks", SHARERS)
@pytest.mark.parametrize("others", [0, 1])
def test_who_writes_into_a_shared_block_copies_it_unless_all_do_and_it_is_the_last(last_blocks, others):
    """All ways to be partly filled, full or to begin a block, and to write or not. `others` hold a pin or a copy."""
    references = {block: last_blocks.count(block) + others for block in set(last_blocks)}
    shared, blocks = pool({**references, 7: 3}), table(*[[7, block] for block in last_blocks])
    for lengths in itertools.product([5, 7, 8], repeat=ROWS):
        for new in itertools.product([0, 1, 6], repeat=ROWS):
            answer = TAIL_WRITES(blocks, shared, ints(lengths), ints(np.add(lengths, new)), SIZE)
            written = [last_blocks[r] if new[r] and lengths[r] % SIZE else NONE for r in range(ROWS)]
            copies, keeps = [False] * ROWS, [False] * ROWS
            for row, block in enumerate(written):
                if block != NONE:
                    writers = [r for r in range(ROWS) if written[r] == block]
                    keeps[row] = len(writers) == references[block] and row == writers[-1]
                    copies[row] = not keeps[row]
            assert np.asarray(answer.blocks).tolist() == written
            assert np.asarray(answer.copies).tolist() == copies
            assert np.asarray(answer.keeps).tolist() == keeps


def test_an_empty_row_and_one_at_a_boundary_write_into_no_block():
    answer = TAIL_WRITES(table([], [0], [1, 2]), pool({0: 2, 1: 2, 2: 2}), ints([0, 4, 8]), ints([3, 5, 9]), SIZE)
    assert np.asarray(answer.blocks).tolist() == [NONE] * ROWS
    assert not np.asarray(answer.copies).any()


def test_a_row_whose_window_left_its_first_blocks_writes_into_its_own_last_one():
    windowed = table([3], [3], [], first=(1, 1, 0))
    answer = TAIL_WRITES(windowed, pool({3: 2}), ints([6, 6, 0]), ints([7, 6, 0]), SIZE)
    assert np.asarray(answer.blocks).tolist() == [3, NONE, NONE]
    assert np.asarray(answer.copies).tolist() == [True, False, False]


# ---- copies --------------------------------------------------------------------------------------------------------


def test_a_copy_holds_both_ends_and_the_row_has_its_own_block():
    """Row 1 shared block 0 and writes; its reference to the source becomes the hold on it."""
    before, taken = table([0], [0], []), 5
    copied = jnp.asarray([False, True, False])
    after = sharing.replace_tail(before, ints([0, 0, 0]), ints([NONE, taken, NONE]), copied)
    assert np.asarray(after.ids)[:, 0].tolist() == [0, taken, NONE]
    held, copies = sharing.hold(pool({0: 2, taken: 1}), [(ints([NONE, 0, NONE]), ints([NONE, taken, NONE]))])
    assert np.asarray(held.ref_counts)[[0, taken]].tolist() == [2, 2]
    assert np.asarray(copies.sources).tolist() == [NONE, 0, NONE]
    assert np.asarray(copies.destinations).tolist() == [NONE, taken, NONE]


def test_rows_that_wait_for_a_copy_in_any_group_are_named():
    nothing = no_copies(2 * ROWS, NONE)
    assert not np.asarray(sharing.pending(nothing, ROWS, NONE)).any()
    second_group = Copies(nothing.sources.at[4].set(0), nothing.destinations.at[4].set(5))
    assert np.asarray(sharing.pending(second_group, ROWS, NONE)).tolist() == [False, True, False]


def test_copies_of_several_steps_are_all_kept():
    old, new = (
        Copies(ints([NONE, 0, NONE]), ints([NONE, 5, NONE])),
        Copies(ints([2, NONE, NONE]), ints([6, NONE, NONE])),
    )
    both = sharing.add(old, new, NONE)
    assert np.asarray(both.sources).tolist() == [2, 0, NONE]
    assert np.asarray(both.destinations).tolist() == [6, 5, NONE]
    assert np.asarray(sharing.add(both, no_copies(ROWS, NONE), NONE).destinations).tolist() == [6, 5, NONE]


# ---- forks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "shared", "first"), [(0, [], 0), (1, [], 1), (2, [4], 1), (3, [4, 5], 1)], ids=str)
def test_a_fork_has_the_first_blocks_of_its_source(blocks, shared, first):
    """Block 0 of the source has left the window."""
    before = table([4, 5], [3], [], first=(1, 0, 0))
    after, ids = sharing.share_row(before, jnp.int32(0), jnp.int32(2), jnp.int32(blocks), NONE)
    assert np.asarray(after.ids)[2].tolist() == [NONE, *shared, *[NONE] * (3 - len(shared))]
    assert (int(after.first[2]), int(after.end[2])) == (min(first, blocks), blocks)
    assert [block for block in np.asarray(ids).tolist() if block != NONE] == shared
    np.testing.assert_array_equal(after.ids[:2], before.ids[:2])


def test_a_fork_that_finds_no_row_changes_nothing_and_refers_to_nothing():
    before = table([4, 5], [3], [6])
    after, ids = sharing.share_row(before, jnp.int32(0), jnp.int32(ROWS), jnp.int32(2), NONE)
    assert np.asarray(ids).tolist() == [NONE] * 4
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new, old)
