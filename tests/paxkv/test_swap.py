"""Sequences that go to the host and come back: who owns what, and what is copied."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import checks, swap
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from tests.paxkv.oracles.block_manager import Prompt
from tests.paxkv.oracles.swap_server import EIGHT, MEMORIES, TIGHT, Server, operations, play_tight
from tests.paxkv.oracles.swapping import SwapTwins, drive_swaps


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORIES)
def test_both_pools_agree_with_the_oracle(name):
    drive_swaps(SwapTwins(MEMORIES[name], operations(MEMORIES[name])), seed=0, steps=200)


@pytest.fixture
def server():
    return Server(EIGHT)


def test_a_block_goes_to_the_host_and_comes_back_and_both_pools_are_as_before(server):
    row = server.store(7)
    assert server.free == (5, 4)
    (place,), outcome, moved = server.out(row)
    assert (outcome, len(moved), server.free) == (Outcome.OK, 1, (6, 3))
    row, outcome, moved = server.back(place)
    assert (row, outcome, len(moved), server.free) == (0, Outcome.OK, 1, (5, 4))
    assert server.state.seqs.lengths.tolist() == [7, 0, 0, 0]


@pytest.mark.parametrize("together", [True, False])
def test_two_forks_of_two_blocks_take_two_host_blocks_and_share_them_when_they_are_back(server, together):
    first = server.store(15)
    second = server.fork(first, 15)
    if together:
        places, outcome, moved = server.out(first, second)
        assert (outcome, len(moved)) == (Outcome.OK, 2)
    else:
        (one,), _, moved = server.out(first)
        assert len(moved) == 2
        (other,), _, moved = server.out(second)
        assert moved == []
        places = [one, other]
    assert server.free == (6, 2)
    assert [len(server.back(place)[2]) for place in places] == [2, 0]
    assert server.free == (4, 4)
    ids = np.asarray(server.state.tables[0].ids)
    np.testing.assert_array_equal(ids[0], ids[1])
    assert server.state.pool.ref_counts[ids[0, :2]].tolist() == [2, 2]


def test_who_comes_back_after_a_fork_has_written_gets_the_block_as_it_was(server):
    first = server.store(15)
    second = server.fork(first, 15)
    (place,), _, _ = server.out(first)
    server.grow({second: 1})  # alone now, into the block that the other shared
    row, outcome, moved = server.back(place)
    assert (outcome, len(moved)) == (Outcome.OK, 1)
    ids = np.asarray(server.state.tables[0].ids)
    assert (ids[row, :2] == ids[second, :2]).tolist() == [True, False]


def test_only_what_changed_goes_to_the_host_again(server):
    row = server.store(20)
    (place,), _, moved = server.out(row)
    assert len(moved) == 3
    row, _, moved = server.back(place)
    assert len(moved) == 3
    server.grow({row: 1})
    last = int(server.state.tables[0].ids[row, 2])
    (place,), _, moved = server.out(row)
    assert [block for block, _ in moved] == [last]
    assert server.free == (6, 1)


def test_a_host_pool_that_is_full_or_too_small_refuses_and_nothing_is_lost(server):
    first, second = server.store(20), server.store(9)
    server.out(first)
    before = jax.tree.leaves(server.state)
    assert server.out(second) == ([EIGHT.rows], Outcome.LATER, [])
    assert server.free == (4, 1)
    for old, new in zip(before, jax.tree.leaves(server.state), strict=True):
        np.testing.assert_array_equal(old, new)
    third = server.store(30)
    before = jax.tree.leaves(server.state)
    assert server.out(second, third)[1] == Outcome.NEVER
    for old, new in zip(before, jax.tree.leaves(server.state), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_copy_that_is_left_on_the_host_takes_room_and_one_for_several_takes_it_once():
    play_tight(TIGHT)


def test_a_sequence_waits_for_blocks_and_for_a_row_and_keeps_the_watermark():
    server = Server(dataclasses.replace(EIGHT, watermark_blocks=1))
    (place,), _, _ = server.out(server.store(9))
    others = [server.store(8) for _ in range(4)]
    assert server.back(place)[1] == Outcome.LATER  # no row
    server.manager.release([False, False, False, True])
    assert server.back(place)[1] == Outcome.OK  # two of three blocks
    (place,), _, _ = server.out(3)
    server.grow({others[0]: 1})
    assert server.back(place)[1] == Outcome.LATER  # two blocks, one of which is kept back
    assert server.free == (2, 2)


def test_it_comes_back_only_with_room_for_its_next_token(server):
    (place,), _, _ = server.out(server.store(16))
    server.store(32)
    assert server.back(place)[1] == Outcome.LATER  # two blocks are free, three are needed for 17 tokens
    server.manager.release([True, False, False, False])
    row = server.back(place)[0]
    assert server.state.seqs.promised[row] == 17


def test_who_fills_the_whole_memory_never_comes_back():
    memory = dataclasses.replace(EIGHT, num_blocks=4)
    server = Server(memory)
    (place,), outcome, _ = server.out(server.store(32))
    assert outcome == Outcome.OK
    assert server.back(place)[1] == Outcome.NEVER
    assert server.manager.discard(place) == Outcome.OK
    assert server.free == (4, 4)


def test_an_aborted_sequence_leaves_the_host(server):
    first = server.store(15)
    second = server.fork(first, 15)
    places, _, _ = server.out(first, second)
    assert server.manager.discard(places[0]) == Outcome.OK
    assert server.free == (6, 2)  # the other still needs them
    assert int(server.state.seqs.faults.word) == 0
    assert server.manager.discard(places[0]) == Outcome.DOUBLE_FREE
    assert server.back(places[0])[1] == Outcome.OUT_OF_RANGE
    assert int(server.state.seqs.faults.word) == 1 << Outcome.DOUBLE_FREE | 1 << Outcome.OUT_OF_RANGE
    assert int(server.state.seqs.faults.row) == places[0]
    assert server.manager.discard(places[1]) == Outcome.OK
    assert server.free == (6, 4)
    assert server.back(-1)[1] == server.back(EIGHT.rows)[1] == Outcome.OUT_OF_RANGE


def test_a_free_row_and_one_that_waits_for_its_copy_are_refused_and_reported(server):
    first = server.store(15)
    second = server.fork(first, 15)
    server.grow({second: 1})
    assert server.out(second)[1] == Outcome.OUT_OF_RANGE
    assert int(server.state.seqs.faults.row) == second
    server.manager.copied()
    assert server.out(second)[1] == Outcome.OK
    assert server.out(second)[1] == Outcome.OUT_OF_RANGE
    assert int(server.state.seqs.faults.word) == 1 << Outcome.OUT_OF_RANGE


def test_what_is_still_cached_need_not_come_back():
    server = Server(dataclasses.replace(EIGHT, cache=PrefixCache(), num_blocks=8))
    row = server.store(20)
    server.manager.publish([list(range(20)), [], [], []])
    (place,), _, _ = server.out(row)
    row, _, moved = server.back(place)
    assert len(moved) == 1  # the third block was not full
    assert server.state.tables[0].ids[row, :2].tolist() == [0, 1]


def test_a_parked_sequence_goes_on_publishing_where_it_was():
    """The same tokens, swapped in between or not: the same contents, keys and hits."""
    records = []
    for swapped in (False, True):
        server = Server(dataclasses.replace(EIGHT, cache=PrefixCache(), num_blocks=8))
        row = server.store(20)
        server.manager.publish([list(range(20)), [], [], []])
        if swapped:
            (place,), _, _ = server.out(row)
            row = server.back(place)[0]
        server.grow({row: 5})
        server.manager.publish([list(range(20, 25)), [], [], []])
        table = np.asarray(server.state.tables[0].ids)[row, :3]
        held = np.asarray(server.state.contents.records)[table]
        records.append((held[:, [0, 1, 3, 4, 5, *range(6, 14)]], jax.tree.map(np.asarray, server.state.chains)))
        assert server.manager.admit(Prompt(tuple(range(26))), 26) == (1, Outcome.OK)
        assert int(server.state.seqs.lengths[1]) == 24
    np.testing.assert_array_equal(records[0][0], records[1][0])
    for alone, swapped in zip(jax.tree.leaves(records[0][1]), jax.tree.leaves(records[1][1]), strict=True):
        np.testing.assert_array_equal(alone, swapped)


def test_a_memory_without_host_blocks_pays_nothing_and_says_so():
    memory = dataclasses.replace(EIGHT, host_blocks=0)
    assert memory.init().swap is None
    with pytest.raises(ValueError, match="host_blocks"):
        swap.swap_out(memory, memory.init(), jnp.zeros(4, jnp.bool))
    with pytest.raises(ValueError, match="host_blocks"):
        dataclasses.replace(EIGHT, host_blocks=-1)


BROKEN = {
    "host_references_are_table_entries": lambda swap: {"tables": (put(swap.tables[0], 3, 0, 1),)},
    "host_free_and_used_are_all": lambda swap: {
        "pool": dataclasses.replace(swap.pool, num_free=swap.pool.num_free + 1)
    },
    "parked_places_hold_all_they_stored": lambda swap: {"lengths": swap.lengths.at[0].set(17)},
    "free_places_hold_nothing": lambda swap: {"promised": swap.promised.at[1].set(3)},
    "twins_are_blocks": lambda swap: {"host_twins": swap.host_twins.at[5].set(-1)},
}


def put(table, place: int, column: int, block: int):
    return dataclasses.replace(table, ids=table.ids.at[place, column].set(block))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_invariant_of_the_host_is_named(server, name):
    server.out(server.store(15))
    state = server.state
    swap_now = dataclasses.replace(state.swap, **BROKEN[name](state.swap))
    with pytest.raises(checks.InvariantError, match=name):
        checks.require_invariants(EIGHT, dataclasses.replace(state, swap=swap_now))


@pytest.mark.parametrize("cache", [None, PrefixCache()], ids=["plain", "prefix cache"])
def test_swaps_are_in_place_and_need_no_more_room_for_larger_pools(cache):
    temporary = []
    for num_blocks in (22_888, 4 * 22_888):
        memory = Paged(256, 4096, 16, num_blocks=num_blocks, host_blocks=num_blocks // 2, cache=cache)

        def step(state, rows, place, memory=memory):
            state, *_, moves_out = swap.swap_out(memory, state, rows)
            state, *_, moves_in = swap.swap_in(memory, state, place)
            return swap.discard(memory, state, place + 1)[0], (moves_out.count, moves_in.count)

        def steps(state, *of, step=step):
            return jax.lax.scan(lambda state, _: step(state, *of), state, length=3)

        state = memory.init()
        lowered = jax.jit(steps, donate_argnums=0).lower(state, jnp.zeros(256, jnp.bool), jnp.int32(0))
        analysis = lowered.compile().memory_analysis()
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert analysis.alias_size_in_bytes == state_bytes
        temporary.append(analysis.temp_size_in_bytes)
    # A bit for each block tells which were counted. A table has 262,144 bytes.
    assert temporary[1] - temporary[0] <= 3 * 22_888 // 8 + 1024
    assert temporary[0] < 262_144 / 2
