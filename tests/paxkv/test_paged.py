"""Paged memory in scenarios with known values. Every operation is also compared with the oracle."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.outcomes import MemoryFaultError, Outcome, raise_on_fault
from paxkv.paged import Paged
from paxkv.seqs import check_append, init_seqs
from paxkv.windows import Group
from tests.paxkv import unchecked
from tests.paxkv.oracles.lockstep import MEMORIES, Lockstep, ask, ints

TEN_BLOCKS = MEMORIES["paged_16"]  # of 16 tokens, for four rows of at most 176 tokens


def table(pair: Lockstep, row: int) -> list[int]:
    held = pair.state.tables[0]
    return np.asarray(held.ids)[row, int(held.first[row]) : int(held.end[row])].tolist()


def free_list(pair: Lockstep) -> list[int]:
    pool = pair.state.pool
    queue = np.asarray(pool.queue)[int(pool.head) : int(pool.tail)].tolist()
    return [block for block in queue if block != pair.memory.num_blocks]


def only(pair: Lockstep, row: int) -> list[bool]:
    return [r == row for r in range(pair.memory.rows)]


def test_freed_blocks_are_reused_tail_first_and_last_sequence_first():
    pair = Lockstep(TEN_BLOCKS)
    first, second = pair.store(48), pair.store(20)
    assert (table(pair, first), table(pair, second)) == ([0, 1, 2], [3, 4])
    pair.release(only(pair, first))
    pair.release(only(pair, second))
    assert free_list(pair) == [4, 3, 2, 1, 0, 5, 6, 7, 8, 9]
    assert table(pair, pair.store(64)) == [4, 3, 2, 1]


def test_blocks_are_reused_in_the_order_in_which_they_came_back_if_asked_to():
    pair = Lockstep(MEMORIES["paged_3_fifo"])
    first, second = pair.store(9), pair.store(7)
    assert (table(pair, first), table(pair, second)) == ([0, 1, 2], [3, 4, 5])
    pair.release(only(pair, first))
    pair.release(only(pair, second))
    assert free_list(pair) == [6, 7, 8, 2, 1, 0, 5, 4, 3]
    assert table(pair, pair.store(11)) == [6, 7, 8, 2]


def test_more_blocks_than_are_taken_at_once_go_to_their_rows_in_order():
    pair = Lockstep(Paged(rows=3, max_len=100, block_size=1, num_blocks=140))
    for tokens in (66, 5, 66):
        pair.admit(tokens)
    assert pair.append([66, 5, 66]) == Outcome.OK
    assert np.asarray(pair.state.tables[0].ids)[2, :66].tolist() == list(range(71, 137))


def test_slots_to_look_ahead_are_given_with_the_tokens_and_counted_by_admission():
    memory = dataclasses.replace(TEN_BLOCKS, lookahead=3)
    admit, append = jax.jit(memory.admit), jax.jit(memory.append, static_argnums=2)
    state, _, _ = admit(memory.init(), ask(14))
    state, outcome = append(state, ints([13, 0, 0, 0]), 16)
    assert (int(outcome), int(memory.held(state)[0])) == (Outcome.OK, 1)  # 16 slots for 13 + 3
    assert np.asarray(memory.demand(state, ints([14, 0, 0, 0]))).tolist() == [1, 0, 0, 0]
    state, _ = append(state, ints([1, 0, 0, 0]), 16)
    assert (int(memory.held(state)[0]), int(state.pool.num_free)) == (2, 8)
    assert int(admit(state, ask(8 * 16 - 2))[2]) == Outcome.LATER
    assert int(admit(state, ask(8 * 16 - 3))[2]) == Outcome.OK
    longest = dataclasses.replace(memory, max_len=32, num_blocks=2)  # nothing is given beyond the longest sequence
    state, _, outcome = longest.admit(longest.init(), ask(32))
    assert int(outcome) == Outcome.OK
    assert int(longest.append(state, ints([32, 0, 0, 0]), 32)[1]) == Outcome.OK


def test_a_full_and_a_windowed_group_share_a_pool_and_admission_counts_what_each_comes_to_hold():
    """512 tokens take 32 blocks under full attention, and 64 + 127 of them at most 13 under a window of 64."""
    groups = (Group(16), Group(16, window=64))
    memory = Paged(rows=2, max_len=1024, block_size=16, num_blocks=78, groups=groups, max_chunk=128)
    admit = jax.jit(memory.admit)
    assert int(admit(memory.init(), ask(512))[2]) == Outcome.OK
    for num_blocks, outcome in ((44, Outcome.NEVER), (45, Outcome.OK)):
        smaller = dataclasses.replace(memory, num_blocks=num_blocks)
        assert int(smaller.admit(smaller.init(), ask(512))[2]) == outcome
    state, _, _ = admit(memory.init(), ask(512))
    assert int(admit(state, ask(33 - 13 << 4))[2]) == Outcome.OK
    assert int(admit(state, ask((33 - 13 << 4) + 1))[2]) == Outcome.LATER


def test_the_last_block_can_be_used_and_not_one_token_more():
    pair = Lockstep(TEN_BLOCKS)
    row = pair.store(160)
    assert int(TEN_BLOCKS.available(pair.state)) == 0
    assert pair.admit(1) == (4, Outcome.LATER)
    assert pair.append([1 if r == row else 0 for r in range(4)]) == Outcome.OUT_OF_BLOCKS
    assert pair.oracle.length(row) == 160
    with pytest.raises(MemoryFaultError, match=f"OUT_OF_BLOCKS, first at row {row}"):
        raise_on_fault(pair.state.seqs.faults)


def test_what_can_never_fit_is_refused_rather_than_left_waiting():
    pair = Lockstep(TEN_BLOCKS)
    assert pair.admit(161) == (4, Outcome.NEVER)  # fits a sequence, but not the pool
    assert pair.admit(8, 8, 161) == (4, Outcome.NEVER)  # would fit now, but not at its end
    assert pair.admit(8, 8, 177) == (4, Outcome.NEVER)  # longer than a sequence may be
    assert len(free_list(pair)) == 10
    assert pair.admit(160) == (0, Outcome.OK)


def test_a_block_starts_with_the_token_that_finds_the_last_one_full():
    pair = Lockstep(TEN_BLOCKS)
    row = pair.store(16)
    assert table(pair, row) == [0]
    pair.append([1, 0, 0, 0])
    assert table(pair, row) == [0, 1]
    slots = TEN_BLOCKS.slots(pair.state, ints([row, row]), ints([15, 16]))
    assert np.asarray(slots).tolist() == [15, 16]  # the last slot of block 0, the first of block 1
    pair.append([15, 0, 0, 0])
    assert table(pair, row) == [0, 1]


def test_two_sequences_at_a_boundary_with_nothing_free_both_stay_as_they_are():
    pair = Lockstep(TEN_BLOCKS)
    pair.store(64), pair.store(96)
    assert free_list(pair) == []
    before = table(pair, 0), table(pair, 1)
    assert pair.append([1, 1, 0, 0]) == Outcome.OUT_OF_BLOCKS
    assert np.asarray(pair.state.seqs.lengths).tolist() == [64, 96, 0, 0]
    assert (table(pair, 0), table(pair, 1)) == before
    assert int(pair.state.seqs.faults.word) == 1 << Outcome.OUT_OF_BLOCKS


def test_admission_counts_what_was_promised_to_rows_still_in_prefill():
    pair = Lockstep(TEN_BLOCKS)
    assert pair.admit(112) == (0, Outcome.OK)  # seven of ten blocks, none of them taken yet
    assert pair.admit(49) == (4, Outcome.LATER)
    assert pair.admit(48) == (1, Outcome.OK)
    pair.append([20, 0, 0, 0])
    assert pair.admit(1) == (4, Outcome.LATER)


def test_releasing_a_free_row_is_a_fault_that_harms_nobody():
    pair = Lockstep(TEN_BLOCKS)
    row = pair.store(20)
    other = pair.store(3)
    pair.release(only(pair, row))
    pair.release(only(pair, row))
    assert table(pair, other) == [2]
    with pytest.raises(MemoryFaultError, match=f"DOUBLE_FREE, first at row {row}"):
        raise_on_fault(pair.state.seqs.faults)


@pytest.mark.parametrize(
    ("tokens", "culprit"),
    [
        pytest.param([0, 0, 1, 0], 2, id="a free row"),
        pytest.param([1, -1, 0, 0], 1, id="a negative count"),
        pytest.param([0, 77, 0, 0], 1, id="past the longest sequence"),
        pytest.param([118, 0, 0, 0], 0, id="more than the static bound"),
        pytest.param([2**31 - 1, 0, 0, 0], 0, id="a count that would wrap round"),
    ],
)
def test_a_malformed_append_is_a_fault_and_serves_nobody(tokens, culprit):
    pair = Lockstep(TEN_BLOCKS)
    pair.store(2), pair.store(100)
    assert pair.append(tokens) == Outcome.OUT_OF_RANGE
    assert np.asarray(pair.state.seqs.lengths).tolist() == [2, 100, 0, 0]
    assert int(pair.state.seqs.faults.row) == culprit


def test_a_watermark_is_kept_back_only_while_something_runs():
    memory = Paged(rows=3, max_len=1600, block_size=16, num_blocks=100, watermark_blocks=10)
    admit, append = jax.jit(memory.admit), jax.jit(memory.append, static_argnums=2)

    def admitted(state, tokens):
        state, _, outcome = admit(state, ask(tokens))
        return state, Outcome(int(outcome))

    assert admitted(memory.init(), 100 * 16)[1] is Outcome.OK
    state, outcome = admitted(memory.init(), 85 * 16)
    assert outcome is Outcome.OK
    state, _ = append(state, ints([85 * 16, 0, 0]), 1600)
    assert int(state.pool.num_free) == 15
    assert admitted(state, 6 * 16)[1] is Outcome.LATER
    state, outcome = admitted(state, 5 * 16)
    assert outcome is Outcome.OK
    state, _ = append(state, ints([0, 80, 0]), 1600)
    assert admitted(state, 1)[1] is Outcome.LATER
    assert int(append(state, ints([0, 1, 0]), 1600)[1]) == Outcome.OK  # who runs may grow


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"watermark_blocks": -1}, "watermark_blocks must be at least 0"),
        ({"num_blocks": 2**30}, "slots must be below 2"),
        ({"lookahead": -1}, "lookahead must be at least 0"),
        ({"max_chunk": 0}, "max_chunk must be at least 1"),
        ({"groups": (Group(8),)}, "block_size: expected that of the first group, 8, got 16"),
        ({"lookahead": 2**31}, "max_len_and_lookahead must be below 2"),
        ({"watermark_blocks": 2**31}, "watermark_blocks must be below 2"),
        ({"host_blocks": 2**27}, "host_slots must be below 2"),
        ({"max_chunk": 2**31}, "longest_view must be below 2"),
        ({"groups": (Group(16, window=2**31),)}, "longest_view must be below 2"),
        ({"max_len": 2**31, "block_size": 2**20}, "max_len_and_lookahead must be below 2"),
        ({"rows": True}, "rows must be an int, got True"),
        ({"num_blocks": None}, "num_blocks must be an int, got None"),
        ({"forks": "no"}, "forks must be True or False, got 'no'"),
        ({"forks": None}, "forks must be True or False, got None"),
        ({"free_order": "lifo"}, "free_order: expected one of recent_first, fifo, got 'lifo'"),
        ({"free_order": None}, "free_order: expected one of"),
        ({"cache": True}, "cache: expected a PrefixCache, or None for no cache, got True"),
        ({"cache": "lru"}, "cache: expected a PrefixCache"),
        ({"groups": [Group(16)]}, "groups: expected a tuple of Group"),
        ({"groups": (3,)}, "groups: expected a tuple of Group"),
        ({"groups": None}, "groups: expected a tuple of Group"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        unchecked.replace(TEN_BLOCKS, **change)


@pytest.mark.parametrize(
    "counts",
    [np.array([1], np.int32), np.zeros((4, 1), np.int32), np.zeros(4, np.float32), np.zeros(4, bool), np.zeros(3, int)],
    ids=lambda counts: f"{counts.dtype}{list(counts.shape)}",
)
def test_counts_that_would_be_broadcast_or_rounded_are_refused(counts):
    check = inspect.unwrap(check_append)  # as it is called where nobody checks types before it does
    with pytest.raises(ValueError, match=r"new_tokens: expected int32\[4\], one count a row, got"):
        check(init_seqs(4), jnp.asarray(counts), 176, 4)


def test_memory_that_cannot_copy_before_it_writes_refuses_forks():
    state, row = TEN_BLOCKS.init(), jnp.int32(0)
    with pytest.raises(ValueError, match="forks: expected memory that copies before it writes, got forks=False"):
        TEN_BLOCKS.fork(state, row, row, row)
    with pytest.raises(ValueError, match="forks: expected memory that copies before it writes, got forks=False"):
        TEN_BLOCKS.reorder(state, ints([0, 1, 2, 3]))


def test_an_admission_of_less_than_nothing_is_refused():
    state, row, outcome = jax.jit(TEN_BLOCKS.admit)(TEN_BLOCKS.init(), ask(-1))
    assert (int(row), int(outcome)) == (4, Outcome.NEVER)
    assert int(state.pool.num_free) == 10


def test_a_bound_on_growth_that_is_no_positive_int_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        TEN_BLOCKS.append(TEN_BLOCKS.init(), ints([0, 0, 0, 0]), 0)
