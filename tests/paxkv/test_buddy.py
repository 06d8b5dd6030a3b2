"""The buddy allocator without lists against the textbook one with them."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.buddy import best_fit, ceil_log2, largest_order
from tests.paxkv.oracles.buddy import BuddyOracle

BEST_FIT = jax.jit(best_fit, static_argnums=4)


def test_ceil_log2_is_exact_up_to_the_largest_int32():
    numbers = [0, 1, 2, 3, 4, 5, 7, 8, 9, 1023, 1024, 1025, 2**24, 2**24 + 1, 2**30, 2**30 + 1, 2**31 - 1]
    expected = [0, 0, 1, 2, 2, 3, 3, 3, 4, 10, 10, 11, 24, 25, 30, 31, 31]
    assert np.asarray(ceil_log2(jnp.asarray(np.array(numbers, np.int32)))).tolist() == expected


@pytest.mark.parametrize(("num_leaves", "order"), [(1, 0), (2, 1), (3, 1), (4, 2), (15_728, 13), (16_384, 14)])
def test_the_largest_block_is_the_largest_power_of_two_in_the_arena(num_leaves, order):
    assert int(largest_order(jnp.int32(num_leaves))) == order


def test_an_arena_of_any_size_can_be_filled_to_the_last_leaf():
    orders = [4, 13, 6, 10, 11, 5, 12, 8]  # the binary digits of 15,728, in no order
    starts = []
    for i, order in enumerate([*orders, 0]):
        taken = jnp.arange(len(orders)) < i
        at = jnp.asarray(np.array(starts + [0] * (len(orders) - i), np.int32))
        start, found = BEST_FIT(at, jnp.asarray(orders, jnp.int32), taken, jnp.int32(order), 15_728, jnp.int32(15_728))
        assert bool(found) == (i < len(orders))
        starts.append(int(start))
    assert starts.pop() == 15_728
    ends = [start + 2**order for start, order in zip(starts, orders, strict=True)]
    assert sorted(starts) == [0, *sorted(ends)[:-1]]
    assert max(ends) == 15_728


@pytest.mark.parametrize("num_leaves", [1, 2, 16, 29, 96])
def test_random_allocations_agree_with_the_textbook(num_leaves):
    rng = random.Random(num_leaves)
    rows = 12
    textbook = BuddyOracle(num_leaves)
    ranges: list[tuple[int, int] | None] = [None] * rows
    refused = 0
    for _ in range(250):
        free_rows = [row for row in range(rows) if ranges[row] is None]
        if free_rows and rng.random() < 0.55:
            row = rng.choice(free_rows)
            order = rng.randint(0, num_leaves.bit_length())
            start, found = BEST_FIT(
                jnp.asarray(np.array([r[0] if r else 0 for r in ranges], np.int32)),
                jnp.asarray(np.array([r[1] if r else 0 for r in ranges], np.int32)),
                jnp.asarray(np.array([r is not None for r in ranges])),
                jnp.int32(order),
                num_leaves + rng.randrange(3) * 7,  # the arena may be smaller than it could be
                jnp.int32(num_leaves),
            )
            expected = textbook.take(order)
            assert bool(found) == (expected is not None)
            assert expected is None or int(start) == expected
            if expected is None:
                refused += 1
            else:
                ranges[row] = (expected, order)
        elif len(free_rows) < rows:
            row = rng.choice([row for row in range(rows) if ranges[row] is not None])
            textbook.give_back(*ranges[row])
            ranges[row] = None
    assert refused > 5


def test_what_does_not_count_is_not_in_the_way():
    starts, orders = jnp.asarray([0, 4], jnp.int32), jnp.asarray([2, 2], jnp.int32)
    start, _ = BEST_FIT(starts, orders, jnp.asarray([False, True]), jnp.int32(2), 8, jnp.int32(8))
    assert int(start) == 0
    start, _ = BEST_FIT(starts, orders, jnp.asarray([True, False]), jnp.int32(2), 8, jnp.int32(8))
    assert int(start) == 4


def test_the_smallest_block_that_holds_the_request_is_split():
    # Taken: leaf 0 and leaves 8 to 11 of 16. Free blocks: [1], [2, 3], [4..7], [12..15].
    starts, orders = jnp.asarray([0, 8], jnp.int32), jnp.asarray([0, 2], jnp.int32)
    both = jnp.asarray([True, True])
    found = [int(BEST_FIT(starts, orders, both, jnp.int32(order), 16, jnp.int32(16))[0]) for order in (0, 1, 2, 3)]
    assert found == [1, 2, 4, 16]
