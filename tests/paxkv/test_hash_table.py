"""The table from keys to blocks: two buckets a key, duplicates, and what happens when both are full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import hash_table
from paxkv.hash_table import WAYS, WIDTH, clear, empty_entry, fill, first_claims, init_table, look_up, tags, tags_at

NONE = 64


@jax.jit
def insert(table, key, block):
    """Adds one block, if there is room for it; where it went."""
    entry, room = empty_entry(look_up(table, key[None], NONE), NONE)
    return fill(table, entry, key[None], block[None], room), entry[0], room[0]


LOOK_UP = jax.jit(look_up, static_argnums=2)
CLEAR = jax.jit(clear, static_argnums=3)


def key(*lanes: int) -> jax.Array:
    return jnp.asarray(np.array(lanes, np.uint32))


def random_keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (count, 2), np.uint32)


def held(table: jax.Array, one: jax.Array) -> list[int]:
    """The blocks of a key, as its tag tells them."""
    ways = LOOK_UP(table, one[None], NONE)
    return sorted(np.asarray(ways.blocks)[np.asarray(ways.same)].tolist())


@pytest.mark.parametrize("num_blocks", [1, 7, 8, 9, 64, 22_888])
def test_a_table_is_at_most_half_full_and_a_power_of_two(num_blocks):
    buckets, ways = init_table(num_blocks).shape
    assert buckets * WIDTH >= 2 * num_blocks
    assert buckets & (buckets - 1) == 0
    assert buckets >= 2  # so that the two buckets of a key differ
    assert ways == WAYS == 2 * WIDTH


@pytest.mark.parametrize("buckets", [2, 4, 16, 4096])
def test_the_two_buckets_of_a_key_differ(buckets):
    both = np.asarray(hash_table._buckets(jnp.asarray(random_keys(5000)), buckets))
    assert (both[:, 0] != both[:, 1]).all()
    assert both.min() == 0
    assert both.max() == buckets - 1


def test_what_was_put_in_is_found_and_nothing_else():
    table, keys = init_table(NONE), jnp.asarray(random_keys(NONE))
    assert held(table, keys[0]) == []
    for block in range(40):
        table, _, room = insert(table, keys[block], jnp.int32(block))
        assert bool(room)
    for block in range(NONE):
        assert held(table, keys[block]) == ([block] if block < 40 else [])


def test_a_full_table_of_any_pool_practically_always_has_room():
    """As many keys as there are blocks, one after another: the emptier of two buckets never has eight."""
    for seed in range(20):
        table = np.asarray(init_table(512))
        both = np.asarray(hash_table._buckets(jnp.asarray(random_keys(512, seed)), table.shape[0]))
        load = np.zeros(table.shape[0], int)
        for first, second in both:
            load[first if load[first] <= load[second] else second] += 1
        assert load.max() < WIDTH


def test_an_entry_goes_to_the_emptier_bucket_and_to_the_first_when_they_are_equal():
    one = key(0x12345678, 0x9ABCDEF0)
    table = init_table(NONE)
    first, second = np.asarray(hash_table._buckets(one[None], table.shape[0]))[0].tolist()
    went = []
    for block in range(4):
        table, entry, _ = insert(table, one, jnp.int32(block))
        went.append(int(entry))
    assert went == [WIDTH * first, WIDTH * second, WIDTH * first + 1, WIDTH * second + 1]


def test_a_key_can_have_sixteen_blocks_and_no_more():
    one = key(0, 0)
    table = init_table(NONE)
    for block in range(WAYS):
        table, _, room = insert(table, one, jnp.int32(block))
        assert bool(room)
    assert held(table, one) == list(range(WAYS))
    full = table
    table, _, room = insert(table, one, jnp.int32(WAYS))
    assert not bool(room)
    np.testing.assert_array_equal(table, full)
    entries = jnp.asarray([WIDTH * int(hash_table._buckets(one[None], table.shape[0])[0, 1]) + 3], jnp.int32)
    table = CLEAR(table, entries, jnp.ones(1, jnp.bool), NONE)  # room again, in that very place
    table, entry, room = insert(table, one, jnp.int32(WAYS))
    assert (bool(room), int(entry)) == (True, int(entries[0]))


def test_a_cleared_entry_is_empty_and_its_neighbours_stay():
    one = key(5, 6)
    table = init_table(NONE)
    entries = []
    for block in (7, 8, 9):
        table, entry, _ = insert(table, one, jnp.int32(block))
        entries.append(int(entry))
    asked = jnp.asarray(np.array(entries, np.int32))
    assert np.asarray(tags_at(table, asked)).tolist() == [6, 6, 6]
    assert held(CLEAR(table, asked, jnp.asarray([False, False, False]), NONE), one) == [7, 8, 9]
    assert held(CLEAR(table, asked, jnp.asarray([True, False, True]), NONE), one) == [8]


def test_keys_of_equal_tags_are_told_apart_by_their_buckets_alone():
    """The table says what may be there; whoever looks up must compare."""
    table = init_table(NONE)
    one, other = key(0, 1), key(1 << 20, 1)
    assert np.asarray(tags(jnp.stack([one, other]))).tolist() == [1, 1]
    table, _, _ = insert(table, one, jnp.int32(3))
    both = np.asarray(hash_table._buckets(jnp.stack([one, other]), table.shape[0]))
    meet = bool(set(both[0].tolist()) & set(both[1].tolist()))
    assert held(table, other) == ([3] if meet else [])


def test_of_all_that_want_an_entry_the_first_gets_it():
    entries = jnp.asarray(np.array([4, 2, 4, 2, 9, 4], np.int32))
    wanted = jnp.asarray([False, True, True, True, True, True])
    got = jax.jit(first_claims)(entries, wanted)
    assert np.asarray(got).tolist() == [False, True, True, False, True, False]


def test_unwanted_places_write_nothing_even_where_others_write():
    table = init_table(NONE)
    keys = jnp.asarray(random_keys(3))
    entry = jnp.asarray(np.array([5, 5, 11], np.int32))
    table = fill(table, entry, keys, jnp.asarray(np.array([1, 2, 3], np.int32)), jnp.asarray([False, True, False]))
    blocks = np.asarray(table)[:, WIDTH:].reshape(-1)
    assert (int(blocks[5]), int((blocks != NONE).sum())) == (2, 1)
    assert int(tags_at(table, entry[:1])[0]) == int(tags(keys)[1])
