"""The free stack: order, refusal, and everything that must not be given back."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.block_pool import BlockPool, give_back, init_block_pool, is_free, take

TAKE = jax.jit(take)
GIVE_BACK = jax.jit(give_back)
NUM_BLOCKS = 7
WIDTH = 9  # places in a call: more than there are blocks


def places(*ids: int) -> jax.Array:
    """Ids at the front, the sentinel behind them."""
    return jnp.asarray(np.array([*ids, *[NUM_BLOCKS] * (WIDTH - len(ids))], np.int32))


def wanted(count: int) -> jax.Array:
    return jnp.arange(WIDTH) < count


def free_list(pool: BlockPool) -> list[int]:
    """Next to be taken first."""
    return np.asarray(pool.free_ids)[: int(pool.num_free)][::-1].tolist()


def seen(pool: BlockPool) -> tuple:
    return free_list(pool), np.asarray(pool.ref_counts).tolist()


def taken(count: int) -> BlockPool:
    pool, _, ok = TAKE(init_block_pool(NUM_BLOCKS), wanted(count))
    assert bool(ok)
    return pool


def share(pool: BlockPool, block: int, times: int) -> BlockPool:
    return dataclasses.replace(pool, extra_refs=pool.extra_refs.at[block].add(times))


def test_blocks_are_taken_in_ascending_order_and_only_where_wanted():
    places_wanted = jnp.asarray([True, False, True, False, False, True, False, False, False])
    pool, ids, ok = TAKE(init_block_pool(NUM_BLOCKS), places_wanted)
    assert bool(ok)
    assert np.asarray(ids).tolist() == [0, 7, 1, 7, 7, 2, 7, 7, 7]
    assert seen(pool) == ([3, 4, 5, 6], [1, 1, 1, 0, 0, 0, 0])


def test_the_last_block_can_be_taken():
    pool, ids, ok = TAKE(taken(6), wanted(1))
    assert (bool(ok), int(ids[0]), int(pool.num_free)) == (True, 6, 0)


def test_taking_one_block_too_many_takes_none():
    before = taken(5)
    pool, ids, ok = TAKE(before, wanted(3))
    assert not bool(ok)
    assert np.asarray(ids).tolist() == [NUM_BLOCKS] * WIDTH
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(pool), strict=True):
        np.testing.assert_array_equal(new, old)


def test_the_last_block_given_back_is_the_first_taken_again():
    pool, ok = GIVE_BACK(taken(5), places(1, 4, 0))
    assert bool(ok)
    assert free_list(pool) == [0, 4, 1, 5, 6]
    _, ids, _ = TAKE(pool, wanted(4))
    assert np.asarray(ids)[:4].tolist() == [0, 4, 1, 5]


def test_sentinels_are_places_with_nothing_to_give_back():
    pool, ok = GIVE_BACK(taken(3), jnp.asarray(np.array([7, 2, 7, 7, 0, 7, 7, 7, 7], np.int32)))
    assert bool(ok)
    assert free_list(pool) == [0, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([2, 2], id="the same block twice"),
        pytest.param([0, 1, 5], id="a block that is free"),
        pytest.param([0, -1], id="a negative id"),
        pytest.param([0, NUM_BLOCKS + 1], id="an id beyond the sentinel"),
        pytest.param([0, -NUM_BLOCKS], id="an id that would wrap round to the first block"),
    ],
)
def test_a_wrong_id_refuses_the_whole_call(ids):
    before = taken(3)
    pool, ok = GIVE_BACK(before, places(*ids))
    assert not bool(ok)
    assert seen(pool) == seen(before)
    pool, ok = GIVE_BACK(pool, places(0, 1, 2))  # and the pool still works
    assert bool(ok)
    assert free_list(pool) == [2, 1, 0, 3, 4, 5, 6]


def test_giving_back_twice_is_refused_the_second_time():
    pool, ok = GIVE_BACK(taken(3), places(1))
    assert bool(ok)
    again, ok = GIVE_BACK(pool, places(1))
    assert not bool(ok)
    assert seen(again) == seen(pool)


def test_a_shared_block_is_freed_with_its_last_reference():
    pool = share(taken(3), block=1, times=2)
    for left in (2, 1):
        pool, ok = GIVE_BACK(pool, places(1))
        assert bool(ok)
        assert (int(pool.ref_counts[1]), free_list(pool)) == (left, [3, 4, 5, 6])
    pool, ok = GIVE_BACK(pool, places(1))
    assert bool(ok)
    assert (int(pool.ref_counts[1]), free_list(pool)) == (0, [1, 3, 4, 5, 6])


def test_a_block_that_is_not_of_the_pool_is_not_free():
    asked = jnp.asarray(np.array([0, 6, 7, 8], np.int32))
    assert np.asarray(is_free(taken(1), asked)).tolist() == [False, True, False, False]


def test_random_operations_agree_with_a_list_and_a_count():
    rng = random.Random(0)
    pool = init_block_pool(NUM_BLOCKS)
    free = list(reversed(range(NUM_BLOCKS)))
    refs = [0] * NUM_BLOCKS
    for _ in range(300):
        held = [block for block in range(NUM_BLOCKS) if refs[block]]
        kind = rng.choice(["take", "give", "give", "share", "wrong"])
        if kind == "take":
            count = rng.randint(0, 4)
            pool, ids, ok = TAKE(pool, wanted(count))
            assert bool(ok) == (count <= len(free))
            if count <= len(free):
                expected = [free.pop() for _ in range(count)]
                assert np.asarray(ids)[:count].tolist() == expected
                for block in expected:
                    refs[block] = 1
        elif kind == "give":
            ids = rng.sample(held, rng.randint(0, len(held)))
            pool, ok = GIVE_BACK(pool, places(*ids))
            assert bool(ok)
            for block in ids:
                refs[block] -= 1
                if refs[block] == 0:
                    free.append(block)
        elif kind == "share" and held:
            block = rng.choice(held)
            pool = share(pool, block, 1)
            refs[block] += 1
        elif kind == "wrong":
            wrong = rng.choice([*free, *[b for b in held for _ in (0, 1)]])
            pool, ok = GIVE_BACK(pool, places(*held, wrong))
            assert not bool(ok)
        assert seen(pool) == (free[::-1], refs)
