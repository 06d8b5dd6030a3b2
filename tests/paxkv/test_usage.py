"""Where the slots are, in cases worked out by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.block_pool import retain
from paxkv.block_tables import BlockTable
from paxkv.contiguous import VAttention
from paxkv.memory import limits
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.reserved import Reserved
from paxkv.windows import Group
from tests.paxkv.oracles.lockstep import ints


def tables_of(memory: Paged, *rows: list[int]) -> tuple[BlockTable, ...]:
    """A block table with these blocks."""
    ids = np.full((memory.rows, memory.blocks_per_seq), memory.num_blocks)
    for row, blocks in enumerate(rows):
        ids[row, : len(blocks)] = blocks
    ends = [len(blocks) for blocks in rows] + [0] * (memory.rows - len(rows))
    return (BlockTable(ints(ids), ints([0] * memory.rows), ints(ends)),)


def used(memory, stored: list[int], final: list[int], **changes) -> tuple[int, int, int, int, int]:
    """Tokens, reserved, internal, external and allocated slots of a state that is given rather than reached."""
    state = memory.init()
    idle = [0] * (memory.rows - len(stored))
    lengths = ints(stored + idle)
    seqs = dataclasses.replace(state.seqs, active=lengths > 0, lengths=lengths, promised=lengths)
    changes = {name: values if isinstance(values, tuple) else ints(values) for name, values in changes.items()}
    if "tables" in changes:
        pool = retain(state.pool, changes["tables"][0].ids.reshape(-1))
        state = dataclasses.replace(state, pool=pool)
    state = dataclasses.replace(state, seqs=seqs, **changes)
    found = memory.usage(state, ints(final + idle))
    return tuple(int(n) for n in (found.tokens, found.reserved, found.internal, found.external, found.allocated))


@pytest.mark.parametrize(("max_len", "stored", "final", "never_used"), [(2048, 8, 10, 2038), (512, 4, 5, 507)])
def test_reserving_for_the_longest_sequence_wastes_what_pagedattention_figure_3_says(
    max_len, stored, final, never_used
):
    memory = Reserved(rows=2, max_len=max_len, num_slots=2 * max_len, policy="max")
    tokens, reserved, internal, external, allocated = used(
        memory, [stored], [final], sizes=[max_len, 0], orders=[max_len.bit_length() - 1, 0]
    )
    assert (tokens, reserved, internal) == (stored, final - stored, never_used)
    assert (external, allocated) == (max_len, max_len)


def test_slots_of_a_block_that_its_owner_will_fill_are_reserved_and_the_rest_is_lost_inside():
    memory = Paged(rows=3, max_len=64, block_size=16, num_blocks=8)
    # Row 0: one block, ends with 16. Row 1: three blocks of which its 40 tokens leave 8 empty. Five blocks are free.
    blocks = tables_of(memory, [0], [1, 2, 3])
    assert used(memory, [10, 33], [16, 40], tables=blocks) == (43, 6 + 7, 8, 4 * 16, 4 * 16)


def test_rounding_to_a_power_of_two_is_external():
    memory = Reserved(rows=2, max_len=64, num_slots=100, policy="oracle")
    # 20 slots asked for, 32 taken; 5 asked for, 8 taken.
    assert used(memory, [12, 5], [20, 5], starts=[0, 32], sizes=[20, 5], orders=[5, 3]) == (17, 8, 0, 100 - 25, 40)


def test_mapped_groups_of_a_live_row_are_its_own_and_those_of_an_idle_row_nobodys():
    memory = VAttention(rows=2, max_len=30, num_groups=10, page_bytes=8, token_bytes=2, buffers=2)
    assert used(memory, [9], [11], mapped=[3, 4]) == (9, 2, 1, 40 - 12, 12)


def test_what_is_over_the_limit_is_not_there():
    memory = VAttention(rows=2, max_len=30, num_groups=10, page_bytes=8, token_bytes=2, buffers=2)
    assert int(memory.usage(memory.init(limits(7)), ints([0, 0])).external) == 7 * 4
    memory = Reserved(rows=2, max_len=64, num_slots=96, policy="oracle", min_block=2)
    assert int(memory.usage(memory.init(limits(20)), ints([0, 0])).external) == 20 * 2


def test_the_last_page_of_a_row_holds_no_slot_past_the_longest_sequence():
    memory = VAttention(rows=2, max_len=30, num_groups=20, page_bytes=32, token_bytes=2, buffers=2)
    # Two pages have 32 slots, of which the row has addresses for 30.
    assert used(memory, [30], [30], mapped=[2, 0]) == (30, 0, 0, 320 - 30, 30)


def test_an_end_that_was_passed_counts_as_reached():
    memory = Paged(rows=1, max_len=64, block_size=16, num_blocks=4)
    assert used(memory, [20], [18], tables=tables_of(memory, [0, 1])) == (20, 0, 12, 32, 32)


def counts(found) -> list[int]:
    return [
        int(n) for n in (found.tokens, found.reserved, found.internal, found.external, found.allocated, found.saved)
    ]


def with_tables(memory: Paged, lengths: list[int], tables: tuple[BlockTable, ...]):
    """Rows of these lengths in these blocks."""
    state, idle = memory.init(), [0] * (memory.rows - len(lengths))
    seqs = dataclasses.replace(state.seqs, active=ints(lengths + idle) > 0, lengths=ints(lengths + idle))
    ids = jnp.concatenate([table.ids.reshape(-1) for table in tables])
    return dataclasses.replace(state, seqs=seqs, tables=tables, pool=retain(state.pool, ids))


def test_a_shared_block_counts_once_with_the_tokens_of_who_is_furthest():
    memory = Paged(rows=3, max_len=64, block_size=16, num_blocks=8, forks=True)
    state = with_tables(memory, [20, 25, 5], tables_of(memory, [0, 1], [0, 1], [2]))
    # Block 0 is full for both. In block 1 row 0 has 4 tokens and row 1 has 9; row 0 will fill 14 slots, row 1 ten.
    found = counts(memory.usage(state, ints([30, 26, 5])))
    assert found == [16 + 9 + 5, 5, 2 + 11, 5 * 16, 3 * 16, 2 * 16]


def test_a_prefix_that_many_share_is_stored_once():
    memory = Paged(rows=50, max_len=1024, block_size=16, num_blocks=200, cache=PrefixCache())
    prefix = list(range(62))  # 992 tokens of 1000 that 50 requests have in common
    blocks = tables_of(memory, *[[*prefix, 62 + row] for row in range(50)])
    found = memory.usage(with_tables(memory, [1000] * 50, blocks), ints([1000] * 50))
    assert int(found.tokens) == 62 * 16 + 50 * 8
    assert int(found.allocated) == (62 + 50) * 16
    assert int(found.saved) == 49 * 62 * 16


def test_a_block_that_only_a_pin_holds_is_allocated_and_holds_no_token_of_a_sequence():
    memory = Paged(rows=1, max_len=64, block_size=16, num_blocks=4, cache=PrefixCache())
    state = memory.init()
    pinned = dataclasses.replace(state, pool=retain(state.pool, ints([3])), pins=ints([0, 0, 0, 1]))
    found = memory.usage(pinned, ints([0]))
    assert counts(found) == [0, 0, 16, 48, 16, 0]


def test_each_group_of_layers_has_its_own_blocks_and_a_full_one_is_worth_the_slots_of_any():
    """Ten tokens in three blocks of four, and in two blocks of eight of which the second is a quarter full."""
    memory = Paged(rows=1, max_len=16, block_size=4, num_blocks=8, groups=(Group(4), Group(8)))
    first, second = tables_of(memory, [0, 1, 2])[0], tables_of(memory, [3, 4])[0]
    state = with_tables(memory, [10], (first, dataclasses.replace(second, ids=second.ids[:, :2])))
    assert counts(memory.usage(state, ints([12]))) == [10 + 5, 2 + 1, 2, 3 * 4, 5 * 4, 0]


def test_what_left_the_window_holds_no_token():
    memory = Paged(rows=1, max_len=16, block_size=4, num_blocks=8, groups=(Group(4, window=4),))
    (table,) = tables_of(memory, [0, 1, 2])
    gone = BlockTable(table.ids.at[0, 0].set(8), table.first.at[0].set(1), table.end)
    assert counts(memory.usage(with_tables(memory, [10], (gone,)), ints([10]))) == [6, 0, 2, 24, 8, 0]
